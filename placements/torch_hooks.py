"""Where torch learns of our placements: the only file that touches private torch API.

Torch has no plug-in point for placements. Each hook below replaces one function that would
take a ``RowAtomic`` or ``Owner`` tensor for a replicated one, or would not know it; stock
placements always reach torch's own function. ``install`` runs once, on import of the package.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._state_dict_utils as _state_dict_utils
import torch.distributed.checkpoint
import torch.distributed.checkpoint._state_dict_stager as _stager
import torch.distributed.checkpoint.state_dict as _state_dict
import torch.distributed.tensor._api as _api
import torch.distributed.tensor._redistribute as _redistribute
import torch.distributed.tensor._utils as _utils
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial
from torch.distributed.tensor._ops.single_dim_strategy import (
    _ShardingPlaceholder as ShardingPlaceholder,
)
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes as outside_of_modes
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.checkpoint import CheckpointPolicy

from placements.block_atomic import BlockAtomic
from placements.boxes import box_shape, check_placements, is_held, is_ours, local_box, normalized
from placements.collectives import DimGroup, all_reduce, broadcast, set_outside_tracing
from placements.owner import Owner
from placements.redistribute import redistribute_local
from placements.row_atomic import RowAtomic

aten = torch.ops.aten
# Torch's own per-op handlers that look at nothing a placement could change.
_STOCK_HANDLERS = (aten.is_same_size.default, aten.is_pinned.default, aten.as_strided.default)

SUPPORTED_TORCH = ((2, 13), (2, 15))
PLACEMENT_TYPES = (RowAtomic, BlockAtomic, Owner)

__all__ = ["DTensorSpec", "NormPartial", "OpSchema", "OutputSharding", "ShardingPlaceholder"]
__all__ += ["TensorMeta", "any_ours", "dispatcher", "install", "local_shape_and_offset"]
__all__ += ["outside_of_modes", "pytree"]

Propagate = Callable[[OpSchema], OutputSharding]
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def any_ours(placements: Sequence[Placement]) -> bool:
    return any(map(is_ours, placements))


def dispatcher() -> Any:
    """DTensor's op dispatcher: sharding rules and per-op handlers."""
    return DTensor._op_dispatcher


def local_tensor(dtensor: DTensor) -> Tensor:
    """The DTensor's own local tensor; ``to_local`` of a parameter makes a view each time."""
    return dtensor._local_tensor


def set_local_tensor(dtensor: DTensor, local: Tensor) -> None:
    """Have a DTensor keep its values in another tensor of the shape that its rank holds."""
    dtensor._local_tensor = local.detach()


def wrap_like(local: Tensor, dtensor: DTensor) -> DTensor:
    """A DTensor of the same spec with another local tensor; nothing is checked."""
    return DTensor(local, dtensor._spec, requires_grad=False)


def squeeze_wrapper(dtensor: DTensor, op: Any, args: tuple[Any, ...], squeezed: DTensor) -> DTensor:
    """Have a DTensor become ``squeezed``, a view of it, as the in-place ``op`` says."""
    dtensor._local_tensor, dtensor._spec = squeezed._local_tensor, squeezed._spec
    return return_and_correct_aliasing(op, args, {}, dtensor)  # changes the outer shape


def local_shape_and_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """This rank's local shape and its first global position; zeros where it holds nothing."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return (0,), ()
    box = local_box(tuple(shape), tuple(mesh.shape), placements, coordinate)
    return box_shape(box), tuple(start for start, _ in box)


def install(propagate: Propagate, handlers: dict[Any, Handler]) -> None:
    """Install every hook, once.

    Args:
        propagate: Sharding rule of an op with at least one tensor of ours.
        handlers: Ops that no sharding rule can express, by overload; called when a tensor
            of ours is among the arguments.

    Raises:
        ImportError: This torch is outside the tested range.
    """
    if getattr(DTensor, "_placements_hooks", False):
        return
    _check_torch_version()
    _register_types()
    set_outside_tracing(outside_of_modes)
    _replace_everywhere("redistribute_local_tensor", _redistribute, _redistribute_hook)
    _replace_everywhere("_redistribute_backward", _redistribute, _redistribute_backward_hook)
    _replace_everywhere("compute_local_shape_and_global_offset", _utils, _local_shape_hook)
    _replace_everywhere("compute_global_tensor_info", _utils, _global_info_hook)
    _hook_propagation(propagate)
    _hook_handlers(handlers)
    _hook_tensor_methods()
    _hook_checkpoints()
    _keep_collectives_where_they_were_traced()
    DTensorSpec._check_equals = _check_equals_hook(DTensorSpec._check_equals)  # type: ignore[method-assign]
    DTensor._placements_hooks = True  # type: ignore[attr-defined]


def _check_torch_version() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = SUPPORTED_TORCH
    if not low <= version <= high:
        raise ImportError(
            f"placements supports torch {low[0]}.{low[1]} to {high[0]}.{high[1]}, found "
            f"{torch.__version__}: its hooks into DTensor are checked for these versions only."
        )


def _register_types() -> None:
    """Make the placements constants for Dynamo and known to the safe loader."""
    import torch._library.opaque_object as opaque

    common = ("is_shard", "is_partial", "is_replicate", "__eq__")
    own = {RowAtomic: ("rows", "is_nested"), Owner: ("rank",)}
    own[BlockAtomic] = ("rows", "is_nested", "block_size")
    for cls in PLACEMENT_TYPES:
        members = dict.fromkeys((*common, *own[cls]), opaque.MemberType.USE_REAL)
        if hasattr(opaque, "register_custom_class"):  # from torch 2.14
            opaque.register_custom_class(cls, typ="constant", members=members)
        else:
            opaque.register_opaque_type(cls, typ="value", members=members)
    torch.serialization.add_safe_globals(list(PLACEMENT_TYPES))


def _replace_everywhere(name: str, home: Any, make: Callable[[Any], Any]) -> None:
    """Replace a function in its module and wherever it was imported by name, by torch or others."""
    original = getattr(home, name)
    replacement = functools.wraps(original)(make(original))
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _keep_collectives_where_they_were_traced() -> None:
    """Leave a collective of a compiled forward out of its backward, and the other way round.

    Inductor's partitioner copies into the backward graph whatever it can compute from what that
    graph has, then drops what is not used, but not collectives. What it has differs from rank to
    rank with uneven shards, so that a rank would take part in a collective that others are not in.
    """
    from torch._functorch import config, partitioners

    def stays(node: torch.fx.Node) -> bool:
        is_collective = getattr(node.target, "namespace", None) == "_c10d_functional"
        recomputed = node.meta.get("recompute") in _RECOMPUTED  # by activation checkpointing
        free = config.unsafe_allow_optimization_of_collectives
        return is_collective and not recomputed and not free

    def extended(stock: Callable[..., bool], *, backward: bool) -> Callable[..., bool]:
        def must_be_in(node: torch.fx.Node) -> bool:
            is_backward = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
            return stock(node) or (stays(node) and is_backward is backward)

        return functools.wraps(stock)(must_be_in)

    partitioners._must_be_in_forward = extended(partitioners._must_be_in_forward, backward=False)
    partitioners._must_be_in_backward = extended(partitioners._must_be_in_backward, backward=True)


def _redistribute_hook(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def redistribute_local_tensor(
        local_tensor: Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **kwargs: Any
    ) -> Tensor:
        source, target = current_spec.placements, target_spec.placements
        if not any_ours(source) and not any_ours(target):
            return stock(local_tensor, current_spec, target_spec, **kwargs)
        if current_spec.mesh != target_spec.mesh:
            raise NotImplementedError(
                f"Cannot redistribute {source} on {current_spec.mesh} to another mesh "
                f"{target_spec.mesh}: go through full_tensor() and distribute_tensor()."
            )
        for spec in (current_spec, target_spec):
            _check_shard_order(spec)
        move = _redistribute_norms if _norm_orders(source) else redistribute_local
        return move(local_tensor, current_spec.shape, current_spec.mesh, source, target)

    return redistribute_local_tensor


def _redistribute_backward_hook(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a partial value is whole on every rank, as torch has it for ``Shard``."""

    def redistribute_backward(grad: DTensor, spec: DTensorSpec, **kwargs: Any) -> Any:
        if any_ours(grad.placements) and any(p.is_partial() for p in spec.placements):
            whole = [
                Replicate() if after.is_partial() and any_ours([now]) else after
                for now, after in zip(grad.placements, spec.placements)
            ]
            spec = DTensorSpec(spec.device_mesh, tuple(whole), tensor_meta=spec.tensor_meta)
        return stock(grad, spec, **kwargs)

    return redistribute_backward


def _norm_orders(placements: Sequence[Placement]) -> set[float]:
    return {placement.norm_type for placement in placements if type(placement) is NormPartial}


def _redistribute_norms(
    local: Tensor,
    shape: Sequence[int],
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
) -> Tensor:
    """p-norms of parts combine as the p-th root of the sum of their p-th powers."""
    orders = _norm_orders((*source, *target))
    if len(orders) > 1:
        raise NotImplementedError(
            f"No rule for {tuple(source)} -> {tuple(target)}: norms of orders {sorted(orders)} do "
            "not combine; redistribute each to Replicate() first."
        )
    order = orders.pop()
    before, after = (
        tuple(Partial("sum") if type(p) is NormPartial else p for p in placements)
        for placements in (source, target)
    )
    return redistribute_local(local.abs() ** order, shape, mesh, before, after) ** (1 / order)


def _check_equals_hook(stock: Callable[..., bool]) -> Callable[..., bool]:
    """Dynamo guards a DTensor by its spec without the global shape. Two tensors with other rows
    can have one local shape on this rank, and a graph made for one would be run for the other."""

    def _check_equals(self: DTensorSpec, other: object, skip_shapes: bool = False) -> bool:
        skip_shapes = skip_shapes and not any_ours(self.placements)
        return stock(self, other, skip_shapes)

    return _check_equals


def _check_shard_order(spec: DTensorSpec) -> None:
    """Torch can cut a dim by its mesh dims in another order than left to right; we cannot."""
    order = spec.shard_order
    if order is not None and order != DTensorSpec.compute_default_shard_order(spec.placements):
        raise NotImplementedError(
            f"{spec.placements} with shard order {order} has no rule beside RowAtomic or Owner: "
            "redistribute it to the default order (left to right) first."
        )


def _local_shape_hook(stock: Callable[..., Any]) -> Callable[..., Any]:
    def compute_local_shape_and_global_offset(
        global_shape: Sequence[int],
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        skip_offset: bool = False,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not any_ours(placements):
            return stock(global_shape, mesh, placements, skip_offset)
        shape, offset = local_shape_and_offset(global_shape, mesh, placements)
        return shape, () if skip_offset else offset

    return compute_local_shape_and_global_offset


def _global_info_hook(stock: Callable[..., Any]) -> Callable[..., Any]:
    def compute_global_tensor_info(
        tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> Any:
        if not any_ours(placements) or tensor.dim() == 0:
            return stock(tensor, mesh, placements)
        raise ValueError(
            f"The global shape cannot be told from one local tensor of shape "
            f"{tuple(tensor.shape)} under {tuple(placements)}: pass shape= and stride= (of the "
            "global tensor) to from_local."
        )

    return compute_global_tensor_info


def _hook_propagation(propagate: Propagate) -> None:
    propagator = dispatcher().sharding_propagator
    stock = propagator.propagate_op_sharding_non_cached

    def propagate_op_sharding_non_cached(op_schema: OpSchema) -> OutputSharding:
        if _schema_has_ours(op_schema):
            _complete_cache_key(op_schema.op)
            return propagate(op_schema)
        return stock(op_schema)

    propagator.propagate_op_sharding_non_cached = propagate_op_sharding_non_cached
    propagator.propagate_op_sharding = LocalLRUCache(propagate_op_sharding_non_cached)


@functools.cache
def _complete_cache_key(op: Any) -> None:
    """Make every argument that can change a result's shape or dtype part of DTensor's cache key.

    Torch's keys leave out keywords such as ``sum``'s dtype, and all arguments of ops that it has
    no rule for; a second call would get the first one's answer. Numbers that only scale values
    stay out, or a changing learning rate would fill the cache.
    """
    propagator = dispatcher().sharding_propagator
    tables = (propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy)
    known = next((table[op] for table in tables if op in table), None)
    info = known or RuntimeSchemaInfo()
    passive = ("Tensor", "number") if known else ("Tensor",)
    keyed = [a for a in op._schema.arguments if not any(t in str(a.type) for t in passive)]
    positions = [op._schema.arguments.index(a) for a in keyed if not a.kwarg_only]
    names = [*(info.static_kwargkey or []), *(a.name for a in keyed if a.kwarg_only)]
    # At least one name, of no argument if need be: the call that brought us here was kept under
    # a key without keywords, which must never be met again.
    names = list(dict.fromkeys(names)) or ["-"]
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(
        min([info.static_argnum, *positions]),
        names,
        info.needs_pytree,
    )


def _schema_has_ours(op_schema: OpSchema) -> bool:
    leaves = pytree.tree_leaves((op_schema.args_schema, op_schema.kwargs_schema))
    specs = [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]
    # Reductions of our tensors are stock Partial tensors, whose item() torch reads unreduced.
    reads_partial = op_schema.op is aten._local_scalar_dense.default and any(
        placement.is_partial() for placement in specs[0].placements
    )
    return reads_partial or any(any_ours(spec.placements) for spec in specs)


def _args_have_ours(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, DTensor) and any_ours(leaf.placements) for leaf in leaves)


def _hook_handlers(handlers: dict[Any, Handler]) -> None:
    """Per-op handlers run before any sharding rule, so each of torch's is guarded too."""
    table = dispatcher()._custom_op_handlers
    for op in {*table, *handlers} - {*_STOCK_HANDLERS}:
        table[op] = _guarded_handler(table.get(op), handlers.get(op))


def _guarded_handler(stock: Handler | None, ours: Handler | None) -> Handler:
    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _args_have_ours(args, kwargs):
            return stock(op, args, kwargs) if stock else run_stock(op, args, kwargs)
        if ours is None:
            raise NotImplementedError(
                f"{op} has no rule for RowAtomic, BlockAtomic or Owner tensors: redistribute its "
                "inputs to Replicate() first."
            )
        return ours(op, args, kwargs)

    return handle


def run_stock(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op as DTensor's dispatcher would without a per-op handler."""
    self = dispatcher()
    info = self.unwrap_to_op_info(op, args, kwargs)
    self.sharding_propagator.propagate(info)
    results = self._dispatch_get_local_results_slow_path(op, args, info)
    is_inplace, is_out = op._schema.name.endswith("_"), op._schema.overload_name == "out"
    if is_inplace or is_out or op is torch.ops.aten.equal.default:
        return self._dispatch_fast_path_python_tail(
            op,
            args,
            kwargs,
            info.compute_mesh,
            info.output_sharding,
            results,
            info.compute_mesh.get_coordinate() is not None,
            is_inplace,
            is_out,
        )
    return self.wrap(results, info.output_sharding.output_spec)


def _hook_tensor_methods() -> None:
    DTensor.from_local = staticmethod(_from_local_hook(DTensor.from_local))  # type: ignore[method-assign]
    DTensor.__create_write_items__ = _write_items_hook(DTensor.__create_write_items__)  # type: ignore[method-assign]
    DTensor.__create_chunk_list__ = _chunk_list_hook(DTensor.__create_chunk_list__)  # type: ignore[method-assign]
    DTensor.__deepcopy__ = _deepcopy_hook(DTensor.__deepcopy__)  # type: ignore[method-assign]
    DTensor.__reduce_ex__ = _reduce_hook(DTensor.__reduce_ex__)  # type: ignore[method-assign]
    to_local = _api._ToTorchTensor
    to_local.backward = staticmethod(_to_local_backward_hook(to_local.backward))  # type: ignore[method-assign]


def _from_local_hook(stock: Callable[..., DTensor]) -> Callable[..., DTensor]:
    @functools.wraps(stock)
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: torch.Size | None = None,
        stride: tuple[int, ...] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        kwargs.update(run_check=run_check, shape=shape, stride=stride)
        if placements is None or not any_ours(placements):
            return stock(local_tensor, device_mesh, placements, **kwargs)
        mesh = device_mesh or _api._mesh_resources.get_current_mesh()
        placements = normalized(placements, local_tensor.dim())
        if shape is None:
            shape, stride = _shape_from_rows(local_tensor, mesh, placements)
            kwargs.update(shape=shape, stride=stride)
        error = _from_local_error(local_tensor, mesh, placements, shape)
        if run_check and mesh.get_coordinate() is not None:
            _check_on_all_ranks(local_tensor, mesh, placements, shape, error)
        elif error is not None:
            raise error
        kwargs["run_check"] = False
        return stock(local_tensor, mesh, placements, **kwargs)

    return from_local


def _shape_from_rows(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[torch.Size, tuple[int, ...]]:
    """Global shape of a tensor split by one explicit row table, replicated otherwise."""
    rows = [p for p in placements if isinstance(p, RowAtomic)]
    others = [p for p in placements if p not in rows]
    table = rows[0].rows if len(rows) == 1 else None
    if (
        table is None
        or isinstance(table[0], tuple)
        or any(type(p) is not Replicate for p in others)
    ):
        _utils.compute_global_tensor_info(local, mesh, placements)  # raises, saying what to pass
        assert local.dim() == 0
        return local.shape, ()
    shape = torch.Size((sum(table), *local.shape[1:]))
    return shape, torch.empty(shape, device="meta").stride()


def _from_local_error(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> ValueError | None:
    """What is wrong with this rank's local tensor. Placements that do not fit raise at once: they
    are the same on every rank."""
    check_placements(tuple(shape), tuple(mesh.shape), placements)
    expected, _ = local_shape_and_offset(shape, mesh, placements)
    if mesh.get_coordinate() is None or tuple(local.shape) == expected:
        return None
    return ValueError(
        f"from_local got a local tensor of shape {tuple(local.shape)} at mesh coordinate "
        f"{tuple(mesh.get_coordinate() or ())}, but {tuple(placements)} of a tensor of shape "
        f"{tuple(shape)} gives this rank shape {expected}."
    )


def _check_on_all_ranks(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    error: ValueError | None,
) -> None:
    """Raise on every rank if one of them is wrong; then make replicas equal, as torch does."""
    stated = zlib.crc32(repr((tuple(shape), tuple(placements), local.dtype)).encode())
    flags = torch.tensor([int(error is not None), stated, -stated], device=local.device)
    for mesh_dim in range(mesh.ndim):
        flags = all_reduce(flags, "max", DimGroup.of(mesh, mesh_dim))
    is_wrong, largest, smallest = flags.tolist()
    if error is not None:
        raise error
    if is_wrong:
        raise ValueError("from_local got a local tensor of the wrong shape on another rank.")
    if largest != -smallest:
        raise ValueError(
            f"from_local got shape {tuple(shape)}, {tuple(placements)} and {local.dtype} here, but "
            "not the same on every rank."
        )
    with torch.no_grad():
        for mesh_dim, placement in enumerate(placements):
            if placement.is_replicate():
                local.copy_(broadcast(local.detach(), 0, DimGroup.of(mesh, mesh_dim)))


def _holds_nothing(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return True
    return not is_held(tensor.placements, coordinate) or tensor.to_local().numel() == 0


def _hook_checkpoints() -> None:
    utils, stager = _state_dict_utils, _stager.StateDictStager
    utils.distribute_tensor = _distribute_full_hook(utils.distribute_tensor)
    stager._offload_tensor = _offload_hook(stager._offload_tensor)  # type: ignore[method-assign]
    for name in ("_split_optim_state_dict", "_unflatten_optim_state_dict"):
        setattr(_state_dict, name, _frozen_state_hook(getattr(_state_dict, name)))
    for name in ("_broadcast_state_dict", "_distribute_state_dict"):
        setattr(_state_dict, name, _full_scalars_hook(getattr(_state_dict, name)))


def _distribute_full_hook(stock: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Take this rank's part of a full state dict, which every rank holds."""

    @functools.wraps(stock)
    def distribute(
        tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement], **options: Any
    ) -> DTensor:
        if not any_ours(placements):
            return stock(tensor, device_mesh, placements, **options)
        shape, offset = local_shape_and_offset(tensor.shape, device_mesh, placements)
        if any(rows == 0 for rows in shape):
            local = tensor.new_empty(shape)
        else:
            cut = tuple(slice(start, start + rows) for start, rows in zip(offset, shape))
            local = tensor[cut].detach().clone(memory_format=torch.contiguous_format)
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        spec = DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)

    return distribute


def _full_scalars_hook(stock: Callable[..., None]) -> Callable[..., None]:
    """Place the 0-D tensors of a full state dict too: stock leaves them plain, which an optimizer
    cannot combine with a parameter that one rank owns."""

    @functools.wraps(stock)
    def fill(
        full: dict[str, Any], local: dict[str, Any], *, device: torch.device, **kwargs: Any
    ) -> None:
        scalars = {
            key: value
            for key, value in local.items()
            if isinstance(value, DTensor) and not value.ndim and any_ours(value.placements)
        }
        stock(full, local, device=device, **kwargs)
        for key in scalars.keys() & local.keys():
            if not isinstance(local[key], DTensor):
                mesh, placements = scalars[key].device_mesh, scalars[key].placements
                value = local[key].to(device)
                local[key] = _state_dict_utils.distribute_tensor(value, mesh, placements)

    return fill


def _offload_hook(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Stage the local tensor of a DTensor for ``async_save``: stock takes a DTensor whose values do
    not start their storage, such as a view of a flat buffer, for a plain tensor, and fails."""

    @functools.wraps(stock)
    def offload(self: Any, x: Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Tensor:
        if not isinstance(x, DTensor) or not any_ours(x.placements):
            return stock(self, x, memo, non_blocking)
        memo[id(x)] = staged = wrap_like(stock(self, local_tensor(x), memo, non_blocking), x)
        return staged

    return offload


def _frozen_state_hook(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Hand the state of frozen parameters to the optimizer too: stock leaves it out, so that a
    parameter that is unfrozen after a resume would have lost its momentum."""

    @functools.wraps(stock)
    def take(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(stock).bind(*args, **kwargs).arguments
        optimizer, names = given["optim"], given["info"].fqn_param_mapping
        saved = given["optim_state_dict" if "optim_state_dict" in given else "state_dict"]
        taken = stock(*args, **kwargs)
        for param, state in optimizer.state.items():
            if param.requires_grad or not isinstance(param, DTensor):
                continue
            for name in names.get(param, ()) if any_ours(param.placements) else ():
                found = saved.get("state", {}).get(name) or {
                    key: saved[f"state.{name}.{key}"]
                    for key in state
                    if f"state.{name}.{key}" in saved
                }
                if found:
                    taken["state"][name] = found
        return taken

    return take


def _write_items_hook(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_write_items(self: DTensor, fqn: str, object: Any) -> Any:
        if any_ours(self.placements) and _holds_nothing(self) and self.numel():
            return []
        return stock(self, fqn, object)

    return create_write_items


def _chunk_list_hook(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_chunk_list(self: DTensor) -> Any:
        if any_ours(self.placements) and _holds_nothing(self) and self.numel():
            return []
        return stock(self)

    return create_chunk_list


def _deepcopy_hook(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Copy this rank's values alone: stock fails where they do not start the storage they lie in,
    and would copy all of that storage, which may hold a whole group of parameters."""

    @functools.wraps(stock)
    def deepcopy(self: DTensor, memo: dict[int, Any]) -> DTensor:
        if not any_ours(self.placements) or not self.is_leaf:
            return stock(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        local = local_tensor(self).detach().clone(memory_format=torch.contiguous_format)
        copied = wrap_like(local, self)
        copied.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        memo[id(self)] = copied
        return copied

    return deepcopy


def _reduce_hook(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Pickle this rank's values alone: as for ``deepcopy``, stock fails on a view that does not
    start its storage, and would save the whole storage of one that does."""

    @functools.wraps(stock)
    def reduce_ex(self: DTensor, protocol: Any) -> Any:
        local = local_tensor(self)
        if any_ours(self.placements) and local.untyped_storage().nbytes() != local.nbytes:
            values = local.detach().clone(memory_format=torch.contiguous_format)
            alone = wrap_like(values, self)
            alone.requires_grad_(self.requires_grad)
            vars(alone).update(vars(self))
            self = alone
        return stock(self, protocol)

    return reduce_ex


def _to_local_backward_hook(stock: Callable[..., Any]) -> Callable[..., Any]:
    def backward(ctx: Any, grad_output: Tensor | None) -> Any:
        spec = ctx.dtensor_spec
        if grad_output is None or not any_ours(ctx.grad_placements or spec.placements):
            return stock(ctx, grad_output)
        placements = ctx.grad_placements or _api._normalize_placements_for_grad(spec.placements)
        grad = DTensor.from_local(
            grad_output,
            spec.mesh,
            placements,
            shape=spec.tensor_meta.shape,
            stride=spec.tensor_meta.stride,
        )
        return grad, None

    return backward
