"""Ops that no sharding rule can express: random numbers, equality, shifts, grad scaling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from placements.boxes import local_box
from placements.collectives import DimGroup, all_reduce
from placements.torch_hooks import (
    DTensorSpec,
    Handler,
    TensorMeta,
    any_ours,
    pytree,
    squeeze_wrapper,
)

aten = torch.ops.aten


def whole(value: Any) -> Any:
    """A DTensor redistributed to ``Replicate`` on every mesh dim; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)


def _on_whole_inputs(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather, then run torch's own rule."""
    args, kwargs = pytree.tree_map(whole, (args, kwargs))
    return op(*args, **kwargs)


# ------------------------------------------------------------------------------- random


def _own_part(full: Tensor, like: DTensor) -> Tensor:
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    shape = tuple(like.device_mesh.shape)
    for dim, (start, stop) in enumerate(local_box(full.shape, shape, like.placements, coordinate)):
        full = full.narrow(dim, start, stop - start)
    return full


def _refuse_partial(op: Any, tensor: DTensor) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise NotImplementedError(
            f"{op} on {tensor.placements}: random values of a tensor that is still to be reduced "
            "have no meaning; redistribute it first."
        )


def _random_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor on every rank and keep the own part.

    The values are those of the full tensor if the ranks' generators are in the same state;
    all ranks advance theirs alike. Costs one temporary of the global size.
    """
    tensor, *rest = args
    _refuse_partial(op, tensor)
    local = tensor._local_tensor
    full = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    op(full, *rest, **kwargs)
    with torch.no_grad():
        local.copy_(_own_part(full, tensor))
    return tensor


def _random_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    _refuse_partial(op, tensor)
    local = tensor._local_tensor
    full = op(torch.empty(tensor.shape, dtype=local.dtype, device=local.device), *rest, **kwargs)
    return _wrap(_own_part(full, tensor).contiguous(), tensor, full)


def _wrap(local: Tensor, like: DTensor, full: Tensor) -> DTensor:
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, meta)
    return DTensor(local, spec, requires_grad=False)


def _dropout(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``native_dropout``: the mask is drawn for the whole tensor."""
    tensor, p, *rest = args
    _refuse_partial(op, tensor)
    local = tensor._local_tensor
    ones = torch.ones(tensor.shape, dtype=local.dtype, device=local.device)
    scale, mask = op(ones, p, *rest, **kwargs)
    own_scale, own_mask = _own_part(scale, tensor), _own_part(mask, tensor).contiguous()
    return _wrap(local * own_scale, tensor, scale), _wrap(own_mask, tensor, mask)


# ---------------------------------------------------------------------- equality, scaling


def _compare(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``equal`` and ``allclose``: true if all parts compare so, on every rank alike."""
    first, second, *rest = args
    if not (isinstance(first, DTensor) and isinstance(second, DTensor)):
        raise RuntimeError(
            f"{op}: got mixed torch.Tensor and DTensor; compare with full_tensor() instead."
        )
    if tuple(first.shape) != tuple(second.shape):
        if op is aten.equal.default:
            return False
        return bool(op(whole(first).to_local(), whole(second).to_local(), *rest, **kwargs))
    target = (first if any_ours(first.placements) else second).placements
    parts = [x.redistribute(placements=target).to_local() for x in (first, second)]
    # An empty part or a rank that is not the owner has nothing to object to.
    flag = torch.tensor(int(op(*parts, *rest, **kwargs)), device=parts[0].device)
    for mesh_dim in range(first.device_mesh.ndim):
        flag = all_reduce(flag, "min", DimGroup.of(first.device_mesh, mesh_dim))
    return bool(flag.item())


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's check: a non-finite value on any rank is found on all."""
    grads, found_inf, inv_scale = args
    local_grads = [g._local_tensor if isinstance(g, DTensor) else g for g in grads]
    op(local_grads, found_inf, inv_scale, **kwargs)
    meshes = dict.fromkeys(g.device_mesh for g in grads if isinstance(g, DTensor))
    found = found_inf
    for mesh in meshes:
        for mesh_dim in range(mesh.ndim):
            found = all_reduce(found, "max", DimGroup.of(mesh, mesh_dim))
    found_inf.copy_(found)


def _squeeze_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``squeeze_``, which ``v @ w`` ends with; torch would leave the spec with the old shape."""
    tensor, dim = args
    return squeeze_wrapper(tensor, op, args, aten.squeeze.dim(tensor, dim))


def _shift(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x << y`` and ``x >> y`` by the names that torch's dispatcher knows what to do with.

    It takes ``aten::__lshift__`` for an in-place op, because of the name's end, and returns ``x``.
    """
    is_left = op._schema.name == "aten::__lshift__"
    return (torch.bitwise_left_shift if is_left else torch.bitwise_right_shift)(*args, **kwargs)


def _ops(handler: Handler, *names: str) -> dict[Any, Handler]:
    found = {}
    for name in names:
        packet, _, overload = name.partition(".")
        found[getattr(getattr(aten, packet), overload or "default")] = handler
    return found


HANDLERS: dict[Any, Handler] = {
    **_ops(
        _random_in_place,
        "normal_",
        "uniform_",
        "bernoulli_.float",
        "random_",
        "random_.from",
        "random_.to",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "geometric_",
    ),
    **_ops(_random_like, "rand_like", "randn_like", "randint_like", "randint_like.low_dtype"),
    **_ops(_dropout, "native_dropout"),
    **_ops(_squeeze_in_place, "squeeze_.dim"),
    **_ops(_compare, "equal", "allclose"),
    **_ops(_shift, "__lshift__.Scalar", "__lshift__.Tensor"),
    **_ops(_shift, "__rshift__.Scalar", "__rshift__.Tensor"),
    **_ops(_unscale, "_amp_foreach_non_finite_check_and_unscale_"),
    **_ops(
        _on_whole_inputs, "convolution", "convolution_backward", "bernoulli", "argmax", "argmin"
    ),
}
