"""ParameterGroup: parameters in one sharded flat buffer, gathered and reduced together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from dtensor_owner.buffer import DBuffer, PendingBuffer
from dtensor_owner.gradients import GradientPacking
from dtensor_owner.layout import GlobalLayout
from dtensor_owner.mxfp8_weights import MXFP8Gather
from dtensor_owner.neighbours import Neighbours
from placements.api import distribute_tensor
from placements.torch_hooks import local_tensor, set_local_tensor, wrap_like


@dataclass
class ManagedParameter:
    """One parameter and every module attribute that holds it (several where it is tied)."""

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]


Stamp = tuple[int, int]  # epoch and version


class _Epoch:
    number = 0


def start_epoch() -> None:
    """From here on parameters may have been changed since they were gathered."""
    _Epoch.number += 1


class ParameterGroup:
    """Parameters of one dtype and ``requires_grad``, sharded in one flat buffer.

    The modules' parameters become DTensors whose local tensors are views of ``buffer``, so an
    optimizer that updates them in place updates what the next gather sends.

    Args:
        managed: The parameters, in the order of the layout; all of one dtype, device and
            ``requires_grad``.
        mesh: The mesh.
        placements: One per mesh dim: ``RowAtomic()`` where the buffer is sharded, else
            ``Replicate()``.
        layout: Where the parameters lie, with a segment for each shard; 0-D ones as ``(1,)``.
        mp_policy: Dtypes of gathers and reductions; None means the parameters' own.
        mxfp8: Gather the weights as MXFP8 planes; all parameters must be fit for it.
        kept_ranks: What to keep of the gathered weights between forward and backward: a part
            such that this many neighbours hold all of them; None keeps nothing.
    """

    #: Reduce gradients in backward; otherwise add them up, for a later backward that does.
    sync_gradients = True

    def __init__(
        self,
        managed: Sequence[ManagedParameter],
        mesh: DeviceMesh,
        *,
        placements: Sequence[Placement],
        layout: GlobalLayout,
        mp_policy: MixedPrecisionPolicy,
        mxfp8: bool = False,
        kept_ranks: int | None = None,
    ) -> None:
        self.names = [m.name for m in managed]
        self._owners = [m.owners for m in managed]
        self._shapes = [tuple(m.parameter.shape) for m in managed]
        self.mesh = mesh
        self.placements = tuple(placements)
        self.layout = layout
        full = [m.parameter for m in managed]
        self._use_buffer(DBuffer.distribute_tensors(full, mesh, self.placements, layout=layout))
        self.mxfp8 = MXFP8Gather(self.layout, self.names) if mxfp8 else None
        self._neighbours = Neighbours(mesh, kept_ranks) if kept_ranks is not None else None
        self._policy = mp_policy
        self._packing = GradientPacking(self.layout)
        self._start()
        self.parameters = [self._shard(i, m) for i, m in enumerate(managed)]

    def _start(self) -> None:
        """What a group forgets between steps."""
        self._shown: dict[int, Sequence[Tensor]] = {}
        # Weights, with the stamp of the parameters that they were made from.
        self._coming: tuple[Stamp, PendingBuffer] | None = None
        self._kept: tuple[Stamp, Tensor] | None = None
        self._narrower: tuple[Stamp, DBuffer] | None = None
        self._held: tuple[int, Tensor] | None = None
        self._accumulated: tuple[Tensor, list[bool]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterGroup:
        """A group of its own for a copied module, with parameters in a buffer of its own."""
        if self._shown:
            raise RuntimeError(
                f"The weights of {self.names} are gathered: copy the module outside of forward "
                "and backward, and after reshard()."
            )
        copied = memo[id(self)] = object.__new__(ParameterGroup)
        vars(copied).update(vars(self))  # mesh, layout and policies are values
        copied._start()
        copied._owners = copy.deepcopy(self._owners, memo)
        copied.parameters = [copy.deepcopy(parameter, memo) for parameter in self.parameters]
        copied._move_into_buffer(copied.parameters)
        return copied

    def _shard(self, i: int, managed: ManagedParameter) -> DTensor:
        """Make parameter ``i`` a DTensor and put it wherever the full one was."""
        requires_grad = managed.parameter.requires_grad
        dtensor = self.buffer.get_dtensor(i) if self._shapes[i] else self._scalar(i)
        sharded = nn.Parameter(dtensor, requires_grad=requires_grad)
        vars(sharded).update(vars(managed.parameter))  # marks that users set on parameters
        for module, name in managed.owners:
            setattr(module, name, sharded)
        return cast(DTensor, sharded)  # a parameter that wraps a DTensor is one

    def _scalar(self, i: int) -> DTensor:
        """A 0-D parameter is whole on the rank that has its element in the buffer."""
        placements = self.layout.owner_placements(i, self.mesh, self.placements)
        scalar = distribute_tensor(self._views[i], self.mesh, placements, src_data_rank=None)
        set_local_tensor(scalar, self._views[i])
        return scalar

    def _local(self, buffer: DBuffer, i: int) -> Tensor:
        """This rank's part of parameter ``i``, a view of the buffer.

        Of a 0-D one, ranks other than its owner have an element that means nothing.
        """
        view = buffer.get_local_tensor(i)
        if self._shapes[i]:
            return view
        return view.view(()) if view.numel() else view.new_zeros(())

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
        if any(map(self._is_elsewhere, range(len(current)), map(local_tensor, current))):
            self._move_into_buffer(current)
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

    def _registered(self, i: int) -> DTensor:
        module, name = self._owners[i][0]
        parameter = module._parameters.get(name)
        ours = self.parameters[i]
        shape = self._shapes[i]
        if parameter is ours and ours.shape == shape:
            return ours
        if not isinstance(parameter, DTensor) or (
            (parameter.shape, parameter.placements, parameter.device_mesh)
            != (shape, ours.placements, ours.device_mesh)
        ):
            now = type(parameter).__name__
            if parameter is not None:
                now = f"a {now} of shape {tuple(parameter.shape)}"
            raise RuntimeError(
                f"{self.names[i]} was replaced after fully_shard, by {now}: a replacement must be "
                f"a DTensor of shape {shape} placed {ours.placements} on the same mesh. Copy "
                "values into the parameter instead."
            )
        return parameter

    def _is_elsewhere(self, i: int, local: Tensor) -> bool:
        if (local.dtype, local.device) != (self.buffer.dtype, self.buffer.device):
            return True
        return bool(local.numel()) and local.data_ptr() != self._addresses[i]

    def _move_into_buffer(self, parameters: Sequence[DTensor]) -> None:
        local = [local_tensor(parameter) for parameter in parameters]
        kinds = {(tensor.dtype, tensor.device) for tensor in local}
        if len(kinds) > 1:
            raise ValueError(
                f"The parameters {self.names} are sharded together, but now differ in dtype or "
                f"device: {sorted(map(str, kinds))}. Convert all of them."
            )
        dtype, device = kinds.pop()
        flat = torch.zeros(self.buffer.range.numel, dtype=dtype, device=device)
        with torch.no_grad():
            self._use_buffer(DBuffer.from_local(flat, self.mesh, self.placements, self.layout))
            for view, tensor, parameter in zip(self._views, local, parameters):
                view.copy_(tensor)
                set_local_tensor(parameter, view)  # whoever refers to the parameter

    def _use_buffer(self, buffer: DBuffer) -> None:
        self.buffer = buffer
        self._views = [self._local(buffer, i) for i in range(len(self.names))]
        self._addresses = [view.data_ptr() for view in self._views]

    # ---------------------------------------------------------------------- weights

    def prefetch(self) -> None:
        """Issue the gather that ``weights`` will wait for; every rank must call it."""
        stamp = self._stamp()
        if self._held is None and self._valid(self._coming, stamp) is None:
            self._coming = stamp, self.start_gather()

    def weights(self) -> Tensor:
        """All weights in one flat tensor of the compute dtype; every rank must call it."""
        if self._held is not None:
            return self._held[1]
        coming = self._valid(self._coming, self._stamp()) or self.start_gather()
        self._coming = None
        return coming.wait().local_buffer

    def forget_gathered(self) -> None:
        """Drop what was gathered and not used yet."""
        self._coming = self._narrower = None

    def hold(self, key: int, flat: Tensor) -> None:
        """Let ``weights`` return this tensor, which is shown under ``key``, until ``release``."""
        self._held = key, flat

    def release(self) -> None:
        """Undo ``hold``; without effect where it has been undone."""
        if self._held is not None:
            self.hide(self._held[0])
            self._held = None

    def keep_part(self, flat: Tensor | None) -> None:
        """Keep this rank's part of gathered weights for the next gather; None drops it."""
        if self._neighbours is not None:
            self._kept = None if flat is None else (self._stamp(), self._neighbours.part(flat))

    def _stamp(self) -> Stamp:
        return _Epoch.number, self.version()

    @staticmethod
    def _valid(entry: tuple[Stamp, Any] | None, stamp: Stamp) -> Any:
        return entry[1] if entry is not None and entry[0] == stamp else None

    def start_gather(self) -> PendingBuffer:
        """Issue a gather of all weights; what it returns is waited for."""
        replicated = [Replicate()] * self.mesh.ndim
        kept = self._valid(self._kept, self._stamp())
        if kept is not None:
            assert self._neighbours is not None
            part = self._neighbours.gather_async(kept, self.layout.size)
            return PendingBuffer(
                lambda: DBuffer.from_local(part.wait(), self.mesh, replicated, self.layout)
            )
        if self.mxfp8 is not None:
            return self.mxfp8.start(self.buffer, self.compute_dtype)
        return self._inner_shards().redistribute_async(replicated)

    def _inner_shards(self) -> DBuffer:
        """Shards in the compute dtype, gathered over all sharded mesh dims but the last.

        Where there are such mesh dims, the result is kept for gathers of the same epoch.
        """
        replicated = [Replicate()] * (self.mesh.ndim - 1)
        if list(self.placements[:-1]) == replicated:
            return self.buffer.cast(self.compute_dtype)
        stamp = self._stamp()
        found = self._valid(self._narrower, stamp)
        if found is None:
            found = self.buffer.cast(self.compute_dtype).redistribute(
                [*replicated, self.placements[-1]]
            )
            self._narrower = stamp, found
        return found

    def full_tensors(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of the gathered weights, one per parameter."""
        ranges = map(self.layout.get_tensor_range, range(len(self.parameters)))
        return tuple(
            flat[start:stop].view(shape) for (start, stop), shape in zip(ranges, self._shapes)
        )

    def version(self) -> int:
        """A number that changes when a parameter is changed in place.

        Not by foreach and fused optimizers: they change DTensors without telling autograd.
        """
        return sum(p._version + local_tensor(p)._version for p in self.parameters)

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

    def start_reduce(self, gradients: Sequence[Tensor | None]) -> PendingGradients | None:
        """Issue the reduction of full gradients to this rank's rows; one reduce-scatter.

        Args:
            gradients: Of each parameter on this rank; None counts as zero if another rank
                has one.

        Returns:
            What to wait for; None where ``sync_gradients`` is off.
        """
        dtype = self._policy.reduce_dtype or self.compute_dtype
        packed = self._packing.pack(gradients, dtype=dtype, device=self.buffer.device)
        used = [gradient is not None for gradient in gradients]
        if self._accumulated is not None:
            earlier, used_earlier = self._accumulated
            packed += earlier
            used = [now or before for now, before in zip(used, used_earlier)]
        self._accumulated = None if self.sync_gradients else (packed, used)
        if not self.sync_gradients:
            return None
        before, _ = self._divisors(dtype)
        if before > 1:
            packed.div_(before)
        partial = [Partial("sum")] * self.mesh.ndim
        buffer = DBuffer.from_local(packed, self.mesh, partial, self._packing.layout)
        return PendingGradients(self, buffer.redistribute_async(self.placements), used)

    def _divisors(self, dtype: torch.dtype) -> tuple[int, float]:
        """What gradients are divided by before and after they are summed, to average them.

        The range of float16 is small: half of the digits go before, so that neither the sum is
        too large nor the parts too small.
        """
        ranks = self.mesh.size()
        before = 1 << (ranks.bit_length() // 2) if dtype == torch.float16 and ranks > 1 else 1
        return before, ranks / before

    def reduce_accumulated(self) -> None:
        """Reduce what earlier backwards have added up here, for a backward without this group."""
        if self._accumulated is None or not self.sync_gradients:
            return
        pending = self.start_reduce([None] * len(self.parameters))
        assert pending is not None
        arrived = {
            parameter: gradient
            for parameter, gradient in zip(self.parameters, pending.wait())
            if gradient is not None and parameter.requires_grad
        }
        if arrived:  # to .grad through autograd, so that hooks of parameters run
            torch.autograd.backward(list(arrived), list(arrived.values()))

    def drop_accumulated(self) -> None:
        """Forget what backwards without ``sync_gradients`` have added up."""
        self._accumulated = None

    def finish_reduce(self, reduced: Tensor, used_here: list[bool]) -> list[DTensor | None]:
        """Gradients placed as the parameters are, from this rank's part of the sum."""
        local, used = self._packing.split(reduced, self.buffer.range.numel, used_here)
        _, after = self._divisors(local.dtype)
        if after != 1:
            local.div_(after)
        local = local.to(self.buffer.dtype)
        buffer = DBuffer.from_local(local, self.mesh, self.placements, self.layout)
        return [
            wrap_like(self._local(buffer, i), parameter) if used[i] else None
            for i, parameter in enumerate(self.parameters)
        ]


class PendingGradients:
    """Gradients of a group on their way to the ranks that keep them."""

    def __init__(self, group: ParameterGroup, reduced: PendingBuffer, used: list[bool]) -> None:
        self._group, self._reduced, self._used = group, reduced, used

    def arrive(self) -> None:
        """Wait for the collectives."""
        self._reduced.wait()

    def wait(self) -> list[DTensor | None]:
        """The average over the ranks; None where no rank has a gradient."""
        return self._group.finish_reduce(self._reduced.wait().local_buffer, self._used)
