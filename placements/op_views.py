"""Views, slices, joins and factories: where a split dim goes when the shape changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from placements.boxes import split_counts, split_dim
from placements.geometry import overlap, ranges
from placements.op_call import LocalOp, OpCall, Rule, replicated
from placements.row_atomic import RowAtomic

aten = torch.ops.aten

Rules = tuple[Callable[[int], list[Rule]], LocalOp | None]
# Where the split dim goes, or None if its parts would have to move.
MoveDim = Callable[[OpCall, int], int | None]


def _moved(move: MoveDim) -> Callable[[OpCall], Rules]:
    """A view of one tensor that moves whole dims: the split stays if its dim does."""

    def family(call: OpCall) -> Rules:
        def rules_on(mesh_dim: int) -> list[Rule]:
            present = call.placements(mesh_dim)[0]
            dim = split_dim(present)
            num_outputs = max(1, len(call.output_metas))
            after = present
            if dim is not None:
                to = move(call, dim)
                kept = to is not None and call.output_metas[0].shape[to] == call.input_shape[dim]
                if not kept or (isinstance(present, RowAtomic) and to != 0):
                    return [] if call.is_view else [replicated(call)]
                assert to is not None
                after = present if isinstance(present, RowAtomic) else Shard(to)
            return [Rule((present,), (after,) * num_outputs)]

        return rules_on, None

    return family


def _dim(call: OpCall, name: str = "dim", added: int = 0) -> int:
    return call.argument(name, 0) % max(1, len(call.input_shape) + added)


def _select(call: OpCall, dim: int) -> int | None:
    at = _dim(call)
    return None if at == dim else dim - (at < dim)


def _unsqueeze(call: OpCall, dim: int) -> int | None:
    return dim + (_dim(call, added=1) <= dim)


def _transpose(call: OpCall, dim: int) -> int | None:
    first, second = _dim(call, "dim0"), _dim(call, "dim1")
    return {first: second, second: first}.get(dim, dim)


def _permute(call: OpCall, dim: int) -> int | None:
    ndim = len(call.input_shape)
    return [d % ndim for d in call.argument("dims")].index(dim)


def _t(call: OpCall, dim: int) -> int | None:
    return len(call.input_shape) - 1 - dim


def _expand(call: OpCall, dim: int) -> int | None:
    to = dim + len(call.output_shape) - len(call.input_shape)
    return to if call.output_shape[to] == call.input_shape[dim] else None


def _repeat(call: OpCall, dim: int) -> int | None:
    repeats = call.argument("repeats")
    to = dim + len(repeats) - len(call.input_shape)
    return to if repeats[to] == 1 else None


def _unless_cut(call: OpCall, dim: int) -> int | None:
    """Ops that cut along one dim and leave the order of dims."""
    return None if _dim(call) == dim else dim


def _unbind(call: OpCall, dim: int) -> int | None:
    return _select(call, dim)


def _same(call: OpCall, dim: int) -> int | None:
    return dim


def _view_dtype(call: OpCall, dim: int) -> int | None:
    return None if dim == len(call.input_shape) - 1 else dim


def _view_as_dtype(call: OpCall) -> Rules:
    """Bits are read as another dtype: what is still to be added up has no bits yet."""
    rules_on, _ = _moved(_view_dtype)(call)
    return (
        lambda mesh_dim: [] if call.placements(mesh_dim)[0].is_partial() else rules_on(mesh_dim),
        None,
    )


def _squeezed_dims(call: OpCall) -> list[int]:
    ndim = len(call.input_shape)
    named = call.argument("dim")
    dims = range(ndim) if named is None else [named] if isinstance(named, int) else named
    return [d % ndim for d in dims if ndim and call.input_shape[d % ndim] == 1]


def _squeeze(call: OpCall) -> Rules:
    """Only dims of global size 1 go; a rank with one row of many keeps its dim."""
    gone = _squeezed_dims(call)
    rules_on, _ = _moved(
        lambda call, dim: None if dim in gone else dim - sum(d < dim for d in gone)
    )(call)
    return rules_on, LocalOp("squeeze", lambda local, *args: aten.squeeze.dims(local, gone))


# ------------------------------------------------------------------------------ reshape


def _reshape(call: OpCall) -> Rules:
    """Rows are contiguous runs of elements; a reshape keeps the split if every boundary also
    begins a row of the new shape."""

    def rules_on(mesh_dim: int) -> list[Rule]:
        present = call.placements(mesh_dim)[0]
        dim = split_dim(present)
        if dim is None:
            return [Rule((present,), (present,))]
        after = _reshaped(call, present, dim, call.mesh.size(mesh_dim))
        return [] if after is None else [Rule((present,), (after,))]

    return rules_on, None


def _reshaped(call: OpCall, present: Placement, dim: int, num_ranks: int) -> Placement | None:
    before, after = call.input_shape, call.output_shape
    if before[: dim + 1] == after[: dim + 1]:
        return present
    alone = sum(p == present for p in call.specs[0].placements) == 1
    if not isinstance(present, RowAtomic) or present.is_nested or not alone or not after:
        return None
    row_numel, new_row_numel = math.prod(before[1:]), math.prod(after[1:])
    counts = split_counts(present, before[0], num_ranks)
    ends = [end * row_numel for end in accumulate(counts)]
    if not new_row_numel or any(end % new_row_numel for end in ends):
        return None
    new_ends = [end // new_row_numel for end in ends]
    return RowAtomic(b - a for a, b in zip([0, *new_ends], new_ends, strict=False))


# -------------------------------------------------------------------------------- slice


def _slice(call: OpCall) -> Rules:
    """A slice of the split rows: every rank keeps what it has of it."""
    dim, step = _dim(call), call.argument("step", 1)
    size = call.input_shape[dim]
    start, stop, _ = slice(call.argument("start"), call.argument("end"), 1).indices(size)
    wanted = (start, max(start, stop))
    is_full = wanted == (0, size) and step == 1
    sliced = [p for p in call.specs[0].placements if split_dim(p) == dim]

    def rules_on(mesh_dim: int) -> list[Rule]:
        present = call.placements(mesh_dim)[0]
        if split_dim(present) != dim or is_full:
            return [Rule((present,), (present,))]
        if not isinstance(present, RowAtomic) or step != 1 or len(sliced) > 1:
            return []
        counts = split_counts(present, size, call.mesh.size(mesh_dim))
        kept = [overlap(own, wanted) or (0, 0) for own in ranges(counts)]
        return [Rule((present,), (RowAtomic(b - a for a, b in kept),))]

    if is_full or not sliced or not isinstance(sliced[0], RowAtomic) or step != 1:
        return rules_on, None

    def run(local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own = _own_range(call, sliced[0])
        low, high = overlap(own, wanted) or (own[0], own[0])
        return aten.slice.Tensor(local, dim, low - own[0], high - own[0])

    return rules_on, LocalOp("slice of own rows", run)


def _own_range(call: OpCall, placement: Placement) -> tuple[int, int]:
    mesh_dim = call.specs[0].placements.index(placement)
    counts = split_counts(placement, call.input_shape[0], call.mesh.size(mesh_dim))
    # Not get_local_rank: that is the rank in the group, which an unsorted mesh numbers otherwise.
    coordinate = call.mesh.get_coordinate()
    assert coordinate is not None
    return ranges(counts)[coordinate[mesh_dim]]


# ------------------------------------------------------------------- joins and factories


def _join(new_dim: bool) -> Callable[[OpCall], Rules]:
    """cat and stack: parts join locally along any dim but the split one."""

    def family(call: OpCall) -> Rules:
        at = _dim(call, added=int(new_dim))

        def rules_on(mesh_dim: int) -> list[Rule]:
            present = call.placements(mesh_dim)
            splits = [p for p in dict.fromkeys(present) if split_dim(p) is not None]
            rules = []
            for fill in splits:
                dim = split_dim(fill)
                assert dim is not None
                same = all(spec.shape[dim] == call.input_shape[dim] for spec in call.specs)
                if same and at != dim and not (new_dim and at <= dim):
                    rules.append(Rule((fill,) * len(present), (fill,)))
            return [*rules, replicated(call)]

        return rules_on, None

    return family


def _like(call: OpCall) -> Rules:
    """Factories that take only shape and dtype from their input."""

    def rules_on(mesh_dim: int) -> list[Rule]:
        present = call.placements(mesh_dim)[0]
        return [Rule((present,), (Replicate() if present.is_partial() else present,))]

    return rules_on, None


def _new(call: OpCall) -> Rules:
    """``new_*`` factories: the input's placement for its shape, whole otherwise."""

    def rules_on(mesh_dim: int) -> list[Rule]:
        present = call.placements(mesh_dim)[0]
        same = call.output_shape == call.input_shape and not present.is_partial()
        return [Rule((present,), (present if same else Replicate(),))]

    return rules_on, None


_SETS_VALUES = (aten.fill_.Scalar, aten.fill_.Tensor)


def _in_place(call: OpCall) -> Rules:
    def rules_on(mesh_dim: int) -> list[Rule]:
        present, *values = call.placements(mesh_dim)
        if present.is_partial() and call.op in _SETS_VALUES:
            return []  # each rank's value would be added up
        return [Rule((present, *(Replicate() for _ in values)), (present,))]

    return rules_on, None


def _ops(family: Callable[[OpCall], Rules], *names: str) -> dict[Any, Callable[[OpCall], Rules]]:
    found = {}
    for name in names:
        packet, _, overload = name.partition(".")
        found[getattr(getattr(aten, packet), overload or "default")] = family
    return found


VIEWS: dict[Any, Callable[[OpCall], Rules]] = {
    **_ops(_moved(_select), "select.int"),
    **_ops(_moved(_unsqueeze), "unsqueeze"),
    **_ops(_moved(_transpose), "transpose.int"),
    **_ops(_moved(_permute), "permute"),
    **_ops(_moved(_t), "t"),
    **_ops(_moved(_expand), "expand", "expand_copy"),
    **_ops(_moved(_repeat), "repeat"),
    **_ops(_moved(_unless_cut), "split.Tensor", "split_with_sizes", "split_with_sizes_copy"),
    **_ops(_moved(_unbind), "unbind.int"),
    **_ops(_moved(_same), "alias", "detach", "contiguous", "lift_fresh"),
    **_ops(_view_as_dtype, "view.dtype"),
    **_ops(_squeeze, "squeeze", "squeeze.dim", "squeeze.dims"),
    **_ops(_reshape, "view", "reshape", "_unsafe_view", "view_copy"),
    **_ops(_slice, "slice.Tensor"),
    **_ops(_join(False), "cat"),
    **_ops(_join(True), "stack"),
    **_ops(_like, "zeros_like", "ones_like", "empty_like", "full_like"),
    **_ops(_new, "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    **_ops(_in_place, "zero_", "fill_.Scalar", "fill_.Tensor", "detach_"),
}
