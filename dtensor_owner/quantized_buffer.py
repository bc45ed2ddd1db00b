"""QuantizedDBuffer: a group of tensors in MXFP8, each plane of it a DBuffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from dtensor_owner.buffer import DBuffer, PendingBuffer
from dtensor_owner.layout import GlobalLayout
from dtensor_owner.mxfp8 import (
    BLOCK,
    DATA_DTYPE,
    DIRECTIONS,
    SCALE_DTYPE,
    Direction,
    MXFP8Tensor,
    dequantize_rowwise,
    quantize_columnwise,
    quantize_rowwise,
)
from dtensor_owner.mxfp8_layout import MXFP8Layout

#: Names of the planes, by direction: data and scales.
PLANES: Mapping[Direction, tuple[str, str]] = {
    "rowwise": ("rowwise_data", "rowwise_scale"),
    "columnwise": ("columnwise_data", "columnwise_scale"),
}


class QuantizedDBuffer:
    """A group of 2-D tensors in MXFP8 blocks: up to four planes, each a ``DBuffer`` of bytes.

    All planes are cut between ranks at the same blocks of 32 rows; a rank may hold nothing of
    any. Bytes are kept as uint8, which every backend sends; ``get_tensor`` gives them their own
    dtypes. Gaps of a padded layout hold no defined values.

    Args:
        mesh: The device mesh.
        placements: One per mesh dim, as of a ``DBuffer``.
        layout: Layout of the tensors, with ``block_size`` 32 (or a multiple), or the plane
            layouts derived from one.
        device: Of the local buffers, which are allocated and not filled.
        directions: Which blocks to hold.

    Raises:
        ValueError: A tensor is not 2-D with both dims multiples of 32, the layout may cut a block
            of 32 rows, no direction is wanted, or the placements do not fit mesh and layout.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        layout: GlobalLayout | MXFP8Layout,
        device: torch.device | str,
        *,
        directions: Sequence[Direction] = DIRECTIONS,
    ) -> None:
        layouts = layout if isinstance(layout, MXFP8Layout) else MXFP8Layout(layout)
        planes = {
            name: DBuffer(mesh, placements, plane_layout, torch.uint8, device)
            for direction in _checked_directions(directions)
            for name, plane_layout in zip(PLANES[direction], _plane_layouts(layouts, direction))
        }
        self._init(layouts, planes)

    def _init(self, layouts: MXFP8Layout, planes: dict[str, DBuffer]) -> None:
        self.layouts = layouts
        self.planes = planes
        any_plane = next(iter(planes.values()))
        self.mesh = any_plane.mesh
        self.placements = any_plane.placements

    @property
    def layout(self) -> GlobalLayout:
        """Of the data planes."""
        return self.layouts.data

    @property
    def device(self) -> torch.device:
        return next(iter(self.planes.values())).device

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Those it holds."""
        return tuple(d for d in DIRECTIONS if PLANES[d][0] in self.planes)

    def quantize_from(self, master: DBuffer) -> QuantizedDBuffer:
        """Quantize this rank's part of a buffer; nothing is sent.

        As no block is cut, quantizing shards and gathering them gives the same bits as
        quantizing the gathered tensors.

        Args:
            master: A buffer in fp32, bf16 or fp16 with this buffer's mesh, placements and layout.

        Returns:
            This buffer.

        Raises:
            ValueError: The master lies elsewhere.
            TypeError: It has another dtype.
        """
        self._check_master(master)
        if "rowwise" in self.directions:
            # Neighbours in a row are neighbours in the buffer: all tensors at once.
            blocks = master.local_buffer.view(-1, BLOCK)
            self._store("rowwise", None, quantize_rowwise(blocks))
        if "columnwise" in self.directions:
            for i in range(len(self.layout.tensor_shapes)):
                self._store("columnwise", i, quantize_columnwise(master.get_local_tensor(i)))
        return self

    def _check_master(self, master: DBuffer) -> None:
        for name in ("mesh", "placements", "layout", "device"):
            ours, theirs = getattr(self, name), getattr(master, name)
            if ours != theirs:
                raise ValueError(
                    f"The master has {name} {theirs}, but this QuantizedDBuffer has {ours}: "
                    "quantize before a gather, or gather both."
                )

    def _store(self, direction: Direction, i: int | None, quantized: tuple[Tensor, Tensor]) -> None:
        """Write bytes into both planes of a direction: of tensor ``i``, or of the whole buffer."""
        for name, values in zip(PLANES[direction], quantized):
            plane = self.planes[name]
            target = plane.local_buffer if i is None else plane.get_local_tensor(i)
            target.copy_(values.view(torch.uint8).view(target.shape))

    def all_gather(self, directions: Sequence[Direction] | None = None) -> QuantizedDBuffer:
        """Gather planes on every mesh dim that is sharded; every rank of the mesh must call it.

        Args:
            directions: Which to gather; the result holds only those. By default all held.

        Raises:
            ValueError: A direction is not held.
        """
        return self.redistribute([Replicate()] * self.mesh.ndim, directions=directions)

    def redistribute(
        self, placements: Sequence[Placement], *, directions: Sequence[Direction] | None = None
    ) -> QuantizedDBuffer:
        """Bring planes to other placements, one after the other, as ``DBuffer.redistribute``."""
        return self.redistribute_async(placements, directions=directions).wait()

    def redistribute_async(
        self, placements: Sequence[Placement], *, directions: Sequence[Direction] | None = None
    ) -> PendingPlanes:
        """As ``redistribute``, but returns when the first collective of each plane is issued."""
        directions = self.directions if directions is None else _checked_directions(directions)
        self._check_held(directions)
        names = [name for direction in directions for name in PLANES[direction]]
        planes = {name: self.planes[name].redistribute_async(placements) for name in names}
        return PendingPlanes(self.layouts, planes)

    def get_tensor(self, i: int) -> MXFP8Tensor:
        """This rank's rows of tensor ``i``, views of the planes; ``(0, d1)`` if none."""
        parts = {}
        for direction in self.directions:
            for name, dtype in zip(PLANES[direction], (DATA_DTYPE, SCALE_DTYPE)):
                parts[name] = self.planes[name].get_local_tensor(i).view(dtype)
        return MXFP8Tensor(**parts)

    def dequantize(
        self, direction: Direction | None = None, *, dtype: torch.dtype = torch.float32
    ) -> DBuffer:
        """The values of one direction as a buffer of the same placements and layout.

        Args:
            direction: By default rowwise if held.
            dtype: Of the values.

        Raises:
            ValueError: The direction is not held.
        """
        direction = self.directions[0] if direction is None else direction
        self._check_held([direction])
        if direction == "rowwise":  # all tensors at once, as in quantize_from
            data, scale = (self.planes[name].local_buffer for name in PLANES[direction])
            values = dequantize_rowwise(data.view(-1, BLOCK), scale.view(-1, 1), dtype=dtype)
            return DBuffer.from_local(values.view(-1), self.mesh, self.placements, self.layout)
        result = DBuffer(self.mesh, self.placements, self.layout, dtype, self.device)
        for i in range(len(self.layout.tensor_shapes)):
            result.get_local_tensor(i).copy_(
                self.get_tensor(i).dequantize("columnwise", dtype=dtype)
            )
        return result

    def _check_held(self, directions: Sequence[Direction]) -> None:
        for direction in directions:
            if direction not in self.directions:
                raise ValueError(
                    f"This QuantizedDBuffer holds only {' and '.join(self.directions)} planes, "
                    f"not {direction} ones: quantize that direction too."
                )

    def __repr__(self) -> str:
        return (
            f"QuantizedDBuffer({len(self.layout.tensor_shapes)} tensors, "
            f"{' and '.join(self.directions)}, {self.placements}, {self.device})"
        )


class PendingPlanes:
    """Planes on their way: ``wait()`` returns them."""

    def __init__(self, layouts: MXFP8Layout, planes: Mapping[str, PendingBuffer]) -> None:
        self._layouts = layouts
        self._planes = planes

    def wait(self) -> QuantizedDBuffer:
        result = QuantizedDBuffer.__new__(QuantizedDBuffer)
        result._init(self._layouts, {name: plane.wait() for name, plane in self._planes.items()})
        return result


def _plane_layouts(layouts: MXFP8Layout, direction: Direction) -> tuple[GlobalLayout, GlobalLayout]:
    if direction == "rowwise":
        return layouts.data, layouts.rowwise_scale
    return layouts.data, layouts.columnwise_scale


def _checked_directions(directions: Sequence[Direction]) -> tuple[Direction, ...]:
    if isinstance(directions, str) or not directions or set(directions) - set(DIRECTIONS):
        raise ValueError(
            f"directions is a non-empty selection of {DIRECTIONS}, got {directions!r}."
        )
    return tuple(direction for direction in DIRECTIONS if direction in directions)
