"""Run a test function on several gloo ranks, in worker processes that live for the whole session.

``run_ranks(4, fn, x)`` calls ``fn(x)`` on four processes that form the default process group and
returns the four results in rank order. Workers are forked from one server that has torch imported,
so a new group costs a fraction of a second and a task on an existing one a few milliseconds.

Every world size has workers of its own. Nothing that torch caches by mesh (sharding decisions,
compiled graphs, process group names) can therefore leak from one world size into another. A
group whose task failed, or that has gathered many sub-groups, is thrown away and forked anew.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

# Imported once, in the fork server; the workers share the pages.
PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "pytest",
    "expecttest",
]
MAX_WORKERS = 16  # over all world sizes; the group used least recently goes first
MAX_SUBGROUPS = 48  # a gloo group costs sockets and threads; past this many, start afresh
START_TIMEOUT = 90.0
GRACE = 2.0  # seconds the other ranks get to finish once one has failed


class RankFailure(AssertionError):
    """A task raised, died or ran out of time on at least one rank.

    Attributes:
        reports: By rank: the traceback, ``"exited with code ..."``, or the stack at which the rank
            was stuck. Ranks that finished are absent.
    """

    def __init__(self, what: str, reports: dict[int, str]) -> None:
        self.reports = reports
        parts = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(reports.items())]
        super().__init__("\n".join([what, *parts]))


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks and return the results in rank order.

    Args:
        world_size: Number of ranks; the default process group (gloo) has exactly this size.
        fn: A function at the top level of an importable module, e.g. of the test's own.
            Before each call the seed is 0; after it, everything compiled is forgotten.
        timeout: Seconds for the whole task, on all ranks.

    Raises:
        RankFailure: The function raised on a rank, a rank died, or the time was up.
    """
    task = pickle.dumps((fn, args, kwargs))
    group = _group(world_size)
    try:
        answers = group.ask(task, timeout, f"{fn.__module__}.{fn.__qualname__}")
    except BaseException:  # also Ctrl-C: ranks may be anywhere, so they are of no further use
        _drop(group)
        raise
    if any(answer["subgroups"] > MAX_SUBGROUPS for answer in answers):
        _drop(group)
    return [pickle.loads(answer["result"]) for answer in answers]


# ---------------------------------------------------------------------------- the parent's side


class _Group:
    """The worker processes of one world size, joined in one default process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.workers: list[BaseProcess] = []
        self.pipes: list[connection.Connection] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_worker,
                args=(rank, world_size, theirs, str(self.folder)),
                name=f"rank {rank} of {world_size}",
                daemon=True,
            )
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self.pipes.append(ours)

    def ask(self, task: bytes | None, timeout: float, name: str) -> list[dict[str, Any]]:
        """Send the task to every rank and wait for all answers; ``None`` waits for the start."""
        deadline = time.monotonic() + timeout
        reports: dict[int, str] = {}
        if task is not None:
            for rank, pipe in enumerate(self.pipes):
                try:
                    pipe.send_bytes(task)
                except OSError:
                    reports[rank] = self._exit_report(rank)
        answers: dict[int, dict[str, Any]] = {}
        waiting = set(range(self.world_size)) - set(reports)
        while waiting:
            if reports:
                deadline = min(deadline, time.monotonic() + GRACE)
            ready = connection.wait(
                [self.pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for rank in [rank for rank in waiting if self.pipes[rank] in ready]:
                waiting.discard(rank)
                try:
                    answer = pickle.loads(self.pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    reports[rank] = self._exit_report(rank)
                    continue
                if "error" in answer:
                    reports[rank] = answer["error"]
                else:
                    answers[rank] = answer
        if waiting and not reports:
            what = f"{name} did not end within {timeout:g} s on {self.world_size} ranks."
        else:
            what = f"{name} failed on {self.world_size} ranks."
        reports |= self._stacks(waiting)
        if reports:
            raise RankFailure(what, reports)
        return [answers[rank] for rank in range(self.world_size)]

    def _exit_report(self, rank: int) -> str:
        self.workers[rank].join(1.0)
        return f"exited with code {self.workers[rank].exitcode}"

    def _stacks(self, ranks: set[int]) -> dict[int, str]:
        """Where the ranks are stuck, written by faulthandler even while they wait in C++."""
        for rank in ranks:
            pid = self.workers[rank].pid
            if pid is not None and self.workers[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.3)
        return {
            rank: "did not finish; it was at:\n" + _stack_file(self.folder, rank).read_text()
            for rank in ranks
            if _stack_file(self.folder, rank).exists()
        }

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join(5.0)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_groups: dict[int, _Group] = {}  # by world size, the one used last at the end


def _group(world_size: int) -> _Group:
    if world_size < 1:
        raise ValueError(f"run_ranks needs at least one rank, got world_size={world_size}.")
    group = _groups.pop(world_size, None)
    if group is None:
        while _groups and sum(_groups) + world_size > MAX_WORKERS:
            _groups.pop(next(iter(_groups))).close()
        group = _Group(world_size)
        try:
            group.ask(None, START_TIMEOUT, "Starting the workers")
        except BaseException:
            group.close()
            raise
    _groups[world_size] = group
    return group


def _drop(group: _Group) -> None:
    _groups.pop(group.world_size, None)
    group.close()


@atexit.register
def close_all() -> None:
    """End every worker; the next ``run_ranks`` starts new ones."""
    for group in list(_groups.values()):
        _drop(group)


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


# ---------------------------------------------------------------------------- the worker's side


def _worker(rank: int, world_size: int, pipe: connection.Connection, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stacks = _stack_file(Path(folder), rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    try:
        _join_group(rank, world_size, folder)
        gc.freeze()  # what was imported so far is never garbage: collections stay cheap
    except Exception:
        _answer(pipe, error=traceback.format_exc())
        return
    _answer(pipe, result=None, subgroups=0)
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        _run_task(pipe, task)


def _run_task(pipe: connection.Connection, task: bytes) -> None:
    import torch

    try:
        torch.manual_seed(0)
        fn, args, kwargs = pickle.loads(task)
        # Plain pickle, as torch's own reducers for pipes would pass shared memory handles.
        result = pickle.dumps(fn(*args, **kwargs))
        del args, kwargs
        _clean_up()
    except BaseException:
        _answer(pipe, error=traceback.format_exc())
        return
    # The default group counts as one.
    _answer(pipe, result=result, subgroups=len(torch.distributed.distributed_c10d._world.pg_map))


def by_tensor_collectives(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` with equal parts carried as on accelerators: by the even tensor collectives.

    For ``run_ranks``. On a CPU the library otherwise leaves them for what gloo does faster.
    """
    from placements import collectives

    with mock.patch.object(collectives, "_DIRECT_DEVICES", frozenset()):
        return fn(*args, **kwargs)


def _clean_up() -> None:
    """Forget what a task may leave behind for the next one."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    gc.collect()


def _join_group(rank: int, world_size: int, folder: str) -> None:
    # gloo looks up the host's own name otherwise, which fails on machines without a network.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )


def _answer(pipe: connection.Connection, **answer: Any) -> None:
    pipe.send_bytes(pickle.dumps(answer))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
