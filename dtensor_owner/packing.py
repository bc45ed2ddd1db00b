"""Where tensors go in a group's flat buffer, and where ranks are cut: integers only."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

Shape = tuple[int, ...]


def row_numel(shape: Sequence[int]) -> int:
    """Elements of one dim-0 slice; 1 for a 1-D shape."""
    return math.prod(shape[1:])


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_offsets(shapes: Sequence[Shape], block_size: int) -> tuple[list[int], int, int]:
    """Place tensors so that every multiple of the chunk size is a row (block) boundary.

    The chunk is the least common multiple of all block sizes in elements. Tensors of at least
    one chunk go first, in order, each from a chunk boundary; where one ends inside a chunk, the
    first later tensor whose own remainder fits ends at that chunk's end, with its remainder in
    front of it. Smaller tensors, largest first, fill what is left of such chunks; what fits
    nowhere goes to the tail.

    Returns:
        The offset of each tensor, the end of the last one, and the chunk size, in elements.

    Source: ``GlobalLayout.build`` of Megatron-FSDP v2, whose offsets this reproduces.
    """
    units = [block_size * row_numel(shape) for shape in shapes]
    numels = [math.prod(shape) for shape in shapes]
    chunk = math.lcm(*units)
    offsets = [0] * len(shapes)
    regular = [i for i, numel in enumerate(numels) if numel >= chunk]
    fragments = sorted(
        (i for i, numel in enumerate(numels) if numel < chunk), key=lambda i: -numels[i]
    )
    remainders = {i: numels[i] % chunk for i in regular}
    paired: set[int] = set()
    end = 0
    for position, i in enumerate(regular):
        if i in paired:
            continue
        offsets[i] = end
        gap_start = end + numels[i]
        end = gap_stop = round_up(gap_start, chunk)
        if not remainders[i]:
            continue
        for j in regular[position + 1 :]:
            if j not in paired and 0 < remainders[j] <= chunk - remainders[i]:
                paired.add(j)
                offsets[j] = gap_stop = end - remainders[j]
                end += numels[j] - remainders[j]
                break
        fragments = _fill_gap(fragments, gap_start, gap_stop, units, numels, offsets)
    for i in fragments:
        offsets[i] = round_up(end, units[i])
        end = offsets[i] + numels[i]
    return offsets, end, chunk


def _fill_gap(
    fragments: list[int],
    start: int,
    stop: int,
    units: Sequence[int],
    numels: Sequence[int],
    offsets: list[int],
) -> list[int]:
    """Place what fits into ``[start, stop)``, in order; return the fragments left over."""
    left = []
    for i in fragments:
        aligned = round_up(start, units[i])
        if aligned + numels[i] <= stop:
            offsets[i] = aligned
            start = aligned + numels[i]
        else:
            left.append(i)
    return left


def unpadded_offsets(shapes: Sequence[Shape]) -> tuple[list[int], int]:
    """Offsets of tensors laid back to back in order, and the end of the last one."""
    ends = list(accumulate((math.prod(shape) for shape in shapes), initial=0))
    return ends[:-1], ends[-1]


def unpadded_boundaries(shapes: Sequence[Shape], dp_size: int, block_size: int) -> tuple[int, ...]:
    """First element of each rank when back-to-back tensors are cut as evenly as rows allow.

    Boundary ``k`` is the point ``size * k / dp_size`` moved to the nearest row (block) boundary
    of the tensor that contains it, the upper one on a tie. A tensor's end is a boundary too,
    so its last block may be short.
    """
    offsets, size = unpadded_offsets(shapes)
    boundaries = [0]
    for k in range(1, dp_size):
        # Zero-size tensors share their offset with the next one, which bisect_right then picks.
        i = bisect_right(offsets, size * k // dp_size) - 1
        if i < 0 or not size:
            boundaries.append(0)
            continue
        unit = block_size * row_numel(shapes[i])
        scaled = size * k - offsets[i] * dp_size  # dp_size times the point within the tensor
        below = scaled // (unit * dp_size) * unit
        above = min(below + unit, math.prod(shapes[i]))
        within = above if 2 * scaled >= (below + above) * dp_size else below
        boundaries.append(max(boundaries[-1], offsets[i] + within))
    return tuple(boundaries)
