"""The whole command, as a user starts it, and the backend it picks for compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtensor_owner.train.compiling import choose_backend
from dtensor_owner.train.outputs import Metrics
from dtensor_owner.train.steps import Ranks
from dtensor_owner.usage import UsageError
from tests.ranks import run_ranks

SMALL = (
    "--layers=1 --dim=16 --heads=2 --hidden=21 --context=16 --batch=8 --steps=10 "
    "--eval-sequences=8 --lr=0.05 --adamw-lr=0.02"
)


def _train(folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> str:
    """Run the command on this project's own sources; returns what it prints."""
    root = Path(__file__).parent.parent
    options = (*SMALL.split(), *options, f"--out={folder}", f"--data={root / 'dtensor_owner'}")
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "dtensor_owner", "train", *options],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=170,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
    )
    assert done.returncode == 0, done.stderr
    assert launcher or not done.stderr  # torchrun has things to say of its own
    return done.stdout


def _check(folder: Path, printed: str, world_size: int) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    validation = summary["validation_nats_per_byte"]
    assert validation["after"] < validation["before"] - 0.3
    assert f"{validation['before']:.4f} nats per byte before" in printed
    plan = summary["plan"]
    assert f"The optimizer step moves {plan['step_bytes']:,} bytes between ranks." in printed
    assert plan["padding_bytes"] == 0 < plan["padded_layout_padding_bytes"]
    assert sum(plan["rank_bytes"]) == plan["payload_bytes"] == 4 * summary["parameters"]
    assert len(plan["rank_bytes"]) == len(plan["newton_schulz_loads"]) == world_size
    assert len(plan["owners"]) == 7
    assert all(f"{name} " in printed for name in plan["owners"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 2, 4, 6, 8, 10]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    return summary


def test_the_command_trains_and_reports(tmp_path):
    printed = _train(tmp_path, "--world-size=2", "--no-compile")
    summary = _check(tmp_path, printed, 2)
    assert summary["compile_backend"] is None
    assert "step    10 of 10" in printed
    assert "compile" not in summary["seconds"]


@pytest.mark.slow
def test_the_command_compiles(tmp_path):
    summary = _check(tmp_path, _train(tmp_path, "--world-size=2"), 2)
    assert summary["compile_backend"] in ("inductor", "aot_eager")
    assert summary["seconds"]["compile"] > 0


@pytest.mark.slow
def test_torchrun_starts_the_same_command(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    _check(tmp_path, _train(tmp_path, "--no-compile", launcher=torchrun), 2)


def test_results_that_cannot_be_written_are_found_at_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"--out .*file/out: cannot be written to: "):
        Metrics(tmp_path / "file" / "out")


def _choose_without_compiler(folder: str) -> tuple[str, str]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # or what was compiled before is found there
    with torch._inductor.config.patch({"cpp.cxx": (None, f"{folder}/no-such-compiler")}):
        return choose_backend(Ranks())


def test_without_a_compiler_the_step_falls_back(tmp_path):
    [(backend, line)] = run_ranks(1, _choose_without_compiler, str(tmp_path))
    assert backend == "aot_eager"
    assert line.startswith("Muon's step falls back to aot_eager, which needs no C++ compiler: ")
    assert "no-such-compiler" in line
    assert "\n" not in line
