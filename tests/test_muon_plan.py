"""Plans of the Muon step: every piece moves once, both sides agree, the text can be read."""

from __future__ import annotations

from itertools import product
from math import prod

import expecttest
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from dtensor_owner.muon_matrices import Matrix, Piece
from dtensor_owner.muon_plan import Settings, StepPlan, plan_step
from dtensor_owner.muon_program import RankProgram, rank_program
from dtensor_owner.ns_schedule import QUINTIC
from placements import BlockAtomic, Owner, RowAtomic
from placements.boxes import box_numel, full_box, local_box

FP32 = Settings((QUINTIC,) * 5, 1e-7, torch.float32, True)
BF16 = Settings((QUINTIC,) * 5, 1e-7, torch.bfloat16, True)


def matrix_of(index, shape, mesh_shape, placements):
    """The matrix of a whole parameter, by brute force over the mesh's coordinates."""
    holders = {}
    for rank, at in enumerate(product(*map(range, mesh_shape))):
        box = local_box(shape, mesh_shape, placements, at)
        if box_numel(box):
            holders.setdefault(box, []).append(rank)
    pieces = tuple(Piece(box, tuple(ranks)) for box, ranks in sorted(holders.items()))
    rest = box_numel(full_box(shape)) // shape[0]
    return Matrix(f"w{index}", index, full_box(shape), (shape[0], rest), pieces)


def plan_of(shapes, mesh_shape, placements, settings=FP32, eligible="holders", cap=10**6):
    matrices = [
        matrix_of(i, shape, mesh_shape, placed)
        for i, (shape, placed) in enumerate(zip(shapes, placements))
    ]
    return plan_step(
        matrices,
        [0] * len(matrices),
        [torch.float32] * len(matrices),
        [settings],
        mesh_shape,
        eligible=eligible,
        bucket_numel=cap,
    )


def check_plan(plan: StepPlan) -> None:
    """Every matrix has one owner and one bucket; what one rank sends, the other expects."""
    placed = [index for bucket in plan.buckets for index in bucket.matrices]
    assert sorted(placed) == list(range(len(plan.matrices)))
    ranks = range(plan.num_ranks)
    moved = 0
    for bucket in plan.buckets:
        programs = [rank_program(plan, bucket, rank) for rank in ranks]
        for a, b in product(ranks, ranks):
            assert programs[a].gather.send_numels[b] == programs[b].gather.recv_numels[a]
            assert programs[a].scatter.send_numels[b] == programs[b].scatter.recv_numels[a]
        there = sum(sum(program.gather.send_numels) for program in programs)
        back = sum(sum(program.scatter.send_numels) for program in programs)
        assert plan.bucket_bytes(bucket) == (
            there * bucket.gather_dtype.itemsize,
            back * bucket.result_dtype.itemsize,
        )
        assert plan.moves(bucket) == (there > 0, back > 0)
        for rank, program in enumerate(programs):
            assert program.gather.send_numels[rank] == program.scatter.send_numels[rank] == 0
            check_program(program)
        owned = sorted(matrix.index for program in programs for matrix in program.owned)
        assert owned == list(bucket.matrices)
        moved += sum(plan.bucket_bytes(bucket))
    assert moved == plan.num_bytes


def check_program(program: RankProgram) -> None:
    """Whole matrices from pieces that are there; every batch slot and every place used once."""
    for matrix in program.owned:
        assert sum(map(prod, (part.shape for part in matrix.parts))) == prod(matrix.shape)
    places = [part.place for matrix in program.owned for part in matrix.parts]
    assert sorted(p for p in places if p >= 0) == list(range(len(program.gather.recv_sizes)))
    number_sent = len(program.pack) - sum(p < 0 for p in places)
    assert sum(program.pack_sizes[:number_sent]) == sum(program.gather.send_numels)
    assert sorted(~p for p in places if p < 0) == list(range(len(program.pack) - number_sent))
    taken = sorted(part.place for part in program.updates if part.place >= 0)
    assert taken == list(range(len(program.scatter.recv_sizes)))
    slots = sorted((matrix.batch, matrix.slot) for matrix in program.owned)
    assert slots == [(b, i) for b, shape in enumerate(program.batches) for i in range(shape[0])]


def shards_not_at_owner(plan: StepPlan) -> int:
    """Elements of all pieces that are not at their matrix's owner; pieces have one holder."""
    return sum(
        piece.numel
        for matrix, owner in zip(plan.matrices, plan.owners)
        for piece in matrix.pieces
        if piece.holders != (owner,)
    )


class Texts(expecttest.TestCase):
    def test_plan_of_a_small_model(self):
        plan = plan_of(
            [(8, 6), (8, 6), (4, 4), (3, 5)],
            (3,),
            [(RowAtomic((5, 0, 3)),), (RowAtomic(),), (Owner(1),), (RowAtomic((0, 3, 0)),)],
            BF16,
        )
        self.assertExpectedInline(
            str(plan),
            """\
4 matrices on 3 ranks in 2 buckets; 216 B per step; Newton-Schulz load max/mean 1.260
bucket 0 (bfloat16/bfloat16): gather 0 B, scatter 0 B
  w2 4 x 4 -> rank 1, 0 B there, 0 B back
  w3 3 x 5 -> rank 1, 0 B there, 0 B back
bucket 1 (bfloat16/bfloat16): gather 108 B, scatter 108 B
  w0 8 x 6 -> rank 0, 36 B there, 36 B back
  w1 8 x 6 -> rank 2, 72 B there, 72 B back
rank 0 owns 1, load 1.260 of mean
rank 1 owns 2, load 0.480 of mean
rank 2 owns 1, load 1.260 of mean""",
        )

    def test_plan_in_buckets(self):
        plan = plan_of([(4, 4)] * 4, (2,), [(Shard(0),)] * 4, cap=16)
        self.assertExpectedInline(
            str(plan),
            """\
4 matrices on 2 ranks in 2 buckets; 256 B per step; Newton-Schulz load max/mean 1.000
bucket 0 (float32/float32): gather 64 B, scatter 64 B
  w0 4 x 4 -> rank 0, 32 B there, 32 B back
  w1 4 x 4 -> rank 1, 32 B there, 32 B back
bucket 1 (float32/float32): gather 64 B, scatter 64 B
  w2 4 x 4 -> rank 0, 32 B there, 32 B back
  w3 4 x 4 -> rank 1, 32 B there, 32 B back
rank 0 owns 2, load 1.000 of mean
rank 1 owns 2, load 1.000 of mean""",
        )


@pytest.mark.parametrize("settings", [FP32, BF16])
def test_bytes_are_those_of_the_shards_not_at_their_owner_twice(settings):
    shapes = [(8, 6), (7, 5), (3, 9), (5, 4)]
    plan = plan_of(shapes, (4,), [(RowAtomic(),), (Shard(0),), (Shard(1),), (Owner(3),)], settings)
    check_plan(plan)
    assert plan.num_bytes == 2 * shards_not_at_owner(plan) * settings.dtype.itemsize > 0


def test_single_holders_and_owners_at_rest_move_nothing():
    placements = [(RowAtomic((0, 4, 0)),), (Owner(2),), (Owner(0),), (RowAtomic((0, 0, 3)),)]
    plan = plan_of([(4, 4), (5, 5), (3, 8), (3, 2)], (3,), placements)
    check_plan(plan)
    assert plan.num_bytes == 0 and plan.owners == (1, 2, 0, 2)
    assert all(plan.moves(bucket) == (False, False) for bucket in plan.buckets)


def test_what_needs_no_exchange_comes_first():
    plan = plan_of([(8, 8), (6, 6)], (2,), [(Shard(0),), (Owner(1),)])
    assert [bucket.matrices for bucket in plan.buckets] == [(1,), (0,)]


def test_replicated_parameters_are_orthogonalized_once_and_shared():
    plan = plan_of([(8, 8)] * 4, (2,), [(Replicate(),)] * 4)
    check_plan(plan)
    assert sorted(plan.owners) == [0, 0, 1, 1]
    assert plan.num_bytes == 4 * 64 * 4  # nothing there, each result to the one other rank


def test_replicas_gather_within_themselves():
    plan = plan_of([(8, 8)] * 4, (2, 2), [(Replicate(), Shard(0))] * 4)
    check_plan(plan)
    assert sorted(plan.owners) == [0, 1, 2, 3]
    # Half of each matrix there; back: its own half to the other replica, both others' halves.
    assert plan.num_bytes == 4 * 4 * (32 + 3 * 32)
    for bucket in plan.buckets:
        for rank in range(4):
            sends = rank_program(plan, bucket, rank).gather.send_numels
            assert sum(n for peer, n in enumerate(sends) if peer // 2 != rank // 2) == 0


def test_buckets_cap_what_an_owner_collects():
    shapes = [(8, 8)] * 10 + [(4, 4)] * 3
    plan = plan_of(shapes, (2,), [(Shard(0),)] * 13, cap=130)
    check_plan(plan)
    for bucket in plan.buckets:
        for rank in range(2):
            owned = [i for i in bucket.matrices if plan.owners[i] == rank]
            assert sum(plan.matrices[i].numel for i in owned) <= 130
    assert len(plan.buckets) == 3
    giant = plan_of([(20, 20), (2, 2)], (2,), [(Shard(0),)] * 2, cap=10)
    check_plan(giant)


def test_balance_is_that_of_the_real_work():
    plan = plan_of([(8, 64)] * 8 + [(8, 8)] * 8, (4,), [(Shard(0),)] * 16)
    assert plan.imbalance == 1.0
    wide, square = 2 * 8 * 8 * 64 + 17 * 8**3, 5 * 3 * 8**3  # Gram form and plain form
    assert sum(plan.loads) == 8 * wide + 8 * square


def test_empty_matrices_are_left_out():
    plan = plan_of([(4, 4)], (2,), [(Shard(0),)])
    empty = Matrix("none", 1, ((0, 0), (0, 4)), (0, 4), ())
    both = plan_step(
        [*plan.matrices, empty],
        [0, 0],
        [torch.float32] * 2,
        [FP32],
        (2,),
        bucket_numel=100,
    )
    assert [bucket.matrices for bucket in both.buckets] == [(0,)]


def test_travel_dtypes():
    assert BF16.gather_dtype(torch.float32) == torch.bfloat16
    assert BF16.gather_dtype(torch.bfloat16) == torch.bfloat16
    assert BF16.gather_dtype(torch.float64) == torch.float64  # bf16 lacks its exponents
    assert FP32.gather_dtype(torch.bfloat16) == torch.float32
    half = Settings((QUINTIC,), 1e-7, torch.float16, True)
    assert half.gather_dtype(torch.float32) == torch.float32


def test_step_sizes_are_those_of_torch_muon():
    from torch.optim._muon import _adjust_lr  # the second opinion

    for name in (None, "original", "match_rms_adamw"):
        settings = Settings((QUINTIC,), 1e-7, torch.float32, True, name)
        for shape in [(4, 9), (9, 4), (5, 5), (1, 7)]:
            assert settings.lr_ratio(shape) == pytest.approx(_adjust_lr(1.0, name, shape))


def rows_on(ranks, size, draw):
    cuts = sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, size]))


@st.composite
def plans(draw):
    ranks = draw(st.integers(1, 5))
    shapes = draw(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 6)), min_size=1, max_size=7))
    placements = []
    for shape in shapes:
        kind = draw(st.integers(0, 5))
        placements.append(
            (
                RowAtomic(rows_on(ranks, shape[0], draw)),
                BlockAtomic(2),
                Owner(draw(st.integers(0, ranks - 1))),
                Shard(0),
                Shard(1),
                Replicate(),
            )[kind]
        )
    return plan_of(
        shapes,
        (ranks,),
        [(p,) for p in placements],
        eligible=draw(st.sampled_from(["holders", "any"])),
        cap=draw(st.sampled_from([1, 20, 1000])),
    )


@given(plans())
def test_any_plan_is_consistent(plan):
    check_plan(plan)


@given(plans(), st.randoms(use_true_random=False))
def test_a_part_of_a_plan_is_consistent_too(plan, random):
    kept = {i for i in range(len(plan.matrices)) if random.random() < 0.6}
    part = plan.restricted_to(kept.__contains__)
    assert {i for bucket in part.buckets for i in bucket.matrices} == kept
    for bucket in part.buckets:
        programs = [rank_program(part, bucket, rank) for rank in range(part.num_ranks)]
        for a, b in product(range(part.num_ranks), repeat=2):
            assert programs[a].gather.send_numels[b] == programs[b].gather.recv_numels[a]
        for program in programs:
            check_program(program)
