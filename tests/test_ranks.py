"""The pool that runs the multi-rank tests: results, failures, time limits, no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests import ranks
from tests.ranks import RankFailure, run_ranks


def _describe(offset: int, *, scale: int = 1) -> dict[str, object]:
    total = torch.tensor([dist.get_rank() + offset]) * scale
    dist.all_reduce(total)
    return {
        "rank": dist.get_rank(),
        "total": total,
        "size": dist.get_world_size(),
        "noise": torch.rand(2),
    }


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only here")
    dist.barrier()


def _exit_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def _sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def _unpicklable() -> object:
    return lambda: None


def _pid() -> int:
    return os.getpid()


def _sum_on_mesh() -> torch.Tensor:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    tensor = DTensor.from_local(torch.full((1, 3), dist.get_rank() + 1.0), mesh, [Shard(0)])
    return (tensor + 1).full_tensor().sum(0)


def _meshes(count: int) -> int:
    for _ in range(count):
        mesh = init_device_mesh("cpu", (2, 1))
        mesh.get_group(0)
    return os.getpid()


def _compiled(x: torch.Tensor) -> torch.Tensor:
    return torch.compile(lambda t: t.sin() + dist.get_rank(), backend="aot_eager")(x)


def test_results_come_back_in_rank_order():
    for world_size in (2, 4, 2, 1):
        answers = run_ranks(world_size, _describe, 1, scale=10)
        assert [answer["rank"] for answer in answers] == list(range(world_size))
        expected = 10 * world_size * (world_size + 1) // 2
        assert all(answer["total"].tolist() == [expected] for answer in answers)
        assert all(answer["size"] == world_size for answer in answers)
        noise = torch.rand(2, generator=torch.Generator().manual_seed(0))
        assert all(torch.equal(answer["noise"], noise) for answer in answers)


def test_meshes_of_changing_world_sizes():
    for world_size in (2, 4, 2):
        expected = torch.full((3,), world_size + world_size * (world_size + 1) / 2)
        assert all(torch.equal(x, expected) for x in run_ranks(world_size, _sum_on_mesh))


def test_workers_are_kept_between_tasks_and_compile():
    before = run_ranks(2, _pid)
    x = torch.arange(3.0)
    for rank, y in enumerate(run_ranks(2, _compiled, x)):
        torch.testing.assert_close(y, x.sin() + rank)
    assert run_ranks(2, _pid) == before


def test_an_exception_names_its_rank_while_others_wait():
    before = run_ranks(3, _pid)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="only here") as failure:
        run_ranks(3, _raise_on_rank_1)
    assert time.monotonic() - start < 15
    assert "KeyError" in failure.value.reports[1]
    assert "_raise_on_rank_1" in failure.value.reports[0]  # the stack at which it waited
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert [answer["size"] for answer in run_ranks(3, _describe, 0)] == [3, 3, 3]


def test_a_rank_that_dies_is_reported():
    with pytest.raises(RankFailure, match="exited with code 7"):
        run_ranks(2, _exit_on_rank_0)


def test_a_timeout_shows_where_the_rank_was():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="did not end within 1 s") as failure:
        run_ranks(2, _sleep_on_rank_1, timeout=1)
    assert time.monotonic() - start < 15
    assert set(failure.value.reports) == {1}
    assert "_sleep_on_rank_1" in failure.value.reports[1]


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(RankFailure, match="_unpicklable"):
        run_ranks(1, _unpicklable)


def test_many_subgroups_start_the_workers_afresh():
    first = run_ranks(2, _meshes, 2)
    assert run_ranks(2, _meshes, ranks.MAX_SUBGROUPS) == first
    assert run_ranks(2, _meshes, 1) != first


ORPHANS = """
import time
from tests import ranks, test_ranks
if __name__ == "__main__":
    ranks.PRELOADED = ["torch"]
    print(*ranks.run_ranks(2, test_ranks._pid), flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_no_worker_outlives_a_killed_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"workers {pids} outlived their parent"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a zombie that nobody has collected counts as ended
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
