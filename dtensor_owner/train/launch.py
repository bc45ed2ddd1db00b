"""Start the ranks of a run on this machine, watch them, and end them all together.

Each local rank is a process of its own, told its rank by the environment, as torchrun would. Where
that is safe, it is forked from the launcher, which has imported everything by then: importing torch
takes seconds of a core, for each rank. When the launcher goes away, for whatever reason, the ranks
notice and exit.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dtensor_owner.train.config import DEFAULT_WORLD_SIZE, TrainConfig, torchrun_world_size
from dtensor_owner.usage import UsageError

FOLDER = "DTENSOR_OWNER_LAUNCH_FOLDER"  # set for ranks that this file started
GRACE_SECONDS = 1.0  # once a rank has failed, how long others may take to tell what they saw
POLL_SECONDS = 0.05
ERROR_LINES = 60


def launch(config: TrainConfig) -> int:
    """Run as one of the ranks that were started already, or start local ranks and wait for them.

    Returns:
        The exit code: 0, 1 (a rank failed), 2 (wrong usage) or 130 (Ctrl-C).

    Raises:
        UsageError: ``--world-size`` contradicts the launcher that started this process.
    """
    started = torchrun_world_size()
    if started is None:
        return _start_and_watch(_with_world_size(config, config.world_size or DEFAULT_WORLD_SIZE))
    if config.world_size not in (None, started):
        raise UsageError(
            f"--world-size {config.world_size}: this process is one of {started} ranks that were "
            "started already; leave the option out"
        )
    return _run_as_rank(_with_world_size(config, started))


def _with_world_size(config: TrainConfig, world_size: int) -> TrainConfig:
    return dataclasses.replace(config, world_size=world_size)  # checked again with it


# ---------------------------------------------------------------------------- the ranks' side


def _run_as_rank(config: TrainConfig) -> int:
    folder = os.environ.get(FOLDER)
    if folder is not None:
        threading.Thread(target=_exit_with_launcher, daemon=True).start()
    try:
        from dtensor_owner.train.loop import run_rank

        run_rank(config, init_method=None if folder is None else f"file://{folder}/store")
    except Exception as error:
        if folder is None:
            raise  # torchrun shows it
        _tell_error(Path(folder), error)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _local_rank(config: TrainConfig, rank: int, folder: Path) -> None:
    """What a process that the launcher started does from beginning to end."""
    os.setsid()  # Ctrl-C reaches the launcher alone, which ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with _log_file(folder, rank).open("wb") as log:
        for stream in [2] if rank == 0 else [1, 2]:
            os.dup2(log.fileno(), stream)
    os.environ.update(_environment(config, rank, folder))
    sys.exit(_run_as_rank(config))


def _exit_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        connection.wait([launcher.sentinel])
        os._exit(1)


def _tell_error(folder: Path, error: Exception) -> None:
    text = str(error) if isinstance(error, UsageError) else traceback.format_exc()
    record = {"time": time.time(), "text": text}
    path = _error_file(folder, int(os.environ["RANK"]))
    path.with_suffix(".part").write_text(json.dumps(record), encoding="utf-8")
    path.with_suffix(".part").rename(path)  # the launcher sees the whole text or none


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


# ------------------------------------------------------------------------- the launcher's side


def _start_and_watch(config: TrainConfig) -> int:
    assert config.world_size is not None
    folder = Path(tempfile.mkdtemp(prefix="dtensor-owner-"))
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)
    ranks: list[BaseProcess] = []
    try:
        context = _context(config)
        for rank in range(config.world_size):
            ranks.append(context.Process(target=_local_rank, args=(config, rank, folder)))
            ranks[-1].start()
        while any(process.exitcode is None for process in ranks):
            if any(process.exitcode for process in ranks):
                return _report_failure(ranks, folder)
            time.sleep(POLL_SECONDS)
        return _report_failure(ranks, folder) if any(p.exitcode for p in ranks) else 0
    except KeyboardInterrupt:
        _end(ranks)
        print("\nInterrupted: all ranks were ended.", file=sys.stderr)
        return 130
    finally:
        _end(ranks)
        signal.signal(signal.SIGTERM, previous)
        shutil.rmtree(folder, ignore_errors=True)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # runs the finally above, which ends the ranks


def _context(config: TrainConfig) -> SpawnContext | ForkContext:
    """How processes start: forked with all imports made, unless CUDA or the system forbids it."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # read where torch is imported
    if config.device != "cpu" or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    modules = ["dtensor_owner.train.loop"]
    if config.compile:
        modules.append("torch._inductor.compile_fx")
    for module in modules:
        importlib.import_module(module)
    return multiprocessing.get_context("fork")


def _environment(config: TrainConfig, rank: int, folder: Path) -> dict[str, str]:
    world_size = config.world_size or 1
    defaults = {
        # Ranks that share the cores fairly are faster than ranks that fight for them.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size)),
    }
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:  # gloo would look up the host's own name, which not every machine can
        defaults["GLOO_SOCKET_IFNAME"] = loopback[0]
    return {
        **defaults,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        FOLDER: str(folder),
    }


def _report_failure(ranks: list[BaseProcess], folder: Path) -> int:
    """End the others, show the error of the rank that failed first, return the exit code."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(process.exitcode is None for process in ranks):
        time.sleep(POLL_SECONDS)
    codes = [process.exitcode for process in ranks]
    _end(ranks)
    rank, text = _first_failure(codes, folder)
    if sys.stdout.isatty():
        print("\x1b[?25h", end="")  # the progress bar of rank 0 had hidden the cursor
    if codes[rank] == 2:
        raise UsageError(text)
    print(f"\nRank {rank} of {len(ranks)} failed; all ranks were ended.", file=sys.stderr)
    print(text.rstrip(), file=sys.stderr)
    return 1


def _first_failure(codes: list[int | None], folder: Path) -> tuple[int, str]:
    """The rank to blame and its error.

    A rank that died without a word (a signal, or an exit from C++) comes first: what the others
    report is then that they lost it. Otherwise the earliest report counts.
    """
    reports = {}
    for rank, code in enumerate(codes):
        if code and _error_file(folder, rank).exists():
            reports[rank] = json.loads(_error_file(folder, rank).read_text(encoding="utf-8"))
    for rank, code in enumerate(codes):
        if code and rank not in reports:
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            log = _log_file(folder, rank).read_text(encoding="utf-8", errors="replace")
            return rank, "\n".join([f"It ended by {cause}.", *log.splitlines()[-ERROR_LINES:]])
    first = min(reports, key=lambda rank: reports[rank]["time"])
    return first, reports[first]["text"]


def _end(ranks: list[BaseProcess]) -> None:
    for process in ranks:
        if process.pid is not None and process.exitcode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            except ProcessLookupError:
                process.kill()
    for process in ranks:
        if process.pid is not None:
            process.join()
