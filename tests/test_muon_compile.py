"""The compiled Muon step: one graph, no recompiles, whatever each rank owns."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from dtensor_owner.muon import Muon
from placements import Owner, RowAtomic, distribute_tensor
from tests.muon_reference import grads_of, reference, weights_of
from tests.ranks import run_ranks
from tests.test_muon import FEW, IN_FP32, OPTIONS, check_same, falling, full, set_grads, train


def graphs_of(shapes, steps=6, **options):
    """Numbers of nodes of the graphs compiled in some steps with a changing lr."""
    sizes = []

    def backend(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    counters.clear()
    params = [torch.nn.Parameter(w) for w in weights_of(shapes)]
    optimizer = Muon(params, compile=True, backend=backend, **IN_FP32, **options)
    for step in range(steps):
        set_grads(params, grads_of(shapes, step))
        value = falling(step)
        optimizer.param_groups[0]["lr"] = torch.tensor(value) if step % 2 else value
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        optimizer.step()
    assert not counters["graph_break"]
    return sizes


TWELVE = [(8, 8 + 4 * i) for i in range(12)]


def test_one_graph_that_grows_with_shapes_and_not_with_matrices():
    few = graphs_of(TWELVE)
    many = graphs_of([shape for shape in TWELVE for _ in range(3)][:30])
    assert len(few) == len(many) == 1  # 30 matrices of 12 shapes, six values of lr
    assert many[0] <= few[0] + 2
    # Control: other shapes do make it grow.
    assert graphs_of(TWELVE[:3])[0] < few[0] - 20


def test_one_graph_for_several_buckets():
    assert len(graphs_of(TWELVE, bucket_numel=300)) == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_equal_to_eager_over_ten_steps(backend):
    results = []
    for options in ({}, {"compile": True, "backend": backend}):
        params = [torch.nn.Parameter(w) for w in weights_of(FEW[:2])]
        optimizer = Muon(params, **IN_FP32, **options)
        for step in range(10):
            set_grads(params, grads_of(FEW[:2], step))
            optimizer.param_groups[0]["lr"] = falling(step)
            optimizer.step()
        results.append([p.detach() for p in params])
    for compiled, eager in zip(*results):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_inductor_on_all_placements(ranks):
    options = {**IN_FP32, "compile": True, "backend": "inductor"}
    results = run_ranks(ranks, train, "mixed", 10, FEW, falling, timeout=170, **options)
    check_same(results, reference(FEW, 10, schedule=falling, **OPTIONS))


def _owners_differ():
    """FIELD_CASES 38: rank 0 owns three, rank 1 one, rank 2 none; one rank compiles again."""
    mesh = init_device_mesh("cpu", (3,))
    placements = [Owner(0), RowAtomic((9, 0, 0)), RowAtomic((6, 0, 0)), Owner(1)]
    shapes = [(6, 4), (9, 5), (6, 4), (3, 3)]
    params = [
        torch.nn.Parameter(distribute_tensor(w, mesh, [p], src_data_rank=None))
        for w, p in zip(weights_of(shapes), placements)
    ]
    optimizer = Muon(params, compile=True, backend="aot_eager", **IN_FP32)
    for step in range(5):
        set_grads(params, grads_of(shapes, step))
        if step == 2 and dist.get_rank() == 1:
            torch.compiler.reset()
        optimizer.step()
    owners = optimizer.plans[0].owners
    return [full(p) for p in params], [], [owners.count(rank) for rank in range(3)]


def test_ranks_with_graphs_of_their_own():
    results = run_ranks(3, _owners_differ, timeout=90)
    assert results[0][2] == [3, 1, 0]
    check_same(results, (reference([(6, 4), (9, 5), (6, 4), (3, 3)], 5, **OPTIONS)[0], []))


def _one_rank_compiles_again(shapes):
    mesh = init_device_mesh("cpu", (3,))
    params = [
        torch.nn.Parameter(distribute_tensor(w, mesh, [RowAtomic()], src_data_rank=None))
        for w in weights_of(shapes)
    ]
    optimizer = Muon(params, compile=True, backend="aot_eager", **IN_FP32)
    for step in range(4):
        set_grads(params, grads_of(shapes, step))
        if step == 2 and dist.get_rank() == 1:
            torch.compiler.reset()
        optimizer.step()
    return [full(p) for p in params], [], 0


def test_ranks_that_compile_at_different_moments():
    shapes = [(6, 4), (2, 5)]  # one with fewer rows than ranks
    results = run_ranks(3, _one_rank_compiles_again, shapes, timeout=90)
    check_same(results, (reference(shapes, 4, **OPTIONS)[0], []))


def test_mixed_dtypes():
    """FIELD_CASES 39: bf16 and fp32 weights, lr as a tensor, lr 0, no decay."""
    shapes = [(6, 8), (5, 4)]
    results = []
    for options in ({}, {"compile": True, "backend": "aot_eager"}):
        params = [
            torch.nn.Parameter(w.to(dtype))
            for w, dtype in zip(weights_of(shapes), (torch.bfloat16, torch.float32))
        ]
        optimizer = Muon(params, lr=torch.tensor(0.1), weight_decay=0.0, **options)
        for step, lr in enumerate((0.1, 0.0, 0.2)):
            optimizer.param_groups[0]["lr"] = torch.tensor(lr)
            for param, grad in zip(params, grads_of(shapes, step)):
                param.grad = grad.to(param.dtype)
            before = [p.detach().clone() for p in params]
            optimizer.step()
            assert all(map(torch.equal, params, before)) == (lr == 0.0)
        results.append([p.detach() for p in params])
    assert all(map(torch.equal, *results))


def _compiled_from_outside(shapes, transport):
    """``torch.compile(optimizer.step)``, with a scheduler, beside the same run without."""
    mesh = init_device_mesh("cpu", (3,))
    results, options = [], {"backend": "aot_eager", "transport": transport, **IN_FP32}
    for compiled in (False, True):
        torch.compiler.reset()
        counters.clear()
        params = [
            torch.nn.Parameter(distribute_tensor(w, mesh, [RowAtomic()], src_data_rank=None))
            for w in weights_of(shapes)
        ]
        optimizer = Muon(params, **options)
        step_once = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(10):
            set_grads(params, grads_of(shapes, step))
            if step == 5:
                params[0].grad = None  # another set of gradients is another graph
            step_once()
            scheduler.step()
        results.append([full(p) for p in params])
    assert all(map(torch.equal, *results))
    return counters["stats"]["unique_graphs"], counters["frames"]["total"]


@pytest.mark.parametrize(("transport", "graphs"), [("all_to_all", 2), ("point_to_point", 0)])
def test_step_compiled_from_outside(transport, graphs):
    for found, frames in run_ranks(3, _compiled_from_outside, [(6, 8), (2, 5)], transport):
        assert found == graphs
        assert frames <= 12  # no recompiles over the schedule


def _callable_backend(shapes):
    def backend(graph, inputs):
        return graph.forward

    mesh = init_device_mesh("cpu", (2,))
    params = [
        torch.nn.Parameter(distribute_tensor(w, mesh, [RowAtomic()], src_data_rank=None))
        for w in weights_of(shapes)
    ]
    optimizer = Muon(params, compile=True, backend=backend, **IN_FP32)
    set_grads(params, grads_of(shapes, 0))
    optimizer.step()
    return [full(p) for p in params], [], 0


def test_a_function_as_backend_on_several_ranks():
    """Its address differs between ranks, what it is called does not."""
    shapes = [(6, 4)]
    check_same(run_ranks(2, _callable_backend, shapes), (reference(shapes, 1, **OPTIONS)[0], []))


def test_inductor_and_a_single_row():
    """In the Gram form this would take inductor minutes; a single element in either form."""
    element, row, plain_row, matrix = (
        graphs_of([shape], steps=1, ns_method=method)[0]
        for shape, method in [
            ((1, 1), "gram"),
            ((1, 5), "gram"),
            ((1, 5), "plain"),
            ((2, 5), "gram"),
        ]
    )
    assert row == plain_row != matrix and element < row
    results = []
    shapes = [(1, 5), (1, 1)]
    for options in ({}, {"compile": True}):
        params = [torch.nn.Parameter(w) for w in weights_of(shapes)]
        optimizer = Muon(params, ns_method="gram", **IN_FP32, **options)
        set_grads(params, grads_of(shapes, 0))
        optimizer.step()
        results.append(params)
    torch.testing.assert_close(*results)
