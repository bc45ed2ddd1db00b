"""The Muon step on sharded parameters against torch.optim.Muon on whole ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_owner import muon_step
from dtensor_owner.exchange import gather_answers
from dtensor_owner.muon import Muon
from dtensor_owner.muon_matrices import domain_of, rank_boxes
from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor
from tests.muon_reference import grads_of, reference, weights_of
from tests.ranks import run_ranks

# Square, wide, tall, a row, fewer rows than ranks, a conv weight, and one size twice.
SHAPES = [(12, 12), (6, 20), (20, 6), (1, 5), (2, 9), (8, 3, 2, 2), (6, 20)]


def placements_for(kind: str, shape: tuple[int, ...], index: int, ranks: int):
    """One of several placements, made to fit."""
    if kind == "mixed":
        kinds = ["rows", "owner", "shard", "replicate", "blocks", "columns"]
        kind = kinds[index % len(kinds)]
    if kind == "rows":  # all rows on few ranks, an empty rank where there are enough
        rows = [0] * ranks
        rows[index % ranks] = shape[0] - shape[0] // 3
        rows[(index + 1) % ranks] += shape[0] // 3
        return RowAtomic(tuple(rows))
    return {
        "balanced": RowAtomic(),
        "blocks": BlockAtomic(4),
        "owner": Owner(index % ranks),
        "shard": Shard(0),
        "columns": Shard(1),
        "replicate": Replicate(),
    }[kind]


def place(tensors, kind, mesh):
    placed = [
        distribute_tensor(
            tensor,
            mesh,
            [placements_for(kind, tensor.shape, i, mesh.size())],
            src_data_rank=None,
        )
        for i, tensor in enumerate(tensors)
    ]
    return placed


def set_grads(params, grads):
    for param, grad in zip(params, grads):
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def full(tensor):
    """The whole tensor from what each rank holds; needs no redistribution that could be wrong."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    domain = domain_of(tensor)
    local = tensor.detach().to_local()
    answers = [local]
    if domain.process_group is not None:
        by_group_rank = gather_answers(local, domain.process_group)
        answers = [by_group_rank[rank] for rank in domain.group.order]
    whole = torch.full(tensor.shape, float("nan"))
    for box, part in zip(rank_boxes(tensor), answers):
        whole[tuple(slice(*span) for span in box)] = part
    return whole


def train(kind, steps=10, shapes=SHAPES, schedule=None, mesh=None, **options):
    """Weights and momenta, whole, after some steps; and how often Newton-Schulz ran."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    params = [torch.nn.Parameter(p) for p in place(weights_of(shapes), kind, mesh)]
    optimizer = Muon(params, **options)
    matrices = 0

    def counting(batch, *args):
        nonlocal matrices
        matrices += batch.shape[0] if batch.ndim == 3 else 1
        return newton_schulz(batch, *args)

    newton_schulz = muon_step.newton_schulz
    if not options.get("compile"):  # a counter's changes would compile anew in every step
        muon_step.newton_schulz = counting
    try:
        for step in range(steps):
            set_grads(params, grads_of(shapes, step))
            if schedule is not None:
                optimizer.param_groups[0]["lr"] = schedule(step)
            optimizer.step()
    finally:
        muon_step.newton_schulz = newton_schulz
    momenta = [optimizer.state[p]["momentum_buffer"] for p in params]
    return [full(p) for p in params], [full(m) for m in momenta], matrices


def check_same(results, expected, atol=2e-5):
    for params, momenta, _ in results:
        for mine, theirs in zip([*params, *momenta], [*expected[0], *expected[1]]):
            torch.testing.assert_close(mine, theirs, atol=atol, rtol=1e-5)


OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
IN_FP32 = {"ns_dtype": torch.float32, **OPTIONS}


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["rows", "balanced", "owner", "shard", "columns", "replicate", "mixed"]
)
def test_ten_steps_equal_torch_muon(ranks, kind):
    results = run_ranks(ranks, train, kind, **IN_FP32)
    check_same(results, reference(SHAPES, 10, **OPTIONS))
    assert sum(matrices for _, _, matrices in results) == 10 * len(SHAPES)


def falling(step):
    return 0.05 / (1 + step)


@pytest.mark.parametrize(
    "options",
    [
        {"adjust_lr_fn": "match_rms_adamw"},
        {"nesterov": False, "adjust_lr_fn": "original"},
        {"momentum": 0.0, "weight_decay": 0.0},
        {"momentum": 0.3, "weight_decay": 5.0},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
        {"ns_method": "gram"},
        {"ns_method": "plain"},
    ],
)
def test_options_and_schedules(options):
    options = {**OPTIONS, **options}
    results = run_ranks(
        3, train, "mixed", steps=3, schedule=falling, ns_dtype=torch.float32, **options
    )
    options.pop("ns_method", None)
    check_same(results, reference(SHAPES, 3, schedule=falling, **options))


# Two distinct shapes, since each takes its time to compile.
FEW = [(6, 20), (20, 6), (3, 5), (6, 5, 2, 2), (5, 3)]
COMPILED = {"compile": True, "backend": "aot_eager", **IN_FP32}


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_compiled_equals_torch_muon(ranks):
    results = run_ranks(ranks, train, "mixed", 10, FEW, falling, **COMPILED)
    check_same(results, reference(FEW, 10, schedule=falling, **OPTIONS))


def test_compiled_with_other_options():
    options = {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}
    results = run_ranks(2, train, "mixed", 3, FEW, falling, **{**COMPILED, **options})
    check_same(results, reference(FEW, 3, schedule=falling, **{**OPTIONS, **options}))


def test_compiled_by_inductor():
    shapes = [(8, 12), (12, 8)]
    results = run_ranks(2, train, "rows", 4, shapes, falling, compile=True, timeout=240, **IN_FP32)
    check_same(results, reference(shapes, 4, schedule=falling, **OPTIONS))


@pytest.mark.parametrize(
    "options",
    [
        {"owners": "any"},
        {"bucket_numel": 130},
        {"transport": "point_to_point"},
        {"transport": "point_to_point", "bucket_numel": 130, "owners": "any"},
    ],
)
def test_other_plans_give_the_same_result(options):
    results = run_ranks(4, train, "mixed", steps=4, **IN_FP32, **options)
    check_same(results, reference(SHAPES, 4, **OPTIONS))


def test_bf16_stays_close_to_torch_muon():
    results = run_ranks(3, train, "mixed", steps=4, **OPTIONS)
    expected = reference(SHAPES, 4, in_fp32=False, **OPTIONS)
    check_same(results, expected, atol=0.004)
    # Control: the tolerance is small beside what four steps change.
    assert all((a - b).abs().max() > 0.02 for a, b in zip(weights_of(SHAPES), expected[0]))


def _local_rows(steps):
    """What must not happen: each rank orthogonalizes the rows it holds."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = place(weights_of(SHAPES), "balanced", mesh)
    locals_ = [torch.nn.Parameter(p.to_local().flatten(1)) for p in placed]
    mine = [p for p in locals_ if p.numel()]
    optimizer = Muon(mine, **IN_FP32)
    for step in range(steps):
        for local, grad in zip(locals_, place(grads_of(SHAPES, step), "balanced", mesh)):
            local.grad = grad.to_local().flatten(1)
        optimizer.step()
    return (
        [
            DTensor.from_local(
                local.detach().view(p.to_local().shape),
                mesh,
                p.placements,
                shape=p.shape,
                stride=p.stride(),
            ).full_tensor()
            for local, p in zip(locals_, placed)
        ],
        [],
        0,
    )


def test_control_local_rows_fail_the_comparison():
    results = run_ranks(4, _local_rows, 2)
    with pytest.raises(AssertionError):
        check_same(results, (reference(SHAPES, 2, **OPTIONS)[0], []))


def _replicas(mesh_shape, kinds):
    mesh = init_device_mesh("cpu", mesh_shape)
    params = [
        torch.nn.Parameter(distribute_tensor(w, mesh, placements, src_data_rank=None))
        for w, placements in zip(weights_of(SHAPES), kinds)
    ]
    optimizer = Muon(params, **IN_FP32)
    for step in range(3):
        set_grads(params, grads_of(SHAPES, step))
        optimizer.step()
    plan = optimizer.plans[0]
    return [full(p) for p in params], [], sorted(plan.owners)


def test_meshes_with_replicas_and_two_cuts():
    kinds = [
        (Replicate(), Shard(0)),
        (Replicate(), RowAtomic((1, 5))),
        (RowAtomic((7, 13)), Shard(1)),
        (Replicate(), Replicate()),
        (Owner(1), Owner(0)),
        (Shard(0), Replicate()),
        (Replicate(), Owner(1)),
    ]
    results = run_ranks(4, _replicas, (2, 2), kinds)
    check_same(results, (reference(SHAPES, 3, **OPTIONS)[0], []))
    assert set(results[0][2]) == {0, 1, 2, 3}  # all replicas work


def _on_subgroups(ranks_of_mesh, transport):
    """Several meshes side by side, each with its own run; None on ranks of no mesh."""
    mine = None
    for ranks in ranks_of_mesh:
        mesh = DeviceMesh("cpu", ranks)
        if dist.get_rank() in ranks:
            mine = mesh
    options = {"transport": transport, **IN_FP32}
    return None if mine is None else train("mixed", steps=3, mesh=mine, **options)


@pytest.mark.parametrize("transport", ["all_to_all", "point_to_point"])
@pytest.mark.parametrize("meshes", [[[2, 3]], [[1, 3]], [[3, 0, 2]], [[2, 0], [3, 1]]])
def test_subgroups_and_permuted_ranks(meshes, transport):
    results = run_ranks(4, _on_subgroups, meshes, transport)
    inside = {rank for mesh in meshes for rank in mesh}
    assert {rank for rank, result in enumerate(results) if result is not None} == inside
    check_same([r for r in results if r], reference(SHAPES, 3, **OPTIONS))


def _count_bytes(transport):
    """Bytes handed to the exchange by all ranks in one step, and the plan's count."""
    sent = 0
    name = "exchange_by_pairs" if transport == "point_to_point" else "exchange_flat_async"

    def counting(send, send_numels, recv_numels, group, *rest):
        nonlocal sent
        assert send_numels[group.coordinate] == 0
        sent += send.numel() * send.itemsize
        return exchange(send, send_numels, recv_numels, group, *rest)

    exchange = getattr(muon_step, name)
    setattr(muon_step, name, counting)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [torch.nn.Parameter(p) for p in place(weights_of(SHAPES), "mixed", mesh)]
    optimizer = Muon(params, lr=0.1, transport=transport)
    set_grads(params, grads_of(SHAPES, 0))
    try:
        optimizer.step()
    finally:
        setattr(muon_step, name, exchange)
    return sent, optimizer.bytes_per_step


@pytest.mark.parametrize("transport", ["all_to_all", "point_to_point"])
def test_bytes_sent_are_the_plans_count(transport):
    results = run_ranks(4, _count_bytes, transport)
    assert sum(sent for sent, _ in results) == results[0][1] > 0


def _sent_dtype_makes_no_difference():
    """bf16 results with the inputs sent in bf16 and in fp32, from the same gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    out = []
    for widen in (False, True):
        params = [torch.nn.Parameter(p) for p in place(weights_of(SHAPES), "shard", mesh)]
        optimizer = Muon(params, lr=0.1)
        set_grads(params, grads_of(SHAPES, 0))
        works = optimizer._prepared.works((True,) * len(params))
        if widen:
            works[:] = [replace(work, gather_dtype=torch.float32) for work in works]
        optimizer.step()
        out.append([p.to_local().detach().clone() for p in params])
    return all(map(torch.equal, *out))


def test_travelling_in_bf16_changes_no_bit():
    assert run_ranks(3, _sent_dtype_makes_no_difference) == [True] * 3
