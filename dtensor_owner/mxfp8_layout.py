"""Where the four planes of an MXFP8 group lie: layouts derived from the data's, integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dtensor_owner.layout import GlobalLayout
from dtensor_owner.mxfp8 import BLOCK, check_shape


@dataclass(frozen=True)
class MXFP8Layout:
    """Layouts of the data and the scales of a group of 2-D tensors, cut at the same blocks.

    A block of 32 elements has one scale, and every offset and rank boundary of the data is a
    whole number of blocks of 32 rows. So the layouts of both scale planes have the data's
    offsets, boundaries and size, divided by 32; they differ in the shapes alone. Where the data
    is placed ``BlockAtomic(32, rows)``, so are rowwise scales, while columnwise scales, which
    have one row for each block of 32, are ``RowAtomic(rows / 32)``.

    Args:
        data: Layout of the tensors themselves, for rowwise and for columnwise data.
        names: What errors call the tensors; by default their numbers.

    Raises:
        ValueError: A tensor is not 2-D with both dims multiples of 32, or the layout may cut a
            block of 32 rows.
    """

    data: GlobalLayout
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for i, shape in enumerate(self.data.tensor_shapes):
            check_shape(shape, f"Tensor {i}" if self.names is None else self.names[i])
        if self.data.block_size % BLOCK:
            raise ValueError(
                f"MXFP8 needs a layout that keeps blocks of {BLOCK} rows whole, got one with "
                f"block_size={self.data.block_size}: build it with block_size={BLOCK}."
            )

    @cached_property
    def rowwise_scale(self) -> GlobalLayout:
        """Layout of the tensors' rowwise scales, ``(d0, d1 / 32)`` each."""
        shapes = [(rows, columns // BLOCK) for rows, columns in self.data.tensor_shapes]
        return self._scale_layout(shapes, self.data.block_size)

    @cached_property
    def columnwise_scale(self) -> GlobalLayout:
        """Layout of the tensors' columnwise scales, ``(d0 / 32, d1)`` each."""
        shapes = [(rows // BLOCK, columns) for rows, columns in self.data.tensor_shapes]
        return self._scale_layout(shapes, self.data.block_size // BLOCK)

    def _scale_layout(self, shapes: list[tuple[int, int]], block_size: int) -> GlobalLayout:
        layout = GlobalLayout(
            tensor_shapes=tuple(shapes),
            tensor_to_offset=tuple(map(_blocks, self.data.tensor_to_offset)),
            rank_to_offset=tuple(map(_blocks, self.data.rank_to_offset)),
            size=_blocks(self.data.size),
            block_size=block_size,
        )
        layout.validate_for_row_atomic()
        return layout


def _blocks(elements: int) -> int:
    """Elements of the data as a number of blocks."""
    blocks, rest = divmod(elements, BLOCK)
    assert not rest, f"{elements} elements are no whole number of blocks"
    return blocks
