"""The parameters of a sharded module as users see them, change them and get them wrong."""

from __future__ import annotations

import copy
import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor

from dtensor_owner.fully_shard import FSDPModule, fully_shard
from dtensor_owner.layout import ShardLayout
from dtensor_owner.train.model import GPT
from dtensor_owner.whole_tensors import WholeTensors
from placements import Owner, distribute_tensor
from tests.fully_shard_helpers import (
    GPT_SIZES,
    Model,
    assert_same_gradients,
    assert_same_parameters,
    full,
    gpt_loss,
    make_gpt,
    mesh_1d,
    mine,
    shard_gpt,
    tokens_of,
)
from tests.ranks import run_ranks


def what_modules_see() -> None:
    model = shard_gpt(make_gpt(), mesh_1d())
    block = model.blocks[0]
    linear = block.mlp.gate
    seen: list[Any] = []
    linear.register_forward_hook(
        lambda module, args, output: seen.append(
            (
                type(module.weight),
                module.weight.shape,
                type(dict(module.named_parameters())["weight"]),
            )
        )
    )
    gpt_loss(model, mine(tokens_of(0, dist.get_world_size()))).backward()
    assert seen == [(Tensor, torch.Size([11, 8]), DTensor)]
    assert isinstance(linear.weight, DTensor) and isinstance(linear.weight, nn.Parameter)
    assert type(block).__name__ == "FSDPBlock" and isinstance(block, FSDPModule)


def test_modules_see_full_weights_and_named_parameters_sharded_ones():
    run_ranks(3, what_modules_see)


def state_dict_round_trip() -> None:
    model = shard_gpt(make_gpt(), mesh_1d())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(state) == list(make_gpt().state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    model.load_state_dict(state)
    assert_same_parameters(model, make_gpt(), rtol=0, atol=0)
    tokens = tokens_of(0, dist.get_world_size())[:, 1:]
    torch.testing.assert_close(model(tokens), make_gpt()(tokens))


def test_state_dict_holds_the_sharded_parameters():
    run_ranks(3, state_dict_round_trip)


# ---------------------------------------------- parameters moved, cast or replaced by the user


def distributed_state(source: Model, model: Model) -> dict[str, DTensor]:
    return {
        name: distribute_tensor(value, mesh_1d(), model.get_parameter(name).placements)
        for name, value in source.state_dict().items()
    }


def assert_trains_like(model: Model, reference: Model) -> None:
    tokens = tokens_of(0, dist.get_world_size())
    for _ in range(2):
        for trained, batch in ((reference, tokens), (model, mine(tokens))):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
            gpt_loss(trained, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)
    torch.testing.assert_close(model(tokens[:, 1:]), reference(tokens[:, 1:]))


def built_on_meta() -> None:
    with torch.device("meta"):
        model = GPT(**GPT_SIZES)
    shard_gpt(model, mesh_1d())
    with pytest.raises(RuntimeError, match="on the meta device: call to_empty"):
        model(tokens_of(0, 1)[:, 1:])
    model.to_empty(device="cpu")
    assert all(p.to_local().device.type == "cpu" for p in model.parameters())
    model.load_state_dict(distributed_state(make_gpt(), model))
    assert_trains_like(model, make_gpt())


def cast_to_double() -> None:
    model = shard_gpt(make_gpt(), mesh_1d()).double()
    assert_trains_like(model, make_gpt().double())


def state_assigned() -> None:
    model, source = shard_gpt(make_gpt(), mesh_1d()), make_gpt()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.25)
    model.load_state_dict(distributed_state(source, model), assign=True)
    assert_trains_like(model, source)


def unfrozen_later() -> None:
    model, reference = make_gpt().requires_grad_(False), make_gpt()
    shard_gpt(model, mesh_1d()).requires_grad_(True)
    assert_trains_like(model, reference)


@pytest.mark.parametrize("change", [built_on_meta, cast_to_double, state_assigned, unfrozen_later])
def test_parameters_that_users_change_are_what_the_next_forward_gathers(change):
    run_ranks(3, change)


def replaced_by_something_else() -> None:
    model = shard_gpt(make_gpt(), mesh_1d())
    model.blocks[0].mlp.gate.weight = nn.Parameter(torch.zeros(11, 8))
    with pytest.raises(RuntimeError, match=r"mlp.gate.weight was replaced .* by a Parameter"):
        model(tokens_of(0, 1)[:, 1:])
    model = shard_gpt(make_gpt(), mesh_1d())
    model.blocks[0].mlp.gate.weight.data = torch.zeros(12, 8)
    with pytest.raises(RuntimeError, match=r"by a DTensor of shape \(12, 8\).* of shape \(11, 8\)"):
        model(tokens_of(0, 1)[:, 1:])
    model = shard_gpt(make_gpt(), mesh_1d())
    model.blocks[0].mlp.gate.weight = None
    with pytest.raises(RuntimeError, match="by NoneType"):
        model(tokens_of(0, 1)[:, 1:])
    model = shard_gpt(make_gpt(), mesh_1d())
    model.blocks[0].mlp.gate.double()
    with pytest.raises(ValueError, match=r"now differ in dtype or device.*float32.*float64"):
        model(tokens_of(0, 1)[:, 1:])


def test_a_replacement_that_does_not_fit_is_refused():
    run_ranks(2, replaced_by_something_else)


# ----------------------------------------------------------------------------- mixed precision


def mixed_precision() -> float:
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    outer = dataclasses.replace(inner, output_dtype=torch.float32)
    model, stock, mesh = make_gpt(), make_gpt(), mesh_1d()
    for shard, sharded in ((fully_shard, model), (stock_fully_shard, stock)):
        for block in sharded.blocks:
            shard(block, mesh=mesh, mp_policy=inner)
        shard(sharded, mesh=mesh, mp_policy=outer)
    tokens = mine(tokens_of(0, dist.get_world_size()))
    output = model(tokens[:, :-1])
    assert output.dtype == torch.float32
    loss, expected = gpt_loss(model, tokens), gpt_loss(stock, tokens)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    loss.backward()
    expected.backward()
    stock_parameters = dict(stock.named_parameters())
    largest = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        torch.testing.assert_close(
            full(parameter.grad), full(stock_parameters[name].grad), rtol=1e-5, atol=1e-7
        )
        largest = max(largest, full(parameter.grad).abs().max().item())
    return largest


def test_mixed_precision_computes_in_bf16_and_keeps_fp32_shards():
    assert all(math.isfinite(largest) and largest > 0 for largest in run_ranks(3, mixed_precision))


def reduced_in_float16(size: float) -> list[float]:
    """The gradient of each rank is ``size``; returns their average, and what sums would be."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    fully_shard(model, mesh=mesh_1d(), mp_policy=policy)
    model(torch.full((1, 1), size, dtype=torch.float16)).sum().backward()
    total = torch.tensor(size, dtype=torch.float16) * dist.get_world_size()
    return [full(model.weight.grad).item(), total.item()]


@pytest.mark.parametrize("size, total", [(40_000.0, math.inf), (2.0**-23, 3 * 2.0**-23)])
def test_a_reduction_in_float16_neither_overflows_nor_vanishes(size, total):
    for average, sum_of_all in run_ranks(3, reduced_in_float16, size):
        assert average == pytest.approx(size, rel=1e-3) and sum_of_all == total


class TwoDtypes(nn.Module):
    """A bf16 layer beside fp32 ones, and buffers that training writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.low = nn.Linear(3, 5, dtype=torch.bfloat16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.low(self.norm(x).bfloat16()).float()


def two_dtypes_and_buffers() -> list[tuple[str, torch.dtype]]:
    torch.manual_seed(0)
    reference = TwoDtypes()
    model = copy.deepcopy(reference)
    buffers = dict(model.named_buffers())
    fully_shard(model, mesh=mesh_1d())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    x = torch.randn(4, 3)  # the same on all ranks: batch norm has statistics of its own on each
    for _ in range(3):
        for trained, optimizer in zip((reference, model), optimizers):
            optimizer.zero_grad()
            trained(x).square().mean().backward()
            optimizer.step()
    # Two equal gradients have an average without rounding.
    assert_same_parameters(model, reference, rtol=0, atol=0)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name] and type(buffer) is Tensor
        assert torch.equal(buffer, reference.get_buffer(name)), name
    assert model.calls.item() == 3
    return [(name, parameter.dtype) for name, parameter in model.named_parameters()]


def test_parameters_of_two_dtypes_beside_buffers_that_stay_as_they_are():
    expected = [(name, p.dtype) for name, p in TwoDtypes().named_parameters()]
    assert run_ranks(2, two_dtypes_and_buffers) == [expected] * 2


# --------------------------------------------------------------------------------------- errors


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.fail = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise ArithmeticError("on purpose")
        return self.layer(x)


def forward_that_raises() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), FailsOnce())
    reference = copy.deepcopy(model)
    mesh = mesh_1d()
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(dist.get_world_size(), 3)
    with pytest.raises(ArithmeticError, match="on purpose"):
        model(x)
    assert isinstance(model[1].layer.weight, DTensor) and isinstance(model[0].weight, DTensor)
    model[1].fail = reference[1].fail = False
    reference(x).square().mean().backward()
    model(mine(x)).square().mean().backward()
    assert_same_gradients(model, reference)


def test_a_forward_that_raises_leaves_the_model_usable():
    run_ranks(3, forward_that_raises)


def forward_that_raises_on_one_rank() -> str:
    """After all gathers of the forward: nobody waits for the rank that raises."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), FailsOnce())
    model[2].fail = False
    reference = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, mesh=mesh_1d())
    fully_shard(model, mesh=mesh_1d())
    x = torch.randn(dist.get_world_size(), 3)

    def compare_a_step() -> None:
        model.zero_grad()
        reference.zero_grad()
        reference(x).square().mean().backward()
        model(mine(x)).square().mean().backward()
        assert_same_gradients(model, reference)

    compare_a_step()
    model[2].fail = dist.get_rank() == 1
    raised = "nothing"
    try:
        model(mine(x))
    except ArithmeticError as error:
        raised = str(error)
    model[2].fail = False
    compare_a_step()
    compare_a_step()
    return raised


def test_a_forward_that_raises_on_one_rank_leaves_the_model_usable():
    assert run_ranks(3, forward_that_raises_on_one_rank) == ["nothing", "on purpose", "nothing"]


def changed_between_forward_and_backward() -> None:
    model = shard_gpt(make_gpt(), mesh_1d())
    loss = gpt_loss(model, mine(tokens_of(0, dist.get_world_size())))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match=r"One of the parameters \['.*changed in place between"):
        loss.backward()


def test_changing_parameters_before_backward_is_noticed():
    run_ranks(3, changed_between_forward_and_backward)


def errors() -> None:
    mesh = mesh_1d()
    model = make_gpt()
    with pytest.raises(ValueError, match="ModuleList has no forward"):
        fully_shard(model.blocks, mesh=mesh)
    shard_gpt(model, mesh)
    with pytest.raises(ValueError, match="already applied to this FSDPGPT"):
        fully_shard(model, mesh=mesh)
    two_dims = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for dims in ("other", 2, ["shard", "other"]):
        with pytest.raises(ValueError, match=r"the mesh has 2 dims of sizes \(1, 2\)"):
            fully_shard(nn.Linear(2, 2), mesh=two_dims, shard_dims=dims)
    with pytest.raises(ValueError, match=r"mesh dims \[0\] of 2: the sharded dims"):
        fully_shard(nn.Linear(2, 2), mesh=two_dims, shard_dims="replicate")
    with pytest.raises(NotImplementedError, match="rows are sharded over at most two"):
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1, 2)), shard_dims=[0, 1, 2])
    with pytest.raises(ValueError, match=r"reshard_after_forward=3 ranks must divide the 2 ranks"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=3)
    with pytest.raises(ValueError, match=r"needs equal shards, because every rank"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, symmetric_memory=True)
    with pytest.raises(NotImplementedError, match="symmetric_memory has no implementation"):
        padded = ShardLayout.PADDED
        fully_shard(nn.Linear(2, 2), mesh=mesh, symmetric_memory=True, shard_layout=padded)
    elsewhere = SimpleNamespace(device_type="cuda", shape=(2,), ndim=1, mesh_dim_names=None)
    with pytest.raises(ValueError, match=r"weight is on cpu, but the mesh is of cuda devices"):
        fully_shard(nn.Linear(2, 2), mesh=elsewhere)
    sharded = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(NotImplementedError, match=r"is already a DTensor placed \(RowAtomic"):
        unsharded = nn.Linear(2, 2)
        unsharded.weight = sharded.weight
        fully_shard(unsharded, mesh=mesh)
    with pytest.raises(ValueError, match="prefetch must be >= 0, got -1"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, prefetch=-1)
    stock = stock_fully_shard(nn.Linear(4, 2), mesh=mesh)
    with pytest.raises(NotImplementedError, match=r"weight is already a DTensor placed \(Shard"):
        fully_shard(nn.Sequential(stock), mesh=mesh)
    recurrent = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    with pytest.raises(NotImplementedError, match="1 is a LSTM"):
        fully_shard(recurrent, mesh=mesh)
    fully_shard(recurrent, mesh=mesh, ignored_params=recurrent[1].parameters())  # as it says
    recurrent(torch.randn(3, 2))[0].sum().backward()
    assert isinstance(recurrent[0].weight, DTensor)


def failed_call() -> None:
    """Of two groups one cannot be laid out: the other one has not been sharded either."""
    owners = WholeTensors()
    fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 2)), whole_tensors=owners)
    loads = list(owners.loads)
    model = nn.Linear(2, 3)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="balances 2 shards, got a mesh with 1"):
        mesh = init_device_mesh("cpu", (2, 1))
        fully_shard(model, mesh=mesh, whole_tensors=owners)
    with pytest.raises(ValueError, match="3 rows, not a multiple of block_size=2"):
        padded = ShardLayout.PADDED
        options = {"mesh": mesh_1d(), "shard_layout": padded, "block_size": 2}
        fully_shard(model, whole_tensors=owners, **options)
    assert owners.loads == loads and type(model) is nn.Linear
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    fully_shard(model, mesh=mesh_1d(), whole_tensors=owners)


def test_a_call_that_fails_changes_nothing():
    run_ranks(2, failed_call)


def hook_that_raises_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    reference = copy.deepcopy(model)
    fully_shard(model[1], mesh=mesh_1d())
    fully_shard(model, mesh=mesh_1d())
    x = torch.randn(dist.get_world_size(), 3)

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    for module in (model, model[1]):
        hook = module.register_forward_pre_hook(fail, prepend=True)
        with pytest.raises(ArithmeticError, match="on purpose"):
            model(mine(x))
        hook.remove()
        for trained, part in ((reference, x), (model, mine(x))):
            trained.zero_grad()
            trained(part).square().mean().backward()
        assert_same_gradients(model, reference)
        assert model._fully_shard_state.is_root


def test_a_hook_that_raises_before_ours_leaves_the_model_usable():
    run_ranks(2, hook_that_raises_first)


def test_errors_say_what_is_wrong():
    run_ranks(2, errors)


def ignored_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    kept = model[1].weight
    fully_shard(model, mesh=mesh_1d(), ignored_params=[kept])
    assert model[1].weight is kept and type(kept) is nn.Parameter
    assert isinstance(model[1].bias, DTensor)
    model(torch.randn(2, 3)).sum().backward()
    assert kept.grad is not None


def test_ignored_parameters_stay_as_they_are():
    run_ranks(2, ignored_parameters)


# ---------------------------------------------------------------------- parameters of no dims


class Scaled(nn.Module):
    """Logits with a learned temperature, as contrastive models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.6))
        self.linear = nn.Linear(3, 5, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.logit_scale.data.fill_(2.6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.logit_scale.exp()


def a_parameter_of_no_dims(options: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    reference = Scaled()
    model = fully_shard(copy.deepcopy(reference), mesh=mesh_1d(), **options)
    scale = model.logit_scale
    assert isinstance(scale, DTensor) and scale.shape == ()
    assert torch.equal(scale.full_tensor(), reference.logit_scale)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1) for m in (model, reference)
    ]
    for _ in range(4):
        x = torch.randn(2 * dist.get_world_size(), 3)
        with model.no_sync():
            model(mine(x)).sin().mean().backward()
        model(mine(x)).square().mean().backward()
        (reference(x).sin().mean() + reference(x).square().mean()).backward()
        if not options:
            assert_same_gradients(model, reference)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, reference)]
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if options else {}
        torch.testing.assert_close(full(norms[0]), norms[1], **tolerance)
        for trained, optimizer in zip((model, reference), optimizers):
            optimizer.step()
            trained.zero_grad()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, **tolerance)

    state = {name: full(value) for name, value in model.state_dict().items()}
    assert state["logit_scale"].shape == ()
    with torch.device("meta"):
        again = Scaled()
    fully_shard(again, mesh=mesh_1d(), **options).to_empty(device="cpu")
    again.reset_parameters()
    assert math.isclose(again.logit_scale.item(), 2.6, rel_tol=1e-6)
    placed = {
        name: distribute_tensor(state[name], p.device_mesh, p.placements)
        for name, p in again.named_parameters()
    }
    again.load_state_dict(placed)
    copied = copy.deepcopy(again)
    for other in (again, copied):
        torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
        assert other.logit_scale.placements == scale.placements
    return scale.placements


@pytest.mark.parametrize(
    "options",
    [{}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}],
    ids=["fp32", "mixed"],
)
def test_a_parameter_of_no_dims_is_whole_on_one_rank(options):
    assert run_ranks(3, a_parameter_of_no_dims, options) == [(Owner(0),)] * 3
