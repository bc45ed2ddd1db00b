"""Saved in one layout on some ranks, resumed in another on others: not a bit changes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dtensor_owner.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint_helpers import build, differing, put_snapshot, snapshot, step
from tests.ranks import run_ranks

Values = dict[str, Tensor]
_folders: list[tempfile.TemporaryDirectory] = []


def _save(folder: str, layout: str) -> Values:
    model, optimizers = build(layout)
    for number in range(2):
        step(model, optimizers, number)
    save_checkpoint(folder, model, optimizers, extra={"step": 2})
    return snapshot(model, optimizers)


def _load(folder: str, layout: str, saved: Values) -> tuple[list[str], list[str], float]:
    """What differs after the load, and after two more steps of it and of an unbroken run."""
    model, optimizers = build(layout, seed=1)
    assert load_checkpoint(folder, model, optimizers) == {"step": 2}
    after_load = differing(snapshot(model, optimizers), saved)
    unbroken, its_optimizers = build(layout, seed=2)
    step(unbroken, its_optimizers, 0)  # torch's own AdamW makes its state in its first step
    put_snapshot(unbroken, its_optimizers, saved)
    for number in (2, 3):
        step(model, optimizers, number)
        step(unbroken, its_optimizers, number)
    resumed, expected = snapshot(model, optimizers), snapshot(unbroken, its_optimizers)
    moved = max(float((resumed[key] - saved[key]).abs().max()) for key in ("a", "d", "e"))
    return after_load, differing(resumed, expected), moved


@functools.cache
def _saved(layout: str, ranks: int) -> tuple[str, Values]:
    _folders.append(tempfile.TemporaryDirectory())
    folder = str(Path(_folders[-1].name) / "checkpoint")
    return folder, run_ranks(ranks, _save, folder, layout)[0]


def _resume(from_layout: str, from_ranks: int, layout: str, ranks: int) -> None:
    folder, saved = _saved(from_layout, from_ranks)
    for after_load, after_steps, moved in run_ranks(ranks, _load, folder, layout, saved):
        assert after_load == []
        assert after_steps == []
        assert moved > 1e-3  # the steps do something


# The default tests: each target once, in few groups of worker processes.
COVER = [
    ("unpadded", 4, "padded", 4),
    ("padded", 4, "fsdp2", 4),
    ("fsdp2", 4, "unpadded", 2),
    ("unpadded", 4, "plain", 1),
    ("rows", 4, "block_atomic", 4),
    ("block_atomic", 4, "owner", 2),
    ("owner", 2, "replicate", 4),
    ("replicate", 4, "whole", 4),
    ("unpadded", 4, "hsdp", 4),
    ("hsdp", 4, "hfsdp", 4),
    ("hfsdp", 4, "buckets", 2),
    ("unpadded", 4, "adamw", 2),
]


@pytest.mark.parametrize(("from_layout", "from_ranks", "layout", "ranks"), COVER)
def test_resumed_in_another_layout(from_layout, from_ranks, layout, ranks):
    _resume(from_layout, from_ranks, layout, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("layout", ["unpadded", "padded", "fsdp2", "rows", "owner", "whole"])
def test_resumed_on_another_number_of_ranks(layout, ranks):
    for from_layout in ("unpadded", "padded", "blocks", "fsdp2", "whole", "hfsdp", "adamw"):
        _resume(from_layout, 4, layout, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("layout", ["hsdp", "hfsdp", "buckets", "block_atomic", "replicate"])
def test_resumed_on_other_meshes(layout, ranks):
    for from_layout in ("unpadded", "owner", "hsdp", "hfsdp", "rows", "buckets", "plain"):
        _resume(from_layout, 4, layout, ranks)


def _load_nothing(folder: str, saved: Values) -> list[str]:
    model, optimizers = build("unpadded", seed=1)
    return differing(snapshot(model, optimizers), saved)


def test_without_the_load_everything_differs():
    folder, saved = _saved("unpadded", 4)
    differs = run_ranks(2, _load_nothing, folder, saved)[0]
    assert set(differs) == set(saved)


@pytest.fixture(scope="module", autouse=True)
def _remove_folders():
    yield
    while _folders:
        _folders.pop().cleanup()
    _saved.cache_clear()


def test_values_are_not_compared_with_themselves():
    assert differing({"a": torch.zeros(1)}, {"a": torch.zeros(1).double()}) == ["a"]
