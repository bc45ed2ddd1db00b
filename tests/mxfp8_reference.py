"""MXFP8 of one block at a time, slowly, from the text of the MX specification 1.0.

Exact rationals and a table of all E4M3 numbers; nothing is shared with ``dtensor_owner.mxfp8``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

import torch
from torch import Tensor

BLOCK = 32


def e4m3_value(code: int) -> Fraction | None:
    """Section 5.3.1 (E4M3): sign, 4 exponent bits of bias 7, 3 mantissa bits; None is NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return None
    if exponent == 0:
        magnitude = Fraction(mantissa, 8) * Fraction(1, 2**6)
    else:
        magnitude = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -magnitude if sign else magnitude


# Codes 0 to 126 are the non-negative numbers in ascending order, 0 to 448.
MAGNITUDES = [e4m3_value(code) for code in range(0x7F)]
MAX_EXPONENT = 8  # of the largest power of two among them


def quantize_block(values: list[float]) -> tuple[list[int], int]:
    """Section 6.3: data codes and scale code of one block of numbers that are exact in fp32."""
    if not all(map(math.isfinite, values)):  # left open by the specification; ours: all NaN
        return [0x7F | _sign_bit(v) for v in values], 0xFF
    largest = max(abs(v) for v in values)
    exponent = -127  # of a zero block; left open as well
    if largest:
        # frexp gives [0.5, 1) * 2**e: the largest power of two up to it is 2**(e - 1).
        exponent = max(-127, math.frexp(largest)[1] - 1 - MAX_EXPONENT)
    scale = Fraction(2) ** exponent
    return [_round(Fraction(abs(v)) / scale) | _sign_bit(v) for v in values], exponent + 127


def _sign_bit(value: float) -> int:
    return 0x80 if math.copysign(1.0, value) < 0 else 0


def _round(magnitude: Fraction) -> int:
    """Nearest E4M3 code, ties to the even one; above 448 it is 448's."""
    upper = bisect_left(MAGNITUDES, magnitude)
    candidates = range(max(upper - 1, 0), min(upper + 1, len(MAGNITUDES)))
    return min(candidates, key=lambda code: (abs(MAGNITUDES[code] - magnitude), code % 2))


def quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of data ``(d0, d1)`` and of scales ``(d0, d1 / 32)``, as uint8."""
    data, scale = [], []
    for block in x.double().reshape(-1, BLOCK).tolist():
        codes, scale_code = quantize_block(block)
        data.append(codes)
        scale.append(scale_code)
    rows, columns = x.shape
    return (
        torch.tensor(data, dtype=torch.uint8).view(rows, columns),
        torch.tensor(scale, dtype=torch.uint8).view(rows, columns // BLOCK),
    )


def dequantize(code: int, scale_code: int) -> float:
    """What a data code stands for under a scale code (section 5.4.1: 2**(code - 127))."""
    value = e4m3_value(code)
    if value is None or scale_code == 0xFF:
        return math.nan
    magnitude = float(abs(value) * Fraction(2) ** (scale_code - 127))
    return -magnitude if code & 0x80 else magnitude
