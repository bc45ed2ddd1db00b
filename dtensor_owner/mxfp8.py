"""MXFP8: 32-element blocks of 8-bit floats that share a power-of-two scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 32  # elements that share a scale

#: Along which dim the elements of a block lie: side by side in a row, or below each other.
Direction = Literal["rowwise", "columnwise"]
DIRECTIONS: tuple[Direction, Direction] = ("rowwise", "columnwise")

DATA_DTYPE = torch.float8_e4m3fn
SCALE_DTYPE = torch.float8_e8m0fnu

_MAX_DATA = 448.0  # largest E4M3 number, 1.75 * 2**8
_MAX_DATA_EXPONENT = 8
_NAN_DATA, _NAN_SCALE = 0x7F, 0xFF
_FP32_MANTISSA_BITS = 23

#: Dtypes that can be quantized without rounding twice.
QUANTIZED_FROM = (torch.float32, torch.bfloat16, torch.float16)


def quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize blocks of 32 neighbours in a row.

    The scale of a block is the largest power of two that is at most its largest magnitude,
    divided by 2**8, the largest power of two in E4M3; its exponent is kept within [-127, 127].
    Elements are divided by the scale, which is exact, and rounded to the nearest E4M3 number,
    ties to even. Those that would pass 448 (a block's largest may reach 512 after the division)
    are saturated to 448 with their sign; those of at most 2**-10 become zero, with their sign.

    The specification leaves three cases open. A block of zeros gets the smallest scale, 2**-127,
    as does one whose scale would be smaller still. A block with a NaN or an infinity becomes NaN
    as a whole, scale and elements: E4M3 has no infinity, and saturating one would hide it.

    Args:
        x: ``(d0, d1)`` in fp32, bf16 or fp16, any strides, ``d1`` a multiple of 32.

    Returns:
        Data ``(d0, d1)`` in ``float8_e4m3fn`` and scales ``(d0, d1 / 32)`` in ``float8_e8m0fnu``.

    Raises:
        ValueError: ``x`` is not 2-D, or ``d1`` is not a multiple of 32.
        TypeError: ``x`` has another dtype.

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.1 (E4M3), 5.4.1 (E8M0),
        6.3 (conversion: the scale rule, saturation and ties to even).
    """
    _check(x, divided_dims=(1,))
    rows, columns = x.shape
    data, scale = _quantize(x.float().reshape(rows, columns // BLOCK, BLOCK), dim=2)
    return data.view(rows, columns), scale


def quantize_columnwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize blocks of 32 elements below each other; otherwise as ``quantize_rowwise``.

    Args:
        x: ``(d0, d1)``, ``d0`` a multiple of 32.

    Returns:
        Data ``(d0, d1)``, not transposed, and scales ``(d0 / 32, d1)``.

    Raises:
        ValueError: ``x`` is not 2-D, or ``d0`` is not a multiple of 32.
        TypeError: ``x`` is not in fp32, bf16 or fp16.
    """
    _check(x, divided_dims=(0,))
    rows, columns = x.shape
    data, scale = _quantize(x.float().reshape(rows // BLOCK, BLOCK, columns), dim=1)
    return data.view(rows, columns), scale


def _check(x: Tensor, *, divided_dims: Sequence[int]) -> None:
    if x.dtype not in QUANTIZED_FROM:
        raise TypeError(
            f"MXFP8 is quantized from fp32, bf16 or fp16, got {x.dtype}: cast to fp32 first."
        )
    check_shape(x.shape, "The tensor", divided_dims=divided_dims)


def check_shape(shape: Sequence[int], name: str, *, divided_dims: Sequence[int] = (0, 1)) -> None:
    """Check that a shape can be cut into blocks.

    Args:
        shape: Of the tensor.
        name: What the error calls it.
        divided_dims: Dims that are cut into blocks.

    Raises:
        ValueError: It is not 2-D, or one of these dims is not a multiple of 32.
    """
    if len(shape) != 2 or any(shape[dim] % BLOCK for dim in divided_dims):
        raise ValueError(
            f"{name} has shape {tuple(shape)}, but MXFP8 needs 2 dims, with "
            f"{' and '.join(f'dim {dim}' for dim in divided_dims)} a multiple of {BLOCK}: pad it, "
            "or keep it in another dtype."
        )


def _quantize(blocks: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
    """Quantize fp32 blocks that lie along ``dim``, which the scales lack."""
    # Twice over the blocks is faster than through a tensor of absolute values.
    bits = torch.maximum(blocks.amax(dim), -blocks.amin(dim)).view(torch.int32)
    exponent = (bits >> _FP32_MANTISSA_BITS) & 0xFF  # biased by 127, as E8M0 is; without the sign
    code = (exponent - _MAX_DATA_EXPONENT).clamp_(min=0)  # fp32 subnormals are far below the clamp
    # The reciprocal of the scale 2**(code - 127) in fp32: a normal number, as code <= 247.
    reciprocal = ((254 - code) << _FP32_MANTISSA_BITS).view(torch.float32)
    scaled = (blocks * reciprocal.unsqueeze(dim)).clamp_(-_MAX_DATA, _MAX_DATA)
    data = scaled.to(DATA_DTYPE).view(torch.uint8)
    is_bad = (exponent == 0xFF).to(torch.uint8)  # NaN or infinity
    data |= (is_bad * _NAN_DATA).unsqueeze(dim)  # keeps the signs
    scale = code.to(torch.uint8) | (is_bad * _NAN_SCALE)
    return data.view(DATA_DTYPE), scale.view(SCALE_DTYPE)


def dequantize_rowwise(
    data: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Multiply blocks along rows by their scales; exact in fp32.

    Args:
        data: ``(d0, d1)`` in ``float8_e4m3fn``, or its bytes as uint8.
        scale: ``(d0, d1 / 32)`` in ``float8_e8m0fnu``, or its bytes as uint8.
        dtype: Of the result; bf16 is exact for magnitudes from 2**-133 on.
    """
    rows, columns = data.shape
    blocks = data.view(DATA_DTYPE).to(dtype).view(rows, columns // BLOCK, BLOCK)
    return blocks.mul_(_scale_as(scale, dtype).unsqueeze(2)).view(rows, columns)


def dequantize_columnwise(
    data: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Multiply blocks along columns by their scales ``(d0 / 32, d1)``; exact in fp32."""
    rows, columns = data.shape
    blocks = data.view(DATA_DTYPE).to(dtype).view(rows // BLOCK, BLOCK, columns)
    return blocks.mul_(_scale_as(scale, dtype).unsqueeze(1)).view(rows, columns)


def _scale_as(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return scale.view(SCALE_DTYPE).to(dtype)


@dataclass(frozen=True)
class MXFP8Tensor:
    """A 2-D tensor in MXFP8, in blocks along its rows, along its columns, or both.

    A block-scaled product sums over the dim its blocks lie along, so a weight ``(out, in)`` is
    needed rowwise for ``x @ w.T`` and columnwise for the gradient ``dy @ w``. The two are
    quantized separately and differ slightly.

    Args:
        rowwise_data: ``(d0, d1)`` in ``float8_e4m3fn``.
        rowwise_scale: ``(d0, d1 / 32)`` in ``float8_e8m0fnu``.
        columnwise_data: ``(d0, d1)``, not transposed.
        columnwise_scale: ``(d0 / 32, d1)``.
    """

    rowwise_data: Tensor | None = None
    rowwise_scale: Tensor | None = None
    columnwise_data: Tensor | None = None
    columnwise_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.rowwise_data is None and self.columnwise_data is None:
            raise ValueError("An MXFP8Tensor holds blocks along rows or columns, got neither.")
        for direction in DIRECTIONS:
            data, scale = self._parts(direction)
            if (data is None) != (scale is None):
                raise ValueError(f"The {direction} data and scale of an MXFP8Tensor come together.")

    @classmethod
    def quantize(cls, x: Tensor) -> MXFP8Tensor:
        """Quantize in both directions, by ``quantize_rowwise`` and ``quantize_columnwise``.

        Raises:
            ValueError: ``x`` is not 2-D with both dims multiples of 32.
            TypeError: ``x`` is not in fp32, bf16 or fp16.
        """
        _check(x, divided_dims=(0, 1))
        return cls(*quantize_rowwise(x), *quantize_columnwise(x))

    @property
    def shape(self) -> torch.Size:
        data = self.rowwise_data if self.rowwise_data is not None else self.columnwise_data
        assert data is not None
        return data.shape

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Those it holds."""
        return tuple(d for d in DIRECTIONS if self._parts(d)[0] is not None)

    def _parts(self, direction: Direction) -> tuple[Tensor | None, Tensor | None]:
        if direction == "rowwise":
            return self.rowwise_data, self.rowwise_scale
        return self.columnwise_data, self.columnwise_scale

    def data(self, direction: Direction = "rowwise") -> Tensor:
        """The elements in one direction, ``(d0, d1)``."""
        return self._held(direction)[0]

    def scale(self, direction: Direction = "rowwise") -> Tensor:
        """The scales in one direction."""
        return self._held(direction)[1]

    def _held(self, direction: Direction) -> tuple[Tensor, Tensor]:
        data, scale = self._parts(direction)
        if data is None or scale is None:
            raise ValueError(
                f"This MXFP8Tensor holds only {' and '.join(self.directions)} blocks, not "
                f"{direction} ones: gather that direction too."
            )
        return data, scale

    def dequantize(
        self, direction: Direction | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The values of one direction, ``(d0, d1)``; by default rowwise if held.

        Raises:
            ValueError: The direction is not held.
        """
        direction = self.directions[0] if direction is None else direction
        dequantize = dequantize_rowwise if direction == "rowwise" else dequantize_columnwise
        return dequantize(*self._held(direction), dtype=dtype)
