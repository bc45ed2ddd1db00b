"""Checkpoints of 2-D meshes, wrapped and quantized models; what a checkpoint sends."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from dtensor_owner import (
    MXFP8Policy,
    Owner,
    RowAtomic,
    distribute_tensor,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from placements.collectives import DimGroup
from tests.checkpoint_helpers import build, differing, full, snapshot, step
from tests.ranks import run_ranks

# ---------------------------------------------------------------------------- two mesh dims

PAIRS = [
    (RowAtomic(), Shard(1)),
    (Shard(1), RowAtomic()),
    (RowAtomic(), Replicate()),
    (Replicate(), RowAtomic()),
    (Owner(1), Owner(1)),
    (Replicate(), Owner(0)),
]


class Placed(nn.Module):
    """One (5, 6) tensor in every pair of placements."""

    def __init__(self, mesh_shape: tuple[int, int], first: float) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", mesh_shape)
        whole = torch.arange(first, first + 30).reshape(5, 6)
        for number, pair in enumerate(PAIRS):
            self.register_buffer(f"pair{number}", distribute_tensor(whole, mesh, pair))


def _on_two_dims(folder: str, mesh_shape: tuple[int, int]) -> dict[str, Tensor]:
    save_checkpoint(folder, Placed(mesh_shape, 0.0))
    model = Placed(mesh_shape[::-1], 100.0)
    load_checkpoint(folder, model)
    return {name: full(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("mesh_shape", [(2, 2), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_pieces_on_two_mesh_dims_have_their_true_offsets(mesh_shape, tmp_path):
    ranks = mesh_shape[0] * mesh_shape[1]
    for found in run_ranks(ranks, _on_two_dims, str(tmp_path / "saved"), mesh_shape):
        assert len(found) == len(PAIRS)
        assert all(torch.equal(v, torch.arange(30.0).reshape(5, 6)) for v in found.values())


# ----------------------------------------------------------------------------------- models


class Counting(nn.Module):
    """State that is no tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), float(count)))
        self.count = count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _wrapped(folder: str) -> tuple[list[str], int]:
    def start(count: int, wrap: bool) -> tuple[nn.Module, Counting]:
        inner = Counting(count)
        model = nn.Sequential(checkpoint_wrapper(inner) if wrap else inner, nn.Linear(2, 2))
        return (torch.compile(model, backend="eager") if wrap else model), inner

    model, _ = start(7, wrap=True)
    muonless = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 3)).sum().backward()
    muonless.step()
    save_checkpoint(folder, model, muonless)
    other, inner = start(1, wrap=False)
    its = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    load_checkpoint(folder, other, its)
    assert its.param_groups[0]["lr"] == 0.1
    momenta = [state["momentum_buffer"] for state in its.state.values()]
    expected = [state["momentum_buffer"] for state in muonless.state.values()]
    assert all(map(torch.equal, momenta, expected))
    names = [name for name, _ in other.named_parameters()]
    values = zip(names, model.parameters(), other.parameters())
    return [name for name, one, two in values if not torch.equal(one, two)], inner.count


def test_wrappers_leave_no_trace_and_extra_state_comes_along(tmp_path):
    assert run_ranks(1, _wrapped, str(tmp_path / "saved")) == [([], 7)]


def _quantized(folder: str) -> tuple[Tensor, Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def start(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return fully_shard(nn.Linear(64, 96), mesh=mesh, block_size=32, mxfp8=MXFP8Policy())

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    model, other = start(0), start(1)
    save_checkpoint(folder, model)
    before = other(x)
    load_checkpoint(folder, other)
    return model(x).detach(), other(x).detach(), before.detach()


def test_weights_gathered_in_mxfp8(tmp_path):
    for expected, found, before in run_ranks(4, _quantized, str(tmp_path / "saved")):
        assert torch.equal(expected, found)
        assert not torch.equal(expected, before)


# ----------------------------------------------------------------------------- what is sent


def _sent(folder: str) -> tuple[int, int]:
    """How often a group is looked up to send a tensor; in a checkpoint, and in a gather."""
    model, optimizers = build("unpadded")
    step(model, optimizers, 0)
    counts = []
    with mock.patch.object(DimGroup, "of", side_effect=DimGroup.of) as looked_up:
        save_checkpoint(folder, model, optimizers)
        load_checkpoint(folder, model, optimizers)
        counts.append(looked_up.call_count)
        model.a.full_tensor()
        counts.append(looked_up.call_count)
    return counts[0], counts[1]


def test_no_tensor_is_sent(tmp_path):
    for checkpointing, gathering in run_ranks(3, _sent, str(tmp_path / "saved")):
        assert checkpointing == 0
        assert gathering > 0


def _saved_by_few(folder: str) -> list[str]:
    """A sub-group saves and loads; the others are not asked."""
    group = dist.new_group([1, 3])
    wrong: list[str] = []
    if dist.get_rank() in (1, 3):
        model, optimizers = build("plain")
        step(model, optimizers, 0)
        save_checkpoint(folder, model, optimizers, process_group=group)
        other, its = build("plain", seed=1)
        load_checkpoint(folder, other, its, process_group=group)
        wrong = differing(snapshot(model, optimizers), snapshot(other, its))
    dist.barrier()
    return wrong


def test_a_sub_group_saves_alone(tmp_path):
    assert run_ranks(4, _saved_by_few, str(tmp_path / "saved"), timeout=60) == [[]] * 4
