"""Tiny and empty tensors, pairs of placements on two mesh dims, and torch's training tools."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor
from tests.ranks import run_ranks
from tests.test_placements_ops import BINARY, UNARY, outcome

Shape = tuple[int, ...]
Found = dict[str, str]
TINY: list[Shape] = [(0, 4), (4, 0), (1,), (), (0,), (2,), (1, 1), (1, 1, 1)]


def values(shape: Shape, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compare(name: str, op: Any, plain: list[Tensor], placed: list[Any]) -> str:
    """What an op does beside the plain tensor: ok, refused, or how it is wrong."""
    try:
        want = op(*plain)
    except Exception:
        want = None  # then ours must fail too, on every rank
    try:
        got = outcome(op, *placed)
    except Exception as error:
        return "ok" if want is None else f"{name}: {error!r}"
    if isinstance(got, str):
        return "refused" if want is not None else "ok"
    if want is None:
        return f"{name}: no error"
    try:
        torch.testing.assert_close(got, want, equal_nan=True)
    except AssertionError as error:
        return f"{name}: {error}"
    return "ok"


def tiny_case(shapes: list[Shape], every: int) -> Found:
    # Torch logs a page for every op that fails, as ops on nothing do here, plain ones too.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    found: Found = {}
    ops = [*((name, op, 1) for name, op in UNARY.items()), *((n, o, 2) for n, o in BINARY.items())]
    count = 0
    for shape in shapes:
        placements: list[Placement] = [Owner(ranks - 1)]
        if shape:
            last = [0] * (ranks - 1) + [shape[0]]
            placements += [RowAtomic(), RowAtomic(last), BlockAtomic(2)]
        for placement in placements:
            plain = [values(shape, seed) for seed in (1, 2)]
            placed = [distribute_tensor(x, mesh, [placement]) for x in plain]
            for name, op, arity in ops:
                count += 1
                if count % every == 0:
                    case = f"{name} of {shape} on {placement}"
                    found[case] = compare(name, op, plain[:arity], placed[:arity])
    return found


def assert_right(results: list[Found]) -> Found:
    """Every rank found the same, and nothing wrong; what was refused."""
    assert all(result == results[0] for result in results)
    wrong = {case: what for case, what in results[0].items() if what not in ("ok", "refused")}
    assert not wrong
    return {case: what for case, what in results[0].items() if what == "refused"}


@pytest.mark.parametrize("ranks", [1, 3])
def test_tiny_tensors(ranks: int) -> None:
    results = run_ranks(ranks, tiny_case, TINY[:4], 5, timeout=120)
    assert len(assert_right(results)) < 5 < len(results[0])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
def test_every_op_on_every_tiny_tensor(ranks: int) -> None:
    for shape in TINY:
        assert_right(run_ranks(ranks, tiny_case, [shape], 1, timeout=300))


PAIRED: list[tuple[Placement, ...]] = [
    (RowAtomic(), RowAtomic()),
    (Shard(1), RowAtomic()),
    (Owner(0), RowAtomic()),
    (Replicate(), RowAtomic()),
    (RowAtomic((5, 0)), Replicate()),
]
SECOND: list[tuple[Placement, ...]] = [
    *PAIRED,
    (Replicate(), RowAtomic((0, 5))),
    (RowAtomic(), Shard(1)),
    (Owner(1), Owner(0)),
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
]


def pair_case(first: tuple[Placement, ...], every: int) -> Found:
    mesh = init_device_mesh("cpu", (2, 2))
    x, y = values((5, 4), 1), values((5, 4), 2)
    dx = distribute_tensor(x, mesh, first)
    found: Found = {}
    count = 0
    for second in SECOND:
        dy = distribute_tensor(y, mesh, second)
        for name, op in BINARY.items():
            for swapped in (False, True):
                count += 1
                if count % every == 0:
                    plain, placed = ([y, x], [dy, dx]) if swapped else ([x, y], [dx, dy])
                    case = f"{name} of {first} and {second}, swapped {swapped}"
                    found[case] = compare(name, op, plain, placed)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", PAIRED, ids=str)
def test_two_splits_on_two_mesh_dims_are_never_mixed_up(first: tuple[Placement, ...]) -> None:
    results = run_ranks(4, pair_case, first, 5, timeout=120)
    assert len(assert_right(results)) < len(results[0])


@pytest.mark.slow
@pytest.mark.parametrize("first", PAIRED, ids=str)
def test_all_ops_of_two_splits(first: tuple[Placement, ...]) -> None:
    assert_right(run_ranks(4, pair_case, first, 1, timeout=300))


# ------------------------------------------------------------------------ torch's own tools


def scaler_case(placement: Placement, overflows: bool) -> tuple[bool, bool, float]:
    """GradScaler: whether the gradients are unscaled and the step done, and its next scale."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = values((5, 4), 1)
    weight = nn.Parameter(distribute_tensor(full, mesh, [placement]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    gradient = values((5, 4), 2) * 8
    if overflows:
        gradient[4, 0] = float("inf")  # in the rows of one rank alone
    weight.grad = distribute_tensor(gradient, mesh, [placement])
    scaler.scale(torch.ones(()))  # a scaler makes its scale when first used
    scaler.unscale_(optimizer)
    unscaled = torch.allclose(weight.grad.full_tensor(), gradient / 8)
    scaler.step(optimizer)
    scaler.update()
    expected = full - 0.5 * gradient / 8
    stepped = torch.allclose(weight.full_tensor().detach(), expected)
    unchanged = torch.equal(weight.full_tensor().detach(), full)
    return unscaled, unchanged if overflows else stepped, scaler.get_scale()


@pytest.mark.parametrize("placement", [RowAtomic((0, 3, 2)), Owner(1)], ids=str)
def test_grad_scaler_finds_an_overflow_on_any_rank(placement: Placement) -> None:
    assert run_ranks(3, scaler_case, placement, False) == [(True, True, 8.0)] * 3
    assert run_ranks(3, scaler_case, placement, True) == [(True, True, 4.0)] * 3


FORMS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
CLASSES: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
]


def optimizer_case(placement: Placement) -> list[str]:
    """Every optimizer in every form that it has, three steps beside plain tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes: list[Shape] = [(5, 4), (5,), (5, 2, 2)]
    wrong = []
    for cls, options in CLASSES:
        for form in FORMS:
            if cls is torch.optim.RMSprop and "fused" in form:
                continue
            plain = [nn.Parameter(values(shape, 0)) for shape in shapes]
            placed = [nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])) for p in plain]
            pair = [cls(params, **options, **form) for params in (plain, placed)]
            for step in range(3):
                for p, d in zip(plain, placed, strict=True):
                    p.grad = values(tuple(p.shape), step + 1)
                    d.grad = distribute_tensor(p.grad, mesh, [placement])
                for optimizer in pair:
                    optimizer.step()
            for p, d in zip(plain, placed, strict=True):
                if not torch.allclose(d.full_tensor(), p, rtol=1e-5, atol=1e-6):
                    wrong.append(f"{cls.__name__} {form} of {tuple(p.shape)}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("placement", [RowAtomic((0, 3, 2)), Owner(1)], ids=str)
def test_every_torch_optimizer_in_every_form(placement: Placement) -> None:
    assert run_ranks(3, optimizer_case, placement, timeout=120) == [[]] * 3


def torch_muon_case() -> tuple[str, bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    outcomes: list[Any] = []
    for placement in (RowAtomic(), Owner(1)):
        weight = nn.Parameter(distribute_tensor(values((6, 4), 0), mesh, [placement]))
        weight.grad = distribute_tensor(values((6, 4), 1), mesh, [placement])
        plain = nn.Parameter(values((6, 4), 0))
        plain.grad = values((6, 4), 1)
        torch.optim.Muon([plain], lr=0.1).step()
        try:
            torch.optim.Muon([weight], lr=0.1).step()
        except NotImplementedError as error:
            outcomes.append(str(error))
        else:
            outcomes.append(torch.allclose(weight.full_tensor(), plain, atol=1e-2))
    return tuple(outcomes)


def test_torchs_muon_steps_on_owners_and_refuses_rows() -> None:
    for on_rows, on_owner in run_ranks(3, torch_muon_case):
        assert on_owner is True
        assert on_rows is True or "redistribute" in on_rows


def mixed_case() -> list[str]:
    """What torch says of a plain tensor beside a placed one."""
    x = distribute_tensor(values((5, 4), 1), init_device_mesh("cpu", (2,)), [RowAtomic()])
    found = []
    for run in (lambda: x + torch.ones(5, 4), lambda: x[torch.tensor([0, 2])]):
        with pytest.raises(RuntimeError) as error:
            run()
        found.append(str(error.value))
    return found


def test_plain_tensors_beside_placed_ones_are_refused() -> None:
    for messages in run_ranks(2, mixed_case):
        assert len(messages) == 2 and all("DTensor" in message for message in messages)


def from_local_case(run_check: bool) -> list[str]:
    """Rank 1 alone gives a local tensor of another shape."""
    mesh = init_device_mesh("cpu", (3,))
    found = []
    for placement, rows in ((RowAtomic((2, 0, 3)), (2, 0, 3)), (Owner(2), (0, 0, 5))):
        mine = rows[dist.get_rank()]
        columns = 4 if mine or placement == RowAtomic((2, 0, 3)) else 0
        local = torch.ones(mine + (dist.get_rank() == 1), columns)
        try:
            DTensor.from_local(
                local, mesh, [placement], run_check=run_check, shape=(5, 4), stride=(4, 1)
            )
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("taken")
    return found


def test_a_wrong_local_shape_is_refused_on_every_rank_where_ranks_check() -> None:
    for messages in run_ranks(3, from_local_case, True):
        assert "taken" not in messages
    unchecked = run_ranks(3, from_local_case, False)
    assert "taken" not in unchecked[1] and unchecked[0] == unchecked[2] == ["taken"] * 2


def shifts_and_out_case() -> list[str]:
    """Shifts and transforms beside the plain tensor; ``out=`` of another shape."""
    mesh = init_device_mesh("cpu", (3,))
    numbers, x = torch.arange(7), values((7, 4), 1)
    found = []
    for placement in (RowAtomic((5, 0, 2)), Owner(1), Replicate()):
        if placement != Replicate():  # stock placements are torch's own affair
            placed = distribute_tensor(numbers, mesh, [placement])
            for run in (lambda n: n << 1, lambda n: n >> 1, lambda n: n << n, lambda n: n >> n):
                torch.testing.assert_close(run(placed).full_tensor(), run(numbers))
        spectrum = torch.fft.rfft(distribute_tensor(x, mesh, [placement]), dim=1)
        torch.testing.assert_close(spectrum.abs().full_tensor(), torch.fft.rfft(x, dim=1).abs())
    for placement in (RowAtomic((5, 0, 2)), Owner(1)):
        placed = distribute_tensor(x, mesh, [placement])
        into = torch.empty_like(placed)
        torch.exp(placed, out=into)
        torch.testing.assert_close(into.full_tensor(), x.exp())
        with pytest.raises(NotImplementedError) as error:
            torch.exp(placed, out=torch.empty_like(placed[:, :1]))
        found.append(str(error.value))
    return found


def test_shifts_transforms_and_out_of_another_shape() -> None:
    for messages in run_ranks(3, shifts_and_out_case):
        assert all("no DTensor is resized" in message for message in messages)
