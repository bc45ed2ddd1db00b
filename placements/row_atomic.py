"""RowAtomic: dim 0 split unevenly into whole rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from placements.base import LayoutPlacement, as_int
from placements.geometry import balanced_counts

RowTable = tuple[int, ...]


@dataclass(frozen=True, init=False, repr=False)
class RowAtomic(LayoutPlacement):
    """Whole rows of dim 0 per rank, in rank order, unevenly and without padding.

    A global tensor ``(d0, d1, ...)`` has local shape ``(rows[r], d1, ...)`` on the rank at
    coordinate ``r`` of the mesh dimension; ``rows[r]`` may be 0, then the rank holds nothing.

    Args:
        rows: Rows of each rank, by coordinate on the mesh dimension. ``None`` is balanced:
            counts differ by at most one, larger first. A tuple of tables (one table per
            coordinate on the mesh dimension that is applied first) describes the second of
            two mesh dimensions that both split dim 0.

    Raises:
        TypeError, ValueError: A count is not an int, or negative. That there is one count
            per rank and that they sum to ``d0`` is checked where the mesh is known.

    Source: ``RaggedShard`` (veScale) with a row as unit.
    """

    rows: RowTable | tuple[RowTable, ...] | None = None

    def __init__(self, rows: Iterable[int] | Iterable[Iterable[int]] | None = None) -> None:
        object.__setattr__(self, "rows", None if rows is None else _as_table(rows))
        self.__post_init__()

    @property
    def is_nested(self) -> bool:
        """Whether ``rows`` is a table of tables, keyed by the dimension applied first."""
        return bool(self.rows) and isinstance(self.rows[0], tuple)  # type: ignore[index]

    def balanced(self, num_rows: int, num_ranks: int) -> RowTable:
        """Rows per rank that ``rows=None`` stands for."""
        return balanced_counts(num_rows, num_ranks)

    def counts(
        self, num_rows: int, num_ranks: int, first_coordinate: int | None = None
    ) -> RowTable:
        """Rows of each rank for a tensor of ``num_rows`` rows on ``num_ranks`` ranks.

        Args:
            num_rows: Rows to split: ``shape[0]``, or what the dimension applied first left.
            num_ranks: Size of the mesh dimension.
            first_coordinate: Coordinate on the mesh dimension applied first, if there is one.

        Raises:
            ValueError: The table does not have ``num_ranks`` counts or does not sum to
                ``num_rows``, or it is nested and no ``first_coordinate`` picks a table.
        """
        num_rows = int(num_rows)  # a traced size is pinned to its value: splits are constants
        if self.rows is None:
            return self.balanced(num_rows, num_ranks)
        table = self._table(first_coordinate)
        if len(table) != num_ranks:
            raise ValueError(
                f"{self} has {len(table)} row counts, but the mesh dimension has {num_ranks} "
                "ranks: give one count per rank (0 for a rank that holds nothing)."
            )
        if sum(table) != num_rows:
            raise ValueError(
                f"{self} covers {sum(table)} rows, but the tensor has {num_rows} rows to split: "
                "the counts must sum to shape[0]."
            )
        return table

    def _table(self, first_coordinate: int | None) -> RowTable:
        assert self.rows is not None
        if not self.is_nested:
            return self.rows  # type: ignore[return-value]
        if first_coordinate is None or first_coordinate >= len(self.rows):
            raise ValueError(
                f"{self} has one table per coordinate of another mesh dimension "
                f"({len(self.rows)} tables), but coordinate {first_coordinate} picks none: nested "
                "tables need a second row placement on the mesh, with as many ranks as tables."
            )
        return self.rows[first_coordinate]  # type: ignore[return-value]

    def with_rows(self, rows: Iterable[int]) -> RowAtomic:
        """The same kind of placement with other counts."""
        return RowAtomic(rows)

    def __repr__(self) -> str:
        return "RowAtomic()" if self.rows is None else f"RowAtomic(rows={self.rows})"

    __str__ = __repr__


def _as_table(rows: Iterable) -> RowTable | tuple[RowTable, ...]:
    table = tuple(rows)
    if not table:
        raise ValueError("rows is empty: give one count per rank, or None for balanced rows.")
    if set(map(type, table)) == {int} and min(table) >= 0:
        return table  # as below, but fast for a thousand ranks
    if any(isinstance(count, Iterable) for count in table):
        return tuple(_flat_table(counts) for counts in table)
    return _flat_table(table)


def _flat_table(counts: Iterable) -> RowTable:
    return tuple(as_int("a row count", count, minimum=0) for count in counts)
