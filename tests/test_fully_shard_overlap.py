"""What is issued when: gathers ahead of their modules, reductions under the next backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_owner.fully_shard import FSDPModule, fully_shard
from tests.fully_shard_helpers import (
    Model,
    assert_same_gradients,
    assert_same_parameters,
    gpt_loss,
    make_gpt,
    mesh_1d,
    mine,
    record_gathers,
    shard_gpt,
    tokens_of,
)
from tests.ranks import by_tensor_collectives, run_ranks

_ISSUE = {
    "broadcast_": "gather",
    "reduce_scatter_tensor": "reduce",
    "all_to_all_single": "reduce",
}


class _NotedWork(NamedTuple):
    work: Any
    note: Callable[[str], None]
    event: str

    def wait(self) -> None:
        self.note(self.event)
        self.work.wait()


class RecordedCollectives(TorchDispatchMode):
    """Writes down collectives as they are issued and waited for, by the module they are for."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._all_gather = dist.all_gather_single  # its wait is no op that a mode could see
        self.events: list[str] = []
        self._for = ""
        self._waits: dict[int, tuple[Tensor, str]] = {}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                name = name or "root"
                for group in module.parameter_groups:
                    group.start_gather = self._naming(name, group.start_gather)
                    group.start_reduce = self._naming(name, group.start_reduce)
                module.register_forward_hook(self._event_hook(f"forward of {name} ends"))
        for i, block in enumerate(model.blocks):
            for what, linear in (("first", block.attention.q), ("last", block.mlp.down)):
                linear.register_forward_hook(self._event_hook(f"  blocks.{i} computes {what}"))
                linear.register_full_backward_hook(
                    self._event_hook(f"  blocks.{i} backward of {what}")
                )

    def _naming(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def named(*args: Any) -> Any:
            self._for = name
            return function(*args)

        return named

    def __enter__(self) -> RecordedCollectives:
        dist.all_gather_single = self._noted_all_gather  # type: ignore[assignment]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        dist.all_gather_single = self._all_gather
        super().__exit__(*error)

    def _noted_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self._note(f"issue gather {self._for}")
        return _NotedWork(self._all_gather(*args, **kwargs), self._note, f"wait gather {self._for}")

    def _event_hook(self, event: str) -> Callable[..., None]:
        return lambda *_: self.events.append(event)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            name = func._schema.name.split("::")[1]
            if name in _ISSUE:
                self._note(f"issue {_ISSUE[name]} {self._for}")
                # Kept, so that no other tensor gets this address meanwhile.
                self._waits[result.data_ptr()] = result, f"wait {_ISSUE[name]} {self._for}"
            elif name == "wait_tensor" and args[0].data_ptr() in self._waits:
                self._note(self._waits.pop(args[0].data_ptr())[1])
        return result

    def _note(self, event: str) -> None:
        if self.events[-1:] != [event]:  # very uneven shards are sent by one call a rank
            self.events.append(event)


def order_of_issue(prefetch: int) -> list[list[str]]:
    model = shard_gpt(make_gpt(), mesh_1d(), prefetch=prefetch)
    tokens = mine(tokens_of(0, dist.get_world_size()))
    gpt_loss(model, tokens).backward()  # the first step learns the order
    recorded = RecordedCollectives(model)
    with recorded:
        loss = gpt_loss(model, tokens)
        forward, recorded.events = recorded.events, []
        loss.backward()
    return [forward, recorded.events]


FORWARD = {
    0: """\
issue gather root
wait gather root
issue gather blocks.0
wait gather blocks.0
  blocks.0 computes first
  blocks.0 computes last
forward of blocks.0 ends
issue gather blocks.1
wait gather blocks.1
  blocks.1 computes first
  blocks.1 computes last
forward of blocks.1 ends
forward of root ends""",
    1: """\
issue gather root
issue gather blocks.0
wait gather root
issue gather blocks.1
wait gather blocks.0
  blocks.0 computes first
  blocks.0 computes last
forward of blocks.0 ends
wait gather blocks.1
  blocks.1 computes first
  blocks.1 computes last
forward of blocks.1 ends
forward of root ends""",
    2: """\
issue gather root
issue gather blocks.0
issue gather blocks.1
wait gather root
wait gather blocks.0
  blocks.0 computes first
  blocks.0 computes last
forward of blocks.0 ends
wait gather blocks.1
  blocks.1 computes first
  blocks.1 computes last
forward of blocks.1 ends
forward of root ends""",
}
BACKWARD = {
    0: """\
issue gather root
wait gather root
issue gather blocks.1
wait gather blocks.1
  blocks.1 backward of last
  blocks.1 backward of first
issue reduce blocks.1
wait reduce blocks.1
issue gather blocks.0
wait gather blocks.0
  blocks.0 backward of last
  blocks.0 backward of first
issue reduce blocks.0
wait reduce blocks.0
issue reduce root
wait reduce root""",
    1: """\
issue gather root
issue gather blocks.1
wait gather root
issue gather blocks.0
wait gather blocks.1
  blocks.1 backward of last
  blocks.1 backward of first
issue reduce blocks.1
wait gather blocks.0
  blocks.0 backward of last
  blocks.0 backward of first
wait reduce blocks.1
issue reduce blocks.0
wait reduce blocks.0
issue reduce root
wait reduce root""",
    2: """\
issue gather root
issue gather blocks.1
issue gather blocks.0
wait gather root
wait gather blocks.1
  blocks.1 backward of last
  blocks.1 backward of first
issue reduce blocks.1
wait gather blocks.0
  blocks.0 backward of last
  blocks.0 backward of first
issue reduce blocks.0
wait reduce blocks.1
issue reduce root
wait reduce blocks.0
wait reduce root""",
}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_order_of_issue(prefetch):
    orders = run_ranks(3, order_of_issue, prefetch)
    forward, backward = ["\n".join(events) for events in orders[0]]
    assert (forward, backward) == (FORWARD[prefetch], BACKWARD[prefetch])
    assert orders[1:] == orders[:1] * 2
    if prefetch == 1:
        assert run_ranks(3, by_tensor_collectives, order_of_issue, prefetch) == orders


class Router(nn.Module):
    """Runs its layers in an order, with repetitions and omissions, that changes by the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


ORDERS = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3], [3, 3, 0], [], [3, 3, 0], [0, 1], [0, 1, 2, 3]]


def changing_orders(prefetch: int) -> None:
    torch.manual_seed(0)
    model = Router()
    reference = copy.deepcopy(model)
    mesh = mesh_1d()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, prefetch=prefetch)
    fully_shard(model, mesh=mesh, prefetch=prefetch)
    alive = record_gathers(model)
    x = torch.randn(2 * dist.get_world_size(), 5)
    for order in ORDERS:
        for trained, batch in ((reference, x), (model, mine(x))):
            trained.zero_grad()
            output = trained(batch, order)
            if order:
                output.square().mean().backward()
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            optimizer.step()
        assert_same_gradients(model, reference)
    assert alive() == []
    assert_same_parameters(model, reference)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_an_order_that_changes_costs_gathers_and_nothing_else(prefetch):
    run_ranks(3, changing_orders, prefetch)


def half_used_output() -> None:
    """Backward of a module does not run although its weights are gathered ahead for it."""
    torch.manual_seed(0)
    model = Router()
    reference = copy.deepcopy(model)
    mesh = mesh_1d()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def forward(self: Router, x: Tensor, order: list[int]) -> Tensor:
        self.layers[order[0]](x)  # whose result nobody uses
        return self.layers[order[1]](x)

    alive = record_gathers(model)
    x = torch.randn(2 * dist.get_world_size(), 5)
    for trained, batch in ((reference, x), (model, mine(x))):
        trained.forward = forward.__get__(trained)
        for order in ([0, 1], [0, 1], [1, 2], [2, 3]):
            trained(batch, order).square().mean().backward()
    assert_same_gradients(model, reference)
    with torch.no_grad():
        model(x, [2, 3])
    assert alive() == []


def test_weights_gathered_ahead_in_vain_are_dropped():
    run_ranks(2, half_used_output)


def backward_hooks_and_partial_gradients() -> None:
    """Autograd itself delivers the gradients: to hooks, and to torch.autograd.grad."""
    model = make_gpt()
    reference = copy.deepcopy(model)
    shard_gpt(model, mesh_1d(), prefetch=2)
    tokens = tokens_of(0, dist.get_world_size())
    seen: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.__setitem__(name, p.grad.full_tensor())
        )
    for _ in range(2):
        gpt_loss(reference, tokens).backward()
        gpt_loss(model, mine(tokens)).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad)
    expected = torch.autograd.grad(gpt_loss(reference, tokens), reference.blocks[0].mlp.up.weight)
    found = torch.autograd.grad(gpt_loss(model, mine(tokens)), model.blocks[0].mlp.up.weight)
    torch.testing.assert_close(found[0].full_tensor(), expected[0])


def test_hooks_see_gradients_and_autograd_grad_works():
    run_ranks(3, backward_hooks_and_partial_gradients)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def failing_backward() -> None:
    model = make_gpt()
    reference = copy.deepcopy(model)
    shard_gpt(model, mesh_1d())
    tokens = tokens_of(0, dist.get_world_size())
    gpt_loss(model, mine(tokens))
    handle = model.blocks[0].mlp.register_forward_hook(lambda *a: FailsInBackward.apply(a[-1]))
    with pytest.raises(ArithmeticError, match="on purpose"):
        gpt_loss(model, mine(tokens)).backward()
    handle.remove()
    model.zero_grad()
    gpt_loss(reference, tokens).backward()
    gpt_loss(model, mine(tokens)).backward()
    assert_same_gradients(model, reference)


def test_a_backward_that_raises_leaves_the_model_usable():
    run_ranks(3, failing_backward)


def two_roots_on_two_meshes() -> None:
    """Each root keeps an order of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    first, second = make_gpt(), make_gpt()
    reference = copy.deepcopy(first)
    shard_gpt(first, mesh)
    shard_gpt(second, mesh_1d(), prefetch=2)
    tokens = tokens_of(0, 4)
    for _ in range(2):
        gpt_loss(reference, tokens).backward()
        losses = [gpt_loss(model, mine(tokens)) for model in (first, second)]
        sum(losses).backward()
    assert_same_gradients(first, reference)
    assert_same_gradients(second, reference)


def test_two_models_in_turn():
    run_ranks(4, two_roots_on_two_meshes)
