"""DTensor ops on RowAtomic, BlockAtomic and Owner against the plain tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor
from tests.ranks import run_ranks

Op = Callable[..., Any]

UNARY: dict[str, Op] = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum(),
    "sum_rows": lambda x: x.sum(0),
    "sum_cols": lambda x: x.sum(1),
    "sum_keep": lambda x: x.sum(1, keepdim=True),
    "mean_rows": lambda x: x.mean(0),
    "mean_cols": lambda x: x.mean(-1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(0),
    "amax_cols": lambda x: x.amax(1),
    "prod": lambda x: x.prod(),
    "norm": lambda x: x.norm(),
    "norm1": lambda x: torch.linalg.vector_norm(x, 1),
    "norminf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "norm_rows": lambda x: torch.linalg.vector_norm(x, 2, dim=1),
    "max_dim": lambda x: x.max(1)[0],
    "argmax": lambda x: x.argmax(),
    "argmax_rows": lambda x: x.argmax(0),
    "var": lambda x: x.var(),
    "any": lambda x: (x > 5).any(),
    "all": lambda x: (x > -100).all(),
    "gt": lambda x: x > 1.5,
    "mul": lambda x: x * 3 + 1,
    "neg": lambda x: -x,
    "relu": lambda x: torch.relu(x),
    "exp": lambda x: x.exp(),
    "pow": lambda x: x**2,
    "softmax": lambda x: x.softmax(-1),
    "softmax_rows": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(1),
    "cumsum": lambda x: x.cumsum(0),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (x.shape[1],)),
    "flatten_all": lambda x: x.reshape(-1),
    "view_rows": lambda x: x.view(x.shape[0] * 2, x.shape[1] // 2),
    "unsqueeze1": lambda x: x.unsqueeze(1),
    "unsqueeze_last": lambda x: x.unsqueeze(-1),
    "flatten_tail": lambda x: x.unsqueeze(-1).flatten(1),
    "slice": lambda x: x[1:3],
    "slice_cols": lambda x: x[:, 1:3],
    "select_col": lambda x: x[:, 1],
    "cat_cols": lambda x: torch.cat([x, x], 1),
    "cat_rows": lambda x: torch.cat([x, x], 0),
    "stack_last": lambda x: torch.stack([x, x], -1),
    "stack_first": lambda x: torch.stack([x, x], 0),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "clone": torch.clone,
    "half": lambda x: x.bfloat16(),
    "isfinite": torch.isfinite,
    "where": lambda x: torch.where(x > 2, x, -x),
    "clamp": lambda x: x.clamp(1, 2),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_zeros_other": lambda x: x.new_zeros((3, 2)),
    "split_cols": lambda x: x.split(2, 1)[1],
    "chunk_cols": lambda x: x.chunk(2, 1)[0],
    "triu": torch.triu,
    "sort": lambda x: x.sort(dim=1)[0],
    "repeat": lambda x: x.repeat(1, 2),
    "expand": lambda x: x.unsqueeze(-1).expand(-1, -1, 3),
    "tile_rows": lambda x: x.repeat(2, 1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(),
    "foreach_norm": lambda x: torch._foreach_norm([x, x * 2])[1],
    "foreach_norm_inf": lambda x: torch._foreach_norm([x, x * 2], float("inf"))[1],
    "foreach_mul": lambda x: torch._foreach_mul([x, x], 2.0)[0],
    "median": torch.median,
    "topk": lambda x: x.topk(2, dim=1)[0],
    "logsumexp": lambda x: x.logsumexp(1),
}

BINARY: dict[str, Op] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub_scalar_tensor": lambda x, y: x - y.sum(),
    "where": lambda x, y: torch.where(x > y, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "maximum": torch.maximum,
    "foreach_add": lambda x, y: torch._foreach_add([x, y], [y, x])[0],
    "equal": lambda x, y: torch.tensor(torch.equal(x, y)),
    "equal_self": lambda x, y: torch.tensor(torch.equal(x, x.clone())),
    "allclose": lambda x, y: torch.tensor(torch.allclose(x, x + (y - y))),
}


def full(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def outcome(op: Op, *args: Any) -> Tensor | str:
    try:
        return full(op(*args))
    except NotImplementedError as error:
        assert "redistribute" in str(error), str(error)
        return "refused"


def check_ops(
    ops: dict[str, Op], placement: list[Placement], second: list[Placement], shape: tuple[int, ...]
) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    x, y = torch.randn(shape), torch.randn(shape)
    dx, dy = distribute_tensor(x, mesh, placement), distribute_tensor(y, mesh, second)
    found = {}
    for name, op in ops.items():
        args, dargs = ((x,), (dx,)) if ops is UNARY else ((x, y), (dx, dy))
        try:
            got = outcome(op, *dargs)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        if isinstance(got, str):
            found[name] = got
            continue
        want = op(*args)
        try:
            torch.testing.assert_close(got, want)
            found[name] = "ok"
        except AssertionError as error:
            found[name] = f"WRONG {str(error)[:300]}"
    return found


PLACEMENTS = [
    RowAtomic(),
    RowAtomic((0, 3, 2, 0)),
    BlockAtomic(2),
    Owner(1),
]


def unary_case(placement: Placement) -> dict[str, str]:
    return check_ops(UNARY, [placement], [placement], (5, 4))


def binary_case(first: Placement, second: Placement) -> dict[str, str]:
    return check_ops(BINARY, [first], [second], (5, 4))


def agree(results: list[dict[str, str]]) -> dict[str, str]:
    for rank, result in enumerate(results):
        assert result == results[0], {
            k: (v, result[k], rank) for k, v in results[0].items() if result[k] != v
        }
    return {k: v for k, v in results[0].items() if v != "ok"}


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_unary_ops_equal_the_plain_tensor(placement: Placement) -> None:
    rest = agree(run_ranks(4, unary_case, placement))
    allowed = {"view_rows", "flatten_all"} if isinstance(placement, Owner) else set()
    assert {k: v for k, v in rest.items() if k not in allowed} == {}


@pytest.mark.parametrize(
    "pair",
    [
        (RowAtomic(), RowAtomic((0, 3, 2, 0))),
        (RowAtomic(), RowAtomic((2, 1, 1, 1))),
        (RowAtomic((0, 3, 2, 0)), Replicate()),
        (Replicate(), RowAtomic()),
        (RowAtomic((0, 3, 2, 0)), Shard(0)),
        (Shard(1), RowAtomic((0, 3, 2, 0))),
        (Owner(1), Owner(1)),
        (Owner(1), Replicate()),
    ],
    ids=str,
)
def test_binary_ops_equal_the_plain_tensor(pair: tuple[Placement, Placement]) -> None:
    assert agree(run_ranks(4, binary_case, *pair)) == {}


@pytest.mark.parametrize("pair", [(Owner(1), Owner(2)), (Owner(1), RowAtomic())], ids=str)
def test_owners_are_never_mixed(pair: tuple[Placement, Placement]) -> None:
    rest = agree(run_ranks(4, binary_case, *pair))
    assert all(v == "refused" for v in rest.values()), rest
    assert "add" in rest


def vector_case() -> list[tuple[Any, ...]]:
    """``v @ w`` ends in ``squeeze_``, which changes a tensor's shape in place."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for plain in (torch.arange(3.0), torch.arange(6.0)[::2]):
        weight = torch.arange(12.0).view(3, 4)
        pair = [x.clone().requires_grad_() for x in (plain, weight)]
        placed = [distribute_tensor(x, mesh, [Owner(1)]).requires_grad_() for x in (plain, weight)]
        for vector, matrix in (pair, placed):
            product = vector @ matrix
            product.square().sum().backward()
        assert isinstance(product, DTensor) and product.shape == (4,)
        grads = [x.grad.full_tensor() for x in placed]  # type: ignore[union-attr]
        found.append((product.placements, torch.equal(product.full_tensor(), plain @ weight)))
        found.append(tuple(torch.equal(a, b.grad) for a, b in zip(grads, pair)))  # type: ignore[arg-type]
    column = distribute_tensor(torch.ones(5, 1), mesh, [RowAtomic()]).squeeze_(1)
    return [*found, (tuple(column.shape), column.placements, column.sum().item())]


def test_a_vector_times_a_matrix_on_one_owner() -> None:
    product = ((Owner(1),), True)
    squeezed = ((5,), (RowAtomic(),), 5.0)
    expected = [product, (True, True)] * 2 + [squeezed]
    assert run_ranks(3, vector_case) == [expected] * 3


LIST_OPS: dict[str, Op] = {
    "add": lambda a, b: torch._foreach_add([a, b], [b, a])[0],
    "lerp": lambda a, b: torch._foreach_lerp([a], [b], 0.5)[0],
    "lerp_of_the_smaller": lambda a, b: torch._foreach_lerp([b], [a], 0.5)[0],
    "copy_": lambda a, b: (lambda copied: (torch._foreach_copy_([copied], [b]), copied)[1])(
        a.clone()
    ),
    "allclose": lambda a, b: torch.tensor(torch.allclose(a * 0, b * 0)),
}


def broadcast_lists_case() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    large = torch.arange(20.0).view(5, 4)
    found = {}
    pairs: list[tuple[Placement, Placement, tuple[int, ...]]] = [
        (RowAtomic((1, 4, 0)), RowAtomic(), (4,)),  # rows of one beside columns of the other
        (RowAtomic((4, 1, 0)), RowAtomic((0, 1, 0)), (1, 4)),
        (RowAtomic((4, 1, 0)), RowAtomic(), (5, 1)),
        (BlockAtomic(2), Shard(0), (4,)),
        (Shard(1), RowAtomic(), (4,)),
        (Shard(1), RowAtomic(), (1, 4)),
        (Replicate(), RowAtomic((0, 2, 2)), (4,)),
        (RowAtomic((1, 4, 0)), Owner(1), (4,)),
        (RowAtomic((1, 4, 0)), Owner(1), ()),
        (Owner(1), Owner(1), (4,)),
    ]
    for first, second, shape in pairs:
        small = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
        placed = [distribute_tensor(x, mesh, [p]) for x, p in ((large, first), (small, second))]
        for name, op in LIST_OPS.items():
            got, want = outcome(op, *placed), op(large, small)
            same = isinstance(got, Tensor) and torch.equal(got, want)
            found[f"{name} {first} {second} {shape}"] = "ok" if same else str(got)
    return found


def test_tensors_that_broadcast_at_one_position_of_a_list() -> None:
    rest = agree(run_ranks(3, broadcast_lists_case))
    assert {key for key in rest if rest[key] != "refused" or "Owner" not in key} == set(), rest
