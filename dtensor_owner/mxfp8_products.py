"""Products of MXFP8 matrices: by a block-scaled kernel where the device has one."""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional

from dtensor_owner.mxfp8 import (
    QUANTIZED_FROM,
    dequantize_rowwise,
    quantize_columnwise,
    quantize_rowwise,
)

#: Kernels read scales in tiles of this many rows and blocks.
TILE_ROWS, TILE_BLOCKS = 128, 4
_SUBTILE_ROWS = 32

#: First compute capability of NVIDIA's tensor cores that take block scales.
_FIRST_CAPABILITY = (10, 0)

Quantized = tuple[Tensor, Tensor]  # data and scales


def block_scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """``a @ b.T``, summed along the blocks: by a kernel, or by dequantizing both and fp32.

    The two ways differ only in the order of a sum of exact products.

    Args:
        a: Data ``(m, k)`` in ``float8_e4m3fn`` and scales ``(m, k / 32)`` in ``float8_e8m0fnu``.
        b: Data ``(n, k)`` and scales ``(n, k / 32)``.
        dtype: Of the result, ``(m, n)``.
    """
    if a[0].numel() and b[0].numel() and has_block_scaled_kernel(a[0].device):
        return _kernel(a, b, dtype)
    return (dequantize_rowwise(*a) @ dequantize_rowwise(*b).mT).to(dtype)


def _kernel(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    recipe = functional.ScalingType.BlockWise1x32
    swizzle = functional.SwizzleType.SWIZZLE_32_4_4
    return functional.scaled_mm(
        a[0],
        b[0].mT,
        scale_a=kernel_scales(a[1]),
        scale_recipe_a=recipe,
        scale_b=kernel_scales(b[1]),
        scale_recipe_b=recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=dtype,
    )


def kernel_scales(scale: Tensor) -> Tensor:
    """Scales in the order in which block-scaled kernels read them.

    Rows and blocks are padded to tiles of 128 x 4, which follow each other row by row; within
    a tile, the scale of row ``r`` and block ``c`` is number ``(r % 32) * 16 + (r // 32) * 4 + c``.

    Args:
        scale: ``(rows, blocks)`` in ``float8_e8m0fnu``.

    Returns:
        1-D, of as many elements as the tiles have.

    Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    rows, blocks = scale.shape
    high, wide = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    padding = (0, wide * TILE_BLOCKS - blocks, 0, high * TILE_ROWS - rows)
    tiles = functional.pad(scale.view(torch.uint8), padding).view(
        high, TILE_ROWS // _SUBTILE_ROWS, _SUBTILE_ROWS, wide, TILE_BLOCKS
    )
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


@torch.compiler.assume_constant_result
@lru_cache(maxsize=64)
def has_block_scaled_kernel(device: torch.device) -> bool:
    """Whether products of MXFP8 matrices run in a kernel of this device.

    A kernel is used only after it has given a trial product right, once for each device of a
    process; one that has not is warned about and left alone.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return False
    return passes_trial(device)


def passes_trial(device: torch.device) -> bool:
    """Whether the block-scaled kernel gives the product of two small matrices; warns if not."""
    generator = torch.Generator().manual_seed(0)
    # Sizes that leave tiles of scales partly filled, and magnitudes that make scales differ.
    a, b = (
        quantize_rowwise(
            torch.randn(rows, 160, generator=generator).mul_(torch.arange(1, rows + 1)[:, None])
        )
        for rows in (160, 96)
    )
    expected = dequantize_rowwise(*a) @ dequantize_rowwise(*b).mT
    a, b = ((data.to(device), scale.to(device)) for data, scale in (a, b))
    try:
        for dtype in (torch.bfloat16, torch.float32):
            product = _kernel(a, b, dtype).to("cpu", torch.float32)
            torch.testing.assert_close(product, expected, rtol=2e-2, atol=2.0)
    except Exception as error:  # of whatever kind: the other way is always there
        warnings.warn(
            f"Block-scaled products on {device} are not used, as a trial failed: {error} "
            "MXFP8 weights are dequantized instead.",
            stacklevel=2,
        )
        return False
    return True


class _BlockScaledLinear(torch.autograd.Function):
    """``x @ weight.T + bias``, where product and gradient of ``x`` are of MXFP8 matrices.

    The gradient of the weight is an ordinary product: its sum is over tokens, in any number.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        # The weight was dequantized from just these blocks: this gives the same ones back.
        product = block_scaled_mm(quantize_rowwise(rows), quantize_rowwise(weight), x.dtype)
        if bias is not None:
            product = product + bias
        return product.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        x_gradient = weight_gradient = bias_gradient = None
        if needs_x:
            data, scale = quantize_columnwise(weight)
            columns = data.mT.contiguous(), scale.mT.contiguous()
            x_gradient = block_scaled_mm(quantize_rowwise(rows), columns, x.dtype).view(x.shape)
        if needs_weight:
            weight_gradient = rows.mT @ x.reshape(-1, x.shape[-1])
        if needs_bias:
            bias_gradient = rows.sum(0)
        return x_gradient, weight_gradient, bias_gradient


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    weight = linear.weight
    # Outside of a gather the parameter itself is there; under autocast the dtypes may differ.
    if isinstance(weight, DTensor) or x.dtype != weight.dtype or x.dtype not in QUANTIZED_FROM:
        return functional.linear(x, weight, linear.bias)
    return _BlockScaledLinear.apply(x, weight, linear.bias)


def use_block_scaled_products(module: nn.Module) -> bool:
    """Let an ``nn.Linear`` whose gathered weight has MXFP8's values compute by block scales.

    Returns:
        Whether it will: modules with a forward of their own stay as they are.
    """
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    if "forward" in vars(module):
        return False
    module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
    return True
