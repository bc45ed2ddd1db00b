"""MXFP8 weights of a parameter group: which parameters take part, and how they are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from dtensor_owner.buffer import DBuffer, PendingBuffer
from dtensor_owner.layout import GlobalLayout
from dtensor_owner.mxfp8 import BLOCK, QUANTIZED_FROM
from dtensor_owner.mxfp8_layout import MXFP8Layout
from dtensor_owner.mxfp8_products import has_block_scaled_kernel
from dtensor_owner.quantized_buffer import QuantizedDBuffer

PRODUCTS = ("auto", "dequantized", "block-scaled")


@dataclass(frozen=True)
class MXFP8Policy:
    """How ``fully_shard`` gathers weights in MXFP8.

    Parameters stay in their own dtype at rest; before a gather each rank quantizes its shards
    along rows. Forward and backward see the same weights, and gradients pass the quantization
    unchanged ("straight through"): those of the gathered weights are applied to the parameters.

    Args:
        eligible_fn: Takes the name and the parameter; False leaves it in an ordinary group.
            By default every parameter that can be quantized is.
        products: ``"dequantized"``: in the compute dtype, with weights dequantized to it.
            ``"block-scaled"``: ``nn.Linear`` modules quantize their inputs too, along rows, and
            the gradients of their outputs in backward, and multiply MXFP8 matrices, in a kernel
            where the device has one, else with the same values in fp32 (slowly: to study the
            numbers). ``"auto"``: block-scaled where the mesh's device has a kernel.

    Raises:
        ValueError: ``products`` is none of these.
    """

    eligible_fn: Callable[[str, nn.Parameter], bool] | None = None
    products: Literal["auto", "dequantized", "block-scaled"] = "auto"

    def __post_init__(self) -> None:
        if self.products not in PRODUCTS:
            raise ValueError(f"products is one of {PRODUCTS}, got {self.products!r}.")

    def block_scaled(self, device_type: str) -> bool:
        """Whether products are block-scaled on this process's device of a type."""
        if self.products != "auto":
            return self.products == "block-scaled"
        if device_type != "cuda":
            return False
        return has_block_scaled_kernel(torch.device(device_type, torch.cuda.current_device()))

    def reason_against(self, name: str, parameter: nn.Parameter) -> str | None:
        """Why a parameter stays in an ordinary group; None if it is quantized."""
        if parameter.dtype not in QUANTIZED_FROM:
            return f"its dtype is {parameter.dtype}"
        if parameter.ndim != 2:
            return f"it has {parameter.ndim} dims, not 2"
        if any(size % BLOCK for size in parameter.shape):
            return f"its dims are not multiples of {BLOCK}"
        if self.eligible_fn is not None and not self.eligible_fn(name, parameter):
            return "eligible_fn says so"
        return None


class MXFP8Gather:
    """Gathers the weights of one group as MXFP8 planes.

    Args:
        layout: The group's layout, with ``block_size`` 32 or a multiple.
        names: Of the parameters, for errors.

    Raises:
        ValueError: A parameter cannot be quantized, or the layout may cut a block.
    """

    def __init__(self, layout: GlobalLayout, names: Sequence[str]) -> None:
        self.layouts = MXFP8Layout(layout, tuple(names))

    def start(self, master: DBuffer, dtype: torch.dtype) -> PendingBuffer:
        """Quantize the shards and issue their gather; the result dequantizes when waited for.

        Every rank must call it.
        """
        shards = QuantizedDBuffer(
            master.mesh, master.placements, self.layouts, master.device, directions=["rowwise"]
        )
        replicated = [Replicate()] * master.mesh.ndim
        planes = shards.quantize_from(master).redistribute_async(replicated)
        return PendingBuffer(lambda: planes.wait().dequantize(dtype=dtype))
