"""ParameterGroup: parameters in one sharded flat buffer, gathered and reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from dtensor_owner.buffer import DBuffer
from dtensor_owner.gradients import GradientPacking
from dtensor_owner.layout import ShardLayout, build_row_atomic_layout
from dtensor_owner.mesh_ranges import mesh_sizes
from dtensor_owner.mxfp8_weights import MXFP8Gather
from placements.row_atomic import RowAtomic


@dataclass
class ManagedParameter:
    """One parameter and every module attribute that holds it (several where it is tied)."""

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]


class ParameterGroup:
    """Parameters of one dtype and ``requires_grad``, sharded in one flat buffer.

    The modules' parameters become DTensors whose local tensors are views of ``buffer``, so an
    optimizer that updates them in place updates what the next gather sends.

    Args:
        managed: The parameters, in the order of the layout; all of one dtype, device and
            ``requires_grad``.
        mesh: A 1-D mesh to shard over.
        shard_layout: Padded or not.
        block_size: Rows that stay together.
        mp_policy: Dtypes of gathers and reductions; None means the parameters' own.
        mxfp8: Gather the weights as MXFP8 planes; all parameters must be fit for it.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParameter],
        mesh: DeviceMesh,
        *,
        shard_layout: ShardLayout,
        block_size: int,
        mp_policy: MixedPrecisionPolicy,
        mxfp8: bool = False,
    ) -> None:
        self.names = [m.name for m in managed]
        self._owners = [m.owners for m in managed]
        self.mesh = mesh
        self.placements: tuple[Placement, ...] = (RowAtomic(),)
        self.layout = build_row_atomic_layout(
            [m.parameter.shape for m in managed],
            mesh_sizes(mesh)[-1],
            block_size=block_size,
            shard_layout=shard_layout,
        )
        self.buffer = DBuffer.distribute_tensors(
            [m.parameter for m in managed], mesh, self.placements, layout=self.layout
        )
        self.mxfp8 = MXFP8Gather(self.layout, self.names) if mxfp8 else None
        self._policy = mp_policy
        self._packing = GradientPacking(self.layout)
        self._shown: dict[int, Sequence[Tensor]] = {}
        self.parameters = [self._shard(i, m) for i, m in enumerate(managed)]

    def _shard(self, i: int, managed: ManagedParameter) -> nn.Parameter:
        """Make parameter ``i`` a DTensor and put it wherever the full one was."""
        requires_grad = managed.parameter.requires_grad
        sharded = nn.Parameter(self.buffer.get_dtensor(i), requires_grad=requires_grad)
        vars(sharded).update(vars(managed.parameter))  # marks that users set on parameters
        for module, name in managed.owners:
            setattr(module, name, sharded)
        return sharded

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter does; users may freeze and unfreeze them at any time."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def compute_dtype(self) -> torch.dtype:
        if self._policy.param_dtype is None or not self.buffer.dtype.is_floating_point:
            return self.buffer.dtype
        return self._policy.param_dtype

    # --------------------------------------------- parameters that users moved or replaced

    def adopt_changes(self) -> None:
        """Bring parameters back into the buffer that have got storage of their own.

        ``to_empty``, ``to`` and ``load_state_dict(assign=True)`` do that. A gather would go on
        sending the old values otherwise.

        Raises:
            RuntimeError: A parameter is no DTensor of the layout any more, or is on meta.
            ValueError: The parameters differ in dtype or device.
        """
        current = [self._registered(i) for i in range(len(self.parameters))]
        with torch.no_grad():
            local = [parameter.to_local() for parameter in current]
            if any(map(self._is_elsewhere, range(len(local)), local)):
                self._move_into_buffer(local)
        for i, parameter in enumerate(current):
            if parameter is not self.parameters[i]:
                self.parameters[i] = parameter
                for module, name in self._owners[i]:
                    setattr(module, name, parameter)
        if self.buffer.device.type == "meta":
            raise RuntimeError(
                f"The parameters {self.names} are on the meta device: call to_empty(device=...) "
                "on the model and initialize it before the first forward."
            )

    def _registered(self, i: int) -> nn.Parameter:
        module, name = self._owners[i][0]
        parameter = module._parameters.get(name)
        ours = self.parameters[i]
        if parameter is ours:
            return ours
        if not isinstance(parameter, DTensor) or (
            (parameter.shape, parameter.placements, parameter.device_mesh)
            != (ours.shape, ours.placements, ours.device_mesh)
        ):
            raise RuntimeError(
                f"{self.names[i]} was replaced after fully_shard, by {type(parameter).__name__}: a "
                f"replacement must be a DTensor of shape {tuple(ours.shape)} placed "
                f"{ours.placements} on the same mesh. Copy values into the parameter instead."
            )
        return parameter

    def _is_elsewhere(self, i: int, local: Tensor) -> bool:
        view = self.buffer.get_local_tensor(i)
        if (local.dtype, local.device) != (view.dtype, view.device):
            return True
        return bool(local.numel()) and local.data_ptr() != view.data_ptr()

    def _move_into_buffer(self, local: Sequence[Tensor]) -> None:
        kinds = {(tensor.dtype, tensor.device) for tensor in local}
        if len(kinds) > 1:
            raise ValueError(
                f"The parameters {self.names} are sharded together, but now differ in dtype or "
                f"device: {sorted(map(str, kinds))}. Convert all of them."
            )
        dtype, device = kinds.pop()
        flat = torch.zeros(self.buffer.range.numel, dtype=dtype, device=device)
        self.buffer = DBuffer.from_local(flat, self.mesh, self.placements, self.layout)
        for i, tensor in enumerate(local):
            view = self.buffer.get_local_tensor(i)
            view.copy_(tensor)
            tensor.set_(view)  # the DTensor's own local tensor, whoever refers to it

    # ---------------------------------------------------------------------- weights

    def gather(self) -> Tensor:
        """All weights in one flat tensor of the compute dtype; every rank must call it."""
        if self.mxfp8 is not None:
            return self.mxfp8(self.buffer, self.compute_dtype).local_buffer
        replicated = [Replicate()] * self.mesh.ndim
        return self.buffer.cast(self.compute_dtype).redistribute(replicated).local_buffer

    def full_tensors(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of the gathered weights, one per parameter."""
        ranges = map(self.layout.get_tensor_range, range(len(self.parameters)))
        return tuple(
            flat[start:stop].view(shape)
            for (start, stop), shape in zip(ranges, self.layout.tensor_shapes)
        )

    def version(self) -> int:
        """A number that changes when a parameter is changed in place."""
        with torch.no_grad():
            return sum(p._version + p.to_local()._version for p in self.parameters)

    def show(self, key: int, tensors: Sequence[Tensor]) -> None:
        """Let the modules see these tensors instead of their sharded parameters.

        The parameters stay registered; an attribute of the instance hides them. Of several
        sets shown at once, the last one is seen.
        """
        self._shown[key] = tensors
        self._update_modules()

    def hide(self, key: int) -> None:
        """Undo ``show``; without effect where it has been undone."""
        if self._shown.pop(key, None) is not None:
            self._update_modules()

    def _update_modules(self) -> None:
        tensors = next(reversed(self._shown.values())) if self._shown else None
        for i, owners in enumerate(self._owners):
            for module, name in owners:
                if tensors is None:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = tensors[i]

    # -------------------------------------------------------------------- gradients

    def reduce(self, gradients: Sequence[Tensor | None]) -> list[DTensor | None]:
        """Average full gradients over the ranks and keep this rank's rows; one reduce-scatter.

        Args:
            gradients: Of each parameter on this rank; None counts as zero if another rank
                has one.

        Returns:
            Gradients placed as the parameters are; None where no rank has one.
        """
        dtype = self._policy.reduce_dtype or self.compute_dtype
        packed = self._packing.pack(gradients, dtype=dtype, device=self.buffer.device)
        partial = [Partial("avg")] * self.mesh.ndim
        reduced = DBuffer.from_local(packed, self.mesh, partial, self._packing.layout).redistribute(
            self.placements
        )
        used_here = [gradient is not None for gradient in gradients]
        local, used = self._packing.split(reduced.local_buffer, self.buffer.range.numel, used_here)
        local = local.to(self.buffer.dtype)
        buffer = DBuffer.from_local(local, self.mesh, self.placements, self.layout)
        return [buffer.get_dtensor(i) if used[i] else None for i in range(len(self.parameters))]
