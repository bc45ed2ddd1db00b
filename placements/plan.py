"""What a redistribution moves, decided before anything is sent."""

from __future__ import annotations

import enum
from collections.abc import Sequence

# A staged collective may move up to a quarter more than the payload: below that one even
# tensor collective beats exact point-to-point messages.
STAGED_LIMIT = 1.25


class Algorithm(enum.Enum):
    """How ranks with different row counts take part in one all_gather or reduce_scatter."""

    EVEN = "even"
    STAGED = "staged"
    UNEVEN = "uneven"


def choose_algorithm(counts: Sequence[int]) -> Algorithm:
    """Choose by the row counts alone, so that all ranks agree.

    Even when all counts are equal; staged (padded to the largest count) while that moves at
    most ``STAGED_LIMIT`` times the payload; exact messages otherwise.
    """
    largest, total = max(counts), sum(counts)
    if largest * len(counts) == total:
        return Algorithm.EVEN
    return Algorithm.STAGED if largest * len(counts) <= STAGED_LIMIT * total else Algorithm.UNEVEN
