"""Lay out a group of tensors in one flat buffer, cut between ranks at whole rows or blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dtensor_owner.global_layout import GlobalLayout, check_shape
from dtensor_owner.layout_types import PaddingReport, Piece, ShardLayout
from dtensor_owner.mesh_ranges import Range
from dtensor_owner.packing import (
    padded_offsets,
    round_up,
    unpadded_boundaries,
    unpadded_offsets,
)

__all__ = [
    "GlobalLayout",
    "PaddingReport",
    "Piece",
    "Range",
    "ShardLayout",
    "build_row_atomic_layout",
    "build_whole_tensor_layout",
]


def build_row_atomic_layout(
    shapes: Iterable[Iterable[int]],
    dp_size: int,
    *,
    block_size: int = 1,
    shard_layout: ShardLayout = ShardLayout.UNPADDED,
) -> GlobalLayout:
    """Lay out tensors for ``dp_size`` ranks so that no rank boundary cuts a row or block.

    Args:
        shapes: Shape of each tensor. Dim 0 may be 0, the others may not.
        dp_size: Number of ranks (for several sharded mesh dims, their product).
        block_size: Rows that stay together.
        shard_layout: ``PADDED`` for equal shards, ``UNPADDED`` for none of the padding.

    Raises:
        ValueError: ``dp_size`` or ``block_size`` < 1, a 0-D shape, a shape with rows of no
            elements, or (padded) ``shape[0]`` not a multiple of ``block_size``.
    """
    tensor_shapes = tuple(tuple(int(dim) for dim in shape) for shape in shapes)
    if dp_size < 1:
        raise ValueError(f"dp_size must be >= 1, got {dp_size}.")
    if block_size < 1:
        raise ValueError(f"block_size must be >= 1, got {block_size}.")
    for i, shape in enumerate(tensor_shapes):
        check_shape(i, shape)
    if ShardLayout(shard_layout) is ShardLayout.UNPADDED:
        offsets, size = unpadded_offsets(tensor_shapes)
        boundaries = unpadded_boundaries(tensor_shapes, dp_size, block_size)
    else:
        for i, shape in enumerate(tensor_shapes):
            if shape[0] % block_size:
                raise ValueError(
                    f"Tensor {i} {shape} has {shape[0]} rows, not a multiple of "
                    f"block_size={block_size}, which a padded layout needs: use "
                    "ShardLayout.UNPADDED, whose last block may be short."
                )
        offsets, end, chunk = padded_offsets(tensor_shapes, block_size)
        size = round_up(end, chunk * dp_size)
        boundaries = tuple(range(0, size, size // dp_size)) if size else (0,) * dp_size
    layout = GlobalLayout(tensor_shapes, tuple(offsets), boundaries, size, block_size)
    layout.validate_for_row_atomic()
    return layout


def build_whole_tensor_layout(
    shapes: Iterable[Iterable[int]], dp_size: int, owners: Sequence[int]
) -> GlobalLayout:
    """Lay out tensors back to back by owner, so that every tensor is whole on its rank.

    Args:
        shapes: Shape of each tensor, with at least one element.
        dp_size: Number of ranks.
        owners: Rank (segment) of each tensor.

    Raises:
        ValueError: ``dp_size`` < 1, an owner out of range or missing, a shape without elements.
    """
    tensor_shapes = tuple(tuple(int(dim) for dim in shape) for shape in shapes)
    if dp_size < 1:
        raise ValueError(f"dp_size must be >= 1, got {dp_size}.")
    if len(owners) != len(tensor_shapes) or not all(0 <= owner < dp_size for owner in owners):
        raise ValueError(
            f"{len(tensor_shapes)} tensors need one owner of 0 to {dp_size - 1} each, got "
            f"{tuple(owners)}."
        )
    offsets = [0] * len(tensor_shapes)
    boundaries, end = [], 0
    for rank in range(dp_size):
        boundaries.append(end)
        for i, shape in enumerate(tensor_shapes):
            if owners[i] == rank:
                check_shape(i, shape)
                offsets[i] = end
                end += math.prod(shape)
    return GlobalLayout(tensor_shapes, tuple(offsets), tuple(boundaries), end, whole_tensors=True)
