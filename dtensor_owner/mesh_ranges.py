"""Which segments of a sharded buffer a rank of a mesh holds: integers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from placements.row_atomic import RowAtomic


class Range(NamedTuple):
    """Half-open range of elements of the global buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersect(self, other: Range) -> Range:
        """The common part; empty, starting at the later start, where there is none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


def sharded_mesh_dims(placements: Sequence[Any]) -> list[int]:
    """Mesh dims on which a buffer is sharded.

    Raises:
        ValueError: They are not the last ones, so a rank's share would not be one range.
    """
    sharded = [dim for dim, placement in enumerate(placements) if isinstance(placement, RowAtomic)]
    if sharded != list(range(len(placements) - len(sharded), len(placements))):
        raise ValueError(
            f"Sharded mesh dims must come last, got {tuple(placements)}: otherwise a rank's "
            "share of the buffer would not be one contiguous range. Reorder the mesh."
        )
    return sharded


def rank_segments(
    dp_size: int, mesh: Any, placements: Sequence[Any], rank: int | Sequence[int]
) -> range:
    """Indices of the segments that one rank holds; see ``GlobalLayout.get_rank_range``."""
    sizes = mesh_sizes(mesh)
    if len(placements) != len(sizes):
        raise ValueError(
            f"{len(placements)} placements {tuple(placements)} for a mesh of shape {sizes}: "
            "give one per mesh dim."
        )
    coordinate = mesh_coordinate(rank, sizes)
    index, num_shards = 0, 1
    for mesh_dim in reversed(sharded_mesh_dims(placements)):
        index = index * sizes[mesh_dim] + coordinate[mesh_dim]
        num_shards *= sizes[mesh_dim]
    per_rank = segments_per_shard(dp_size, num_shards)
    return range(index * per_rank, (index + 1) * per_rank)


def segments_per_shard(dp_size: int, num_shards: int) -> int:
    """How many segments of a layout each of ``num_shards`` ranks gets."""
    if dp_size % num_shards:
        raise ValueError(
            f"A layout of {dp_size} segments cannot be dealt out to {num_shards} ranks "
            f"evenly: build it with a multiple of {num_shards}."
        )
    return dp_size // num_shards


def mesh_sizes(mesh: Any) -> tuple[int, ...]:
    """Shape of a ``DeviceMesh``, or of a mesh given by its shape."""
    return tuple(getattr(mesh, "shape", mesh))


def mesh_coordinate(rank: int | Sequence[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Coordinates of a rank given by them or by its position in the flattened mesh."""
    if isinstance(rank, int):
        digits = []
        rest = rank
        for size in reversed(sizes):
            rest, digit = divmod(rest, size)
            digits.append(digit)
        if rest:
            raise ValueError(f"rank {rank} is not in a mesh of shape {sizes}.")
        return tuple(reversed(digits))
    coordinate = tuple(rank)
    if len(coordinate) != len(sizes) or not all(
        0 <= c < size for c, size in zip(coordinate, sizes, strict=True)
    ):
        raise ValueError(f"coordinates {coordinate} are not in a mesh of shape {sizes}.")
    return coordinate
