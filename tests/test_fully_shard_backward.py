"""What fully_shard does around backward: re-gathers, memory, checkpointing, compiled blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from dtensor_owner.fully_shard import fully_shard
from tests.fully_shard_helpers import (
    GPT_SIZES,
    assert_same_gradients,
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

# ---------------------------------------------------------- collectives, memory


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
    for counts in run_ranks(world_size, by_tensor_collectives, count_collectives, keep):
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


def peak_of_gathered_weights(prefetch: int) -> list[list[str]]:
    model = shard_gpt(make_gpt(), mesh_1d(), prefetch=prefetch)
    tokens = mine(tokens_of(0, dist.get_world_size()))
    gpt_loss(model, tokens).backward()  # the first step learns the order
    alive = record_gathers(model)
    seen: list[list[str]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: seen.append(alive()))
            module.register_full_backward_hook(lambda *_: seen.append(alive()))
    gpt_loss(model, tokens).backward()
    return seen


@pytest.mark.parametrize("prefetch", [0, 1])
def test_only_the_running_block_the_next_one_and_the_root_are_gathered(prefetch):
    linears = 7
    first = ["", "blocks.0", "blocks.1"] if prefetch else ["", "blocks.0"]
    forward = [first] * linears + [["", "blocks.1"]] * linears
    last = ["", "blocks.1", "blocks.0"] if prefetch else ["", "blocks.1"]
    backward = [last] * linears + [["", "blocks.0"]] * linears
    for seen in run_ranks(3, peak_of_gathered_weights, prefetch):
        assert seen == forward + backward


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


# ----------------------------------------------------------------------------------- compiled


def compiled_blocks(how: str) -> None:
    model, reference = make_gpt(), make_gpt()
    mesh = mesh_1d()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        if how == "forward":
            block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
        if how == "before":
            block.compile(backend=counter)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    alive = record_gathers(model)
    for step in range(3):
        tokens = tokens_of(step, dist.get_world_size())
        for trained, batch in ((reference, tokens), (model, mine(tokens))):
            trained.zero_grad()
            loss = gpt_loss(trained, batch)
            assert trained is reference or alive() == []
            loss.backward()
        assert_same_gradients(model, reference)
    assert counter.frame_count == len(model.blocks)  # one graph a block, no recompilation


@pytest.mark.parametrize("how", ["forward", pytest.param("before", marks=pytest.mark.slow)])
def test_compiled_blocks_give_the_same_gradients_and_keep_no_weights(how):
    run_ranks(2, compiled_blocks, how)
