"""Splits of dim 0 and the moves between them, against element-by-element brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placements.geometry import (
    balanced_block_rows,
    balanced_counts,
    chunk_counts,
    moves,
    offsets,
    overlap,
    ranges,
)

quick = settings(max_examples=60, derandomize=True, deadline=None)
counts = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def owners(rows: list[int] | tuple[int, ...]) -> list[int]:
    """The rank of every row."""
    return [rank for rank, count in enumerate(rows) for _ in range(count)]


@quick
@given(st.integers(0, 40), st.integers(1, 9))
def test_balanced_counts_differ_by_at_most_one_larger_first(total: int, ranks: int) -> None:
    rows = balanced_counts(total, ranks)
    assert len(rows) == ranks and sum(rows) == total
    assert max(rows) - min(rows) <= 1
    assert list(rows) == sorted(rows, reverse=True)


@quick
@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 8))
def test_balanced_block_rows_cut_no_block(rows: int, ranks: int, block: int) -> None:
    split = balanced_block_rows(rows, ranks, block)
    assert len(split) == ranks and sum(split) == rows and min(split) >= 0
    held = [-(-count // block) for count in split]
    assert max(held) - min(held) <= 1 and held == sorted(held, reverse=True)
    of_row = owners(split)
    for first in range(0, rows, block):
        assert len(set(of_row[first : first + block])) == 1, (split, first)


@quick
@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_counts_are_those_of_torch_chunk(total: int, ranks: int) -> None:
    torch = pytest.importorskip("torch")
    chunks = [len(chunk) for chunk in torch.arange(total).chunk(ranks)] if total else []
    assert chunk_counts(total, ranks) == tuple(chunks + [0] * (ranks - len(chunks)))


@quick
@given(counts)
def test_ranges_and_offsets_name_every_row_once(rows: list[int]) -> None:
    assert [row for start, stop in ranges(rows) for row in range(start, stop)] == list(
        range(sum(rows))
    )
    assert offsets(rows) == tuple(start for start, _ in ranges(rows))


@quick
@given(st.tuples(*[st.integers(0, 6)] * 4))
def test_overlap_is_the_set_intersection(ends: tuple[int, int, int, int]) -> None:
    first, second = sorted(ends[:2]), sorted(ends[2:])
    common = set(range(*first)) & set(range(*second))
    found = overlap(tuple(first), tuple(second))
    assert (set(range(*found)) if found else set()) == common
    assert found is None or found[0] < found[1]


@quick
@given(counts, st.randoms(use_true_random=False))
def test_moves_carry_every_row_once_from_its_holder_to_who_wants_it(rows, random) -> None:
    cuts = sorted(random.randint(0, sum(rows)) for _ in range(random.randint(0, 5)))
    target = [b - a for a, b in zip([0, *cuts], [*cuts, sum(rows)], strict=True)]
    carried = [(m.source, m.target) for m in moves(rows, target) for _ in range(m.rows)]
    assert carried == list(zip(owners(rows), owners(target), strict=True))
    flat = [row for move in moves(rows, target) for row in range(move.start, move.stop)]
    assert flat == list(range(sum(rows)))
    assert all(move.rows > 0 for move in moves(rows, target))


def test_splits_of_different_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Cannot move 3 rows \(1, 2\) onto 4 rows \(4,\)"):
        moves((1, 2), (4,))
    with pytest.raises(ValueError, match="ranks must be >= 1"):
        balanced_counts(3, 0)
    with pytest.raises(ValueError, match="block_size must be >= 1, got 0"):
        balanced_block_rows(3, 2, 0)
