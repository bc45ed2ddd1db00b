"""BlockAtomic from end to end: placed, moved, computed on, stepped, saved and loaded in blocks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from dtensor_owner.fully_shard import fully_shard
from dtensor_owner.layout import ShardLayout
from dtensor_owner.muon import Muon
from dtensor_owner.mxfp8_weights import MXFP8Policy
from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor
from tests.fully_shard_helpers import assert_same_parameters, full, mesh_1d
from tests.ranks import run_ranks


def data_and_scales_on_five_ranks() -> tuple[int, int]:
    """Three blocks of 32 rows on five ranks; the scales by the same layout, with rows / 32."""
    mesh = mesh_1d()
    data = torch.randn(96, 64)
    scales = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64)
    on_blocks = distribute_tensor(data, mesh, [BlockAtomic(32)])
    rows = [min(32, max(0, 96 - 32 * rank)) for rank in range(5)]
    on_rows = distribute_tensor(scales, mesh, [RowAtomic(tuple(r // 32 for r in rows))])
    explicit = distribute_tensor(data, mesh, [BlockAtomic(32, tuple(rows))])
    assert torch.equal(on_blocks.full_tensor(), data)
    assert torch.equal(on_rows.full_tensor(), scales)
    assert torch.equal(on_blocks.to_local(), explicit.to_local())
    for target in (Replicate(), Owner(4), Shard(0), Shard(1), RowAtomic()):
        moved = on_blocks.redistribute(placements=[target])
        assert torch.equal(moved.full_tensor(), data)
        back = moved.redistribute(placements=[BlockAtomic(32)])
        assert torch.equal(back.to_local(), on_blocks.to_local())
    torch.testing.assert_close(on_blocks.norm().full_tensor(), data.norm())
    torch.testing.assert_close((on_blocks * 2 + on_blocks).full_tensor(), data * 3)
    return on_blocks.to_local().shape[0], on_rows.to_local().shape[0]


def test_data_and_scales_are_cut_at_the_same_blocks():
    assert run_ranks(5, data_and_scales_on_five_ranks) == [(32, 1)] * 3 + [(0, 0)] * 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 32, bias=False))


def shard(model: nn.Module, kind: ShardLayout) -> nn.Module:
    return fully_shard(model, mesh=mesh_1d(), block_size=32, shard_layout=kind, mxfp8=MXFP8Policy())


def give_gradients(model: nn.Module, step: int) -> None:
    """The same gradients whatever the weights, so that optimizers alone are compared."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if hasattr(parameter, "placements"):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def step_beside_reference(optimizer: str, kind: ShardLayout) -> None:
    model, reference = make_model(), make_model()
    shard(model, kind)
    optimizers = []
    for each in (model, reference):
        matrices = [p for p in each.parameters() if p.ndim == 2]
        rest = [p for p in each.parameters() if p.ndim != 2]
        if optimizer == "adamw":
            optimizers.append(torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.1))
        else:
            groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
            optimizers.append(Muon(groups, lr=0.01, ns_dtype=torch.float32))
    for step in range(3):
        for each, optim in zip((model, reference), optimizers):
            give_gradients(each, step)
            optim.step()
    before = dict(make_model().named_parameters())
    for name, parameter in model.named_parameters():
        assert (full(parameter.detach()) - before[name]).abs().max() > 1e-3  # it has moved
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", list(ShardLayout))
def test_optimizers_step_on_blocks(optimizer, kind):
    run_ranks(5, step_beside_reference, optimizer, kind)


def save_trained(folder: str, kind: ShardLayout) -> dict[str, torch.Tensor]:
    model = shard(make_model(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    give_gradients(model, 0)
    optimizer.step()
    state = {f"{p}/{key}": value for p, key, value in _moments(model, optimizer)}
    dcp.save({"model": model.state_dict(), "moments": state}, checkpoint_id=folder)
    return {name: full(p.detach()) for name, p in model.named_parameters()} | {
        key: full(value) for key, value in state.items()
    }


def _moments(model, optimizer):
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            yield name, key, optimizer.state[parameter][key]


def load(folder: str, kind: ShardLayout, saved: dict[str, torch.Tensor]) -> list[int]:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    shard(model, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    give_gradients(model, 1)
    optimizer.step()
    state = {f"{p}/{key}": value for p, key, value in _moments(model, optimizer)}
    held = {"model": model.state_dict(), "moments": copy.copy(state)}
    dcp.load(held, checkpoint_id=folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter.detach()), saved[name]), name
    for key, value in state.items():
        assert torch.equal(full(value), saved[key]), key
    # The next gather sends what was loaded.
    weights = {name: value for name, value in saved.items() if "/" not in name}
    expected = shard_free_output(weights)
    torch.testing.assert_close(model(torch.ones(2, 64)), expected)
    return [parameter.to_local().shape[0] for parameter in model.parameters()]


def shard_free_output(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    from dtensor_owner.mxfp8 import dequantize_rowwise, quantize_rowwise

    rounded = {
        name: dequantize_rowwise(*quantize_rowwise(w)) if w.ndim == 2 else w
        for name, w in weights.items()
    }
    return torch.func.functional_call(make_model(), rounded, (torch.ones(2, 64),)).detach()


def test_checkpoint_into_other_ranks_and_layout(tmp_path: Path):
    saved = run_ranks(5, save_trained, str(tmp_path / "saved"), ShardLayout.UNPADDED)[0]
    for world_size, kind in ((2, ShardLayout.PADDED), (3, ShardLayout.UNPADDED)):
        rows = run_ranks(world_size, load, str(tmp_path / "saved"), kind, saved)
        assert [sum(counts) for counts in zip(*rows)] == [96, 96, 32]
