"""The text of every kind of plan, and of every refusal, as a reader sees it."""

# ruff: noqa: E501 (a text is one line, however long)

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path

import expecttest
import numpy as np
import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from placements import BlockAtomic, Owner, RowAtomic, explain


def text(source: object, target: object, shape: tuple, mesh: object = 3, **options: object) -> str:
    return str(explain(source, target, shape, mesh_shape=mesh, **options))


class PlanTexts(expecttest.TestCase):
    """One row of the table in docs/redistribution.md each."""

    def test_rows_to_rows(self) -> None:
        self.assertExpectedInline(
            text(RowAtomic((5, 1, 2)), RowAtomic(), (8, 4)),
            """\
mesh dim 0: RowAtomic(rows=(5, 1, 2)) -> RowAtomic(), point-to-point
  0 keep  rows [0, 3)  48 B
  0 -> 1  rows [3, 5)  32 B
  1 keep  rows [5, 6)  16 B
  2 keep  rows [6, 8)  32 B""",
        )

    def test_rows_to_owner(self) -> None:
        self.assertExpectedInline(
            text(RowAtomic((5, 1, 2)), Owner(1), (8, 4)),
            """\
mesh dim 0: RowAtomic(rows=(5, 1, 2)) -> Owner(rank=1), point-to-point
  0 -> 1  rows [0, 5)  80 B
  1 keep  rows [5, 6)  16 B
  2 -> 1  rows [6, 8)  32 B""",
        )

    def test_rows_to_replicate_even(self) -> None:
        self.assertExpectedInline(
            text(RowAtomic(), Replicate(), (6, 4)),
            """\
mesh dim 0: RowAtomic() -> R, all_gather (even)
  rank 0 sends 64 B, receives 64 B
  rank 1 sends 64 B, receives 64 B
  rank 2 sends 64 B, receives 64 B""",
        )

    def test_rows_to_replicate_staged(self) -> None:
        self.assertExpectedInline(
            text(RowAtomic(), Replicate(), (8, 4)),
            """\
mesh dim 0: RowAtomic() -> R, all_gather (staged)
  rank 0 sends 96 B, receives 96 B
  rank 1 sends 96 B, receives 96 B
  rank 2 sends 96 B, receives 96 B""",
        )

    def test_rows_to_replicate_uneven(self) -> None:
        self.assertExpectedInline(
            text(RowAtomic((5, 0, 2)), Replicate(), (7, 4)),
            """\
mesh dim 0: RowAtomic(rows=(5, 0, 2)) -> R, all_gather (uneven)
  rank 0 sends 160 B, receives 32 B
  rank 1 sends 0 B, receives 112 B
  rank 2 sends 64 B, receives 80 B""",
        )

    def test_rows_to_shard_0(self) -> None:
        self.assertExpectedInline(
            text(RowAtomic((5, 0, 2)), Shard(0), (7, 4)),
            """\
mesh dim 0: RowAtomic(rows=(5, 0, 2)) -> S(0), point-to-point
  0 keep  rows [0, 3)  48 B
  0 -> 1  rows [3, 5)  32 B
  2 -> 1  rows [5, 6)  16 B
  2 keep  rows [6, 7)  16 B""",
        )

    def test_rows_to_shard_1(self) -> None:
        self.assertExpectedInline(
            text(RowAtomic((5, 0, 2)), Shard(1), (7, 4)),
            """\
mesh dim 0: RowAtomic(rows=(5, 0, 2)) -> S(1), point-to-point
  0 keep  rows [0, 5) x dim 1 [0, 2)  40 B
  0 -> 1  rows [0, 5) x dim 1 [2, 4)  40 B
  2 -> 0  rows [5, 7) x dim 1 [0, 2)  16 B
  2 -> 1  rows [5, 7) x dim 1 [2, 4)  16 B""",
        )

    def test_blocks_to_rows(self) -> None:
        self.assertExpectedInline(
            text(BlockAtomic(4), RowAtomic(), (10, 2)),
            """\
mesh dim 0: BlockAtomic(4) -> RowAtomic(), point-to-point
  0 keep  rows [0, 4)  32 B
  1 keep  rows [4, 7)  24 B
  1 -> 2  rows [7, 8)  8 B
  2 keep  rows [8, 10)  16 B""",
        )

    def test_owner_to_rows(self) -> None:
        self.assertExpectedInline(
            text(Owner(2), RowAtomic(), (7, 4)),
            """\
mesh dim 0: Owner(rank=2) -> RowAtomic(), point-to-point
  2 -> 0  rows [0, 3)  48 B
  2 -> 1  rows [3, 5)  32 B
  2 keep  rows [5, 7)  32 B""",
        )

    def test_owner_to_owner(self) -> None:
        self.assertExpectedInline(
            text(Owner(2), Owner(0), (7, 4)),
            """\
mesh dim 0: Owner(rank=2) -> Owner(rank=0), point-to-point
  2 -> 0  rows [0, 7)  112 B""",
        )

    def test_owner_to_replicate(self) -> None:
        self.assertExpectedInline(
            text(Owner(2), Replicate(), (7, 4)),
            """\
mesh dim 0: Owner(rank=2) -> R, broadcast
  rank 0 sends 0 B, receives 112 B
  rank 1 sends 0 B, receives 112 B
  rank 2 sends 224 B, receives 0 B""",
        )

    def test_owner_to_shard_1(self) -> None:
        self.assertExpectedInline(
            text(Owner(2), Shard(1), (7, 4)),
            """\
mesh dim 0: Owner(rank=2) -> S(1), point-to-point
  2 -> 0  rows [0, 7) x dim 1 [0, 2)  56 B
  2 -> 1  rows [0, 7) x dim 1 [2, 4)  56 B""",
        )

    def test_replicate_to_rows(self) -> None:
        self.assertExpectedInline(
            text(Replicate(), RowAtomic(), (7, 4)), """mesh dim 0: R -> RowAtomic(), local slice"""
        )

    def test_replicate_to_owner(self) -> None:
        self.assertExpectedInline(
            text(Replicate(), Owner(1), (7, 4)), """mesh dim 0: R -> Owner(rank=1), local slice"""
        )

    def test_shard_to_owner(self) -> None:
        self.assertExpectedInline(
            text(Shard(0), Owner(1), (7, 4)),
            """\
mesh dim 0: S(0) -> Owner(rank=1), point-to-point
  0 -> 1  rows [0, 3)  48 B
  1 keep  rows [3, 6)  48 B
  2 -> 1  rows [6, 7)  16 B""",
        )

    def test_partial_to_rows(self) -> None:
        self.assertExpectedInline(
            text(Partial("avg"), RowAtomic((4, 3, 0)), (7, 4)),
            """\
mesh dim 0: P(avg) -> RowAtomic(rows=(4, 3, 0)), reduce_scatter (uneven)
  rank 0 sends 48 B, receives 128 B
  rank 1 sends 64 B, receives 96 B
  rank 2 sends 112 B, receives 0 B""",
        )

    def test_partial_to_owner(self) -> None:
        self.assertExpectedInline(
            text(Partial(), Owner(1), (7, 4)),
            """\
mesh dim 0: P(sum) -> Owner(rank=1), reduce
  rank 0 sends 120 B, receives 80 B
  rank 1 sends 80 B, receives 152 B
  rank 2 sends 112 B, receives 80 B""",
        )

    def test_nothing(self) -> None:
        self.assertExpectedInline(
            text(RowAtomic(), RowAtomic((3, 2, 2)), (7, 4)), """nothing to do"""
        )

    def test_one_rank(self) -> None:
        self.assertExpectedInline(
            text(RowAtomic(), Owner(0), (7, 4), 1),
            """mesh dim 0: RowAtomic() -> Owner(rank=0), none""",
        )

    def test_two_mesh_dims(self) -> None:
        source, target = (Partial(), RowAtomic()), (Replicate(), Owner(1))
        self.assertExpectedInline(
            text(source, target, (5, 4), (2, 2)),
            """\
mesh dim 1: RowAtomic() -> Owner(rank=1), point-to-point
  0 -> 1  rows [0, 3)  48 B
  1 keep  rows [3, 5)  32 B
mesh dim 0: P(sum) -> R, none""",
        )

    def test_nested_rows(self) -> None:
        source = (RowAtomic((3, 2)), RowAtomic(((2, 1), (0, 2))))
        target = (Replicate(), RowAtomic())
        self.assertExpectedInline(
            text(source, target, (5, 4), (2, 2), coordinate=(1, 0)),
            """\
mesh dim 1: RowAtomic(rows=((2, 1), (0, 2))) -> R, all_gather (uneven)
  rank 0 sends 0 B, receives 32 B
  rank 1 sends 32 B, receives 0 B
mesh dim 0: RowAtomic(rows=(3, 2)) -> R, all_gather (staged)
  rank 0 sends 48 B, receives 48 B
  rank 1 sends 48 B, receives 48 B
mesh dim 1: R -> RowAtomic(), local slice""",
        )

    def test_an_owner_elsewhere_leaves_nothing_to_do(self) -> None:
        source, target = (Owner(0), RowAtomic()), (Owner(0), Owner(1))
        self.assertExpectedInline(
            text(source, target, (5, 4), (2, 2), coordinate=(1, 0)),
            """mesh dim 1: RowAtomic() -> Owner(rank=1), none""",
        )


class Refusals(expecttest.TestCase):
    def assert_refused(
        self, kind: type[Exception], call: Callable[[], object], expected: str
    ) -> None:
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind
        self.assertExpectedInline(str(caught.value), expected, skip=1)

    def test_a_negative_count(self) -> None:
        self.assert_refused(
            ValueError, lambda: RowAtomic((3, -1)), """a row count must be >= 0, got -1."""
        )

    def test_a_count_that_is_no_int(self) -> None:
        self.assert_refused(
            TypeError,
            lambda: RowAtomic((3, 1.5)),
            """a row count must be an int, got 1.5 of type float.""",
        )

    def test_a_bool(self) -> None:
        self.assert_refused(
            TypeError,
            lambda: Owner(True),
            """Owner's rank (a coordinate on the mesh dimension) must be an int, got True of type bool.""",
        )

    def test_no_counts(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: RowAtomic(()),
            """rows is empty: give one count per rank, or None for balanced rows.""",
        )

    def test_a_negative_owner(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: Owner(-1),
            """Owner's rank (a coordinate on the mesh dimension) must be >= 0, got -1.""",
        )

    def test_a_boundary_inside_a_block(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: BlockAtomic(4, (6, 4)),
            """BlockAtomic(4, rows=(6, 4)) cuts a block: boundary at row 6 is not a multiple of block_size=4. Move it to row 4 or use RowAtomic.""",
        )

    def test_a_nested_boundary_inside_a_block(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: BlockAtomic(4, ((4, 4), (2, 6))),
            """BlockAtomic(4, rows=((4, 4), (2, 6))) cuts a block: boundary at row 2 is not a multiple of block_size=4. Move it to row 0 or use RowAtomic.""",
        )

    def test_blocks_below_rows_that_cut_them(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: explain(
                (RowAtomic((3, 5)), BlockAtomic(2)), (Replicate(),) * 2, (8,), mesh_shape=(2, 2)
            ),
            """BlockAtomic(2) on mesh dim 1 beside RowAtomic(rows=(3, 5)) on mesh dim 0 cuts a block: boundary at row 3 is not a multiple of block_size=2. Use BlockAtomic on both, or RowAtomic.""",
        )

    def test_an_owner_past_the_mesh_dim(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: text(Owner(3), Replicate(), (4,)),
            """Owner(rank=3) names coordinate 3, but the mesh dimension has 3 ranks: use 0 to 2 (coordinates on the mesh dimension, not global ranks).""",
        )

    def test_too_few_counts(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: text(RowAtomic((2, 2)), Owner(0), (4,)),
            """RowAtomic(rows=(2, 2)) has 2 row counts, but the mesh dimension has 3 ranks: give one count per rank (0 for a rank that holds nothing).""",
        )

    def test_counts_of_another_tensor(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: text(RowAtomic((2, 2, 1)), Owner(0), (4,)),
            """RowAtomic(rows=(2, 2, 1)) covers 5 rows, but the tensor has 4 rows to split: the counts must sum to shape[0].""",
        )

    def test_rows_of_a_scalar(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: text(RowAtomic(), Owner(0), ()),
            """RowAtomic() on mesh dim 0 splits dim 0, but the tensor has shape (): use Owner or Replicate() for it.""",
        )

    def test_a_missing_dim(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: text(Shard(2), Owner(0), (4, 3)),
            """S(2) on mesh dim 0 splits dim 2, but the tensor has shape (4, 3): use Owner or Replicate() for it.""",
        )

    def test_too_few_placements(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: text((Owner(0),), (Owner(0),) * 2, (4,), (2, 2)),
            """Got 1 placements (Owner(rank=0),) for a mesh of shape (2, 2): give one placement per mesh dim.""",
        )

    def test_rows_beside_a_shard_of_the_same_dim(self) -> None:
        self.assert_refused(
            NotImplementedError,
            lambda: text((RowAtomic(), Shard(0)), (Replicate(),) * 2, (4,), (2, 2)),
            """RowAtomic() on mesh dim 0 and S(0) on mesh dim 1 both split dim 0: use RowAtomic on both, or Replicate() on one.""",
        )

    def test_three_row_splits(self) -> None:
        self.assert_refused(
            NotImplementedError,
            lambda: text((RowAtomic(),) * 3, (Replicate(),) * 3, (4,), (2, 2, 2)),
            """RowAtomic on 3 mesh dims (0, 1, 2): at most two may split dim 0.""",
        )

    def test_a_nested_table_alone(self) -> None:
        self.assert_refused(
            ValueError,
            lambda: text(RowAtomic(((2, 2), (1, 3))), Replicate(), (4,), 2),
            """Nested row tables on mesh dims [0] of (RowAtomic(rows=((2, 2), (1, 3))),): exactly one of two row placements may be nested; it is keyed by the coordinate on the other.""",
        )

    def test_relabelling_as_partial(self) -> None:
        # Also where no rank would have anything to move: the values would change their meaning.
        for source in ((Replicate(), RowAtomic()), (Partial("avg"), RowAtomic())):
            with pytest.raises(NotImplementedError, match="cannot be relabelled"):
                explain(source, (Partial(), RowAtomic()), (4,), mesh_shape=(2, 2))
        self.assert_refused(
            NotImplementedError,
            lambda: text((Replicate(), Owner(0)), (Partial(), Owner(0)), (4,), (2, 2)),
            """No rule for R -> P(sum) on mesh dim 0: a value cannot be relabelled as a partial one; redistribute to Replicate() or a split placement.""",
        )


def test_numpy_ints_are_counts() -> None:
    assert RowAtomic(np.array([3, 2])) == RowAtomic((3, 2))
    assert repr(RowAtomic(np.array([3, 2]))) == "RowAtomic(rows=(3, 2))"
    assert RowAtomic([np.array([1, 2]), np.array([0, 2])]) == RowAtomic(((1, 2), (0, 2)))
    owner = Owner(np.int64(1))
    assert owner == Owner(1) and hash(owner) == hash(Owner(1)) and type(owner.rank) is int
    assert BlockAtomic(np.int32(2)) == BlockAtomic(2)


PLACEMENTS = [
    RowAtomic(),
    RowAtomic((1,)),
    RowAtomic((1, 0)),
    RowAtomic((0, 1)),
    RowAtomic(((1,),)),
    RowAtomic(((1,), (0,))),
    BlockAtomic(32),
    BlockAtomic(16),
    BlockAtomic(1),
    BlockAtomic(32, (32, 1)),
    BlockAtomic(16, (32, 1)),
    RowAtomic((32, 1)),
    BlockAtomic(1, ((1,),)),
    Owner(0),
    Owner(1),
    Replicate(),
    Shard(0),
    Shard(1),
    Partial(),
]


def test_placements_are_equal_exactly_when_they_say_the_same() -> None:
    for i, first in enumerate(PLACEMENTS):
        for j, second in enumerate(PLACEMENTS):
            assert (first == second) is (i == j), (first, second)
            assert (first != second) is (i != j), (first, second)
    assert len(set(PLACEMENTS)) == len(PLACEMENTS)
    assert len({hash(p) for p in PLACEMENTS}) == len(PLACEMENTS)
    assert len({repr(p) for p in PLACEMENTS}) == len(PLACEMENTS)
    for placement in PLACEMENTS[:15]:
        again = eval(repr(placement))
        assert again == placement and hash(again) == hash(placement)
        with pytest.raises(AttributeError):
            placement.rows = (9,)  # type: ignore[attr-defined]


def test_the_examples_of_the_page_are_true() -> None:
    page = Path(__file__).parent.parent / "docs" / "redistribution.md"
    failed, run = doctest.testfile(str(page), module_relative=False)
    assert (failed, run) == (0, 6)


def test_the_bytes_of_the_page_are_true() -> None:
    """The table's last column, for a tensor of B bytes on N ranks."""
    rows, shape, ranks = (5, 1, 2), (8, 12), 3
    held = [count * 12 * 4 for count in rows]
    total = sum(held)

    def moved(source: object, target: object) -> list[tuple[int, int]]:
        plan = explain(source, target, shape, mesh_shape=ranks)
        return [plan.bytes_moved((rank,)) for rank in range(ranks)]

    split = RowAtomic(rows)
    assert [sent for sent, _ in moved(split, Shard(1))] == [b * 2 // 3 for b in held]
    assert moved(split, Owner(1)) == [(held[0], 0), (0, total - held[1]), (held[2], 0)]
    assert [got for _, got in moved(split, Replicate())] == [total - b for b in held]
    assert moved(Owner(1), split) == [(0, held[0]), (total - held[1], 0), (0, held[2])]
    assert moved(Owner(1), Owner(2)) == [(0, 0), (total, 0), (0, total)]
    assert [got for _, got in moved(Owner(1), Replicate())] == [total, 0, total]
    assert [sent for sent, _ in moved(Partial(), split)] == [total - b for b in held]
    for target in (split, Owner(0), BlockAtomic(2)):
        assert moved(Replicate(), target) == [(0, 0)] * ranks
