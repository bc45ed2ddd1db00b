"""``dtensor-owner train``, killed and resumed: the same losses as a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtensor_owner.checkpoint_files import is_complete

ROOT = Path(__file__).parent.parent
TEXT = Path(json.__file__).parent  # a text that does not change between the runs
STEPS = 12
SMALL = (
    f"--layers=1 --dim=16 --heads=2 --hidden=21 --context=16 --batch=8 --steps={STEPS} "
    "--eval-sequences=8 --lr=0.05 --adamw-lr=0.02 --no-compile"
)


def _command(out: Path, *options: str) -> list[str]:
    # Options given twice: the last one counts.
    fixed = [*SMALL.split(), "--world-size=2", f"--out={out}", f"--data={TEXT}"]
    return [sys.executable, "-m", "dtensor_owner", "train", *fixed, *options]


def _run(out: Path, *options: str, code: int = 0) -> tuple[str, str]:
    done = subprocess.run(
        _command(out, *options), cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout, done.stderr


def _losses(out: Path) -> list[tuple[int, str, float]]:
    """Everything measured, in order; losses bit for bit."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], key, line[key])
        for line in lines
        for key in ("loss", "validation_loss")
        if key in line
    ]


def _killed(out: Path, when: Callable[[], bool], whom: Callable[[int], list[int]], *options: str):
    """Start a run and kill processes of it; returns whether it was still running."""
    process = subprocess.Popen(
        _command(out, *options), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and not when():
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        if process.poll() is not None:
            return False
        for pid in whom(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(120)  # one that is syncing a file cannot be killed until it is done
        return True
    finally:
        process.kill()
        process.wait()


def _ranks(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [int(pid) for pid in children.split()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    _run(out, "--checkpoint-every=4")
    return out


def _without_end(unbroken: Path, folder: Path) -> Path:
    """The run as if it had been killed after step 9, while a line was written."""
    shutil.copytree(unbroken, folder)
    (folder / "summary.json").unlink()
    (newest,) = folder.glob("checkpoints/*12")
    newest.rename(newest.with_name(newest.name + ".incomplete"))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    past = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 10)
    (folder / "metrics.jsonl").write_text("".join(lines[:past]) + lines[past][:20])
    return folder


def test_a_resumed_run_ends_like_an_unbroken_one(unbroken, tmp_path):
    out = _without_end(unbroken, tmp_path / "run")
    options = ("--checkpoint-every=4", f"--resume={out}")  # its checkpoints are meant
    printed, _ = _run(out, *options)
    assert f"Going on after step 8, from {out / 'checkpoints' / 'step-00000008'}\n" in printed
    assert _losses(out) == _losses(unbroken)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (out, unbroken)]
    for key in ("validation_nats_per_byte", "train_nats_per_byte"):
        assert summaries[0][key] == summaries[1][key]
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000012"]


@pytest.mark.slow
def test_a_run_that_had_ended_only_writes_its_results(unbroken, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    (out / "summary.json").unlink()
    _run(out, "--checkpoint-every=4", f"--resume={out / 'checkpoints'}")
    assert _losses(out) == _losses(unbroken)
    assert json.loads((out / "summary.json").read_text())["tokens_per_second"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("--world-size=1",),
        ("--world-size=4", "--shard-layout=padded"),
        ("--world-size=3", "--compile"),
    ],
)
@pytest.mark.timeout(900)
def test_resumed_on_other_ranks_and_layouts(changes, unbroken, tmp_path):
    _without_end(unbroken, tmp_path / "run")
    out = tmp_path / "other"
    _run(out, f"--resume={tmp_path / 'run' / 'checkpoints'}", *changes)
    expected = [record for record in _losses(unbroken) if record[0] > 8]
    found = _losses(out)
    assert [record[:2] for record in found] == [record[:2] for record in expected]
    for (*_, loss), (*_, other) in zip(found, expected):
        assert loss == pytest.approx(other, abs=1e-4)


def _resume_until_done(out: Path, every: int) -> None:
    checkpoints = out / "checkpoints"
    complete = [path for path in checkpoints.glob("step-*") if is_complete(path)]
    _run(out, f"--checkpoint-every={every}", *([f"--resume={checkpoints}"] if complete else []))


def test_killed_while_a_checkpoint_is_written(unbroken, tmp_path):
    out = tmp_path / "run"

    def saving() -> bool:
        return any((out / "checkpoints").glob("*8.incomplete"))

    assert _killed(out, saving, _ranks, "--checkpoint-every=4")
    left = {path.name for path in (out / "checkpoints").iterdir()}
    assert "step-00000004" in left or "step-00000008" in left
    assert "step-00000012" not in left
    _resume_until_done(out, 4)
    assert _losses(out) == _losses(unbroken)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again_at_random_moments(seed, unbroken, tmp_path):
    """Ranks or the launcher, one or all, mostly while saving: there is a checkpoint every step."""
    dice, out = random.Random(seed), tmp_path / "run"
    kills = 0
    while kills < 6:
        newest = max((p.name for p in (out / "checkpoints").glob("step-????????")), default="")
        reached = time.monotonic() + 300
        delay = dice.uniform(0.0, 0.25)

        def due(newest: str = newest, delay: float = delay) -> bool:
            """A little after the first checkpoint beyond those that there were."""
            nonlocal reached
            now = time.monotonic()
            if any(p.name > newest for p in (out / "checkpoints").glob("step-????????")):
                reached = min(reached, now + delay)
            return now > reached

        def victims(launcher: int) -> list[int]:
            ranks = _ranks(launcher)
            return dice.choice([ranks, ranks[:1], ranks[1:], [launcher]])

        resume = [f"--resume={out / 'checkpoints'}"] if newest else []
        if not _killed(out, due, victims, "--checkpoint-every=1", *resume):
            break
        kills += 1
        time.sleep(0.5)  # ranks whose launcher was killed end by themselves
    assert kills >= 2
    _resume_until_done(out, 1)
    assert _losses(out) == _losses(unbroken)


# ------------------------------------------------------------------------------ wrong usage


def _damage(folder: Path) -> None:
    """Flip bits in the second rank's file: of 512 bytes, since fewer could all be padding."""
    path = folder / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 512):
        data[at] ^= 1
    path.write_bytes(data)


def _remove_shard(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


CASES: list[tuple[str, Any, tuple[str, ...], str]] = [
    ("damaged", _damage, (), r"__1_0.distcp: \S+ is damaged"),
    ("missing", _remove_shard, (), r"__1_0.distcp, which holds"),
    ("model", None, ("--dim=32",), r"was saved with --dim 16, here --dim 32"),
    ("steps", None, ("--steps=3",), r"--steps 3: .* is at step 12 already"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "options", "error"), CASES, ids=[case[0] for case in CASES]
)
def test_what_cannot_be_resumed_is_one_line(name, change, options, error, unbroken, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    newest = out / "checkpoints" / "step-00000012"
    if change is not None:
        change(newest)
    before = (out / "metrics.jsonl").read_bytes()
    _, told = _run(out, f"--resume={newest}", *options, code=2)
    assert len(told.splitlines()) == 1
    assert re.search(error, told), told
    assert (out / "metrics.jsonl").read_bytes() == before


pytestmark = pytest.mark.slow  # minutes on a busy machine
