"""Small values around a group's layout: its kind, its padding, what a segment holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from dtensor_owner.mesh_ranges import Range


class ShardLayout(Enum):
    """How a group's tensors share one flat buffer.

    ``PADDED``: equal shards; gaps are left so that every rank boundary falls between rows.
    ``UNPADDED``: tensors back to back; shards differ by at most a row (block) at their ends.
    """

    PADDED = "padded"
    UNPADDED = "unpadded"


@dataclass(frozen=True)
class PaddingReport:
    """What a layout stores beside its tensors.

    Args:
        payload: Elements of all tensors.
        padding: Elements that belong to no tensor.
        rank_bytes: Bytes of each rank's shard, padding included.
        empty_ranks: Ranks that hold no element of any tensor.
    """

    payload: int
    padding: int
    rank_bytes: tuple[int, ...]
    empty_ranks: tuple[int, ...]

    @property
    def percent(self) -> float:
        """Padding in percent of the payload."""
        return 100.0 * self.padding / self.payload if self.payload else 0.0

    def __str__(self) -> str:
        low, high = min(self.rank_bytes), max(self.rank_bytes)
        each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return (
            f"payload {self.payload:,}, padding {self.padding:,} ({self.percent:.1f} %), "
            f"{each} bytes per rank, {len(self.empty_ranks)} of {len(self.rank_bytes)} ranks empty"
        )


class Piece(NamedTuple):
    """A run of elements of the global buffer that belong to one tensor, or to none (a gap)."""

    tensor: int | None
    elements: Range
