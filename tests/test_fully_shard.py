"""fully_shard on gloo ranks: losses, gradients and parameters of one process on full tensors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_owner.fully_shard import fully_shard
from dtensor_owner.layout import ShardLayout
from tests.fully_shard_helpers import (
    Shapes,
    assert_same_gradients,
    assert_same_parameters,
    compare_training,
    gpt_loss,
    make_gpt,
    mesh_1d,
    mine,
    record_gathers,
    shard_gpt,
    tokens_of,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize("world_size", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_ten_steps_equal_one_process_and_stock_fsdp(world_size, optimizer):
    # Every layout, and stock FSDP as a second opinion, for the optimizer that people use most.
    kinds = list(ShardLayout) if optimizer == "adamw" else [ShardLayout.UNPADDED]
    for kind in kinds:
        stock = kind is ShardLayout.UNPADDED and optimizer == "adamw"
        arguments = (world_size,), None, kind, optimizer, stock
        assert len(set(run_ranks(world_size, compare_training, *arguments))) == 1


# ------------------------------------------------------------------------ shapes, edge cases


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
    return [tuple(p.to_local().shape) for p in model.parameters() if p.ndim]


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


def on_a_part_of_the_ranks(members: list[list[int]]) -> bool:
    mesh = DeviceMesh("cpu", members, mesh_dim_names=("other", "shard"))["shard"]
    if mesh.get_coordinate() is None:
        return False
    model = make_gpt()
    reference = copy.deepcopy(model)
    shard_gpt(model, mesh)
    tokens = tokens_of(0, mesh.size())
    assert_same_parameters(model, reference, rtol=0, atol=0)
    gpt_loss(reference, tokens).backward()
    gpt_loss(model, tokens.chunk(mesh.size())[mesh.get_local_rank()]).backward()
    assert_same_gradients(model, reference)
    return True


@pytest.mark.parametrize(
    "members", [[[2, 3]], [[1, 3]], [[3, 0, 2]], [[0, 2], [1, 3]], [[3, 1], [2, 0]]]
)
def test_coordinates_on_the_mesh_are_not_global_ranks(members):
    taken_part = run_ranks(4, on_a_part_of_the_ranks, members)
    assert taken_part == [any(rank in row for row in members) for rank in range(4)]
