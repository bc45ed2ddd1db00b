"""Packing to and from owners, with the transport played in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dtensor_owner.exchange import OwnerGatherPlan, OwnerScatterPlan, agree
from dtensor_owner.owners import GroupOwnerLayout, ParameterLayout, assign_owner_work
from tests.model_shapes import split_unpadded
from tests.ranks import run_ranks


def owner_layouts(layouts, owners, num_ranks):
    """The same owner layout as each rank sees it."""
    return [
        GroupOwnerLayout(
            SimpleNamespace(mesh=SimpleNamespace(get_local_rank=lambda rank=rank: rank)),
            layouts,
            owners,
        )
        for rank in range(num_ranks)
    ]


def deliver(plans):
    """Hand every send buffer to its receiver, checking sizes as a transport would."""
    received = [{} for _ in plans]
    for source, plan in enumerate(plans):
        for target, buffer in plan.send_buffers.items():
            assert source != target and buffer.numel() > 0
            received[target][source] = buffer.clone()
    for plan, buffers in zip(plans, received):
        assert {source: b.numel() for source, b in buffers.items()} == plan.recv_sizes
    return received


def fulls_of(layouts):
    return {
        index: torch.arange(layout.full_numel(), dtype=torch.float64) + 1000 * index
        for index, layout in layouts.items()
    }


def shards_of(layouts, rank):
    return {
        index: full.split(list(layouts[index].flat_counts))[rank].clone()
        for index, full in fulls_of(layouts).items()
        if layouts[index].rank_numel(rank)
    }


def round_trip(layouts, owners):
    """Gather, negate on the owners, scatter; check every value against the whole tensors."""
    num_ranks = next(iter(layouts.values())).dp_size
    seen = owner_layouts(layouts, owners, num_ranks)
    shards = [shards_of(layouts, rank) for rank in range(num_ranks)]
    gathers = [OwnerGatherPlan.pack(plan, own) for plan, own in zip(seen, shards)]
    buffers = deliver(gathers)
    results: list[dict[int, torch.Tensor]] = [{} for _ in range(num_ranks)]
    for index, owner in owners.items():
        full = gathers[owner].reconstruct_full(index, buffers[owner])
        assert torch.equal(full, fulls_of(layouts)[index])
        results[owner][index] = -full.reshape(layouts[index].full_shape)
    scatters = [OwnerScatterPlan.pack(plan, own) for plan, own in zip(seen, results)]
    for rank, (scatter, received) in enumerate(zip(scatters, deliver(scatters))):
        unpacked = scatter.unpack(received)
        expected = {i: -x for i, x in shards[rank].items() if owners[i] != rank}
        assert unpacked.keys() == expected.keys()
        assert all(torch.equal(unpacked[i], expected[i]) for i in expected)
    return gathers, scatters


def test_two_ranks_and_one_owner():
    layouts = {0: ParameterLayout((6, 4), (12, 12)), 1: ParameterLayout((4, 4), (8, 8))}
    (first, second), (back_0, back_1) = round_trip(layouts, {0: 1, 1: 1})
    assert first.send_buffers.keys() == {1} and first.send_buffers[1].numel() == 20
    assert first.recv_sizes == {} and first.own_shards == {} and first.recv_offsets == {}
    assert second.send_buffers == {} and second.recv_sizes == {0: 20}
    assert second.recv_offsets == {(0, 0): 0, (1, 0): 12}
    assert second.own_shards.keys() == {0, 1}
    assert back_0.recv_sizes == {1: 20} and back_0.recv_offsets == {(0, 1): 0, (1, 1): 12}
    assert back_1.send_buffers.keys() == {0} and back_1.recv_offsets == {}


def test_back_to_back_layout_shares_one_tensor_per_boundary():
    # rank 0 | rank 1 | rank 2 cut two tensors; the third has one holder.
    layouts = {
        0: ParameterLayout((6, 3), (12, 6, 0)),
        1: ParameterLayout((4, 2), (0, 6, 2)),
        2: ParameterLayout((2, 2), (0, 0, 4)),
    }
    owners = assign_owner_work(layouts)
    assert owners == {0: 0, 1: 1, 2: 2}
    gathers, _ = round_trip(layouts, owners)
    assert gathers[0].recv_sizes == {1: 6}
    assert gathers[1].recv_sizes == {2: 2}
    assert gathers[2].recv_sizes == {}


def test_every_tensor_split_over_all_ranks():
    layouts = {i: ParameterLayout((8, 6), (12, 12, 12, 12)) for i in range(4)}
    owners = assign_owner_work(layouts)
    assert sorted(owners.values()) == [0, 1, 2, 3]
    gathers, scatters = round_trip(layouts, owners)
    for rank in range(4):
        assert gathers[rank].recv_sizes == {r: 12 for r in range(4) if r != rank}
        assert scatters[rank].recv_sizes == {r: 12 for r in range(4) if r != rank}


def test_single_holder_is_not_copied():
    layouts = {0: ParameterLayout((4, 2), (0, 8))}
    plan = owner_layouts(layouts, {0: 1}, 2)[1]
    shard = torch.arange(8.0).view(4, 2)
    gather = OwnerGatherPlan.pack(plan, {0: shard})
    assert gather.reconstruct_full(0, {}).data_ptr() == shard.data_ptr()
    # An owner that holds nothing of a matrix gets all of it.
    round_trip(layouts, {0: 0})


def test_tensor_order_not_dict_order():
    layouts = {5: ParameterLayout((2, 2), (2, 2)), 2: ParameterLayout((2, 2), (2, 2))}
    gathers, _ = round_trip(layouts, {5: 1, 2: 1})
    assert gathers[1].recv_offsets == {(2, 0): 0, (5, 0): 2}


def test_nothing_takes_part():
    plan = owner_layouts({}, {}, 2)[0]
    gather, scatter = OwnerGatherPlan.pack(plan, {}), OwnerScatterPlan.pack(plan, {})
    assert gather.send_buffers == gather.own_shards == gather.recv_offsets == {}
    assert scatter.send_buffers == scatter.recv_sizes == scatter.unpack({}) == {}


def test_wrong_tensors_are_named():
    layouts = {0: ParameterLayout((4, 2), (4, 4)), 1: ParameterLayout((4, 2), (4, 4))}
    plan = owner_layouts(layouts, {0: 1, 1: 1}, 2)[0]
    good = torch.zeros(4)
    with pytest.raises(ValueError, match="shard of tensor 1 is missing"):
        OwnerGatherPlan.pack(plan, {0: good})
    with pytest.raises(ValueError, match=r"tensor 1 has shape \(3,\)"):
        OwnerGatherPlan.pack(plan, {0: good, 1: torch.zeros(3)})
    with pytest.raises(ValueError, match="cannot share one buffer"):
        OwnerGatherPlan.pack(plan, {0: good, 1: good.double()})
    with pytest.raises(ValueError, match="result of tensor 0 is missing"):
        OwnerScatterPlan.pack(owner_layouts(layouts, {0: 1, 1: 1}, 2)[1], {})


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_any_layout_any_owner(shapes, num_ranks, random):
    layouts = split_unpadded(shapes, num_ranks)
    gathers, scatters = round_trip(
        layouts, {index: random.randrange(num_ranks) for index in layouts}
    )
    sent = sum(b.numel() for plan in gathers for b in plan.send_buffers.values())
    back = sum(b.numel() for plan in scatters for b in plan.send_buffers.values())
    assert sent == back


# ------------------------------------------------------------------------- agreement


def _agree(lines, odd_rank, odd_lines, error_rank=None):
    rank = dist.get_rank()
    try:
        agree(
            odd_lines if rank == odd_rank else lines,
            dist.group.WORLD,
            "the weights",
            error="weight 3 is broken" if rank == error_rank else None,
        )
    except ValueError as error:  # caught here, so that the workers live on
        return str(error)
    return "agreed"


def test_ranks_that_agree():
    assert run_ranks(3, _agree, ["a", "b"], None, None) == ["agreed"] * 3


@pytest.mark.parametrize(
    ("odd", "here", "there"),
    [(["a", "c"], "b", "c"), (["a"], "b", "nothing"), (["a", "b", "z"], "nothing", "z")],
)
def test_the_first_difference_is_named_on_every_rank(odd, here, there):
    answers = run_ranks(3, _agree, ["a", "b"], 2, odd)
    assert len(set(answers)) == 1
    assert "Ranks disagree on the weights" in answers[0]
    assert f"rank 0: {here}\n" in answers[0] and f"rank 2: {there}\n" in answers[0]


def test_a_fault_on_one_rank_is_raised_on_all():
    answers = run_ranks(3, _agree, ["a"], None, None, error_rank=1)
    assert answers == ["weight 3 is broken (found on rank 1)"] * 3
