"""Local ranks: started together, ended together, the right one blamed, none left behind.

The launcher and the ranks are the real ones; only what a rank does is replaced by a few lines.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# Python imports sitecustomize before anything else; here it puts a stand-in for the training loop.
# The package's own __init__, which imports torch, is not run: nothing here needs it.
STAND_IN = """
import importlib.util, os, sys, types

package = importlib.util.module_from_spec(importlib.util.find_spec("dtensor_owner"))
sys.modules["dtensor_owner"] = package

def run_rank(config, *, init_method):
    rank = int(os.environ["RANK"])
    print("not for the screen" if rank else "shown", flush=True)
    with open(os.path.join(config.out, f"pid-{{rank}}.part"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, file.name.removesuffix(".part"))
    import time
{body}

module = types.ModuleType("dtensor_owner.train.loop")
module.run_rank = run_rank
sys.modules[module.__name__] = module
"""
SLEEP = "time.sleep(600)"


class Launch:
    """A running launcher whose ranks execute ``body``."""

    def __init__(self, folder: Path, body: str, world_size: int = 3) -> None:
        lines = "\n".join("    " + line for line in body.splitlines())
        (folder / "sitecustomize.py").write_text(STAND_IN.format(body=lines))
        self.folder, self.world_size = folder, world_size
        options = [f"--world-size={world_size}", "--no-compile", f"--out={folder}"]
        root = Path(__file__).parent.parent
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"}
        for name in ("RANK", "WORLD_SIZE"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dtensor_owner", "train", *options],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self) -> list[int]:
        """Wait until every rank runs its body; returns their process ids."""
        files = [self.folder / f"pid-{rank}" for rank in range(self.world_size)]
        _wait_until(lambda: all(file.exists() for file in files), 90)
        return [int(file.read_text()) for file in files]

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=90)
        assert all(not _alive(pid) for pid in self.pids())
        return self.process.returncode, out, err


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(body: str, world_size: int = 3) -> Launch:
        started.append(Launch(tmp_path, body, world_size))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_all_ranks_run_and_only_the_first_is_heard(launch):
    code, out, err = launch("assert os.environ['WORLD_SIZE'] == '3'").finish()
    assert (code, out, err) == (0, "shown\n", "")


def test_the_error_of_the_failing_rank_is_shown(launch):
    body = "if rank == 2: raise RuntimeError('no more text')\n" + SLEEP
    start = time.monotonic()
    run = launch(body)
    run.pids()
    code, _, err = run.finish()
    assert time.monotonic() - start < 60
    assert code == 1
    assert "Rank 2 of 3 failed; all ranks were ended." in err
    assert err.rstrip().endswith("RuntimeError: no more text")


def test_the_first_error_counts_not_what_it_led_to(launch):
    body = "time.sleep(0.0 if rank == 1 else 0.3)\nraise RuntimeError(f'from rank {rank}')"
    _, _, err = launch(body).finish()
    assert "from rank 1" in err
    assert "from rank 0" not in err


def test_a_rank_killed_from_outside_is_blamed(launch):
    # The others then fail too, as they would when a connection breaks.
    run = launch("while os.path.exists(config.out): time.sleep(0.01)\nraise RuntimeError('lost')")
    os.kill(run.pids()[1], signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = run.finish()
    assert time.monotonic() - killed < 10
    assert code == 1
    assert "Rank 1 of 3 failed" in err
    assert "It ended by SIGKILL." in err


def test_wrong_usage_found_by_a_rank_is_one_line(launch):
    code, _, err = launch(
        "from dtensor_owner.usage import UsageError\nraise UsageError('too little text')"
    ).finish()
    assert (code, err) == (2, "dtensor-owner train: error: too little text\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_all_ranks(launch, number, code):
    run = launch(SLEEP)
    run.pids()
    run.process.send_signal(number)
    assert run.finish()[0] == code


def test_ranks_do_not_outlive_a_killed_launcher(launch):
    run = launch(SLEEP)
    pids = run.pids()
    run.process.kill()
    _wait_until(lambda: not any(_alive(pid) for pid in pids), 10)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {seconds} s"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a zombie that nobody has collected counts as ended
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
