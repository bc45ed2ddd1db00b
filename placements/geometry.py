"""Rows of dim 0 over the ranks of one mesh dimension: integers only.

Everything here is arithmetic on tuples of row counts, so every split can be checked by
brute force without torch, a tensor or a process group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Move(NamedTuple):
    """Rows ``[start, stop)`` of the global tensor, held by ``source``, wanted by ``target``."""

    source: int
    target: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def balanced_counts(total: int, num_ranks: int) -> tuple[int, ...]:
    """Split ``total`` items into ``num_ranks`` counts that differ by at most one, larger first."""
    if total < 0 or num_ranks < 1:
        raise ValueError(
            f"Cannot split {total} rows over {num_ranks} ranks: "
            "rows must be >= 0 and ranks must be >= 1."
        )
    share, larger = divmod(total, num_ranks)
    return tuple(share + 1 if rank < larger else share for rank in range(num_ranks))


def balanced_block_rows(rows: int, num_ranks: int, block_size: int) -> tuple[int, ...]:
    """Split ``rows`` so that ranks hold whole blocks and block counts differ by at most one.

    The tensor's last block may be short; it belongs to the last rank that holds a block.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be >= 1, got {block_size}.")
    num_blocks = -(-rows // block_size)
    ends = accumulate(balanced_counts(num_blocks, num_ranks))
    row_ends = [min(end * block_size, rows) for end in ends]
    return tuple(stop - start for start, stop in zip([0, *row_ends], row_ends, strict=False))


def chunk_counts(total: int, num_ranks: int) -> tuple[int, ...]:
    """Counts of ``torch.chunk``, by which the stock ``Shard`` placement splits a dim.

    Every chunk but the last non-empty one has ``ceil(total / num_ranks)`` items.
    """
    size = -(-total // num_ranks)
    return tuple(max(0, min(size, total - rank * size)) if size else 0 for rank in range(num_ranks))


def offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """First row of each rank, by mesh coordinate."""
    return (0, *accumulate(counts))[: len(counts)]


def ranges(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Half-open row range of each rank, by mesh coordinate."""
    ends = tuple(accumulate(counts))
    return tuple(zip((0, *ends), ends, strict=False))


def overlap(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int] | None:
    """Common part of two half-open ranges, or None where they share nothing."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return (start, stop) if start < stop else None


def moves(source_rows: Sequence[int], target_rows: Sequence[int]) -> tuple[Move, ...]:
    """Return the row ranges to carry from one split of dim 0 to another.

    Args:
        source_rows: Rows each rank holds now, by mesh coordinate; zeros are allowed.
        target_rows: Rows each rank shall hold. Same sum.

    Returns:
        Moves in row order. A move with ``source == target`` is a local copy.

    Raises:
        ValueError: The two splits cover a different number of rows.
    """
    if sum(source_rows) != sum(target_rows):
        raise ValueError(
            f"Cannot move {sum(source_rows)} rows {tuple(source_rows)} onto "
            f"{sum(target_rows)} rows {tuple(target_rows)}: both splits must cover dim 0 "
            "of the same tensor. Build both from its shape[0]."
        )
    source_ends, target_ends = list(accumulate(source_rows)), list(accumulate(target_rows))
    cuts = sorted({0, *source_ends, *target_ends})
    return tuple(
        Move(bisect_right(source_ends, start), bisect_right(target_ends, start), start, stop)
        for start, stop in zip(cuts, cuts[1:], strict=False)
    )
