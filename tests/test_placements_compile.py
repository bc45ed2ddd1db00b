"""torch.compile(fullgraph=True) over our placements: one graph, eager's values, no recompiles."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor, redistribute_group
from tests.ranks import run_ranks


class Counter:
    """A backend that counts the graphs it is given and hands them on to another one."""

    def __init__(self, inner: str) -> None:
        self.inner, self.graphs = inner, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.inner)(graph, inputs)


def compiled(function: Callable[..., Any], backend: str) -> tuple[Callable[..., Any], Counter]:
    # Torch's cache of sharding decisions hands out the mesh of an earlier test, which is equal but
    # another object; with stock placements too, a graph with gradients then has an output too many.
    _clear_sharding_prop_cache()
    counter = Counter(backend)
    return torch.compile(function, fullgraph=True, backend=counter, dynamic=False), counter


def values(result: Any) -> list[Tensor]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [r.full_tensor() if isinstance(r, DTensor) else r for r in results]


FULL = torch.arange(28.0).reshape(7, 4) / 8


def builds_placements(local: Tensor, mesh: DeviceMesh) -> tuple[DTensor, Tensor]:
    x = DTensor.from_local(
        local, mesh, [RowAtomic((4, 0, 3))], run_check=False, shape=(7, 4), stride=(4, 1)
    )
    assert x.placements == (RowAtomic((4, 0, 3)),)
    y = x.redistribute(placements=[Owner(1)])
    z = (y.mT @ y).redistribute(placements=[RowAtomic()])
    return z, z.to_local() + len(z.placements)


def ops(x: DTensor, y: DTensor) -> tuple[DTensor, ...]:
    z = torch.lerp(x, y, 0.5) * 2 + x.sum(1, keepdim=True)
    return z, z.sum(), torch.linalg.vector_norm(z), z.mean(0), torch.cat([z, x], 1), z > 1


KINDS: list[Placement] = [
    RowAtomic(),
    RowAtomic((0, 5, 2)),
    BlockAtomic(2),
    Owner(1),
    Replicate(),
    Shard(1),
]


def tour(x: DTensor, kinds: list[Placement]) -> list[DTensor]:
    """Through all ordered pairs of placements, keeping every stop."""
    stops = []
    for source in kinds:
        for target in kinds:
            x = x.redistribute(placements=[source])
            x = x.redistribute(placements=[target])
            stops.append(x)
    return stops


def moves_case(kinds: list[Placement], backend: str) -> list[str]:
    mesh = init_device_mesh("cpu", (3,))
    wrong = []
    step, counter = compiled(lambda t: tour(t, kinds), backend)
    for _ in range(2):  # the second time with placements built anew
        stops = step(distribute_tensor(FULL, mesh, [RowAtomic((0, 5, 2))]))
        for stop, target in zip(stops, kinds * len(kinds), strict=True):
            if stop.placements != (target,) or not torch.equal(stop.full_tensor(), FULL):
                wrong.append(f"-> {target}")
    if counter.graphs != 1:
        wrong.append(f"{counter.graphs} graphs")
    partial = DTensor.from_local(FULL * (dist.get_rank() + 1), mesh, [Partial()])
    step, _ = compiled(lambda t: [t.redistribute(placements=[p]) for p in kinds], backend)
    for got, target in zip(step(partial), kinds, strict=True):
        if not torch.equal(got.full_tensor(), FULL * 6):
            wrong.append(f"Partial -> {target}")
    return wrong


BACKENDS = [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"]


def test_redistributions_trace_into_one_graph() -> None:
    kinds = [RowAtomic((0, 5, 2)), Owner(1), Replicate()]
    assert run_ranks(3, moves_case, kinds, "aot_eager", timeout=150) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_all_redistributions_trace_into_one_graph(backend: str) -> None:
    assert run_ranks(3, moves_case, KINDS, backend, timeout=150) == [[]] * 3


def ops_case(backend: str) -> list[str]:
    mesh = init_device_mesh("cpu", (3,))
    wrong = []
    for source in [RowAtomic((0, 5, 2)), Owner(2)]:
        x, y = (distribute_tensor(t, mesh, [source]) for t in (FULL, FULL.flip(0)))
        step, counter = compiled(ops, backend)
        for _ in range(2):
            for got, want in zip(values(step(x, y)), ops(FULL, FULL.flip(0)), strict=True):
                if not torch.allclose(got.double(), want.double()):
                    wrong.append(f"{source}: {got} != {want}")
        if counter.graphs != 1:
            wrong.append(f"{counter.graphs} graphs for {source}")
    rank = dist.get_rank()
    local = FULL[[slice(0, 4), slice(4, 4), slice(4, 7)][rank]]
    step, counter = compiled(lambda t: builds_placements(t, mesh), backend)
    for got, want in zip(values(step(local)), values(builds_placements(local, mesh)), strict=True):
        if not torch.equal(got, want):
            wrong.append("placements built inside")
    got = step(local)[0]
    if got.placements != (RowAtomic(),) or counter.graphs != 1:
        wrong.append(f"placements built inside: {got.placements}, {counter.graphs} graphs")
    return wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_ops_and_placements_built_inside(backend: str) -> None:
    assert run_ranks(3, ops_case, backend, timeout=150) == [[]] * 3


def recompile_case() -> list[int]:
    """Graphs after: a first call, an equal placement built anew, another split, the first again."""
    mesh = init_device_mesh("cpu", (3,))
    step, counter = compiled(lambda t: (t * 2).redistribute(placements=[Owner(0)]), "aot_eager")
    graphs = []
    for rows in ((0, 5, 2), (0, 5, 2), (3, 2, 2), (0, 5, 2)):
        x = distribute_tensor(FULL, mesh, [RowAtomic(rows)])
        got = step(x)
        assert torch.equal(got.full_tensor(), FULL * 2), rows
        graphs.append(counter.graphs)
    for owner in (0, 1, 0):
        got = step(distribute_tensor(FULL, mesh, [Owner(owner)]))
        assert torch.equal(got.full_tensor(), FULL * 2)
        graphs.append(counter.graphs)
    return graphs


def test_equal_placements_share_a_graph_and_others_do_not() -> None:
    assert run_ranks(3, recompile_case, timeout=120) == [[1, 1, 2, 2, 3, 4, 4]] * 3


class Scale(nn.Module):
    def __init__(self, weight: DTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.weight.redistribute(placements=[Replicate()]).to_local()
        return x @ whole


def module_case(backend: str) -> list[str]:
    mesh = init_device_mesh("cpu", (3,))
    wrong = []
    x = torch.randn(2, 7)
    for placement in (RowAtomic((0, 5, 2)), Owner(1)):
        module = Scale(distribute_tensor(FULL, mesh, [placement]))
        step, counter = compiled(lambda t, module=module: module(t), backend)
        for _ in range(2):
            module.zero_grad()
            step(x).square().sum().backward()
        weight = FULL.clone().requires_grad_()
        (x @ weight).square().sum().backward()
        grad = module.weight.grad
        if grad.placements != (placement,) or counter.graphs != 1:
            wrong.append(f"{grad.placements} {counter.graphs}")
        if not torch.allclose(grad.full_tensor(), weight.grad, rtol=1e-5, atol=1e-5):
            wrong.append(f"gradient of {placement}")
        closed, counter = compiled(lambda t, w=module.weight: (w * t).sum(), backend)
        if not torch.allclose(closed(2.0).full_tensor(), FULL.sum() * 2):
            wrong.append("closure")
    return wrong


# The second one cuts forward and backward apart as inductor does, by what each rank's graph has.
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_module_parameters_and_closures(backend: str) -> None:
    assert run_ranks(3, module_case, backend, timeout=120) == [[]] * 3


def group_case(order: list, backend: str) -> list[str]:
    mesh = DeviceMesh("cpu", order)
    if mesh.get_coordinate() is None:
        return []
    size = mesh.size()

    def gather_and_scatter(a: DTensor, b: DTensor) -> list[DTensor]:
        owned = redistribute_group([a, b], [[Owner(0)], [Owner(size - 1)]])
        doubled = [t * 2 for t in owned]
        return redistribute_group(doubled, [[RowAtomic()], [BlockAtomic(2)]])

    a, b = distribute_tensor(FULL, mesh, [RowAtomic()]), distribute_tensor(FULL, mesh, [Owner(1)])
    step, counter = compiled(gather_and_scatter, backend)
    wrong = []
    for _ in range(2):
        got = step(a, b)
        if [t.placements for t in got] != [(RowAtomic(),), (BlockAtomic(2),)]:
            wrong.append("placements")
        if not all(torch.equal(t.full_tensor(), FULL * 2) for t in got):
            wrong.append("values")
    return wrong + [f"{counter.graphs} graphs"] * (counter.graphs != 1)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3], [3, 1]], ids=str)
def test_packed_exchanges_and_sub_groups(order: list) -> None:
    assert run_ranks(4, group_case, order, "aot_eager", timeout=120) == [[]] * 4


def asynchronous_case(backend: str) -> list[str]:
    mesh = init_device_mesh("cpu", (3,))
    wrong = []
    step, _ = compiled(lambda t: t * 3, backend)
    for target in (Replicate(), Owner(1), RowAtomic((0, 200, 100))):
        x = distribute_tensor(torch.randn(300, 400), mesh, [RowAtomic()])
        want = x.full_tensor() * 3
        moved = x.redistribute(placements=[target], async_op=True)
        if not torch.equal(step(moved).full_tensor(), want):
            wrong.append(str(target))
    return wrong


def test_what_an_asynchronous_redistribute_returns_is_waited_for() -> None:
    assert run_ranks(3, asynchronous_case, "aot_eager", timeout=120) == [[]] * 3


def dynamic_rows_case(dynamic: bool | None) -> list[str]:
    """A split is a constant of the graph, so another number of rows gets a graph of its own."""
    mesh = init_device_mesh("cpu", (3,))
    step = torch.compile(
        lambda t: (t * 2).redistribute(placements=[Owner(0)]),
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    wrong = []
    for rows in (7, 2):
        full = torch.randn(rows, 4)
        for placement in (RowAtomic(), RowAtomic((rows, 0, 0))):
            got = step(distribute_tensor(full, mesh, [placement]))
            if not torch.equal(got.full_tensor(), full * 2):
                wrong.append(f"{rows} rows as {placement}")
    return wrong


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_row_counts_give_right_values(dynamic: bool | None) -> None:
    assert run_ranks(3, dynamic_rows_case, dynamic, timeout=120) == [[]] * 3


def first_use_case() -> list[str]:
    """The mesh is met for the first time inside the compiled function."""
    mesh = DeviceMesh("cpu", [2, 0, 1])
    local = FULL[[slice(0, 4), slice(4, 4), slice(4, 7)][mesh.get_coordinate()[0]]]
    step, _ = compiled(lambda t: builds_placements(t, mesh), "aot_eager")
    got, want = step(local)[0].full_tensor(), FULL.mT @ FULL
    return [] if torch.allclose(got, want) else ["values"]


def test_a_mesh_may_first_be_used_in_a_compiled_function() -> None:
    assert run_ranks(3, first_use_case, timeout=120) == [[]] * 3


def inductor_case(case: Callable[[str], list[str]]) -> list[str]:
    # A cache of its own: kernels that a stopped process left half written have crashed.
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
    ):
        return case("inductor")[:3]


INDUCTOR_CASES: dict[str, Callable[[str], list[str]]] = {
    "ops": ops_case,
    "module": module_case,
    "asynchronous": asynchronous_case,
    "moves": functools.partial(moves_case, KINDS),
    "sub-group": functools.partial(group_case, [2, 1]),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", INDUCTOR_CASES)
def test_inductor_gives_the_same(name: str) -> None:
    assert run_ranks(3, inductor_case, INDUCTOR_CASES[name], timeout=600) == [[]] * 3


def optimizer_case() -> list[str]:
    """torch's AdamW compiled on our parameters, with a learning rate that changes."""
    mesh = init_device_mesh("cpu", (3,))
    wrong = []
    for placement in (RowAtomic((0, 5, 2)), Owner(1)):
        plain = nn.Parameter(FULL.clone())
        ours = nn.Parameter(distribute_tensor(FULL, mesh, [placement]))
        lrs = [torch.tensor(0.1), torch.tensor(0.1)]
        pair = [
            torch.optim.AdamW([p], lr=lr, foreach=False)
            for p, lr in zip((plain, ours), lrs, strict=True)
        ]
        counter = Counter("aot_eager")
        step = torch.compile(pair[1].step, backend=counter)  # torch's own step breaks the graph
        for turn in range(3):
            plain.grad = torch.sin(FULL + turn)
            ours.grad = distribute_tensor(plain.grad, mesh, [placement])
            for lr in lrs:
                lr.fill_(0.1 / (turn + 1))
            pair[0].step()
            with torch.no_grad():
                step()
        if not torch.allclose(ours.full_tensor(), plain, atol=1e-6):
            wrong.append(f"values under {placement}")
        if counter.graphs > 2:
            wrong.append(f"{counter.graphs} graphs")
    return wrong


def test_compiled_adamw_equals_one_process() -> None:
    assert run_ranks(3, optimizer_case, timeout=150) == [[]] * 3


def gathered_and_reduced(x: DTensor) -> tuple[Tensor, Tensor]:
    mesh = x.device_mesh
    partial = DTensor.from_local(x.full_tensor(), mesh, [Partial()], run_check=False)
    return x.full_tensor(), partial.redistribute(placements=[RowAtomic()]).to_local()


def graph_on_one_rank_case() -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [RowAtomic()])
    run = gathered_and_reduced
    if dist.get_rank() == 0:  # the other one may have reached a limit of recompiles
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    return run(x)


def test_a_rank_without_a_graph_meets_the_others() -> None:
    full = torch.arange(12.0).view(6, 2)
    for rank, (whole, part) in enumerate(run_ranks(2, graph_on_one_rank_case, timeout=60)):
        assert torch.equal(whole, full)
        assert torch.equal(part, 2 * full.chunk(2)[rank])
