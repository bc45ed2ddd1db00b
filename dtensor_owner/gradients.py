"""Gradients of a parameter group, packed so that one reduce-scatter carries them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_owner.layout import GlobalLayout
from placements.plan import Algorithm, choose_algorithm


class _Chunk(NamedTuple):
    """Elements ``[start, stop)`` of a tensor's gradient; a gap or the flags where it is None."""

    tensor: int | None
    start: int
    stop: int
    flags: bool = False


class GradientPacking:
    """A group's gradients in one flat tensor, with one flag per parameter after each segment.

    A parameter may have got a gradient on some ranks only, for example in a branch that the
    other ranks did not take. The flags tell every rank whether any rank had one, in the same
    collective that sums the gradients: a parameter is then updated on all ranks or on none.

    Segments are filled up to equal size where the collective would do that anyway
    (``Algorithm.STAGED``), which saves it a copy of all gradients.

    Args:
        layout: The parameters' layout, with one segment per rank that keeps a different part.
    """

    def __init__(self, layout: GlobalLayout) -> None:
        self.num_tensors = len(layout.tensor_shapes)
        numels = [segment.numel + self.num_tensors for segment in layout.segments]
        staged = choose_algorithm(numels) is Algorithm.STAGED
        self._chunks: list[_Chunk] = []
        segment_starts = [0]
        for pieces, numel in zip(layout.contents(), numels, strict=True):
            for i, (start, stop) in pieces:
                offset = start if i is None else layout.tensor_to_offset[i]
                self._chunks.append(_Chunk(i, start - offset, stop - offset))
            self._chunks.append(_Chunk(None, 0, self.num_tensors, flags=True))
            if staged and numel < max(numels):
                self._chunks.append(_Chunk(None, 0, max(numels) - numel))
            segment_starts.append(segment_starts[-1] + (max(numels) if staged else numel))
        sizes = [chunk.stop - chunk.start for chunk in self._chunks]
        offsets = list(accumulate(sizes, initial=0))
        #: The packed tensor as a layout of 1-D tensors, one per chunk.
        self.layout = GlobalLayout(
            tensor_shapes=tuple((size,) for size in sizes),
            tensor_to_offset=tuple(offsets[:-1]),
            rank_to_offset=tuple(segment_starts[:-1]),
            size=offsets[-1],
        )
        self._numels = [math.prod(shape) for shape in layout.tensor_shapes]

    def pack(
        self, gradients: Sequence[Tensor | None], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Flatten the full gradients of all parameters in segment order; zeros where missing.

        Returns:
            ``(layout.size,)`` in ``dtype``.
        """
        flat = [
            torch.zeros(numel, dtype=dtype, device=device)
            if gradient is None
            else (gradient.to_dense() if gradient.is_sparse else gradient).to(dtype).reshape(-1)
            for gradient, numel in zip(gradients, self._numels, strict=True)
        ]
        used = [gradient is not None for gradient in gradients]
        if all(used):
            flags = torch.ones(self.num_tensors, dtype=dtype, device=device)
        else:
            flags = torch.tensor(used, dtype=dtype, device=device)
        parts = []
        for i, start, stop, is_flags in self._chunks:
            if is_flags:
                parts.append(flags)
            elif i is None:
                parts.append(torch.zeros(stop - start, dtype=dtype, device=device))
            else:
                parts.append(flat[i][start:stop])
        return torch.cat(parts)

    def split(
        self, local: Tensor, numel: int, used_here: Sequence[bool]
    ) -> tuple[Tensor, list[bool]]:
        """Take this rank's reduced part apart.

        Args:
            local: This rank's segment of the packed gradients, reduced over the ranks.
            numel: Elements of this rank's segment in the parameters' layout.
            used_here: Which parameters got a gradient on this rank.

        Returns:
            The gradients in the parameters' layout, and which parameters got one on any rank.
        """
        used = list(used_here)
        if not all(used):  # reading flags waits for the device, so only where it can matter
            flags = local[numel : numel + self.num_tensors].tolist()
            used = [here or flag > 0 for here, flag in zip(used, flags)]
        return local[:numel], used
