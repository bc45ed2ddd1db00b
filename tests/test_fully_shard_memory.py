"""Bytes alive while a sharded model runs, counted storage by storage."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor_owner.fully_shard import fully_shard
from dtensor_owner.layout import ShardLayout
from tests.fully_shard_helpers import mesh_1d
from tests.ranks import by_tensor_collectives, run_ranks

BLOCKS, WIDTH = 8, 48
BLOCK_BYTES = 2 * WIDTH * WIDTH * 4


class Census(TorchDispatchMode):
    """Counts the storages that ops have made since and that are still alive.

    Threads of gloo hold a buffer a moment longer than the program does. A count above ``bound``
    is therefore taken again until it has settled; only this thread could make it grow.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}
        self._bound = bound
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage()._cdata for leaf in _plain(args)}
        result = func(*args, **(kwargs or {}))
        for leaf in _plain(result):
            storage = leaf.untyped_storage()
            if storage._cdata not in known:
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        deadline = time.monotonic() + 2
        while self.peak <= self._bound < self.alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        """Bytes of live storages; those of a block at least, as activations are tiny here."""
        self._storages = {s: n for s, n in self._storages.items() if not s.expired()}
        return sum(n for n in self._storages.values() if n >= BLOCK_BYTES // 2)


def _plain(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if type(leaf) in (Tensor, nn.Parameter)]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH, bias=False),
                nn.Tanh(),
                nn.Linear(WIDTH, WIDTH, bias=False),
            )
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def settled(census: Census, kept: bool) -> int:
    """Bytes alive once gloo's threads have let go of what they have sent."""
    expected = BLOCKS * BLOCK_BYTES if kept else 0
    deadline = time.monotonic() + 5
    while census.alive() > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return census.alive()


Bounds = dict[str, float]


def bounds(prefetch: int, staged: bool, direct: bool) -> Bounds:
    """The most gathered blocks that may be alive in each phase."""
    # A staging buffer may be a little larger than the block; it is freed before the module runs.
    gathered = prefetch + 1 + (1.1 if staged else 0)
    # Besides: full gradients of a block, and those of the blocks under way, packed. What arrives
    # of them is counted only where an exchange carries them: gloo's reduce_scatter hides a copy.
    backward = 1.1 * (gathered + 1 + max(1, prefetch) * (2 if direct else 1))
    return {"forward": gathered, "backward": backward, "no_grad": gathered}


def blocks_alive(prefetch: int, kind: ShardLayout, keep: bool, limits: Bounds) -> Bounds:
    """Peaks and what is left, in units of one gathered block."""
    model = Deep()
    for block in model.blocks:
        fully_shard(
            block,
            mesh=mesh_1d(),
            prefetch=prefetch,
            shard_layout=kind,
            reshard_after_forward=not keep,
        )
    fully_shard(model, mesh=mesh_1d(), prefetch=prefetch)
    x = torch.randn(1, WIDTH)
    model(x).sum().backward()  # the first step learns the order
    model.zero_grad()
    found = {}
    for phase in ("forward", "backward", "no_grad"):
        with Census(limits[phase] * BLOCK_BYTES) as census:
            if phase == "forward":
                loss = model(x).sum()
            elif phase == "backward":
                loss.backward()
            else:
                with torch.no_grad():
                    model(x)
            found[phase] = census.peak / BLOCK_BYTES
            found[f"after {phase}"] = settled(census, phase == "forward" and keep) / BLOCK_BYTES
    assert dist.get_world_size() > 2, "shards would count as blocks"
    return found


@pytest.mark.parametrize("prefetch", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", list(ShardLayout))
def test_memory_is_bounded_by_the_groups_in_use(prefetch, kind):
    limits = bounds(prefetch, staged=False, direct=True)
    for found in run_ranks(3, blocks_alive, prefetch, kind, False, limits):
        assert found["after forward"] == found["after backward"] == found["after no_grad"] == 0
        for phase, bound in limits.items():
            assert found[phase] <= bound, phase
        assert found["backward"] < 2 * BLOCKS


@pytest.mark.parametrize("prefetch", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", list(ShardLayout))
def test_memory_by_tensor_collectives(prefetch, kind):
    limits = bounds(prefetch, staged=kind is ShardLayout.UNPADDED, direct=False)
    case = (blocks_alive, prefetch, kind, False, limits)
    for found in run_ranks(3, by_tensor_collectives, *case):
        assert found["after forward"] == found["after backward"] == found["after no_grad"] == 0
        for phase, bound in limits.items():
            assert found[phase] <= bound, phase
        assert found["backward"] < BLOCKS


@pytest.mark.parametrize("kind", list(ShardLayout))
def test_nothing_gathered_is_left(kind):
    limits = bounds(1, staged=False, direct=True)
    for found in run_ranks(3, blocks_alive, 1, kind, False, limits):
        assert found["after forward"] == found["after backward"] == found["after no_grad"] == 0


def test_the_census_sees_weights_that_are_kept():
    limits = bounds(1, staged=False, direct=True)
    for found in run_ranks(3, blocks_alive, 1, ShardLayout.PADDED, True, limits):
        assert found["after forward"] == BLOCKS
        assert found["after backward"] == found["after no_grad"] == 0
