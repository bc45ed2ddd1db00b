"""One DTensor op call, taken apart for the sharding rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from placements.boxes import local_box, same_split, split_dim
from placements.owner import Owner
from placements.torch_hooks import (
    DTensorSpec,
    OpSchema,
    TensorMeta,
    dispatcher,
    outside_of_modes,
    pytree,
)


@dataclass(frozen=True)
class Rule:
    """One right way to run an op on one mesh dim.

    Attributes:
        inputs: Placement of each tensor input, in the order of ``OpCall.specs``.
        outputs: Placement of each tensor output.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


class OpCall:
    """The arguments of one op: tensor inputs as specs, everything else as it is."""

    def __init__(self, schema: OpSchema) -> None:
        self.schema = schema
        self.op = schema.op
        self.leaves, self._tree = pytree.tree_flatten((schema.args_schema, schema.kwargs_schema))
        self.specs: list[DTensorSpec] = [x for x in self.leaves if isinstance(x, DTensorSpec)]
        self.mesh: DeviceMesh = self.specs[0].mesh
        self.propagator = dispatcher().sharding_propagator

    @property
    def name(self) -> str:
        return str(self.op)

    @cached_property
    def output_meta(self) -> Any:
        """Global shape, stride and dtype of the result(s)."""
        return self.propagator._propagate_tensor_meta_non_cached(self.schema)

    @cached_property
    def output_metas(self) -> list[TensorMeta]:
        meta = self.output_meta
        if meta is None:
            return []
        metas = [meta] if isinstance(meta, TensorMeta) else list(meta)
        return [m for m in metas if m is not None]

    def shape(self, index: int) -> tuple[int, ...]:
        return tuple(self.specs[index].shape)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shape(0)

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        return tuple(self.output_metas[0].shape)

    def placements(self, mesh_dim: int) -> tuple[Placement, ...]:
        return tuple(spec.placements[mesh_dim] for spec in self.specs)

    def argument(self, name: str, default: Any = None) -> Any:
        """A non-tensor argument by its schema name."""
        if name in self.schema.kwargs_schema:
            return self.schema.kwargs_schema[name]
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if position < len(self.schema.args_schema):
                    return self.schema.args_schema[position]
                return argument.default_value if argument.has_default_value() else default
        return default

    @cached_property
    def mutated(self) -> list[bool]:
        """For each tensor input, whether the op writes into it."""
        flags: list[bool] = []
        arguments = self.op._schema.arguments
        named = {argument.name: argument for argument in arguments}
        values = [*zip(arguments, self.schema.args_schema, strict=False)]
        values += [(named[key], value) for key, value in self.schema.kwargs_schema.items()]
        for argument, value in values:
            count = sum(isinstance(x, DTensorSpec) for x in pytree.tree_leaves(value))
            writes = argument.alias_info is not None and argument.alias_info.is_write
            flags += [writes] * count
        return flags

    @property
    def is_view(self) -> bool:
        return bool(self.op._schema._is_view_op())

    def rebuild(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        return pytree.tree_unflatten(list(leaves), self._tree)

    def run_on_empty(self, shape_of: Callable[[DTensorSpec], tuple[int, ...]]) -> Any:
        """Run the op itself with tensors without elements, of the given shapes."""
        with outside_of_modes(), torch.no_grad():  # a graph being traced shall not have it
            leaves = [
                torch.empty(shape_of(x), dtype=x.tensor_meta.dtype, device=self.mesh.device_type)
                if isinstance(x, DTensorSpec) and x.tensor_meta is not None
                else x
                for x in self.leaves
            ]
            args, kwargs = self.rebuild(leaves)
            return self.op(*args, **kwargs)

    def refuse(self, reason: str) -> NotImplementedError:
        """The error for a call without a right rule; same text on every rank."""
        shown = ", ".join(
            f"{tuple(spec.placements)} of shape {tuple(spec.shape)}" for spec in self.specs[:4]
        )
        more = f" and {len(self.specs) - 4} more" if len(self.specs) > 4 else ""
        return NotImplementedError(
            f"{self.name} on {shown}{more}: {reason} Call .redistribute(placements=[Replicate(), "
            "...]) or .full_tensor() on the inputs first."
        )


def replicated(call: OpCall) -> Rule:
    """Every rank runs the whole op."""
    return Rule((Replicate(),) * len(call.specs), (Replicate(),) * max(1, len(call.output_metas)))


def owned(call: OpCall, owner: Owner) -> Rule:
    """The owner runs the whole op, the others nothing."""
    return Rule((owner,) * len(call.specs), (owner,) * max(1, len(call.output_metas)))


def same_rows(spec: DTensorSpec, mesh_dim: int, wanted: Placement) -> bool:
    """Whether every rank holds the same bytes with ``wanted`` on ``mesh_dim``, though it may be
    written differently (``RowAtomic()``, the counts it stands for, an equal ``Shard(0)``)."""
    present = spec.placements[mesh_dim]
    if present == wanted:
        return True
    if not spec.shape or split_dim(present) != 0 or split_dim(wanted) != 0:
        return False
    other = [*spec.placements]
    other[mesh_dim] = wanted
    try:
        return same_split(spec.shape, tuple(spec.mesh.shape), spec.placements, other, mesh_dim)
    except ValueError:
        return False  # a table that does not fit this tensor


def local_shape(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """This rank's shape of a tensor."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    box = local_box(tuple(shape), tuple(mesh.shape), placements, coordinate)
    return tuple(stop - start for start, stop in box)


class LocalOp:
    """Stands in for an op where the local computation is another one than the global op."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self._name, self._run = name, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __str__(self) -> str:
        return self._name

    def name(self) -> str:
        return self._name


def empty_result(call: OpCall) -> LocalOp:
    """What a non-owner does instead of the op: nothing, with a result of the right kind."""
    metas, returns_list = call.output_meta, isinstance(call.output_meta, list)
    mutates = any(call.mutated)

    def run(*args: Any, **kwargs: Any) -> Any:
        like = args[0] if args else None
        if not isinstance(like, torch.Tensor):
            leaves = pytree.tree_leaves((args, kwargs))
            like = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if mutates:
            return like

        device = kwargs.get("device") or like.device

        def make(meta: TensorMeta | None) -> torch.Tensor | None:
            if meta is None:
                return None
            return like.new_zeros((0,) * len(meta.shape), dtype=meta.dtype, device=device)

        if metas is None:
            return None
        if isinstance(metas, TensorMeta):
            return make(metas)
        results = [make(meta) for meta in metas]
        return results if returns_list else tuple(results)

    return LocalOp(f"nothing instead of {call.name}", run)
