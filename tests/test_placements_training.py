"""Optimizers, clipping, autograd and copies on our placements against one process."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor, redistribute_group
from tests.ranks import run_ranks

PLACEMENTS = [RowAtomic(), RowAtomic((0, 3, 0, 2)), BlockAtomic(2), Owner(2), Shard(0), Replicate()]
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "fused_adamw": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "fused_sgd": (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    "foreach_adamw": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "foreach_adam": (torch.optim.Adam, {"lr": 0.1, "foreach": True, "amsgrad": True}),
    "loop_adamw": (torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
    "foreach_sgd": (
        torch.optim.SGD,
        {"lr": 0.1, "foreach": True, "momentum": 0.9, "nesterov": True},
    ),
    "tensor_lr_adamw": (torch.optim.AdamW, {"lr": torch.tensor(0.1), "foreach": False}),
}
SHAPES = [(5, 4), (5, 2), (5,), (5, 2, 2)]


def make(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def optimizer_case(name: str, placement: Placement) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cls, options = OPTIMIZERS[name]
    plain = [nn.Parameter(t) for t in make(0)]
    sharded = [nn.Parameter(distribute_tensor(t, mesh, [placement])) for t in make(0)]
    steps = [cls(params, **copy.deepcopy(options)) for params in (plain, sharded)]
    for step in range(3):
        grads = make(step + 1)
        for p, s, g in zip(plain, sharded, grads, strict=True):
            p.grad, s.grad = g.clone(), distribute_tensor(g, mesh, [placement])
        for optimizer in steps:
            optimizer.step()
    wrong = []
    for index, (p, s) in enumerate(zip(plain, sharded, strict=True)):
        assert s.placements == (placement,)
        if not torch.allclose(s.full_tensor(), p, rtol=1e-6, atol=1e-6):
            wrong.append(f"{name} {placement} parameter {index}")
    return wrong


@pytest.mark.parametrize("placement", [RowAtomic((0, 3, 0, 2)), Owner(2)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers_equal_one_process(name: str, placement: Placement) -> None:
    assert run_ranks(4, optimizer_case, name, placement) == [[]] * 4


def clip_case(
    norm_type: float, max_norm: float, foreach: bool | None
) -> tuple[float, list[Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(s, generator=generator) for s in [(7, 3), (4, 4), (3,), (8, 2)]]
    placements = [RowAtomic((0, 5, 2, 0)), Owner(2), Replicate(), Shard(0)]
    params = []
    for grad, placement in zip(grads, placements, strict=True):
        param = nn.Parameter(distribute_tensor(torch.zeros_like(grad), mesh, [placement]))
        param.grad = distribute_tensor(grad, mesh, [placement])
        params.append(param)
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, foreach=foreach)
    total = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return total.item(), [p.grad.full_tensor() for p in params]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("max_norm", [1e-3, 1e6])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clip_grad_norm_counts_each_element_once(
    norm_type: float, max_norm: float, foreach: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    params = []
    for shape in [(7, 3), (4, 4), (3,), (8, 2)]:
        param = nn.Parameter(torch.zeros(shape))
        param.grad = torch.randn(shape, generator=generator)
        params.append(param)
    want = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type).item()
    for got, grads in run_ranks(4, clip_case, norm_type, max_norm, foreach):
        assert got == pytest.approx(want, rel=1e-5)
        for grad, param in zip(grads, params, strict=True):
            torch.testing.assert_close(grad, param.grad)


def autograd_case(placement: Placement) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    wrong = []
    weight = torch.randn((5, 4), generator=torch.Generator().manual_seed(0))
    x = torch.randn((4, 3), generator=torch.Generator().manual_seed(rank + 1))
    w = distribute_tensor(weight, mesh, [placement]).requires_grad_()
    # A loss per rank, summed over ranks by Partial gradients of to_local.
    whole = w.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    (whole @ x).square().sum().backward()
    reference = weight.clone().requires_grad_()
    total = sum(
        (reference @ torch.randn((4, 3), generator=torch.Generator().manual_seed(r + 1)))
        .square()
        .sum()
        for r in range(dist.get_world_size())
    )
    total.backward()
    if w.grad.placements != w.placements:
        wrong.append(f"gradient is {w.grad.placements}")
    if not torch.allclose(w.grad.full_tensor(), reference.grad, rtol=1e-5, atol=1e-5):
        wrong.append("redistribute -> to_local")

    w.grad = None
    (w.full_tensor() ** 3).sum().backward()
    if not torch.allclose(w.grad.full_tensor(), 3 * weight**2, rtol=1e-5, atol=1e-5):
        wrong.append("full_tensor")

    w.grad = None
    (w * 2).sum().full_tensor().backward()
    if not torch.equal(w.grad.full_tensor(), torch.full((5, 4), 2.0)):
        wrong.append("ops")

    w.grad = None
    local = w.to_local()
    (local * 5).sum().backward()
    if not torch.equal(w.grad.full_tensor(), torch.full((5, 4), 5.0)):
        wrong.append("to_local")

    w.grad = None
    outs = redistribute_group([w * 1, w * 2], [[Replicate()], [Owner(0)]])
    (outs[0].sum() + outs[1].redistribute(placements=[Replicate()]).sum()).to_local().backward()
    if not torch.equal(w.grad.full_tensor(), torch.full((5, 4), 3.0)):
        wrong.append(f"group {w.grad.full_tensor()}")
    return wrong


@pytest.mark.parametrize("placement", PLACEMENTS[:4], ids=str)
def test_gradients_come_back_in_the_inputs_placement(placement: Placement) -> None:
    assert run_ranks(4, autograd_case, placement) == [[]] * 4


def partial_case(placement: Placement) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    w = distribute_tensor(whole_matrix(), mesh, [RowAtomic()]).requires_grad_()
    sums = w.sum(0)
    assert sums.placements[0].is_partial()
    moved = sums.redistribute(placements=[placement])
    (moved**3).sum().backward()
    assert w.grad is not None and not w.grad.placements[0].is_partial()
    return [moved.detach().full_tensor(), w.grad.full_tensor()]


def whole_matrix() -> Tensor:
    return torch.randn((5, 4), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("placement", [RowAtomic(), RowAtomic((0, 3, 1)), Owner(1)], ids=str)
def test_gradients_of_a_reduction_scattered_to_rows_or_an_owner(placement: Placement) -> None:
    w = whole_matrix().requires_grad_()
    sums = w.sum(0)
    (sums**3).sum().backward()
    for got in run_ranks(3, partial_case, placement):
        torch.testing.assert_close(got, [sums.detach(), w.grad])


def object_case(placement: Placement) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrong = []
    full = torch.randn((5, 4), generator=torch.Generator().manual_seed(0))
    tensor = distribute_tensor(full, mesh, [placement])
    copied = copy.deepcopy(tensor)
    if copied.placements != tensor.placements or not torch.equal(copied.full_tensor(), full):
        wrong.append("deepcopy")
    if copied.to_local().numel() and copied.to_local().data_ptr() == tensor.to_local().data_ptr():
        wrong.append("deepcopy shares storage")
    buffer = io.BytesIO()
    torch.save({"t": tensor, "p": placement}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    if loaded["p"] != placement or not torch.equal(loaded["t"].full_tensor(), full):
        wrong.append("torch.load")
    if pickle.loads(pickle.dumps(placement)) != placement:
        wrong.append("pickle")
    layer = nn.Linear(4, 5, device="meta")
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [placement]))
    layer.to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.copy_(distribute_tensor(full, mesh, [placement]))
    if layer.weight.placements != (placement,) or layer.weight.to_local().is_meta:
        wrong.append("to_empty")
    if not torch.equal(layer.weight.full_tensor(), full):
        wrong.append("to_empty values")
    layer.load_state_dict({"weight": tensor * 2, "bias": layer.bias}, strict=True)
    if not torch.equal(layer.weight.full_tensor(), full * 2):
        wrong.append("load_state_dict")
    for name, op in {
        "normal_": lambda t: t.normal_(),
        "uniform_": lambda t: t.uniform_(),
        "rand_like": torch.rand_like,
        "randn_like": torch.randn_like,
        "dropout": lambda t: torch.nn.functional.dropout(t, 0.5),
        "xavier": lambda t: torch.nn.init.xavier_uniform_(t),
        "kaiming": lambda t: torch.nn.init.kaiming_uniform_(t),
        "trunc": lambda t: torch.nn.init.trunc_normal_(t),
    }.items():
        torch.manual_seed(7)
        want = op(full.clone())
        torch.manual_seed(7)
        got = op(tensor.clone())
        if not torch.equal(got.full_tensor(), want):
            wrong.append(name)
    if tensor.sum().item() != pytest.approx(full.sum().item(), abs=1e-5):
        wrong.append("item")
    return wrong


@pytest.mark.parametrize("placement", PLACEMENTS[:4], ids=str)
def test_tensor_as_object(placement: Placement) -> None:
    assert run_ranks(4, object_case, placement) == [[]] * 4
