"""Ops on lists of tensors: foreach math, fused optimizers, foreach norms.

Every position of the lists is an op of its own and keeps its own placement.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from placements.boxes import is_ours, split_dim
from placements.op_call import LocalOp, OpCall, same_rows
from placements.op_reductions import norm_partial
from placements.owner import Owner
from placements.torch_hooks import DTensorSpec, OpSchema, OutputSharding, pytree

aten = torch.ops.aten

_NORMS = (aten._foreach_norm.Scalar,)
_PREFIXES = ("aten::_foreach_", "aten::_fused_")
# Reductions of a list that have no rule of their own.
_REFUSED = ("aten::_foreach_max", "aten::_foreach_powsum")


def is_list_op(call: OpCall) -> bool:
    return call.op._schema.name.startswith(_PREFIXES)


def propagate_lists(call: OpCall) -> OutputSharding:
    """Sharding of one list op with at least one tensor of ours."""
    if call.op._schema.name in _REFUSED:
        raise call.refuse("there is no rule for this reduction of a list.")
    lists: list[list[DTensorSpec]] = [list(a) for a in call.schema.args_schema if _is_spec_list(a)]  # type: ignore[call-overload]
    length = len(lists[0])
    if any(len(specs) != length for specs in lists):
        raise call.refuse(f"its lists have different lengths {[len(x) for x in lists]}.")
    writes = _written_lists(call)
    positions = [[specs[i] for specs in lists] for i in range(length)]
    shapes = [torch.broadcast_shapes(*(spec.shape for spec in position)) for position in positions]
    targets = [
        _element_placements(call, position, shape, writes)
        for position, shape in zip(positions, shapes, strict=True)
    ]
    wanted = [
        [
            _target_spec(call, spec, _fitted(call, placements, spec, shape), is_written)
            for spec, placements, shape in zip(specs, targets, shapes, strict=True)
        ]
        for specs, is_written in zip(lists, writes, strict=True)
    ]
    return _sharding(call, _with_lists(call, wanted), targets, lists[0])


def _is_spec_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], DTensorSpec)


def _written_lists(call: OpCall) -> list[bool]:
    return [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument, value in zip(call.op._schema.arguments, call.schema.args_schema, strict=False)
        if _is_spec_list(value)
    ]


def _element_placements(
    call: OpCall, specs: list[DTensorSpec], shape: torch.Size, writes: list[bool]
) -> tuple[Placement, ...]:
    """The placement that the result at one position, of ``shape``, shall have.

    That of the first tensor written to; of the first one of ours where nothing is written. Others
    of that shape get the same.
    """
    meshes = [spec.mesh for spec in specs if spec.shape or is_any_ours(spec)]
    if any(mesh != meshes[0] for mesh in meshes):
        raise call.refuse(f"one position of its lists lives on different meshes {meshes}.")
    candidates = [spec for spec, write in zip(specs, writes, strict=True) if write]
    candidates += [spec for spec in specs if is_any_ours(spec)] + specs
    whole = [spec for spec in candidates if spec.shape == shape]
    if not whole:
        raise call.refuse(f"it broadcasts all tensors at one position, to {tuple(shape)}.")
    placements = whole[0].placements
    if any(p.is_partial() for p in placements):
        if any(writes):
            raise call.refuse("it would write into a tensor that is still to be reduced.")
        return tuple(Replicate() if p.is_partial() else p for p in placements)
    return placements


def _fitted(
    call: OpCall, placements: tuple[Placement, ...], spec: DTensorSpec, shape: torch.Size
) -> tuple[Placement, ...]:
    """Placements of a tensor that is broadcast to ``shape``, which has ``placements``.

    A dim that it lacks, or has once for all, is whole on every rank.
    """
    if spec.shape == shape:
        return placements
    lacking = len(shape) - len(spec.shape)

    def fit(placement: Placement) -> Placement:
        if isinstance(placement, (Owner, Replicate)):
            return placement
        dim = split_dim(placement)
        if dim is None:
            raise call.refuse(f"it broadcasts {tuple(spec.shape)} to a tensor placed {placement}.")
        own = dim - lacking
        if own < 0 or spec.shape[own] != shape[dim]:
            return Replicate()
        return Shard(own) if lacking else placement

    return tuple(map(fit, placements))


def is_any_ours(spec: DTensorSpec) -> bool:
    return any(map(is_ours, spec.placements))


def _target_spec(
    call: OpCall, spec: DTensorSpec, placements: tuple[Placement, ...], is_written: bool
) -> DTensorSpec:
    if not spec.shape and not is_any_ours(spec):  # a scalar such as an optimizer's step count
        return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, spec.tensor_meta)
    pairs = list(zip(spec.placements, placements, range(len(placements)), strict=True))
    if all(same_rows(spec, mesh_dim, wanted) for _, wanted, mesh_dim in pairs):
        return spec
    if is_written:
        raise call.refuse("two tensors at one position that it writes to are placed differently.")
    for present, target, mesh_dim in pairs:
        changes_owner = isinstance(present, Owner) and present != target
        takes_owner = isinstance(target, Owner) and not isinstance(present, (Owner, Replicate))
        if changes_owner or takes_owner:
            raise call.refuse(
                f"one position mixes {present} and {target} on mesh dim {mesh_dim}; redistribute "
                "them to the same placement."
            )
    return DTensorSpec(spec.mesh, placements, spec.tensor_meta)


def _with_lists(call: OpCall, lists: list[list[DTensorSpec]]) -> tuple[Any, ...]:
    """The arguments with other specs in the lists, and whole tensors beside the lists."""
    remaining = iter(lists)
    args: list[Any] = []
    for arg in call.schema.args_schema:
        if _is_spec_list(arg):
            args.append(type(arg)(next(remaining)))  # type: ignore[call-arg]
        elif isinstance(arg, DTensorSpec):
            args.append(DTensorSpec(arg.mesh, (Replicate(),) * arg.mesh.ndim, arg.tensor_meta))
        else:
            args.append(arg)
    return tuple(args)


def _sharding(
    call: OpCall,
    args: tuple[Any, ...],
    targets: list[tuple[Placement, ...]],
    anchors: list[DTensorSpec],
) -> OutputSharding:
    changed = any(
        isinstance(a, DTensorSpec) and a.placements != b.placements
        for a, b in zip(
            pytree.tree_leaves(call.schema.args_schema), pytree.tree_leaves(args), strict=True
        )
    )
    is_norm = call.op in _NORMS
    order = call.argument("ord", 2)
    output_spec = None
    if call.output_meta is not None:
        placements = [_norm_placements(call, t, order) if is_norm else t for t in targets]
        output_spec = tuple(
            DTensorSpec(anchor.mesh, p, meta)
            for anchor, p, meta in zip(anchors, placements, call.output_metas, strict=True)
        )
    local_op = _norm_op(call, order) if is_norm else None
    if not changed and local_op is None:
        return OutputSharding(output_spec)
    schema = OpSchema(
        local_op or call.op,  # type: ignore[arg-type]
        args,
        call.schema.kwargs_schema,
        schema_info=call.schema.schema_info,
    )
    return OutputSharding(output_spec, schema, needs_redistribute=True)


def _norm_placements(
    call: OpCall, placements: tuple[Placement, ...], order: Any
) -> tuple[Placement, ...]:
    partial = norm_partial(order)
    if partial is None:
        raise call.refuse(f"norms of order {order} do not combine from parts.")
    return tuple(p if split_dim(p) is None else partial for p in placements)


def _norm_op(call: OpCall, order: Any) -> LocalOp | None:
    """Norms whose empty parts are 0: torch refuses the inf-norm of nothing."""
    if float(order) != math.inf:
        return None

    def run(tensors: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        full = [tensor for tensor in tensors if tensor.numel()]
        norms = iter(call.op(full, *args, **kwargs) if full else [])
        dtypes = [meta.dtype for meta in call.output_metas]
        return [
            next(norms) if tensor.numel() else tensor.new_zeros((), dtype=dtype)
            for tensor, dtype in zip(tensors, dtypes, strict=True)
        ]

    return LocalOp("inf-norms", run)
