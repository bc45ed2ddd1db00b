"""Distributing tensors and modules with our placements; torch's signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import distribute_tensor as _stock_distribute_tensor

from placements.boxes import check_placements, is_held, local_box, normalized
from placements.owner import Owner
from placements.plan import Plan, make_plan
from placements.redistribute import plan_for, redistribute_local, redistribute_locals
from placements.torch_hooks import DTensorSpec, TensorMeta, any_ours

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """As ``torch.distributed.tensor.distribute_tensor``, for our placements too.

    Args:
        tensor: The whole tensor; every rank passes one of the same shape and dtype. A meta
            tensor gives a DTensor on meta without communication.
        device_mesh: Mesh to place it on.
        placements: One per mesh dim.
        src_data_rank: Coordinate, on every mesh dim, of the rank whose values count; each shard
            is sent from there. ``None``: every rank keeps its part of its own tensor.

    Raises:
        ValueError, NotImplementedError: A placement does not fit the shape or mesh; nothing has
            been sent then.
    """
    if placements is None or not any_ours(placements):
        return _stock_distribute_tensor(
            tensor, device_mesh, placements, src_data_rank=src_data_rank
        )
    if device_mesh is None:
        raise ValueError("distribute_tensor needs a device_mesh for placements of this package.")
    mesh = device_mesh
    placements = normalized(placements, tensor.dim())
    if isinstance(tensor, DTensor):
        return _distribute_dtensor(tensor, mesh, placements)
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes leaf tensors; inside a computation use DTensor.from_local "
            "and redistribute."
        )
    check_placements(tuple(tensor.shape), tuple(mesh.shape), placements)
    source = tensor.detach()
    if source.device.type != mesh.device_type and not source.is_meta:
        source = source.to(mesh.device_type)
    local = _local_part(source, mesh, placements, src_data_rank)
    stride = torch.empty(tensor.shape, device="meta").stride()
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(tensor.shape, stride, tensor.dtype))
    result = DTensor(
        local.requires_grad_(tensor.requires_grad), spec, requires_grad=tensor.requires_grad
    )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(result, requires_grad=tensor.requires_grad)  # type: ignore[return-value]
    return result


def _local_part(
    source: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], src_data_rank: int | None
) -> Tensor:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return source.new_empty(0)
    if source.is_meta or src_data_rank is None:
        box = local_box(tuple(source.shape), tuple(mesh.shape), placements, coordinate)
        local = source
        for dim, (start, stop) in enumerate(box):
            local = local.narrow(dim, start, stop - start)
        return local.clone(memory_format=torch.contiguous_format)
    # The source rank owns the whole tensor; from there it is redistributed like any other.
    owners = [Owner(src_data_rank)] * mesh.ndim
    held = source if is_held(owners, coordinate) else source.new_empty((0,) * source.dim())
    local = redistribute_local(held, source.shape, mesh, owners, placements)
    return local.clone() if local is source else local


def _distribute_dtensor(
    tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    if tensor.device_mesh != mesh or tuple(tensor.placements) != tuple(placements):
        raise ValueError(
            f"Cannot distribute a DTensor that is already {tensor.placements} on "
            f"{tensor.device_mesh} to {tuple(placements)} on {mesh}: call redistribute on it."
        )
    return tensor


def distribute_module(
    module: ModuleT,
    device_mesh: DeviceMesh,
    placement_fn: Callable[[str, nn.Parameter], Sequence[Placement] | None],
) -> ModuleT:
    """Replace a module's parameters by DTensors, in place.

    Args:
        module: Its parameters are whole tensors, or meta tensors.
        device_mesh: Mesh to place them on.
        placement_fn: ``(name, parameter) -> placements``; ``None`` replicates.

    Returns:
        The module. A parameter that occurs twice (tied) stays one parameter. Nothing is
        replaced if any placement is refused.
    """
    replicate = (Replicate(),) * device_mesh.ndim
    chosen = {
        name: placement_fn(name, parameter) or replicate
        for name, parameter in module.named_parameters()
    }
    for name, parameter in module.named_parameters():
        check_placements(tuple(parameter.shape), tuple(device_mesh.shape), chosen[name])
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        distributed = distribute_tensor(parameter.detach(), device_mesh, chosen[name])
        replaced[id(parameter)] = nn.Parameter(distributed, parameter.requires_grad)
    for submodule in module.modules():
        for key, own in list(submodule._parameters.items()):
            if own is not None:
                submodule._parameters[key] = replaced[id(own)]
    return module


class _RedistributeGroup(torch.autograd.Function):
    """Gradients come back in the inputs' placements, packed like the forward."""

    @staticmethod
    def forward(ctx: Any, placements: Any, *tensors: DTensor) -> tuple[DTensor, ...]:
        ctx.sources = [_grad_placements(tensor.placements) for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(_redistribute_group(tensors, placements))

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[DTensor | None, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        back = _redistribute_group(
            [grads[i] for i in present],  # type: ignore[misc]
            [ctx.sources[i] for i in present],
        )
        results: list[DTensor | None] = [None] * len(grads)
        for i, grad in zip(present, back, strict=True):
            results[i] = grad
        return (None, *results)


@torch.compiler.allow_in_graph
def _apply_redistribute_group(targets: Any, *tensors: DTensor) -> tuple[DTensor, ...]:
    """One call in a traced graph: what it does is traced on local tensors."""
    return _RedistributeGroup.apply(targets, *tensors)


def _grad_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def redistribute_group(
    tensors: Sequence[DTensor],
    placements: Sequence[Placement] | Sequence[Sequence[Placement]],
) -> list[DTensor]:
    """Redistribute many tensors with one packed exchange per mesh dim.

    Args:
        tensors: DTensors on one mesh; any shapes and dtypes. The list is the same (shapes,
            dtypes, placements, order) on every rank.
        placements: One list for all tensors, or one list per tensor.

    Returns:
        New DTensors, in order. The inputs stay unchanged; gradients come back in the inputs'
        placements.

    Raises:
        ValueError: Different meshes, or a wrong number of placement lists.
    """
    tensors = list(tensors)
    if not tensors:
        return []
    targets = _placements_per_tensor(tensors, placements)
    if any(tensor.device_mesh != tensors[0].device_mesh for tensor in tensors):
        raise ValueError(
            "redistribute_group needs tensors on one mesh, got "
            f"{list(dict.fromkeys(str(t.device_mesh) for t in tensors))}: call it once per mesh."
        )
    return list(_apply_redistribute_group(targets, *tensors))


def _placements_per_tensor(
    tensors: list[DTensor], placements: Sequence[Any]
) -> list[tuple[Placement, ...]]:
    if all(isinstance(p, Placement) for p in placements):
        return [normalized(placements, tensor.dim()) for tensor in tensors]
    if len(placements) != len(tensors):
        raise ValueError(
            f"redistribute_group got {len(tensors)} tensors and {len(placements)} placement "
            "lists: pass one list for all, or one per tensor."
        )
    return [normalized(p, t.dim()) for p, t in zip(placements, tensors, strict=True)]


def _redistribute_group(
    tensors: Sequence[DTensor], placements: Sequence[tuple[Placement, ...]]
) -> list[DTensor]:
    if not tensors:
        return []
    mesh = tensors[0].device_mesh
    locals_ = [tensor._local_tensor for tensor in tensors]
    plans = [
        plan_for(tensor.shape, tensor.dtype, mesh, tensor.placements, target)
        for tensor, target in zip(tensors, placements, strict=True)
    ]
    results = redistribute_locals(locals_, plans, mesh)
    return [
        DTensor(
            local,
            DTensorSpec(mesh, target, tensor._spec.tensor_meta),
            requires_grad=tensor.requires_grad,
        )
        for local, target, tensor in zip(results, placements, tensors, strict=True)
    ]


def explain(
    source: Placement | Sequence[Placement],
    target: Placement | Sequence[Placement],
    shape: Sequence[int],
    *,
    mesh_shape: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
    coordinate: Sequence[int] | None = None,
) -> Plan:
    """The plan of a redistribution, without a process group.

    Args:
        source, target: Placements, one per mesh dim (one alone for a 1-D mesh).
        shape: Global shape.
        mesh_shape: Ranks per mesh dim.
        dtype: For the byte counts.
        coordinate: The rank whose view to take; the first rank of every dim by default.

    Returns:
        A ``Plan``: ``str()`` is its text, ``bytes_moved(coordinate)`` its bytes per rank.
    """
    sizes = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    before, after = (
        normalized((p,) if isinstance(p, Placement) else tuple(p), len(shape))
        for p in (source, target)
    )
    at = tuple(coordinate) if coordinate is not None else (0,) * len(sizes)
    return make_plan(tuple(shape), dtype.itemsize, sizes, before, after, at)
