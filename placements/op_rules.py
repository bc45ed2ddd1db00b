"""Which ops keep which placement, and what an op does instead where none is kept.

``propagate`` answers for every op with a ``RowAtomic``, ``BlockAtomic`` or ``Owner`` tensor among
its inputs. On each mesh dim it lists the right ways to run the op (``Rule``), takes the one that
moves the fewest bytes, and refuses where there is none: nothing is ever computed as if a split
tensor were whole.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from placements.boxes import check_placements, is_ours, split_dim
from placements.op_call import (
    LocalOp,
    OpCall,
    Rule,
    empty_result,
    local_shape,
    owned,
    replicated,
    same_rows,
)
from placements.op_lists import is_list_op, propagate_lists
from placements.op_reductions import REDUCTIONS
from placements.op_views import VIEWS
from placements.owner import Owner
from placements.row_atomic import RowAtomic
from placements.torch_hooks import (
    DTensorSpec,
    NormPartial,
    OpSchema,
    OutputSharding,
    ShardingPlaceholder,
    pytree,
)

aten = torch.ops.aten

# An op family gives, for one call, its rules on one mesh dim and the local op (None: the op).
Family = Callable[[OpCall], tuple[Callable[[int], list[Rule]], LocalOp | None]]
_MASKS = (torch.bool, torch.uint8)
_JOINS = (aten.cat.default, aten.stack.default)
# Their kernels raise on a rank that holds no rows, on it alone.
_FAIL_ON_NOTHING = (aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default)
FAMILIES: dict[Any, Family] = {**REDUCTIONS, **VIEWS}


def propagate(schema: OpSchema) -> OutputSharding:
    """Sharding of one op call with at least one tensor of ours.

    Raises:
        NotImplementedError: No right rule; the text names the op, the placements and what to
            call instead. The same on every rank.
    """
    call = OpCall(schema)
    if call.op is aten._local_scalar_dense.default:
        return _whole_scalar(call)
    if is_list_op(call):
        return propagate_lists(call)
    if any(spec.mesh != call.mesh for spec in call.specs):
        raise call.refuse("its inputs live on different meshes.")
    _check_kind(call)
    _check_without_elements(call)
    _check_out(call)
    rules_on, local_op = _family(call)
    rules = [_choose(call, mesh_dim, rules_on) for mesh_dim in range(call.mesh.ndim)]
    inputs = [_wanted(call, rules, i) for i in range(len(call.specs))]
    outputs = [
        tuple(rule.outputs[i] for rule in rules) for i in range(max(1, len(call.output_metas)))
    ]
    for placements, meta in zip(outputs, call.output_metas, strict=False):
        _check_output(call, meta.shape, placements)
    return _output_sharding(call, inputs, outputs, local_op)


def _family(call: OpCall) -> tuple[Callable[[int], list[Rule]], LocalOp | None]:
    family = FAMILIES.get(call.op)
    if family is not None:
        return family(call)
    info = call.propagator.op_single_dim_strategy_funcs.get(call.op)
    usable = info is not None and call.op not in call.propagator.op_to_scalar_shape_adjuster
    usable = usable and call.op not in _FAIL_ON_NOTHING
    if usable:
        return _single_dim_rules(call, info), None
    # One owner can run any op, and any op is right on whole tensors. A view of a gathered copy
    # would be no view, and what is written into a copy is lost: ``_cost`` refuses those.
    return lambda mesh_dim: [replicated(call)], None


def _check_kind(call: OpCall) -> None:
    """Refuse ops that no placement of the result can describe, or whose values would differ."""
    tags = call.op.tags
    is_dynamic = torch.Tag.dynamic_output_shape in tags
    if call.op is aten.index.Tensor:  # only masks have as many results as they have ones
        is_dynamic = any(spec.tensor_meta.dtype in _MASKS for spec in call.specs[1:])  # type: ignore[union-attr]
    if is_dynamic:
        raise call.refuse("the shape of its result depends on the values.")
    if torch.Tag.inplace_view in tags:
        raise call.refuse("it would change the shape of a tensor in place.")
    if torch.Tag.nondeterministic_seeded in tags:
        raise call.refuse("there is no rule for its random numbers.")


def _check_without_elements(call: OpCall) -> None:
    """Raise what torch does for an op on tensors of no elements, such as ``max``, on every rank.

    A rank that is not the owner would not notice, and wait for the others in the next collective.
    """
    if any(math.prod(spec.shape) for spec in call.specs):
        return
    call.run_on_empty(lambda spec: tuple(map(int, spec.shape)))


def _check_out(call: OpCall) -> None:
    """``out=`` of another shape is resized by torch; the tensor around the part would not know."""
    if not any(argument.is_out for argument in call.op._schema.arguments):
        return
    written = [spec for spec, writes in zip(call.specs, call.mutated, strict=True) if writes]
    for spec, meta in zip(written, call.output_metas, strict=False):
        if tuple(spec.shape) != tuple(meta.shape):
            raise call.refuse(
                f"the result has shape {tuple(meta.shape)} and is to be written into one of shape "
                f"{tuple(spec.shape)}; no DTensor is resized."
            )


def _whole_scalar(call: OpCall) -> OutputSharding:
    """``item()`` reads the value from the rank that has it."""
    whole = DTensorSpec(call.mesh, (Replicate(),) * call.mesh.ndim, call.specs[0].tensor_meta)
    schema = OpSchema(call.op, (whole,), {}, schema_info=call.schema.schema_info)
    return OutputSharding(None, schema, needs_redistribute=True)


# ------------------------------------------------------------------- torch's own rules


def _single_dim_rules(call: OpCall, info: Any) -> Callable[[int], list[Rule]]:
    """Rows of torch's single-dim strategies, with our placement where they say "any shard".

    A row holds for any cut of the named dims into consecutive parts, so it holds for uneven
    rows; a row that averages partial results does not.
    """
    strategy = call.propagator._wrap_with_op_strategy(call.schema)
    rows = info.func(call.op, strategy.args_meta, strategy.kwargs_meta)
    num_outputs = len(rows[0]) - len(call.specs) if rows else 0

    def rules_on(mesh_dim: int) -> list[Rule]:
        present = call.placements(mesh_dim)
        fills: list[Placement] = [p for p in dict.fromkeys(present) if isinstance(p, RowAtomic)]
        if any(type(p) is Shard for p in present) or not fills:
            fills.append(Shard(0))
        rules = [
            rule
            for row in rows
            for fill in fills
            if (rule := _fill_row(call, row, fill, num_outputs, mesh_dim)) is not None
        ]
        return [*dict.fromkeys(rules), replicated(call)]

    return rules_on


def _fill_row(
    call: OpCall, row: Sequence[Any], fill: Placement, num_outputs: int, mesh_dim: int
) -> Rule | None:
    shapes = [tuple(meta.shape) for meta in call.output_metas] or [call.input_shape] * num_outputs
    shapes += [call.shape(i) for i in range(len(call.specs))]
    if len(shapes) != len(row):
        return None
    filled = []
    for entry, shape in zip(row, shapes, strict=True):
        placement = entry
        if isinstance(entry, ShardingPlaceholder):
            placement = _fill_entry(fill, entry.dim, shape, call.mesh.size(mesh_dim))
        if placement is None or (isinstance(placement, Partial) and placement.reduce_op == "avg"):
            return None
        if type(placement) is Shard and isinstance(fill, RowAtomic):
            return None  # a literal shard cut torch's way, beside rows cut ours
        filled.append(placement)
    return Rule(tuple(filled[num_outputs:]), tuple(filled[:num_outputs]))


def _fill_entry(
    fill: Placement, dim: int, shape: Sequence[int], num_ranks: int
) -> Placement | None:
    if not isinstance(fill, RowAtomic):
        return Shard(dim)
    if dim != 0 or not shape:
        return None
    try:
        if not fill.is_nested:
            fill.counts(shape[0], num_ranks)
    except ValueError:
        return None  # the table belongs to a tensor with another number of rows
    return fill


# ---------------------------------------------------------------------- choosing a rule


def _choose(call: OpCall, mesh_dim: int, rules_on: Callable[[int], list[Rule]]) -> Rule:
    present = call.placements(mesh_dim)
    owners = [p for p in dict.fromkeys(present) if isinstance(p, Owner)]
    if call.op in _JOINS and not _on_one_owner(present):
        rules = [replicated(call)]  # parts of any kind meet whole, as the norms of clipping do
    elif owners:
        rules = [owned(call, owners[0])]
    elif all(isinstance(p, Replicate) for p in present):
        return replicated(call)
    else:
        rules = rules_on(mesh_dim)
    costs = [_cost(call, mesh_dim, rule) for rule in rules]
    if not costs or min(costs) == math.inf:
        if len(owners) > 1 or (owners and any(split_dim(p) is not None for p in present)):
            raise call.refuse(
                f"mesh dim {mesh_dim} mixes {list(dict.fromkeys(present))}, and an op can run "
                "on one owner only; redistribute them to the same owner."
            )
        raise call.refuse(f"there is no rule for this on mesh dim {mesh_dim}.")
    return rules[costs.index(min(costs))]


def _on_one_owner(present: Sequence[Placement]) -> bool:
    kinds = {p for p in present if not isinstance(p, Replicate)}
    return len(kinds) <= 1 or not any(isinstance(p, Owner) for p in kinds)


def _cost(call: OpCall, mesh_dim: int, rule: Rule) -> float:
    total = 0.0
    for index, wanted in enumerate(rule.inputs):
        spec = call.specs[index]
        present = spec.placements[mesh_dim]
        if same_rows(spec, mesh_dim, wanted):
            continue
        if call.mutated[index] or call.is_view:
            return math.inf  # moving it would change a copy, not the tensor itself
        assert spec.tensor_meta is not None
        num_bytes = math.prod(spec.shape) * spec.tensor_meta.dtype.itemsize
        total += _move_cost(present, wanted) * num_bytes + 1
    return total


def _move_cost(present: Placement, wanted: Placement) -> float:
    """Bytes moved per byte of the tensor, roughly; infinite where no redistribution exists."""
    if isinstance(present, Owner):
        return 1.0 if isinstance(wanted, Replicate) else math.inf
    if isinstance(wanted, Owner):
        return 0.0 if isinstance(present, Replicate) else math.inf
    if isinstance(wanted, Partial):
        return math.inf
    if isinstance(present, Partial):
        return 2.0 if isinstance(wanted, Replicate) else 1.0
    return 0.0 if isinstance(present, Replicate) else 1.0


def _wanted(call: OpCall, rules: list[Rule], index: int) -> tuple[Placement, ...]:
    """Placements of one input as the rules ask; as it is where that means the same bytes."""
    spec = call.specs[index]
    wanted = tuple(rule.inputs[index] for rule in rules)
    if all(same_rows(spec, mesh_dim, placement) for mesh_dim, placement in enumerate(wanted)):
        return tuple(spec.placements)
    return wanted


def _check_output(call: OpCall, shape: Sequence[int], placements: tuple[Placement, ...]) -> None:
    if not any(map(is_ours, placements)):
        return
    # A norm of parts is a partial value like any other where shapes are concerned.
    plain = [Partial() if type(p) is NormPartial else p for p in placements]
    try:
        check_placements(tuple(shape), tuple(call.mesh.shape), plain)
    except (ValueError, NotImplementedError) as error:
        raise call.refuse(f"its result would be {placements}: {error}") from error


# ----------------------------------------------------------------------- what to do


def _output_sharding(
    call: OpCall,
    inputs: list[tuple[Placement, ...]],
    outputs: list[tuple[Placement, ...]],
    local_op: LocalOp | None,
) -> OutputSharding:
    expected = [
        DTensorSpec(spec.mesh, placements, spec.tensor_meta)
        for spec, placements in zip(call.specs, inputs, strict=True)
    ]
    changed = any(a.placements != b.placements for a, b in zip(expected, call.specs, strict=True))
    output_spec = _output_spec(call, outputs)
    local_args = None
    if _is_elsewhere(call, inputs):
        if not _may_run_on_nothing(call):
            local_op = empty_result(call)
    elif local_op is None:
        local_args = _local_shape_args(call, outputs)
    if not changed and local_op is None and local_args is None:
        return OutputSharding(output_spec)
    remaining = iter(expected)
    leaves = [next(remaining) if isinstance(x, DTensorSpec) else x for x in call.leaves]
    args, kwargs = call.rebuild(leaves)
    if local_args is not None:
        args = tuple(local_args.get(i, arg) for i, arg in enumerate(args))
    schema = OpSchema(
        local_op or call.op,  # type: ignore[arg-type]
        args,
        kwargs,
        schema_info=call.schema.schema_info,
    )
    return OutputSharding(
        output_spec,
        schema,
        needs_redistribute=True,
        use_val_from_redistribute_schema=local_args is not None,
    )


def _output_spec(call: OpCall, outputs: list[tuple[Placement, ...]]) -> Any:
    if any(call.mutated):
        first = call.mutated.index(True)
        spec = call.specs[first]
        return None if not call.op._schema.returns else spec
    meta = call.output_meta
    if meta is None:
        return None
    if not isinstance(meta, (list, tuple)) or hasattr(meta, "dtype"):
        return DTensorSpec(call.mesh, outputs[0], call.output_metas[0])
    remaining = iter(outputs)
    metas: list[Any] = list(meta)
    return tuple(None if m is None else DTensorSpec(call.mesh, next(remaining), m) for m in metas)


def _is_elsewhere(call: OpCall, inputs: list[tuple[Placement, ...]]) -> bool:
    """Whether the owner of this call is another rank."""
    coordinate = call.mesh.get_coordinate()
    return coordinate is not None and any(
        isinstance(placement, Owner) and placement.rank != at
        for placement, at in zip(inputs[0], coordinate, strict=True)
    )


def _may_run_on_nothing(call: OpCall) -> bool:
    """Whether the op itself is right on empty tensors, which is faster than what stands for it.

    Not where the result has no dims: its one element would be computed from undefined ones.
    """
    if not all(meta.shape for meta in call.output_metas):
        return False
    return torch.Tag.pointwise in call.op.tags or _makes_nothing_of_nothing(call)


def _makes_nothing_of_nothing(call: OpCall) -> bool:
    """Whether empty tensors give empty results of the right kind, without a complaint: tried."""
    if any(call.mutated):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = call.run_on_empty(lambda spec: (0,) * len(spec.shape))
    except Exception:
        return False
    found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [(tuple(tensor.shape), tensor.dtype) for tensor in found] == [
        ((0,) * len(meta.shape), meta.dtype) for meta in call.output_metas
    ]


def _local_shape_args(call: OpCall, outputs: list[tuple[Placement, ...]]) -> dict | None:
    """Shape arguments of views and factories, from global to this rank's."""
    index = call.propagator.op_to_shape_and_stride_idx.get(call.op)
    if index is None or all(isinstance(p, Replicate) for p in outputs[0]):
        return None
    shape = local_shape(call.output_shape, call.mesh, outputs[0])
    if isinstance(index, tuple):
        return {index[0]: shape, index[1]: torch.empty(shape, device="meta").stride()}
    return {index: shape}
