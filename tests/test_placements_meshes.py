"""Ops on two mesh dims, and ops whose results torch keeps in private kinds of partial values."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from placements import Owner, RowAtomic, distribute_tensor
from tests.ranks import run_ranks
from tests.test_placements_ops import UNARY, outcome

INF = float("inf")
OPS = UNARY | {
    "norm of rows": lambda x: x / x.norm(dim=1, keepdim=True),
    "norm of columns": lambda x: x / x.norm(dim=0, keepdim=True),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3),
    "inf-norm of rows": lambda x: torch.linalg.vector_norm(x, INF, dim=1),
    "nested sums": lambda x: (x - x.mean()).square().sum().sqrt(),
}

PLACEMENTS = [
    pytest.param((RowAtomic(), RowAtomic()), marks=pytest.mark.slow),
    (RowAtomic((3, 2)), RowAtomic(((0, 3), (1, 1)))),
    (RowAtomic(((0, 3), (1, 1))), RowAtomic((3, 2))),
    (Replicate(), RowAtomic((0, 5))),
    pytest.param((RowAtomic((5, 0)), Replicate()), marks=pytest.mark.slow),
    pytest.param((RowAtomic(), Shard(1)), marks=pytest.mark.slow),
    (Shard(1), RowAtomic((0, 5))),
    (Owner(1), Owner(0)),
    (Owner(0), RowAtomic()),
]


def mesh_case(placements: tuple[Placement, ...]) -> tuple[list[str], list[str]]:
    """Wrong or failing ops, and refused ones."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.randn((5, 4), generator=torch.Generator().manual_seed(1))
    x = distribute_tensor(full, mesh, placements)
    wrong, refused = [], []
    for name, op in OPS.items():
        got = outcome(op, x)
        if isinstance(got, str):
            refused.append(name)
            continue
        try:
            torch.testing.assert_close(got, op(full))
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    if not torch.equal(x.full_tensor(), full):
        wrong.append("an op changed its input")
    return wrong, refused


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_ops_on_two_mesh_dims_are_never_wrong(placements: tuple[Placement, ...]) -> None:
    results = run_ranks(4, mesh_case, placements)
    assert [wrong for wrong, _ in results] == [[]] * 4
    assert all(refused == results[0][1] for _, refused in results)
    assert len(results[0][1]) < len(OPS) / 3, results[0][1]
    must_work = {"sum", "mean", "norm", "norminf", "mul", "sum_cols", "max", "gt", "nested sums"}
    assert not must_work & set(results[0][1])


def nested_sum_case() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.ones(5, 4), mesh, (RowAtomic(), RowAtomic()))
    wrong = []
    if x.sum().placements != (Partial(), Partial()):
        wrong.append(f"sum over nested rows is {x.sum().placements}")
    norm = torch.linalg.vector_norm(
        distribute_tensor(torch.full((5, 4), 2.0), mesh, (RowAtomic(), Shard(1))), 2, dim=1
    )
    # Partial norms of torch's own kind beside our rows: powers are summed, not the norms.
    whole = norm.redistribute(placements=[RowAtomic(), Replicate()])
    if not torch.allclose(whole.full_tensor(), torch.full((5,), 4.0)):
        wrong.append(f"norms of rows: {whole.full_tensor()}")
    return wrong


def test_reductions_over_nested_rows_are_partial_on_both_dims() -> None:
    assert run_ranks(4, nested_sum_case) == [[]] * 4


def unsorted_case() -> list[str]:
    """A rank's coordinate is not its rank in the group where a mesh is not sorted."""
    mesh = DeviceMesh("cpu", [2, 0, 1])
    full = torch.randn((5, 4), generator=torch.Generator().manual_seed(1))
    wrong = []
    for placement in (RowAtomic((3, 0, 2)), Owner(0)):
        x = distribute_tensor(full, mesh, [placement])
        for name, op in OPS.items():
            got = outcome(op, x)
            if not isinstance(got, str) and not torch.allclose(got.double(), op(full).double()):
                wrong.append(f"{name} on {placement}")
    return wrong


def test_ops_on_an_unsorted_mesh_are_never_wrong() -> None:
    assert run_ranks(3, unsorted_case) == [[]] * 3


def refused_case() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for placement in (Owner(1), RowAtomic((3, 2))):
        x = distribute_tensor(torch.randn(5, 1), mesh, [placement])
        for call in (
            lambda x=x: x.clone().t_(),
            lambda x=x: x.nonzero(),
            lambda x=x: torch.unique(x),
            lambda x=x: torch.masked_select(x, x > 0),
            lambda x=x: x[x > 0],
            lambda x=x: x.clone().set_(torch.zeros(3)),
        ):
            try:
                found.append(f"accepted, {call()}")
            except (NotImplementedError, RuntimeError) as error:
                found.append(str(error)[:60])
    return found


def test_what_no_placement_can_describe_is_refused_alike_on_all_ranks() -> None:
    first, second = run_ranks(2, refused_case)
    assert first == second
    assert not [text for text in first if text.startswith("accepted")]


def test_the_control_a_sum_that_forgets_other_ranks_is_noticed() -> None:
    results = run_ranks(2, broken_case)
    assert all(any("sum" in text for text in wrong) for wrong in results)


def broken_case() -> list[str]:
    """With the split forgotten, sums are this rank's alone: the comparison must see it."""
    from placements import op_reductions

    kept = op_reductions.Partial
    op_reductions.Partial = lambda op: Replicate()  # type: ignore[assignment,misc]
    try:
        mesh = init_device_mesh("cpu", (2,))
        full = torch.arange(20.0).reshape(5, 4)
        x = distribute_tensor(full, mesh, [RowAtomic((3, 2))])
        got = x.sum(0, keepdim=True).to_local()
        return [] if torch.equal(got, full.sum(0, keepdim=True)) else ["sum is wrong"]
    finally:
        op_reductions.Partial = kept  # type: ignore[misc]
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
