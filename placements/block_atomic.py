"""BlockAtomic: RowAtomic whose boundaries never cut a block of rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from placements.base import as_int
from placements.geometry import balanced_block_rows
from placements.row_atomic import RowAtomic, RowTable


@dataclass(frozen=True, init=False, repr=False)
class BlockAtomic(RowAtomic):
    """Whole blocks of ``block_size`` rows per rank; the tensor's last block may be short.

    Local shapes are those of ``RowAtomic``; every inner boundary is a multiple of
    ``block_size`` rows, so 32-row MXFP8 blocks are never cut.

    Args:
        block_size: Rows per block.
        rows: Rows of each rank, or ``None``: block counts differ by at most one, larger first.

    Raises:
        ValueError: ``block_size`` < 1, or an inner boundary of ``rows`` cuts a block.
    """

    block_size: int = 32

    def __init__(
        self,
        block_size: int = 32,
        rows: Iterable[int] | Iterable[Iterable[int]] | None = None,
    ) -> None:
        object.__setattr__(self, "block_size", as_int("block_size", block_size, minimum=1))
        super().__init__(rows)
        if self.rows is not None:
            for table in self.rows if self.is_nested else (self.rows,):
                self._check_boundaries(table)  # type: ignore[arg-type]

    def _check_boundaries(self, table: RowTable) -> None:
        total = sum(table)
        cut = [end for end in accumulate(table) if end % self.block_size and end != total]
        if cut:
            raise ValueError(
                f"{self} cuts a block: boundary at row {cut[0]} is not a multiple of "
                f"block_size={self.block_size}. Move it to row "
                f"{cut[0] // self.block_size * self.block_size} or use RowAtomic."
            )

    def _args(self) -> tuple[Any, ...]:
        return self.block_size, self.rows

    def balanced(self, num_rows: int, num_ranks: int) -> RowTable:
        """Rows per rank that ``rows=None`` stands for: whole blocks, larger shares first."""
        return balanced_block_rows(num_rows, num_ranks, self.block_size)

    def with_rows(self, rows: Iterable[int]) -> RowAtomic:
        """The same kind of placement with other counts (RowAtomic where they cut a block)."""
        table = tuple(rows)
        total = sum(table)
        if any(end % self.block_size and end != total for end in accumulate(table)):
            return RowAtomic(table)
        return BlockAtomic(self.block_size, table)

    def __repr__(self) -> str:
        if self.rows is None:
            return f"BlockAtomic({self.block_size})"
        return f"BlockAtomic({self.block_size}, rows={self.rows})"

    __str__ = __repr__
