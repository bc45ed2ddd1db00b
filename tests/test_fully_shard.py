"""fully_shard on gloo ranks: losses, gradients and parameters of one process on full tensors."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from dtensor_owner.fully_shard import FSDPModule, fully_shard
from dtensor_owner.layout import ShardLayout
from dtensor_owner.train.model import GPT, summed_loss
from tests.ranks import run_ranks

GPT_SIZES = dict(layers=2, dim=8, heads=2, hidden=11, context=6)  # 11 rows divide by no rank count
BATCH = 2  # sequences a rank
Model = nn.Module
Loss = Callable[[Model, Tensor], Tensor]


def make_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(**GPT_SIZES)


def shard_gpt(model: GPT, mesh: DeviceMesh, **options: Any) -> GPT:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def gpt_loss(model: Model, tokens: Tensor) -> Tensor:
    """Mean over the batch, so the mean over ranks is the mean over all sequences."""
    return summed_loss(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()


def tokens_of(step: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    shape = (world_size * BATCH, GPT_SIZES["context"] + 1)
    return torch.randint(0, 256, shape, generator=generator)


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def mine(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(model: Model, reference: Model) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = expected[name].grad
        if gradient is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.placements == parameter.placements
        torch.testing.assert_close(
            full(parameter.grad), gradient, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_parameters(model: Model, reference: Model, **tolerance: Any) -> None:
    expected = dict(reference.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter), expected[name], **tolerance)


def record_gathers(model: Model) -> Callable[[], list[str]]:
    """Record what is gathered from now on; the result names the modules whose weights live."""
    storages: list[tuple[str, StorageWeakRef]] = []

    def recorded(module: str, gather: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def wrapper() -> Tensor:
            flat = gather()
            storages.append((module, StorageWeakRef(flat.untyped_storage())))
            return flat

        return wrapper

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in module.parameter_groups:
                group.gather = recorded(name, group.gather)

    def alive() -> list[str]:
        assert storages, "nothing was gathered: record before running the model"
        return [module for module, storage in storages if not storage.expired()]

    return alive


# -------------------------------------------------------------------------------- training


def train(
    shard: Callable[[GPT], GPT], steps: int, optimizer: str, sharded: bool = True
) -> tuple[list[float], dict[str, Tensor]]:
    world_size = dist.get_world_size()
    model = shard(make_gpt())
    if optimizer == "adamw":
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
    else:
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        tokens = tokens_of(step % 2, world_size)
        loss = gpt_loss(model, mine(tokens) if sharded else tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        optim.zero_grad()
        mean = loss.detach().clone()
        if sharded:
            dist.all_reduce(mean)
            mean /= world_size
        losses.append(mean.item())
    return losses, {name: full(p.detach()) for name, p in model.named_parameters()}


def compare_training(kind: ShardLayout, optimizer: str, stock: bool) -> float:
    mesh = mesh_1d()
    losses, parameters = train(
        lambda m: shard_gpt(m, mesh, shard_layout=kind), steps=10, optimizer=optimizer
    )

    def shard_by_torch(model: GPT) -> GPT:
        for block in model.blocks:
            stock_fully_shard(block, mesh=mesh)
        return stock_fully_shard(model, mesh=mesh)

    references = [train(lambda model: model, 10, optimizer, sharded=False)]
    if stock:
        references.append(train(shard_by_torch, 10, optimizer))
    for expected_losses, expected_parameters in references:
        torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-5)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected_parameters[name], rtol=1e-3, atol=1e-4)
    assert losses[-1] < losses[0]
    return losses[-1]


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_ten_steps_equal_one_process_and_stock_fsdp(world_size, optimizer):
    for kind in ShardLayout:
        stock = kind is ShardLayout.UNPADDED
        finals = run_ranks(world_size, compare_training, kind, optimizer, stock)
        assert len(set(finals)) == 1


# ------------------------------------------------------------------------ shapes, edge cases


class Shapes(nn.Module):
    """Parameters of one row, of fewer rows than ranks, a convolution, a 3-D stack, no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.convolution = nn.Conv1d(3, 5, 2)
        self.experts = nn.Parameter(torch.randn(2, 5, 3))
        self.head = nn.Linear(3, 1)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x * self.scale).mean(-1)
        x = torch.einsum("bi,eij->bj", x, self.experts)
        return self.head(x) + self.empty.sum()


def odd_shapes(kind: ShardLayout) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    model = Shapes()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=mesh_1d(), shard_layout=kind)
    x = torch.randn(2 * dist.get_world_size(), 3, 6)
    assert_same_parameters(model, reference, rtol=0, atol=0)
    reference(x).square().mean().backward()
    model(mine(x)).square().mean().backward()
    assert_same_gradients(model, reference)
    return [tuple(p.to_local().shape) for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_odd_shapes_and_empty_ranks(world_size):
    for kind in ShardLayout:
        by_rank = run_ranks(world_size, odd_shapes, kind)
        # Names are in order of registration: scale, experts, empty, then the children.
        for i, rows in enumerate([1, 2, 0, 5, 5, 1, 1]):
            assert sum(shapes[i][0] for shapes in by_rank) == rows
        if world_size > 1:
            assert any(shapes[0][0] == 0 for shapes in by_rank)


class Branches(nn.Module):
    """Uses ``odd`` only where told to; ``never`` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.odd = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor, use_odd: bool) -> Tensor:
        return self.odd(self.always(x)) if use_odd else self.always(x)


def gradients_missing_on_some_ranks() -> list[bool]:
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=mesh_1d())
    x = torch.randn(2 * world_size, 4)
    found = []
    for users in ([world_size - 1], [], list(range(world_size))):
        model.zero_grad()
        reference.zero_grad()
        loss = sum(
            reference(part, rank in users).square().mean()
            for rank, part in enumerate(x.chunk(world_size))
        )
        (loss / world_size).backward()
        model(mine(x), dist.get_rank() in users).square().mean().backward()
        assert_same_gradients(model, reference)
        assert model.never.weight.grad is None
        found.append(model.odd.weight.grad is not None)
    return found


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_a_parameter_used_on_some_ranks_gets_a_gradient_on_all(world_size):
    assert (
        run_ranks(world_size, gradients_missing_on_some_ranks, timeout=30)
        == [[True, False, True]] * world_size
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


def tied_parameters() -> None:
    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    mesh = mesh_1d()
    fully_shard(model.middle, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in reference.named_parameters()
    ]
    tokens = torch.arange(2 * dist.get_world_size() * 3).reshape(-1, 3) % 11
    reference(tokens).square().mean().backward()
    model(mine(tokens)).square().mean().backward()
    assert_same_gradients(model, reference)


def test_tied_parameters_stay_one_parameter():
    run_ranks(3, tied_parameters)


def tied_over_two_groups() -> None:
    model, mesh = Tied(), mesh_1d()
    fully_shard(model.embedding, mesh=mesh)
    with pytest.raises(ValueError, match=r"head.weight is the same parameter as weight of Embed"):
        fully_shard(model, mesh=mesh)


def test_tied_parameters_of_two_groups_are_refused():
    run_ranks(2, tied_over_two_groups)


def frozen_parameters(frozen: list[str]) -> None:
    torch.manual_seed(0)
    model = make_gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    reference = copy.deepcopy(model)
    shard_gpt(model, mesh_1d())
    alive = record_gathers(model)
    groups = [len(block.parameter_groups) for block in model.blocks]
    tokens = tokens_of(0, dist.get_world_size())
    gpt_loss(reference, tokens).backward()
    gpt_loss(model, mine(tokens)).backward()
    assert_same_gradients(model, reference)
    assert alive() == []
    assert groups == [1 if "blocks.0" in frozen else 2, 2 if frozen == ["q"] else 1]


@pytest.mark.parametrize("frozen", [["q"], ["embedding", "blocks.0"]])
def test_frozen_parameters_are_gathered_and_not_reduced(frozen):
    run_ranks(3, frozen_parameters, frozen)


def everything_frozen() -> None:
    model = make_gpt().requires_grad_(False)
    reference = copy.deepcopy(model)
    alive = record_gathers(shard_gpt(model, mesh_1d()))
    tokens = tokens_of(0, dist.get_world_size())
    output = model(tokens[:, 1:])
    assert not output.requires_grad
    torch.testing.assert_close(output, reference(tokens[:, 1:]))
    assert alive() == []


def test_a_model_without_any_gradient():
    run_ranks(3, everything_frozen)


def evaluation(no_grad: bool) -> None:
    model = make_gpt()
    reference = copy.deepcopy(model)
    alive = record_gathers(shard_gpt(model, mesh_1d()).eval())
    tokens = tokens_of(0, dist.get_world_size())
    with torch.no_grad() if no_grad else torch.inference_mode():
        torch.testing.assert_close(model(tokens[:, 1:]), reference(tokens[:, 1:]))
    assert alive() == []
    gpt_loss(reference, tokens).backward()
    gpt_loss(model, mine(tokens)).backward()  # and training works afterwards
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("no_grad", [True, False])
def test_evaluation_leaves_nothing_behind(no_grad):
    run_ranks(3, evaluation, no_grad)


def several_forwards(interleave: bool) -> None:
    model = make_gpt()
    reference = copy.deepcopy(model)
    alive = record_gathers(shard_gpt(model, mesh_1d()))
    world_size = dist.get_world_size()
    batches = [tokens_of(step, world_size) for step in range(3)]
    expected = [gpt_loss(reference, tokens) for tokens in batches]
    losses = [gpt_loss(model, mine(tokens)) for tokens in batches]
    if interleave:
        sum(expected).backward()
        sum(losses).backward()
    else:
        for loss in [*expected, *reversed(losses)]:
            loss.backward()
    assert_same_gradients(model, reference)
    assert alive() == []


@pytest.mark.parametrize("interleave", [True, False])
def test_several_forwards_before_backward(interleave):
    run_ranks(3, several_forwards, interleave)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(x)))


def called_twice() -> None:
    torch.manual_seed(0)
    model = CalledTwice()
    reference = copy.deepcopy(model)
    mesh = mesh_1d()
    fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(dist.get_world_size() * 2, 5)
    reference(x).square().mean().backward()
    model(mine(x)).square().mean().backward()
    assert_same_gradients(model, reference)


def test_a_module_called_twice_in_one_forward():
    run_ranks(3, called_twice)


def retained_graph() -> None:
    model = make_gpt()
    reference = copy.deepcopy(model)
    shard_gpt(model, mesh_1d())
    tokens = tokens_of(0, dist.get_world_size())
    expected, loss = gpt_loss(reference, tokens), gpt_loss(model, mine(tokens))
    for graph in (True, False):
        expected.backward(retain_graph=graph)
        loss.backward(retain_graph=graph)
        assert_same_gradients(model, reference)


def test_backward_twice_through_a_retained_graph():
    run_ranks(3, retained_graph)


# -------------------------------------------------------------------- activation checkpointing


class Checkpointed(nn.Module):
    """Runs a block under activation checkpointing."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            self.runs += 1
            return self.block(x)

        return checkpoint(run, x, use_reentrant=self.reentrant)


def checkpointing(outside: bool, reentrant: bool, keep: bool) -> list[int]:
    model = make_gpt()
    reference = copy.deepcopy(model)
    mesh = mesh_1d()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = Checkpointed(block, reentrant)
        sharded = block if outside else model.blocks[i]
        fully_shard(sharded, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep)
    alive = record_gathers(model)
    tokens = tokens_of(0, dist.get_world_size())
    for _ in range(2):
        gpt_loss(reference, tokens).backward()
        gpt_loss(model, mine(tokens)).backward()
    expected = {f"{name}": p for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            full(parameter.grad), expected[name.replace(".block.", ".")].grad
        )
    assert alive() == []
    return [block.runs for block in model.blocks]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_activation_checkpointing(outside, reentrant, keep):
    """Outside: around the sharded block. Inside: within the module that is sharded."""
    runs = run_ranks(3, checkpointing, outside, reentrant, keep)
    assert runs == [[4, 4]] * 3  # two forwards, each run again in backward


# ---------------------------------------------------------- collectives, memory, weights seen


def count_collectives(keep: bool) -> dict[str, dict[str, int]]:
    model = shard_gpt(make_gpt(), mesh_1d(), reshard_after_forward=not keep)
    alive = record_gathers(model)
    tokens = mine(tokens_of(0, dist.get_world_size()))
    counts: dict[str, dict[str, int]] = {}

    def counted(name: str, function: Callable[[], Any]) -> Any:
        with CommDebugMode() as mode:
            result = function()
        counts[name] = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}
        return result

    loss = counted("forward", lambda: gpt_loss(model, tokens))
    assert alive() == (["", "blocks.0", "blocks.1"] if keep else [])
    counted("backward", loss.backward)
    assert alive() == []
    with torch.no_grad():
        counted("no_grad", lambda: gpt_loss(model, tokens))
    return counts


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("keep", [False, True])
def test_one_gather_and_one_reduce_scatter_per_group(world_size, keep):
    groups = GPT_SIZES["layers"] + 1
    for counts in run_ranks(world_size, count_collectives, keep):
        forward, backward = counts["forward"], counts["backward"]
        assert sum(forward.values()) == groups and "reduce_scatter_tensor" not in forward
        assert sum(backward.values()) == (groups if keep else 2 * groups)
        assert sum(counts["no_grad"].values()) == groups


def one_rank_communicates_nothing() -> int:
    model = shard_gpt(make_gpt(), mesh_1d())
    with CommDebugMode() as mode:
        gpt_loss(model, tokens_of(0, 1)).backward()
    return mode.get_total_counts()


def test_one_rank_communicates_nothing_here():
    assert run_ranks(1, one_rank_communicates_nothing) == [0]


def peak_of_gathered_weights() -> list[list[str]]:
    model = shard_gpt(make_gpt(), mesh_1d())
    alive = record_gathers(model)
    seen: list[list[str]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: seen.append(alive()))
            module.register_full_backward_hook(lambda *_: seen.append(alive()))
    gpt_loss(model, mine(tokens_of(0, dist.get_world_size()))).backward()
    return seen


def test_only_the_running_block_and_the_root_are_gathered():
    linears = 7
    forward = [["", "blocks.0"]] * linears + [["", "blocks.1"]] * linears
    for seen in run_ranks(3, peak_of_gathered_weights):
        assert seen == forward + forward[::-1]


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
    with pytest.raises(NotImplementedError, match="1-D mesh, got mesh dims"):
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, dist.get_world_size())))
    scalar = nn.Linear(2, 2)
    scalar.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"temperature has the 0-D shape \(\)"):
        fully_shard(scalar, mesh=mesh)
    stock = stock_fully_shard(nn.Linear(4, 2), mesh=mesh)
    with pytest.raises(NotImplementedError, match=r"weight is already a DTensor placed \(Shard"):
        fully_shard(nn.Sequential(stock), mesh=mesh)
    with pytest.raises(NotImplementedError, match="1 is a LSTM"):
        fully_shard(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), mesh=mesh)


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
