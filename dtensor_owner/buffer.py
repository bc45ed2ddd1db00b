"""DBuffer: a group of tensors in one flat local buffer, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from dtensor_owner.layout import GlobalLayout, ShardLayout, build_row_atomic_layout
from dtensor_owner.mesh_ranges import Range, sharded_mesh_dims
from placements.collectives import (
    DimGroup,
    Pending,
    all_gather_rows_async,
    all_reduce,
    reduce_scatter_rows_async,
)
from placements.row_atomic import RowAtomic


class DBuffer:
    """A group of tensors in one flat local buffer; to the group what ``DTensor`` is to a tensor.

    The global buffer is laid out by ``layout``. A rank stores the contiguous part that
    ``placements`` give it: its own segments where a mesh dim is sharded (``RowAtomic()`` or
    ``BlockAtomic()`` without row counts, the layout has them), everything where it is
    ``Replicate`` or ``Partial``. Sharded mesh dims come last. Gaps hold no defined values.

    Args:
        mesh: The device mesh.
        placements: One per mesh dim.
        layout: Offsets of the tensors, and segments for the sharded mesh dims.
        dtype: Of all tensors.
        device: Of the local buffer, which is allocated and not filled.

    Raises:
        ValueError, TypeError: The placements do not fit the mesh or the layout.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        layout: GlobalLayout,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        placements = checked_placements(placements)
        numel = layout.get_local_range(mesh, placements).numel
        self._init(mesh, placements, layout, torch.empty(numel, dtype=dtype, device=device))

    def _init(
        self,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        layout: GlobalLayout,
        local_buffer: Tensor,
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.layout = layout
        self.local_buffer = local_buffer
        self.range: Range = layout.get_local_range(mesh, placements)

    @classmethod
    def from_local(
        cls,
        local_buffer: Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        layout: GlobalLayout,
    ) -> DBuffer:
        """Use an existing flat contiguous tensor as this rank's part; nothing is copied.

        Raises:
            ValueError: It is not flat and contiguous, or not of the size the layout says.
        """
        placements = checked_placements(placements)
        numel = layout.get_local_range(mesh, placements).numel
        if local_buffer.shape != (numel,) or not local_buffer.is_contiguous():
            raise ValueError(
                f"This rank's part under {placements} is a contiguous tensor of shape ({numel},), "
                f"got shape {tuple(local_buffer.shape)}, stride {local_buffer.stride()}."
            )
        buffer = cls.__new__(cls)
        buffer._init(mesh, placements, layout, local_buffer)
        return buffer

    @classmethod
    def distribute_tensors(
        cls,
        tensors: Iterable[Tensor],
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        block_size: int = 1,
        shard_layout: ShardLayout = ShardLayout.UNPADDED,
        layout: GlobalLayout | None = None,
    ) -> DBuffer:
        """Keep this rank's part of full tensors; nothing is sent.

        Args:
            tensors: Full tensors of one dtype and device, the same on all ranks, any strides.
            mesh: The device mesh.
            placements: One per mesh dim.
            block_size: Rows that stay together.
            shard_layout: Padded or not.
            layout: A finished layout, instead of one for ``mesh.size()`` ranks.

        Raises:
            ValueError: No tensors, several dtypes or devices, or shapes without rows.
        """
        tensors = [tensor.detach() for tensor in tensors]
        if not tensors:
            raise ValueError("distribute_tensors needs at least one tensor to take the dtype from.")
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
        if len(kinds) > 1:
            raise ValueError(
                "The tensors of one buffer share a dtype and a device, got "
                f"{sorted(map(str, kinds))}: "
                "make one buffer for each."
            )
        if layout is None:
            layout = build_row_atomic_layout(
                [tensor.shape for tensor in tensors],
                mesh.size(),
                block_size=block_size,
                shard_layout=shard_layout,
            )
        buffer = cls(mesh, placements, layout, tensors[0].dtype, tensors[0].device)
        if layout.size != layout.payload:
            buffer.local_buffer.zero_()  # gaps: defined, so that a stored buffer is repeatable
        for i, tensor in enumerate(tensors):
            buffer.copy_from(i, tensor)
        return buffer

    @property
    def dtype(self) -> torch.dtype:
        return self.local_buffer.dtype

    @property
    def device(self) -> torch.device:
        return self.local_buffer.device

    def copy_from(self, i: int, tensor: Tensor) -> None:
        """Copy this rank's part of the full tensor ``i`` into the buffer."""
        start = self.layout.tensor_to_offset[i]
        part = self.range.intersect(self.layout.get_tensor_range(i))
        flat = tensor.detach().reshape(-1)
        self._narrow(part).copy_(flat[part.start - start : part.stop - start])

    def _narrow(self, part: Range) -> Tensor:
        if not part.numel:
            return self.local_buffer[:0]
        return self.local_buffer.narrow(0, part.start - self.range.start, part.numel)

    def get_local_tensor(self, i: int) -> Tensor:
        """This rank's rows of tensor ``i``, a view of the buffer; ``(0, d1, ...)`` if none.

        In a layout of whole tensors it is ``(0, 0, ...)``, as ``Owner`` has it.
        """
        shape = self.layout.tensor_shapes[i]
        part = self.range.intersect(self.layout.get_tensor_range(i))
        if self.layout.whole_tensors and not part.numel:
            return self.local_buffer[:0].view((0,) * len(shape))
        rows = part.numel // math.prod(shape[1:])
        return self._narrow(part).view(rows, *shape[1:])

    def get_dtensor(self, i: int) -> DTensor:
        """Tensor ``i`` as a DTensor with its true row counts; its local tensor is a view."""
        shape = torch.Size(self.layout.tensor_shapes[i])
        return DTensor.from_local(
            self.get_local_tensor(i),
            self.mesh,
            self.layout.tensor_placements(i, self.mesh, self.placements),
            run_check=False,
            shape=shape,
            stride=contiguous_stride(shape),
        )

    def cast(self, dtype: torch.dtype) -> DBuffer:
        """The same buffer in another dtype; itself where that is its dtype."""
        if dtype == self.dtype:
            return self
        return self._with(self.local_buffer.to(dtype), self.placements)

    def _with(self, local_buffer: Tensor, placements: Sequence[Placement]) -> DBuffer:
        return DBuffer.from_local(local_buffer, self.mesh, placements, self.layout)

    # ------------------------------------------------------------------ redistribution

    def redistribute(
        self, placements: Sequence[Placement], *, out: DBuffer | None = None
    ) -> DBuffer:
        """Bring the buffer to other placements, one mesh dim at a time.

        Sharded to ``Replicate`` gathers, ``Partial`` to sharded reduce-scatters, ``Partial`` to
        ``Replicate`` all-reduces, ``Replicate`` to sharded keeps a slice. Every rank of the mesh
        must call it. The result shares no memory with this buffer.

        Args:
            placements: The wanted placements.
            out: A buffer with them to write the result into.

        Raises:
            NotImplementedError: There is no such step, for example ``Replicate`` to ``Partial``.
        """
        self._check_out(out, checked_placements(placements))
        result = self.redistribute_async(placements).wait()
        if out is None:
            return result
        out.local_buffer.copy_(result.local_buffer)
        return out

    def redistribute_async(self, placements: Sequence[Placement]) -> PendingBuffer:
        """As ``redistribute``, but returns when the first collective is issued.

        Later ones, on further mesh dims, are issued by ``wait()`` of the result.
        """
        placements = checked_placements(placements)
        mesh_dims = _order_of_dims(self.placements, placements)
        started = self._start_dim(mesh_dims[0], placements[mesh_dims[0]]) if mesh_dims else None

        def finish() -> DBuffer:
            result = self
            if started is not None:
                between = list(self.placements)
                between[mesh_dims[0]] = placements[mesh_dims[0]]
                result = self._with(_arrived(started), between)
            for mesh_dim in mesh_dims[1:]:
                between[mesh_dim] = placements[mesh_dim]
                local = _arrived(result._start_dim(mesh_dim, placements[mesh_dim]))
                result = self._with(local, between)
            local = result.local_buffer
            if _share_memory(local, self.local_buffer):
                local = local.clone()
            return self._with(local, placements)

        return PendingBuffer(finish)

    def _check_out(self, out: DBuffer | None, placements: tuple[Placement, ...]) -> None:
        if out is None:
            return
        wanted = (self.mesh, placements, self.layout, self.dtype, self.device)
        given = (out.mesh, out.placements, out.layout, out.dtype, out.device)
        for name, want, got in zip(
            ("mesh", "placements", "layout", "dtype", "device"), wanted, given, strict=True
        ):
            if want != got:
                raise ValueError(f"out has {name} {got}, but the result has {name} {want}.")

    def _start_dim(self, mesh_dim: int, target: Placement) -> Pending | Tensor:
        source = self.placements[mesh_dim]
        placements = list(self.placements)
        placements[mesh_dim] = target
        group = DimGroup.of(self.mesh, mesh_dim)
        if isinstance(source, RowAtomic) and isinstance(target, Replicate):
            counts = self.layout.get_peer_numels(self.mesh, self.placements, mesh_dim)
            return all_gather_rows_async(self.local_buffer, counts, group)
        if isinstance(source, Partial) and isinstance(target, RowAtomic):
            if group.size == 1:  # reduce_scatter_rows would copy
                return self.local_buffer
            counts = self.layout.get_peer_numels(self.mesh, placements, mesh_dim)
            return reduce_scatter_rows_async(self.local_buffer, counts, source.reduce_op, group)
        if isinstance(source, Partial) and isinstance(target, Replicate):
            return all_reduce(self.local_buffer, source.reduce_op, group)
        if isinstance(source, Replicate) and isinstance(target, RowAtomic):
            return self._narrow(self.layout.get_local_range(self.mesh, placements))
        raise NotImplementedError(
            f"A DBuffer cannot go from {source!r} to {target!r} on mesh dim {mesh_dim}: gather "
            "to Replicate first, or write the values wanted."
        )

    def __repr__(self) -> str:
        return (
            f"DBuffer({len(self.layout.tensor_shapes)} tensors, elements [{self.range.start}, "
            f"{self.range.stop}) of {self.layout.size}, {self.placements}, {self.dtype}, "
            f"{self.device})"
        )


class PendingBuffer:
    """A redistributed buffer on its way: ``wait()`` returns it, on any number of calls."""

    def __init__(self, finish: Callable[[], DBuffer]) -> None:
        self._finish: Callable[[], DBuffer] | None = finish
        self._result: DBuffer | None = None

    def wait(self) -> DBuffer:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        assert self._result is not None
        return self._result


def checked_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements of a buffer as a tuple.

    Raises:
        TypeError: A placement is none that a buffer can have.
        ValueError: A row placement brings counts of its own.
    """
    placements = tuple(placements)
    for placement in placements:
        if not isinstance(placement, (RowAtomic, Replicate, Partial)):
            raise TypeError(
                f"A DBuffer is placed by RowAtomic(), BlockAtomic(), Replicate() or Partial(), "
                f"got {placement!r}."
            )
        if isinstance(placement, RowAtomic) and placement.rows is not None:
            raise ValueError(
                f"{placement} brings row counts, but a DBuffer's rows come from its layout: "
                "use RowAtomic()."
            )
    sharded_mesh_dims(placements)
    return placements


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    stride = [1]
    for dim in reversed(shape[1:]):
        stride.append(stride[-1] * max(dim, 1))
    return tuple(reversed(stride))


def _order_of_dims(source: Sequence[Placement], target: Sequence[Placement]) -> list[int]:
    """Mesh dims to change, so that sharded ones come last at every step in between."""
    changed = [
        dim
        for dim, (old, new) in enumerate(zip(source, target, strict=True))
        if old != new and not (isinstance(old, RowAtomic) and isinstance(new, RowAtomic))
    ]
    unsharded = [dim for dim in changed if isinstance(source[dim], RowAtomic)]
    return [*unsharded, *(dim for dim in reversed(changed) if dim not in unsharded)]


def _arrived(started: Pending | Tensor) -> Tensor:
    return started.wait() if isinstance(started, Pending) else started


def _share_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
