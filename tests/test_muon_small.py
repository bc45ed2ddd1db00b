"""Cases of FIELD_CASES with a scene of their own: tiny shapes, averages, accumulation, memory."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtensor_owner import muon_step
from dtensor_owner.muon import Muon
from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor
from tests.muon_reference import grads_of, reference, weights_of
from tests.ranks import run_ranks
from tests.test_muon import full, set_grads
from tests.test_muon_faults import error_of

FP32 = {"lr": 0.1, "ns_dtype": torch.float32}
TINY = [(1,), (1, 1), (2,), (0, 4), (4, 0), (2, 1)]


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _tiny(placement):
    """FIELD_CASES 9: backward, redistribution and a step of the smallest parameters there are."""
    refused = error_of(distribute_tensor, torch.ones(()), mesh(), [placement])
    params = [
        torch.nn.Parameter(distribute_tensor(w, mesh(), [placement], src_data_rank=None))
        for w in weights_of(TINY)
    ]
    early = error_of(Muon, params, **FP32)
    groups = [
        {"params": [p for p in params if p.ndim >= 2]},
        {"params": [p for p in params if p.ndim < 2], "algorithm": "adamw", "lr": 0.1},
    ]
    optimizer = Muon(groups, **FP32)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        for param in params:
            (param.redistribute(placements=[Replicate()]).to_local() ** 2).sum().backward()
        optimizer.step()
    return refused, early, [full(p) for p in params]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("placement", [RowAtomic(), BlockAtomic(2), Owner(0)])
def test_tiny_parameters(ranks, placement):
    twins = [torch.nn.Parameter(w) for w in weights_of(TINY)]
    groups = [
        {"params": [p for p in twins if p.ndim >= 2]},
        {"params": [p for p in twins if p.ndim < 2], "algorithm": "adamw", "lr": 0.1},
    ]
    optimizer = Muon(groups, **FP32)
    for _ in range(2):
        optimizer.zero_grad()
        for twin in twins:
            (twin**2).sum().backward()
        # A replica on every rank: their gradients are summed, which changes no direction.
        for twin in twins:
            twin.grad *= ranks
        optimizer.step()
    for refused, early, params in run_ranks(ranks, _tiny, placement, timeout=60):
        assert placement == Owner(0) or "()" in refused or "0-D" in refused
        assert "0-D and 1-D parameters belong in a group" in early
        for mine, theirs in zip(params, twins):
            assert mine.shape == theirs.shape
            torch.testing.assert_close(mine, theirs.detach(), atol=2e-5, rtol=1e-5)


def _own_data(kind):
    """FIELD_CASES 21, 41: each rank has a gradient of its own data; the step takes their mean."""
    shapes = [(5, 4), (6, 4), (3, 8)]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # The first has one holder, the others cross a boundary.
    placements = [RowAtomic((5,) + (0,) * (ranks - 1)), RowAtomic(), RowAtomic()]
    params = [
        torch.nn.Parameter(distribute_tensor(w, mesh(), [p], src_data_rank=None))
        for w, p in zip(weights_of(shapes), placements)
    ]
    optimizer = Muon(params, **FP32)
    for step in range(2):
        for param, grad in zip(params, grads_of(shapes, 10 * step + rank)):
            if kind == "local":  # control: nobody adds them up
                part = distribute_tensor(grad, mesh(), param.placements, src_data_rank=None)
                param.grad = part
                continue
            mine = grad if kind == "avg" else grad / ranks
            param.grad = DTensor.from_local(mine, mesh(), [Partial(kind)])
        optimizer.step()
    return [full(p) for p in params]


def mean_of(shapes, ranks):
    params = [torch.nn.Parameter(w) for w in weights_of(shapes)]
    optimizer = Muon(params, **FP32)
    for step in range(2):
        parts = [grads_of(shapes, 10 * step + rank) for rank in range(ranks)]
        for index, param in enumerate(params):
            param.grad = sum(part[index] for part in parts) / ranks
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_step_takes_the_reduced_gradient(ranks):
    expected = mean_of([(5, 4), (6, 4), (3, 8)], ranks)

    def distance(kind):
        return max(
            float((mine - theirs).abs().max())
            for params in run_ranks(ranks, _own_data, kind, timeout=60)
            for mine, theirs in zip(params, expected)
        )

    assert distance("sum") < 2e-5 and distance("avg") < 2e-5
    assert distance("local") > 1e-2


def _accumulated(parts):
    """FIELD_CASES 26: one step per round, however many backward passes; matrices are counted."""
    weight = torch.nn.Parameter(
        distribute_tensor(weights_of([(4, 6)])[0], mesh(), [RowAtomic((1, 3))], src_data_rank=None)
    )
    optimizer = Muon([weight], **FP32)
    runs = 0
    inner = muon_step.newton_schulz

    def counting(*args):
        nonlocal runs
        runs += 1
        return inner(*args)

    muon_step.newton_schulz = counting
    try:
        for number in range(3):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            for part in grads_of([(8, 6)], number)[0].split(8 // parts):
                whole = weight.redistribute(placements=[Replicate()]).to_local(
                    grad_placements=[Replicate()]
                )
                (part @ whole.t()).square().sum().backward()
            optimizer.step()
    finally:
        muon_step.newton_schulz = inner
    return full(weight), runs


def test_accumulation_is_one_step():
    one, four = run_ranks(2, _accumulated, 1), run_ranks(2, _accumulated, 4)
    torch.testing.assert_close(one[0][0], four[0][0], atol=1e-4, rtol=1e-4)
    assert sum(runs for _, runs in four) == 3  # three rounds, on the owner only
    assert (one[0][0] - weights_of([(4, 6)])[0]).abs().max() > 0.05


def _peak(bucket_numel):
    """Most elements this rank's step had in tensors of its own at once, and what it owns."""
    shapes = [(64, 64)] * 16
    params = [
        torch.nn.Parameter(distribute_tensor(w, mesh(), [Shard(0)], src_data_rank=None))
        for w in weights_of(shapes)
    ]
    optimizer = Muon(params, bucket_numel=bucket_numel, **FP32)
    set_grads(params, grads_of(shapes, 0))
    optimizer.step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        optimizer.step()
    now = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    gc.collect()
    return peak / 4, optimizer.plans[0].owners.count(dist.get_rank())


def test_buckets_bound_memory():
    """FIELD_CASES 34: no rank ever holds all matrices, and smaller buckets need less."""
    matrix = 64 * 64
    whole, small = run_ranks(4, _peak, 1 << 26), run_ranks(4, _peak, matrix)
    assert all(owned == 4 for _, owned in whole)
    assert max(peak for peak, _ in small) < 0.75 * max(peak for peak, _ in whole)
    # Three buckets of one matrix each, in a few copies, beside the look-ahead of own shards.
    assert max(peak for peak, _ in small) < 12 * matrix + 16 * matrix / 4


def _closure():
    """A closure computes gradients once per step, sharded; lr as a tensor."""
    weight = torch.nn.Parameter(
        distribute_tensor(weights_of([(4, 6)])[0], mesh(), [Owner(1)], src_data_rank=None)
    )
    optimizer = Muon([weight], lr=torch.tensor(0.1), ns_dtype=torch.float32)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        set_grads([weight], grads_of([(4, 6)], calls - 1))
        return calls

    losses = [optimizer.step(closure) for _ in range(3)]
    return full(weight), losses


def test_closures_on_shards():
    expected = reference([(4, 6)], 3, lr=0.1)[0][0]
    for weight, losses in run_ranks(2, _closure):
        torch.testing.assert_close(weight, expected, atol=2e-5, rtol=1e-5)
        assert losses == [1, 2, 3]


def _group_added_later():
    shapes = [(4, 6), (5, 4), (3,)]
    weights = [
        torch.nn.Parameter(distribute_tensor(w, mesh(), [Shard(0)], src_data_rank=None))
        for w in weights_of(shapes)
    ]
    optimizer = Muon(weights[:1], **FP32)
    keys = [sorted(optimizer.state[weights[0]])]
    for step in range(3):
        set_grads(weights, grads_of(shapes, step))
        if step == 1:
            optimizer.add_param_group({"params": weights[1:2], "lr": 0.2})
            optimizer.add_param_group({"params": weights[2:], "algorithm": "adamw"})
            keys += [sorted(optimizer.state[w]) for w in weights[1:]]
        optimizer.step()
    copied = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copied)
    optimizer.step()
    return [full(w) for w in weights], keys, len(optimizer.plans[0].matrices)


def test_groups_added_on_all_ranks():
    first, second = run_ranks(2, _group_added_later)
    assert first[1] == second[1] == [["momentum_buffer"]] * 2 + [["exp_avg", "exp_avg_sq", "step"]]
    assert first[2] == 2
    for a, b in zip(first[0], second[0]):
        assert torch.equal(a, b)
    alone = torch.nn.Parameter(weights_of([(4, 6)])[0])
    optimizer = Muon([alone], **FP32)
    for step in (0, 1, 2, 2):
        set_grads([alone], grads_of([(4, 6), (5, 4), (3,)], step)[:1])
        optimizer.step()
    torch.testing.assert_close(first[0][0], alone.detach(), atol=2e-5, rtol=1e-5)


def _owners_given(transport):
    """FIELD_CASES 15: another plan in every step, such that some ranks have nothing to send."""
    shapes = [(8, 4), (6, 6), (4, 9), (8, 4), (5, 3), (2, 7)]
    rows = [(0, 4, 2, 2), (0, 1, 2, 3), (0, 0, 2, 2), (2, 2, 2, 2), (0, 5, 0, 0), (0, 0, 1, 1)]
    params = [
        torch.nn.Parameter(distribute_tensor(w, mesh(), [RowAtomic(r)], src_data_rank=None))
        for w, r in zip(weights_of(shapes), rows)
    ]
    optimizer = Muon(params, owners="any", transport=transport, **FP32)
    plans = [
        (0, 0, 0, 0, 0, 0),
        (1, 2, 3, 1, 2, 3),  # rank 0 owns nothing
        (0, 0, 0, 3, 3, 3),  # rank 0 owns only what it holds nothing of
        (1, 1, 2, 2, 1, 3),
        (3, 2, 1, 0, 3, 0),
    ]
    moved = []
    for step, owners in enumerate(plans):
        prepared = optimizer._prepared
        (domain, plan), *_ = prepared.plans.items()
        prepared.plans[domain] = replace(plan, owners=owners)
        prepared._works.clear()
        set_grads(params, grads_of(shapes, step))
        optimizer.step()
        moved.append(optimizer.bytes_per_step)
    return [full(p) for p in params], moved


@pytest.mark.parametrize("transport", ["all_to_all", "point_to_point"])
def test_ranks_with_nothing_to_send_hold_nobody_up(transport):
    shapes = [(8, 4), (6, 6), (4, 9), (8, 4), (5, 3), (2, 7)]
    expected = reference(shapes, 5, lr=0.1)[0]
    for params, moved in run_ranks(4, _owners_given, transport, timeout=60):
        assert len(set(moved)) > 1
        for mine, theirs in zip(params, expected):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)


def _many_steps():
    shapes = [(10, 6), (6, 10)]
    params = [
        torch.nn.Parameter(distribute_tensor(w, mesh(), [RowAtomic()], src_data_rank=None))
        for w in weights_of(shapes)
    ]
    optimizer = Muon(params, weight_decay=0.0, **FP32)
    for step in range(100):
        before = [full(p).clone() for p in params]
        set_grads(params, grads_of(shapes, step))
        optimizer.step()
    # What the last step added, over lr and the factor of its shape.
    updates = [(b - full(p)) / 0.1 for b, p in zip(before, params)]
    return [full(p) for p in params], [updates[0] / (10 / 6) ** 0.5, updates[1]]


@pytest.mark.slow
def test_a_hundred_steps_stay_orthogonal_and_finite():
    """FIELD_CASES 22: the singular values of whole updates lie in the band of the quintic."""
    for params, updates in run_ranks(4, _many_steps, timeout=90):
        assert all(p.isfinite().all() for p in params)
        for update in updates:
            values = torch.linalg.svdvals(update)
            assert values.min() > 0.6 and values.max() < 1.3


_PLAN_TEXT = """
from dtensor_owner import ParameterLayout, plan_owners
layouts = {i: ParameterLayout((8 + i % 5, 6), ((8 + i % 5) * 3,) * 2) for i in range(12)}
print(plan_owners([layouts, layouts], bucket_numel=100).to_json())
"""


@pytest.mark.slow
def test_plans_do_not_depend_on_hash_seeds():
    """FIELD_CASES 19."""
    texts = {
        subprocess.run(
            [sys.executable, "-c", _PLAN_TEXT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1 and "owners" in texts.pop()
