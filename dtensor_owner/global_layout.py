"""GlobalLayout: where a group's tensors lie in one flat buffer, and where ranks are cut."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from dtensor_owner.layout_types import PaddingReport, Piece
from dtensor_owner.mesh_ranges import (
    Range,
    mesh_sizes,
    rank_segments,
    segments_per_shard,
    sharded_mesh_dims,
)
from dtensor_owner.packing import Shape, row_numel
from placements.block_atomic import BlockAtomic
from placements.owner import Owner
from placements.row_atomic import RowAtomic


@dataclass(frozen=True)
class GlobalLayout:
    """Offsets of a group's tensors in one global buffer, and where the ranks are cut.

    The buffer is cut into ``dp_size`` segments. On a 1-D mesh segment ``k`` belongs to rank
    ``k``; ``get_rank_range`` tells for other meshes. All numbers count elements.

    Args:
        tensor_shapes: Shape of each tensor, at least 1-D.
        tensor_to_offset: Offset of each tensor's first element.
        rank_to_offset: Offset of each segment's first element; non-decreasing, from 0.
        size: Elements of the global buffer, gaps and tail padding included.
        block_size: Rows that stay together; 1 means single rows.
        whole_tensors: No segment boundary cuts a tensor, so that each has one ``Owner``.

    Raises:
        ValueError: Tensors overlap or leave the buffer, or segment offsets are not ascending.
            Whether segments keep rows whole is checked by ``validate_for_row_atomic``.

    Source: ``GlobalLayout`` of Megatron-FSDP v2.
    """

    tensor_shapes: tuple[Shape, ...]
    tensor_to_offset: tuple[int, ...]
    rank_to_offset: tuple[int, ...]
    size: int
    block_size: int = 1
    whole_tensors: bool = False

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # frozen: lists are stored as tuples so that layouts hash
        set_field(self, "tensor_shapes", tuple(tuple(shape) for shape in self.tensor_shapes))
        set_field(self, "tensor_to_offset", tuple(self.tensor_to_offset))
        set_field(self, "rank_to_offset", tuple(self.rank_to_offset))
        if self.size < 0:
            raise ValueError(f"A layout's size must be >= 0, got {self.size}.")
        if self.block_size < 1:
            raise ValueError(f"block_size must be >= 1, got {self.block_size}.")
        self._check_segments()
        self._check_tensors()
        if self.whole_tensors:
            self._check_whole()

    def _check_segments(self) -> None:
        offsets = self.rank_to_offset
        if not offsets:
            raise ValueError("rank_to_offset is empty: give the first offset of at least one rank.")
        if offsets[0] != 0 or offsets[-1] > self.size:
            raise ValueError(
                f"rank_to_offset must start at 0 and stay within the size {self.size}, "
                f"got first {offsets[0]} and last {offsets[-1]}."
            )
        for rank, (start, stop) in enumerate(pairwise(offsets)):
            if start > stop:
                raise ValueError(
                    f"rank_to_offset must not decrease, but rank {rank} starts at {start} "
                    f"and rank {rank + 1} at {stop}."
                )

    def _check_tensors(self) -> None:
        if len(self.tensor_shapes) != len(self.tensor_to_offset):
            raise ValueError(
                f"{len(self.tensor_shapes)} tensor shapes, but "
                f"{len(self.tensor_to_offset)} offsets: give one offset per tensor."
            )
        for i, (shape, offset) in enumerate(
            zip(self.tensor_shapes, self.tensor_to_offset, strict=True)
        ):
            check_shape(i, shape)
            stop = offset + math.prod(shape)
            if offset < 0 or stop > self.size:
                raise ValueError(
                    f"Tensor {i} {shape} at [{offset}, {stop}) leaves the buffer [0, {self.size})."
                )
        for first, second in pairwise(self._filled):
            if self._stop(first) > self.tensor_to_offset[second]:
                raise ValueError(
                    f"Tensors overlap: tensor {first} ends at {self._stop(first)}, but "
                    f"tensor {second} starts at {self.tensor_to_offset[second]}."
                )

    def _check_whole(self) -> None:
        for i, shape in enumerate(self.tensor_shapes):
            segment = self.segments[self.segment_of(i)]
            if not math.prod(shape) or self._stop(i) > segment.stop:
                raise ValueError(
                    f"Tensor {i} {shape} is not whole in one segment [{segment.start}, "
                    f"{segment.stop}), or has no elements: build the layout with "
                    "build_whole_tensor_layout, or with whole_tensors=False."
                )

    def segment_of(self, i: int) -> int:
        """Segment that holds the first element of tensor ``i``."""
        return bisect_right(self.rank_to_offset, self.tensor_to_offset[i]) - 1

    def _stop(self, i: int) -> int:
        return self.tensor_to_offset[i] + math.prod(self.tensor_shapes[i])

    @cached_property
    def _filled(self) -> tuple[int, ...]:
        """Tensors with at least one element, by offset."""
        filled = (i for i, shape in enumerate(self.tensor_shapes) if math.prod(shape))
        return tuple(sorted(filled, key=self.tensor_to_offset.__getitem__))

    @cached_property
    def payload(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape in self.tensor_shapes)

    @property
    def dp_size(self) -> int:
        """Number of segments."""
        return len(self.rank_to_offset)

    @cached_property
    def segments(self) -> tuple[Range, ...]:
        """Element range of each segment."""
        return tuple(Range(*ends) for ends in pairwise((*self.rank_to_offset, self.size)))

    def get_tensor_range(self, i: int) -> Range:
        """Elements of tensor ``i``."""
        return Range(self.tensor_to_offset[i], self._stop(i))

    def validate_for_row_atomic(self, block_size: int | None = None) -> None:
        """Check that no segment boundary cuts a row (``block_size`` 1) or a block of rows.

        Args:
            block_size: Rows that must stay together, counted from each tensor's first row; a
                tensor's last block may be short. ``None``: the layout's own.

        Raises:
            ValueError: A boundary cuts a block, naming the tensor and the boundary.
        """
        block_size = self.block_size if block_size is None else block_size
        if block_size < 1:
            raise ValueError(f"block_size must be >= 1, got {block_size}.")
        starts = [self.tensor_to_offset[i] for i in self._filled]
        for rank, boundary in enumerate(self.rank_to_offset):
            position = bisect_right(starts, boundary) - 1
            if position < 0:
                continue
            i = self._filled[position]
            within = boundary - self.tensor_to_offset[i]
            unit = block_size * row_numel(self.tensor_shapes[i])
            if within < math.prod(self.tensor_shapes[i]) and within % unit:
                what = "row" if block_size == 1 else f"block of {block_size} rows"
                raise ValueError(
                    f"Rank {rank} starts at {boundary}, element {within} of tensor {i} "
                    f"{self.tensor_shapes[i]}, and cuts a {what} ({unit} elements): build the "
                    f"layout with block_size={block_size}."
                )

    def rows(self, i: int, segments: Sequence[Range] | None = None) -> tuple[int, ...]:
        """Rows of tensor ``i`` in each segment (or in each of the given ascending ranges)."""
        segments = self.segments if segments is None else segments
        row, tensor = row_numel(self.tensor_shapes[i]), self.get_tensor_range(i)
        counts = [0] * len(segments)
        k = max(0, bisect_right(segments, tensor.start, key=lambda segment: segment.start) - 1)
        while k < len(segments) and segments[k].start < tensor.stop:
            counts[k], rest = divmod(tensor.intersect(segments[k]).numel, row)
            if rest:
                self.validate_for_row_atomic(1)
            k += 1
        return tuple(counts)

    def placement(self, i: int) -> RowAtomic | BlockAtomic | Owner:
        """Placement of tensor ``i`` on a 1-D mesh of ``dp_size`` ranks: its true row counts."""
        if self.whole_tensors:
            return Owner(self.segment_of(i))
        return self._placement(self.rows(i))

    def _placement(self, rows: tuple[Any, ...]) -> RowAtomic | BlockAtomic:
        return RowAtomic(rows) if self.block_size == 1 else BlockAtomic(self.block_size, rows)

    @cached_property
    def _known(self) -> dict[Any, Any]:
        """Answers that cost time in proportion to the ranks and are asked for at every step."""
        return {}

    def tensor_placements(self, i: int, mesh: Any, placements: Sequence[Any]) -> tuple[Any, ...]:
        """Placements of tensor ``i`` when the buffer lies on ``mesh`` by ``placements``.

        On two sharded mesh dims the inner one splits the rows first: its counts are those of
        whole columns of ranks, and the outer dim has one table for each inner coordinate.

        Raises:
            NotImplementedError: More than two mesh dims are sharded.
        """
        key = (i, mesh_sizes(mesh), tuple(placements))
        if key not in self._known:
            self._known[key] = self._tensor_placements(i, mesh, placements)
        return self._known[key]

    def _tensor_placements(self, i: int, mesh: Any, placements: Sequence[Any]) -> tuple[Any, ...]:
        sharded = sharded_mesh_dims(placements)
        if len(sharded) > 2:
            raise NotImplementedError(
                f"Rows sharded over mesh dims {sharded} by {tuple(placements)} have no DTensor "
                "placement: shard over at most two mesh dims."
            )
        if not sharded:
            return tuple(placements)
        if self.whole_tensors:
            return self.owner_placements(i, mesh, placements)
        sizes, first = mesh_sizes(mesh), sharded[0]
        outer = sizes[first] if len(sharded) == 2 else 1
        rows = self.rows(i, self._shares(math.prod(sizes[d] for d in sharded)))
        if len(sharded) == 1:
            return (*placements[:first], self._placement(rows))
        tables = tuple(rows[start : start + outer] for start in range(0, len(rows), outer))
        by_inner = self._placement(tuple(map(sum, tables)))
        return (*placements[:first], self._placement(tables), by_inner)

    def owner_placements(self, i: int, mesh: Any, placements: Sequence[Any]) -> tuple[Any, ...]:
        """Placements of tensor ``i`` where one shard has all of it, at most two dims sharded."""
        sharded, sizes = sharded_mesh_dims(placements), mesh_sizes(mesh)
        if not sharded:
            return tuple(placements)
        shares = self._shares(math.prod(sizes[d] for d in sharded))
        index = bisect_right([share.start for share in shares], self.tensor_to_offset[i]) - 1
        outer = sizes[sharded[0]] if len(sharded) == 2 else 1
        at = (index % outer, index // outer)[-len(sharded) :]
        return (*placements[: sharded[0]], *map(Owner, at))

    def _shares(self, num_shards: int) -> tuple[Range, ...]:
        """Elements of each of ``num_shards`` equal runs of segments."""
        run = segments_per_shard(self.dp_size, num_shards)
        firsts = range(0, self.dp_size, run)
        return tuple(Range(self.segments[k].start, self.segments[k + run - 1].stop) for k in firsts)

    def get_rank_range(
        self, mesh: Any, placements: Sequence[Any], rank: int | Sequence[int]
    ) -> Range:
        """Elements that one rank of a mesh holds.

        Sharded mesh dims come last in ``placements``; the innermost is the most significant digit
        of the segment index. With an outer dim of size M, rank ``(o, i)`` holds segment
        ``i * M + o`` when both are sharded, and segments ``[i * M, (i + 1) * M)`` when only the
        inner one is, so sharding further only narrows ranges.

        Args:
            mesh: A ``DeviceMesh`` or its shape; no process group is needed.
            placements: One per mesh dim: ``RowAtomic`` or ``BlockAtomic`` where the buffer is
                sharded, anything else where each rank holds the same range.
            rank: Coordinates on the mesh, or the position in the flattened mesh (row-major).

        Raises:
            ValueError: The segments cannot be dealt out evenly to the sharded mesh dims.
        """
        segments = rank_segments(self.dp_size, mesh, placements, rank)
        return Range(self.segments[segments.start].start, self.segments[segments.stop - 1].stop)

    def get_local_range(self, mesh: Any, placements: Sequence[Any]) -> Range:
        """Elements that this rank of a ``DeviceMesh`` holds."""
        return self.get_rank_range(mesh, placements, _own_coordinate(mesh))

    def get_peer_numels(
        self, mesh: Any, placements: Sequence[Any], mesh_dim: int
    ) -> tuple[int, ...]:
        """Elements each rank along ``mesh_dim`` holds that differs from this one only there."""
        coordinate = _own_coordinate(mesh)
        key = (mesh_dim, mesh_sizes(mesh), tuple(placements), coordinate)
        if key not in self._known:
            before, after = coordinate[:mesh_dim], coordinate[mesh_dim + 1 :]
            self._known[key] = tuple(
                self.get_rank_range(mesh, placements, (*before, c, *after)).numel
                for c in range(mesh_sizes(mesh)[mesh_dim])
            )
        return self._known[key]

    def padding_report(self, *, itemsize: int = 4) -> PaddingReport:
        """Count payload, padding and bytes per rank, for elements of ``itemsize`` bytes."""
        starts = [self.tensor_to_offset[i] for i in self._filled]
        empty = []
        for rank, segment in enumerate(self.segments):
            # The last tensor that starts before the segment's stop decides: if it ends before
            # the segment's start, so do all earlier ones.
            position = bisect_right(starts, segment.stop - 1) - 1
            last_stop = self._stop(self._filled[position]) if position >= 0 else 0
            if not segment.numel or last_stop <= segment.start:
                empty.append(rank)
        return PaddingReport(
            payload=self.payload,
            padding=self.size - self.payload,
            rank_bytes=tuple(segment.numel * itemsize for segment in self.segments),
            empty_ranks=tuple(empty),
        )

    def contents(self) -> tuple[tuple[Piece, ...], ...]:
        """What each segment holds, piece by piece, gaps included."""
        found = []
        position = 0
        for segment in self.segments:
            pieces, cursor = [], segment.start
            while position < len(self._filled):
                i = self._filled[position]
                part = segment.intersect(self.get_tensor_range(i))
                if part.numel:
                    if cursor < part.start:
                        pieces.append(Piece(None, Range(cursor, part.start)))
                    pieces.append(Piece(i, part))
                    cursor = part.stop
                if self._stop(i) > segment.stop:
                    break
                position += 1
            if cursor < segment.stop:
                pieces.append(Piece(None, Range(cursor, segment.stop)))
            found.append(tuple(pieces))
        return tuple(found)

    def __str__(self) -> str:
        report = self.padding_report(itemsize=1)
        lines = [
            f"{len(self.tensor_shapes)} tensors on {self.dp_size} ranks, size {self.size:,} = "
            f"payload {report.payload:,} + padding {report.padding:,} ({report.percent:.1f} %)"
        ]
        for rank, (segment, pieces) in enumerate(zip(self.segments, self.contents(), strict=True)):
            content = " | ".join(map(self._piece_text, pieces)) or "nothing"
            lines.append(f"rank {rank} [{segment.start}, {segment.stop}): {content}")
        return "\n".join(lines)

    def _piece_text(self, piece: Piece) -> str:
        if piece.tensor is None:
            return f"gap {piece.elements.numel}"
        row, start = (
            row_numel(self.tensor_shapes[piece.tensor]),
            self.tensor_to_offset[piece.tensor],
        )
        rows = f"[{(piece.elements.start - start) // row}, {(piece.elements.stop - start) // row})"
        return f"tensor {piece.tensor} rows {rows}"


def _own_coordinate(mesh: Any) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"This rank is not part of {mesh}: it holds no range of the layout.")
    return tuple(coordinate)


def check_shape(i: int, shape: Shape) -> None:
    if not shape:
        raise ValueError(f"Tensor {i} has the 0-D shape (): it has no rows. Give it shape (1,).")
    if shape[0] < 0 or any(dim < 1 for dim in shape[1:]):
        raise ValueError(
            f"Tensor {i} has shape {tuple(shape)}: only dim 0 may be 0, and no dim negative."
        )
