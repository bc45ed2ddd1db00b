"""State that comes from elsewhere: other placements, plain tensors, another shape."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from dtensor_owner.muon import Muon
from placements import Owner, RowAtomic, distribute_tensor
from tests.muon_reference import grads_of, reference, weights_of
from tests.ranks import run_ranks
from tests.test_muon import IN_FP32, OPTIONS, check_same, full, set_grads

SHAPES = [(7, 6), (2, 9)]  # the second has fewer rows than ranks


def _optimizer(weights, placement):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [
        torch.nn.Parameter(
            w.clone()
            if placement is None
            else distribute_tensor(w, mesh, [placement], src_data_rank=None)
        )
        for w in weights
    ]
    bias = torch.nn.Parameter(
        distribute_tensor(torch.ones(4), mesh, [placement or Replicate()], src_data_rank=None)
    )
    groups = [{"params": params}, {"params": [bias], "algorithm": "adamw", "lr": 0.01}]
    return params, bias, Muon(groups, **IN_FP32)


def _steps(params, bias, optimizer, steps):
    for step in steps:
        set_grads([*params, bias], [*grads_of(SHAPES, step), torch.arange(4.0) * step])
        optimizer.step()


def _moved(before, after):
    """Two steps, then on with other placements; whole values, and how the state is placed."""
    params, bias, optimizer = _optimizer(weights_of(SHAPES), before)
    _steps(params, bias, optimizer, range(2))
    twins, other_bias, other = _optimizer([full(p) for p in params], after)
    with torch.no_grad():
        other_bias.copy_(
            distribute_tensor(
                full(bias), other_bias.device_mesh, other_bias.placements, src_data_rank=None
            )
        )
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _steps(twins, other_bias, other, range(2, 4))
    _steps(params, bias, optimizer, range(2, 4))
    torch.testing.assert_close(full(other_bias), full(bias))
    momenta = [other.state[p]["momentum_buffer"] for p in twins]
    assert all(m.placements == p.placements for m, p in zip(momenta, twins))
    return [full(p) for p in twins], [full(m) for m in momenta], 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Shard(0), RowAtomic()),
        (Owner(0), RowAtomic()),
        (RowAtomic(), Owner(1)),
        (Owner(0), Owner(2)),
        (Shard(0), Replicate()),
        (None, Shard(0)),
    ],
)
def test_loaded_state_is_placed_as_the_parameter_is(before, after):
    results = run_ranks(3, _moved, before, after)
    check_same(results, reference(SHAPES, 4, **OPTIONS))


def _other_shape(on):
    params, bias, optimizer = _optimizer(weights_of(SHAPES), Shard(0))
    _steps(params, bias, optimizer, range(1))
    before = [full(p) for p in params]
    if dist.get_rank() in on:
        optimizer.state[params[1]]["momentum_buffer"] = torch.zeros(3, 3)
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError) as caught:
        _steps(params, bias, optimizer, range(1, 2))
    assert all(map(torch.equal, before, [full(p) for p in params]))
    return str(caught.value)


@pytest.mark.parametrize("on", [(0, 1), (1,)])
def test_state_of_another_shape_is_an_error_on_all_ranks(on):
    texts = run_ranks(2, _other_shape, on)
    assert texts[0] == texts[1]
    assert "momentum_buffer of parameter 1 of group 0 has shape (3, 3)" in texts[0]


def test_a_parameter_that_changed_its_shape():
    param = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = Muon([param], **IN_FP32)
    param.data = torch.ones(5, 4)
    param.grad = torch.ones(5, 4)
    with pytest.raises(ValueError, match="build the optimizer anew"):
        optimizer.step()
    assert torch.equal(param, torch.ones(5, 4))
