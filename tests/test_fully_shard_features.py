"""fully_shard: accumulation without communication, unshard, kept parts, copies, whole tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from dtensor_owner.fully_shard import fully_shard
from dtensor_owner.muon import Muon
from dtensor_owner.whole_tensors import WholeTensors
from placements.owner import Owner
from placements.row_atomic import RowAtomic
from tests.fully_shard_helpers import (
    Model,
    assert_same_gradients,
    assert_same_parameters,
    full,
    gpt_loss,
    make_gpt,
    mesh_1d,
    mine,
    record_gathers,
    shard_gpt,
    tokens_of,
)
from tests.ranks import by_tensor_collectives, run_ranks


def collectives(function: Any) -> dict[str, int]:
    with CommDebugMode() as mode:
        function()
    return {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}


# ------------------------------------------------------------------ gradient accumulation


def accumulation(how: str) -> None:
    model = make_gpt()
    reference = copy.deepcopy(model)
    shard_gpt(model, mesh_1d())
    batches = [tokens_of(step, dist.get_world_size()) for step in range(3)]
    for _ in range(2):  # nothing is left over for the second round
        model.zero_grad()
        reference.zero_grad()
        for i, tokens in enumerate(batches):
            gpt_loss(reference, tokens).backward()
            last = i == len(batches) - 1
            if how == "no_sync" and not last:
                with model.no_sync():
                    counts = collectives(gpt_loss(model, mine(tokens)).backward)
            else:
                if how == "set":
                    model.set_requires_gradient_sync(last)
                counts = collectives(gpt_loss(model, mine(tokens)).backward)
            assert ("reduce_scatter_tensor" in counts) == (last or how == "sync")
            if how != "sync" and not last:
                assert all(p.grad is None for p in model.parameters())
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("how", ["sync", "set", "no_sync"])
def test_accumulated_gradients_are_reduced_once(how):
    run_ranks(3, by_tensor_collectives, accumulation, how)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, i: int) -> Tensor:
        return self.layers[i](x)


def accumulation_of_other_parameters() -> None:
    """A parameter used in the backward that reduced nothing, by one rank only, is not lost."""
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=mesh_1d())
    x = torch.randn(dist.get_world_size(), 4)
    for rank, part in enumerate(x.chunk(len(x))):
        for used in (1 if rank == 0 else 0, 0):
            (reference(part, used).square().mean() / len(x)).backward()
    with model.no_sync():
        model(mine(x), 1 if dist.get_rank() == 0 else 0).square().mean().backward()
    model(mine(x), 0).square().mean().backward()
    assert_same_gradients(model, reference)
    assert model.layers[1].weight.grad is not None and model.layers[2].weight.grad is None


def test_accumulation_over_other_parameters():
    run_ranks(3, accumulation_of_other_parameters)


class Layers(Branches):
    """Each layer is sharded by itself; a forward uses those it is told to."""

    def forward(self, x: Tensor, *used: int) -> Tensor:
        for i in used:
            x = torch.tanh(self.layers[i](x))
        return x


def accumulation_in_modules_that_the_last_backward_leaves_out(
    shard_dims: tuple,
) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    model = Layers()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, shard_dims=shard_dims)
    fully_shard(model, mesh=mesh, shard_dims=shard_dims)
    arrived = []

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            arrived.append(tuple(parameter.shape))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    x = torch.randn(dist.get_world_size(), 4)
    for _ in range(2):  # nothing is left over for the second round
        model.zero_grad()
        reference.zero_grad()
        for used in ((0, 1), (1, 2)):
            reference(x, *used).square().mean().backward()
        with model.no_sync():
            model(mine(x), 0, 1).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        model(mine(x), 1, 2).square().mean().backward()
        assert_same_gradients(model, reference)
    return arrived


@pytest.mark.parametrize("shard_dims", [("inner",), ("outer", "inner")])
def test_what_no_sync_left_is_reduced_by_a_backward_without_that_module(shard_dims):
    for arrived in run_ranks(
        4, accumulation_in_modules_that_the_last_backward_leaves_out, shard_dims
    ):
        assert sorted(arrived) == 6 * [(4,)] + 6 * [(4, 4)]  # once a parameter and round


def accumulation_given_up() -> None:
    model = make_gpt()
    reference = copy.deepcopy(model)
    shard_gpt(model, mesh_1d())
    first, second = (tokens_of(step, dist.get_world_size()) for step in range(2))
    for give_up in (True, False):
        with model.no_sync():
            gpt_loss(model, mine(first)).backward()
        if give_up:
            model.zero_grad()
        else:  # the control: without zero_grad it is part of the next gradient
            gpt_loss(reference, first).backward()
        gpt_loss(model, mine(second)).backward()
        gpt_loss(reference, second).backward()
        assert_same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()


def test_zero_grad_drops_what_no_sync_has_added_up():
    run_ranks(2, accumulation_given_up)


# -------------------------------------------------------------------------- unshard, reshard


def unsharded_by_the_user() -> None:
    model = make_gpt()
    reference = copy.deepcopy(model)
    shard_gpt(model, mesh_1d())
    alive = record_gathers(model)
    tokens = tokens_of(0, dist.get_world_size())
    weight = model.blocks[0].mlp.gate.weight
    for module in (model, model.blocks[0]):
        module.unshard()
    assert type(model.blocks[0].mlp.gate.weight) is Tensor
    assert model.blocks[0].mlp.gate.weight.shape == (11, 8)
    assert dict(model.named_parameters())["blocks.0.mlp.gate.weight"] is weight
    assert alive() == ["", "blocks.0"]
    with torch.no_grad():
        assert collectives(lambda: model(tokens[:, 1:])) and alive() == ["", "blocks.0"]
    # A method other than forward may use the weights, and gradients arrive.
    product = model.blocks[0].mlp.gate(torch.ones(2, 8)).square().mean()
    reference.blocks[0].mlp.gate(torch.ones(2, 8)).square().mean().backward()
    product.backward()
    assert alive() == ["", "blocks.0"]  # that was no backward of the module
    gpt_loss(reference, tokens).backward()
    gpt_loss(model, mine(tokens)).backward()
    assert_same_gradients(model, reference)
    assert alive() == [] and model.blocks[0].mlp.gate.weight is weight
    model.unshard()
    model.reshard()
    model.reshard()
    assert alive() == []
    for trained in (model, reference):
        torch.optim.AdamW(trained.parameters(), lr=0.1, foreach=True).step()
    torch.testing.assert_close(model(tokens[:, 1:]), reference(tokens[:, 1:]))


def test_unshard_and_reshard():
    run_ranks(3, by_tensor_collectives, unsharded_by_the_user)


def steps_between(options: dict[str, Any]) -> None:
    """Foreach optimizers do not count up versions: nothing stale may be used after a step."""
    model = make_gpt()
    reference = copy.deepcopy(model)
    shard_gpt(model, mesh_1d(), **options)
    tokens = tokens_of(0, dist.get_world_size())
    optimizers = [
        torch.optim.SGD(trained.parameters(), lr=0.5, foreach=True)
        for trained in (model, reference)
    ]
    for step in range(4):
        for trained, batch, optimizer in zip(
            (model, reference), (mine(tokens), tokens), optimizers
        ):
            with torch.no_grad():
                trained(tokens[:, 1:])
            gpt_loss(trained, batch).backward()
            if step == 1:
                gpt_loss(trained, batch)  # whose backward never comes
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)


@pytest.mark.parametrize("keep", [True, None, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_weights_are_never_older_than_the_last_step(keep, prefetch):
    run_ranks(4, steps_between, {"reshard_after_forward": keep, "prefetch": prefetch})


# ----------------------------------------------------------------- kept by some neighbours


def kept_by_neighbours(num_ranks: int | None) -> tuple[list[int], int]:
    model = make_gpt()
    reference = copy.deepcopy(model)
    shard_gpt(model, mesh_1d(), reshard_after_forward=num_ranks)
    alive = record_gathers(model)
    tokens = tokens_of(0, dist.get_world_size())
    found = []
    for _ in range(2):
        gpt_loss(reference, tokens).backward()
        loss = gpt_loss(model, mine(tokens))
        found.append(len(alive()))
        counts = collectives(loss.backward)
    assert_same_gradients(model, reference)
    assert alive() == []
    with torch.no_grad():
        model(tokens[:, 1:])
    assert alive() == []
    return found, sum(n for name, n in counts.items() if "reduce" not in name)


def test_weights_kept_by_neighbours():
    groups, case = 3, (by_tensor_collectives, kept_by_neighbours)
    assert run_ranks(4, *case, 2) == [([0, 0], groups)] * 4
    assert run_ranks(4, *case, 1) == [([groups] * 2, 0)] * 4  # kept by every rank
    assert run_ranks(4, *case, 4) == [([0, 0], groups)] * 4  # sharded again
    assert run_ranks(4, *case, None) == [([1, 1], groups - 1)] * 4  # the root alone


# ------------------------------------------------------------------------------------- copies


def copied_module() -> None:
    model = shard_gpt(make_gpt(), mesh_1d())
    reference = make_gpt()
    tokens = tokens_of(0, dist.get_world_size())
    gpt_loss(model, mine(tokens)).backward()
    copied = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), copied.parameters()):
        assert parameter.placements == other.placements and parameter is not other
        assert parameter.device_mesh is other.device_mesh
        assert torch.equal(full(parameter.grad), full(other.grad))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_parameters(copied, reference, rtol=0, atol=0)
    copied.zero_grad()
    gathered = record_gathers(model)
    alive = record_gathers(copied)
    for _ in range(2):
        for trained, batch in ((reference, tokens), (copied, mine(tokens))):
            gpt_loss(trained, batch).backward()
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(copied, reference)
    assert alive() == []
    with pytest.raises(AssertionError, match="nothing was gathered"):
        gathered()
    block = copy.deepcopy(copied.blocks[0])
    x = torch.randn(1, 4, 8)
    torch.testing.assert_close(block(x), reference.blocks[0](x))


def test_copies_are_modules_of_their_own():
    run_ranks(3, copied_module)


# --------------------------------------------------------------------------- whole tensors


def matrices_of(model: Model) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]


def muon_on_whole_matrices(whole: bool) -> tuple[dict[str, int], list[int]]:
    """Collectives in a step of Muon, and how many matrices each rank owns."""
    model, reference = make_gpt(), make_gpt()
    policy = WholeTensors(eligible_fn=lambda name, _: "embedding" not in name and "pos" not in name)
    shard_gpt(model, mesh_1d(), whole_tensors=policy if whole else None)
    matrices = matrices_of(model)
    kind = Owner if whole else RowAtomic
    assert all(isinstance(p.placements[0], kind) for p in matrices)
    assert isinstance(model.embedding.weight.placements[0], RowAtomic)
    optimizers = [
        Muon(matrices, lr=0.1, ns_dtype=torch.float32),
        torch.optim.Muon(matrices_of(reference), lr=0.1),
    ]
    tokens = tokens_of(0, dist.get_world_size())
    for _ in range(2):
        for trained, batch, optimizer in zip(
            (model, reference), (mine(tokens), tokens), optimizers
        ):
            gpt_loss(trained, batch).backward()
            counts = collectives(optimizer.step)
            if trained is model:
                found = counts
            trained.zero_grad()
    assert_same_parameters(model, reference, rtol=5e-2, atol=5e-3)
    owners = [p.placements[0].rank for p in matrices] if whole else []
    return found, [owners.count(rank) for rank in range(dist.get_world_size())]


def test_muon_steps_without_communication_where_matrices_are_whole():
    results = run_ranks(3, muon_on_whole_matrices, True)
    # The ranks agree on which gradients there are; nothing else is sent.
    assert [found for found, _ in results] == [{"all_reduce": 1}] * 3
    assert min(results[0][1]) >= 4  # of 14 matrices on 3 ranks
    by_rows = run_ranks(3, muon_on_whole_matrices, False)
    assert all(sum(found.values()) > 1 for found, _ in by_rows)
