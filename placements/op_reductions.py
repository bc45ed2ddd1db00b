"""Ops that reduce, or run along, tensor dims.

Over the split dim a reduction gives ``Partial``; where the local result of an empty shard is no
neutral element (mean, max, inf-norm), a local op stands in for it. Along other dims the split
stays. What cannot be combined from parts (median, sort, ...) runs on the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from placements.boxes import split_dim
from placements.op_call import LocalOp, OpCall, Rule, replicated
from placements.row_atomic import RowAtomic
from placements.torch_hooks import NormPartial

aten = torch.ops.aten

Rules = tuple[Callable[[int], list[Rule]], LocalOp | None]


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims an op reduces or runs along; all where it names none."""
    dim = call.argument("dim")
    ndim = len(call.input_shape)
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    for d in dims:
        if not -max(ndim, 1) <= d < max(ndim, 1):  # not every op's own check runs on all ranks
            raise IndexError(f"{call.name}: a tensor of {ndim} dims has no dim {d}.")
    return tuple(d % ndim if ndim else 0 for d in dims)


def shifted(placement: Placement, dims: Sequence[int], keepdim: bool) -> Placement:
    """A split placement after ``dims`` (other than the split one) are reduced."""
    dim = split_dim(placement)
    if dim is None or keepdim or isinstance(placement, RowAtomic):
        return placement  # rows stay dim 0: no dim lies before them
    return Shard(dim - sum(d < dim for d in dims))


def _reduction(
    partial: Callable[[OpCall], Placement | None],
    local_op: Callable[[OpCall, tuple[int, ...]], LocalOp | None] = lambda call, dims: None,
    linear: bool = False,
) -> Callable[[OpCall], Rules]:
    def family(call: OpCall) -> Rules:
        dims, keepdim = reduced_dims(call), bool(call.argument("keepdim", False))
        combined = partial(call)

        def rules_on(mesh_dim: int) -> list[Rule]:
            present = call.placements(mesh_dim)[0]
            dim = split_dim(present)
            num_outputs = max(1, len(call.output_metas))
            rules = []
            if dim is not None and dim not in dims:
                rules.append(Rule((present,), (shifted(present, dims, keepdim),) * num_outputs))
            elif dim is not None and combined is not None:
                rules.append(Rule((present,), (combined,) * num_outputs))
            elif linear and type(present) is Partial and present.reduce_op in ("sum", "avg"):
                rules.append(Rule((present,), (present,) * num_outputs))
            return [*rules, replicated(call)]

        return rules_on, local_op(call, dims)

    return family


def _splits_reduced_dim(call: OpCall, dims: tuple[int, ...]) -> bool:
    return any(split_dim(placement) in dims for placement in call.specs[0].placements)


def _mean_op(call: OpCall, dims: tuple[int, ...]) -> LocalOp | None:
    """Local sum over the global count, so that parts of any size add up to the mean."""
    if not _splits_reduced_dim(call, dims):
        return None
    count = math.prod(call.input_shape[d] for d in dims)
    dtype, keepdim = call.output_metas[0].dtype, bool(call.argument("keepdim", False))

    def run(local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return local.sum(dims, keepdim=keepdim, dtype=dtype) / count

    return LocalOp("sum over global count", run)


def _extreme_op(lowest: bool) -> Callable[[OpCall, tuple[int, ...]], LocalOp | None]:
    """max or min whose empty parts give the neutral element."""

    def make(call: OpCall, dims: tuple[int, ...]) -> LocalOp | None:
        if not _splits_reduced_dim(call, dims):
            return None
        keepdim = bool(call.argument("keepdim", False))

        def run(local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if local.numel():
                return (local.amax if lowest else local.amin)(dims, keepdim=keepdim)
            shape = [1 if d in dims else size for d, size in enumerate(local.shape)]
            if not keepdim:
                shape = [size for d, size in enumerate(local.shape) if d not in dims]
            return local.new_full(shape, _extreme(local.dtype, lowest))

        return LocalOp("amax" if lowest else "amin", run)

    return make


def _extreme(dtype: torch.dtype, lowest: bool) -> float | int | bool:
    if dtype is torch.bool:
        return not lowest
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    info = torch.iinfo(dtype)
    return info.min if lowest else info.max


def norm_partial(order: Any) -> Placement | None:
    """How local p-norms combine: the p-norm of p-norms, or their maximum."""
    order = 2.0 if order is None else float(order)
    if order == math.inf:
        return Partial("max")
    return NormPartial(order) if order > 0 else None


def _norm_order(call: OpCall) -> Any:
    return call.argument("ord", call.argument("p", 2))


def _norm_op(call: OpCall, dims: tuple[int, ...]) -> LocalOp | None:
    """A norm whose empty parts give 0: torch refuses the inf-norm of nothing."""
    if not _splits_reduced_dim(call, dims) or float(_norm_order(call) or 2) != math.inf:
        return None
    op, keepdim = call.op, bool(call.argument("keepdim", False))
    dtype = call.output_metas[0].dtype

    def run(local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if local.numel():
            return op(local, *args, **kwargs)
        return local.sum(dims, keepdim=keepdim, dtype=dtype).abs()

    return LocalOp("inf-norm", run)


def _along(call: OpCall) -> Rules:
    """Ops that run along one dim and keep all others: softmax, sort, cumsum, ..."""
    dims = reduced_dims(call)
    if call.argument("dim") is None:
        dims = (len(call.input_shape) - 1,) if call.op is aten.sort.default else dims

    def rules_on(mesh_dim: int) -> list[Rule]:
        present = call.placements(mesh_dim)
        fills = [p for p in present if split_dim(p) is not None and split_dim(p) not in dims]
        num_outputs = max(1, len(call.output_metas))
        rules = [Rule((p,) * len(call.specs), (p,) * num_outputs) for p in dict.fromkeys(fills)]
        return [*rules, replicated(call)]

    return rules_on, None


def _whole(call: OpCall) -> Rules:
    """Ops that need the whole tensor."""
    return lambda mesh_dim: [replicated(call)], None


def _dot(call: OpCall) -> Rules:
    def rules_on(mesh_dim: int) -> list[Rule]:
        present = call.placements(mesh_dim)
        fills = [p for p in present if split_dim(p) == 0]
        rules = [Rule((p, p), (Partial("sum"),)) for p in dict.fromkeys(fills)]
        return [*rules, replicated(call)]

    return rules_on, None


def _matrix_vector(call: OpCall) -> Rules:
    """Each row of a matrix gives one element: rows stay where they are."""

    def rules_on(mesh_dim: int) -> list[Rule]:
        matrix = call.placements(mesh_dim)[0]
        rules = [Rule((matrix, Replicate()), (matrix,))] if split_dim(matrix) == 0 else []
        return [*rules, replicated(call)]

    return rules_on, None


_SUM = _reduction(lambda call: Partial("sum"), linear=True)
_MEAN = _reduction(lambda call: Partial("sum"), _mean_op, linear=True)
_MAX = _reduction(lambda call: Partial("max"), _extreme_op(True))
_MIN = _reduction(lambda call: Partial("min"), _extreme_op(False))
_PROD = _reduction(lambda call: Partial("product"))
_NORM = _reduction(lambda call: norm_partial(_norm_order(call)), _norm_op)
_PER_ROW = _reduction(lambda call: None)

REDUCTIONS: dict[Any, Callable[[OpCall], Rules]] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.nansum.default), _SUM),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _MEAN),
    **dict.fromkeys((aten.amax.default, aten.max.default), _MAX),
    **dict.fromkeys((aten.amin.default, aten.min.default), _MIN),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int), _PROD),
    aten.mv.default: _matrix_vector,
    **dict.fromkeys((aten.linalg_vector_norm.default, aten.norm.Scalar), _NORM),
    **dict.fromkeys(
        (
            aten.max.dim,
            aten.min.dim,
            aten.logsumexp.default,
            aten.var.correction,
            aten.std.correction,
            aten.var_mean.correction,
            aten.any.default,
            aten.any.dim,
            aten.all.default,
            aten.all.dim,
            aten.count_nonzero.default,
        ),
        _PER_ROW,
    ),
    **dict.fromkeys(
        (
            aten._softmax.default,
            aten._log_softmax.default,
            aten._safe_softmax.default,
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
            aten.cumsum.default,
            aten.cumprod.default,
            aten.cummax.default,
            aten.cummin.default,
            aten.logcumsumexp.default,
            aten.sort.default,
            aten.sort.stable,
            aten.topk.default,
        ),
        _along,
    ),
    **dict.fromkeys(
        (
            aten.median.default,
            aten.nanmedian.default,
            aten.histc.default,
            aten.tril.default,
            aten.triu.default,
            aten.diag.default,
            aten.linalg_qr.default,
            aten._linalg_svd.default,
            aten._linalg_eigh.default,
            aten.var.default,
            aten.std.default,
        ),
        _whole,
    ),
    aten.dot.default: _dot,
}
