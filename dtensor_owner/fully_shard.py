"""fully_shard: train a module on unpadded shards, gathered where forward and backward run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement, Replicate

from dtensor_owner.fsdp_module import FSDPModule
from dtensor_owner.layout import (
    GlobalLayout,
    ShardLayout,
    build_row_atomic_layout,
    build_whole_tensor_layout,
)
from dtensor_owner.managed_parameters import (
    check_parameters,
    managed_parameters,
    mark_as_sharded,
)
from dtensor_owner.module_state import ModuleState, after_forward, before_forward
from dtensor_owner.mxfp8 import BLOCK
from dtensor_owner.mxfp8_products import use_block_scaled_products
from dtensor_owner.mxfp8_weights import MXFP8Policy
from dtensor_owner.parameter_group import ManagedParameter, ParameterGroup
from dtensor_owner.whole_tensors import WholeTensors
from placements.row_atomic import RowAtomic

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "fully_shard"]


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    shard_dims: str | int | Sequence[str | int] | None = None,
    shard_layout: ShardLayout = ShardLayout.UNPADDED,
    block_size: int = 1,
    whole_tensors: WholeTensors | None = None,
    reshard_after_forward: bool | int | None = True,
    prefetch: int = 1,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  a frozen value
    ignored_params: Iterable[nn.Parameter] | None = None,
    mxfp8: MXFP8Policy | None = None,
    symmetric_memory: bool = False,
) -> nn.Module:
    """Shard a module's parameters over a mesh; gather them around its forward and backward.

    Apply it bottom-up, to each block and then to the whole model: a call takes the parameters
    below ``module`` that no earlier call took. They become DTensors placed ``RowAtomic`` (or
    ``BlockAtomic``, or ``Owner``); optimizers, ``state_dict`` and ``clip_grad_norm_`` see those.
    All ranks must hold the same full values, call this in the same order, and run the same
    modules. Gradients are averaged once over all ranks of the mesh.

    Args:
        module: Changed in place; its class becomes a subclass that is also an ``FSDPModule``.
        mesh: The data-parallel ranks: a 1-D mesh, or one of two dims (replicate, shard) for HSDP
            or (outer, inner) for HFSDP, which may be a sub-mesh of a larger one.
        shard_dims: The mesh dims to shard over, by name or number, the last ones of the mesh;
            replicas of the shards lie along the others. By default the last one. Over two dims,
            parameters and optimizer state are sharded over both, while a copy of the weights in
            the compute dtype stays sharded over the inner one alone, and gathers use that.
        shard_layout: ``UNPADDED``, or ``PADDED`` for equal shards.
        block_size: Rows of a parameter that stay on one rank.
        whole_tensors: Keep each matrix whole on one rank (placed ``Owner``) instead of cutting
            it; other parameters are sharded by rows in a group of their own. Pass the same
            object to all calls for a model.
        reshard_after_forward: Free the gathered weights after forward and gather them again for
            backward; otherwise they are kept in between. A number of ranks, which divides the
            last mesh dim: that many neighbours keep them together and gather among themselves.
            None: True, but False for the root module.
        prefetch: How many modules' weights are gathered ahead of the one that computes, in the
            order of the previous forward, and as many gradient reductions left under way. Each
            costs memory of one gathered module. 0 overlaps nothing.
        mp_policy: Dtypes of compute and reduction (``torch.distributed.fsdp``'s own class).
        ignored_params: Parameters left as they are.
        mxfp8: Gather weights in MXFP8; needs ``block_size=32``. Parameters that cannot be
            quantized (norms, biases, dims that are not multiples of 32) get a group of their
            own, with ``block_size`` 1, and ``not_quantized`` tells why.
        symmetric_memory: Not supported; refused with the reason.

    Returns:
        ``module``.

    Raises:
        ValueError: It is sharded already, has no forward, or has parameters on a device
            other than the mesh's, or shared with a module that was sharded before. Mesh dims that
            do not exist or are not the last ones. ``mxfp8`` with a ``block_size`` that is not a
            multiple of 32, or together with ``whole_tensors``.
        NotImplementedError: More than two mesh dims to shard over, or a parameter cannot be
            sharded.
    """
    placements = _placements(mesh, shard_dims)
    _check_module(module)
    _check_options(shard_layout, prefetch, symmetric_memory)
    if mxfp8 is not None and whole_tensors is not None:
        raise ValueError("mxfp8 and whole_tensors exclude each other: pass one of them.")
    managed = managed_parameters(module, ignored_params or ())
    check_parameters(managed, mesh)
    not_quantized = _not_quantized(managed, mxfp8, block_size)
    num_shards = prod(n for n, p in zip(mesh.shape, placements) if isinstance(p, RowAtomic))
    keep, kept_ranks = _kept(reshard_after_forward, mesh)
    groups: dict[_GroupKey, list[ManagedParameter]] = {}
    for m in managed:
        quantize = mxfp8 is not None and m.name not in not_quantized
        key = _GroupKey(
            m.parameter.dtype,
            m.parameter.requires_grad,
            whole=whole_tensors is not None and whole_tensors.is_whole(m.name, m.parameter),
            quantize=quantize,
            block_size=block_size if quantize or mxfp8 is None else 1,
        )
        groups.setdefault(key, []).append(m)
    layouts = _layouts(groups, num_shards, shard_layout, whole_tensors)
    # No parameter has changed before this: groups replace those they take.
    state = ModuleState(
        [
            ParameterGroup(
                members,
                mesh,
                placements=placements,
                layout=layouts[key],
                mp_policy=mp_policy,
                mxfp8=key.quantize,
                kept_ranks=kept_ranks,
            )
            for key, members in groups.items()
        ],
        keep=keep,
        prefetch=prefetch,
        mp_policy=mp_policy,
        not_quantized=not_quantized,
    )
    mark_as_sharded(managed, module)
    if mxfp8 is not None and mxfp8.block_scaled(mesh.device_type):
        quantized = [m for m in managed if m.name not in not_quantized]
        for owner, name in [owner for m in quantized for owner in m.owners]:
            if name == "weight":
                use_block_scaled_products(owner)
    _hook(module, state)
    return module


class _GroupKey(NamedTuple):
    """What the parameters of one group have in common."""

    dtype: torch.dtype
    requires_grad: bool
    whole: bool
    quantize: bool
    block_size: int


def _layouts(
    groups: Mapping[_GroupKey, Sequence[ManagedParameter]],
    num_shards: int,
    shard_layout: ShardLayout,
    whole_tensors: WholeTensors | None,
) -> dict[_GroupKey, GlobalLayout]:
    """The layout of each group; owners are assigned last, once everything else fits."""
    layouts: dict[_GroupKey, GlobalLayout] = {}
    for key in sorted(groups, key=lambda key: key.whole):
        shapes = [tuple(m.parameter.shape) or (1,) for m in groups[key]]
        if key.whole and whole_tensors is not None:
            owners = whole_tensors.assign(shapes, num_shards)
            layouts[key] = build_whole_tensor_layout(shapes, num_shards, owners)
        else:
            layouts[key] = build_row_atomic_layout(
                shapes, num_shards, block_size=key.block_size, shard_layout=shard_layout
            )
    return layouts


def _hook(module: nn.Module, state: ModuleState) -> None:
    """Make the module an ``FSDPModule`` whose forward and backward gather and reduce."""
    cls = type(module)
    module.__class__ = type(
        f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__}
    )
    cast(FSDPModule, module)._fully_shard_state = state
    # A compiled module compiles its forward; gathers stay outside of its graphs.
    before, after = map(torch.compiler.disable, (before_forward, after_forward))
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True, always_call=True)


def _placements(
    mesh: DeviceMesh, shard_dims: str | int | Sequence[str | int] | None
) -> list[Placement]:
    names, sizes = mesh.mesh_dim_names or (), tuple(mesh.shape)
    if shard_dims is None:
        shard_dims = [mesh.ndim - 1]
    if isinstance(shard_dims, (str, int)):
        shard_dims = [shard_dims]
    numbers = []
    for dim in shard_dims:
        number = names.index(dim) if dim in names else dim
        if not isinstance(number, int) or not -mesh.ndim <= number < mesh.ndim:
            raise ValueError(
                f"shard_dims names mesh dim {dim!r}, but the mesh has {len(sizes)} dims of sizes "
                f"{sizes} and the names {names}."
            )
        numbers.append(number % mesh.ndim)
    if sorted(numbers) != list(range(mesh.ndim - len(numbers), mesh.ndim)) or not numbers:
        raise ValueError(
            f"shard_dims {shard_dims} are mesh dims {numbers} of {mesh.ndim}: the sharded dims "
            "must be the last ones, so that each rank's share is one range. Reorder the mesh."
        )
    if len(numbers) > 2:
        raise NotImplementedError(
            f"shard_dims {shard_dims} are {len(numbers)} mesh dims: rows are sharded over at most "
            "two. Flatten some of them into one."
        )
    return [RowAtomic() if dim in numbers else Replicate() for dim in range(mesh.ndim)]


def _kept(reshard: bool | int | None, mesh: DeviceMesh) -> tuple[bool | None, int | None]:
    """Whether all gathered weights are kept after forward, and if not, by how many neighbours."""
    if reshard is None:
        return None, None
    size = mesh.shape[-1]
    if isinstance(reshard, bool) or reshard in (1, size):
        return (not reshard if isinstance(reshard, bool) else reshard == 1), None
    if reshard < 1 or size % reshard:
        raise ValueError(
            f"reshard_after_forward={reshard} ranks must divide the {size} ranks of the last mesh "
            "dim: pass a divisor, True or False."
        )
    return False, reshard


def _check_options(shard_layout: ShardLayout, prefetch: int, symmetric_memory: bool) -> None:
    if prefetch < 0:
        raise ValueError(f"prefetch must be >= 0, got {prefetch}.")
    if symmetric_memory and shard_layout is ShardLayout.UNPADDED:
        raise ValueError(
            "symmetric_memory needs equal shards, because every rank maps the same number of bytes "
            "of every other one, and ShardLayout.UNPADDED has shards of different sizes: pass "
            "ShardLayout.PADDED."
        )
    if symmetric_memory:
        raise NotImplementedError(
            "symmetric_memory has no implementation here yet: leave it off; PADDED shards are "
            "gathered by the backend's even collectives."
        )


def _check_module(module: nn.Module) -> None:
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"fully_shard was already applied to this {type(module).__name__}: apply it once to "
            "each module, inner ones first."
        )
    if type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward, so nothing would gather its parameters: "
            "apply fully_shard to its children and to the module that calls them."
        )


def _not_quantized(
    managed: Sequence[ManagedParameter], policy: MXFP8Policy | None, block_size: int
) -> dict[str, str]:
    """Names of the parameters that MXFP8 is not for, with the reasons."""
    if policy is None:
        return {}
    if block_size % BLOCK:
        raise ValueError(
            f"mxfp8 needs blocks of {BLOCK} rows to stay on one rank, got block_size={block_size}: "
            f"pass block_size={BLOCK}."
        )
    reasons = {m.name: policy.reason_against(m.name, m.parameter) for m in managed}
    return {name: reason for name, reason in reasons.items() if reason is not None}
