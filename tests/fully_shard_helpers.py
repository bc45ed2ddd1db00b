"""A small sharded GPT, its batches, and what the fully_shard tests compare."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor_owner.buffer import DBuffer, PendingBuffer
from dtensor_owner.fully_shard import FSDPModule, fully_shard
from dtensor_owner.layout import ShardLayout
from dtensor_owner.train.model import GPT, summed_loss

GPT_SIZES = dict(layers=2, dim=8, heads=2, hidden=11, context=6)  # 11 rows divide by no rank count
BATCH = 2  # sequences a rank
Model = nn.Module


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


class Shapes(nn.Module):
    """Parameters of no dims, of one row, fewer rows than ranks, none; a convolution, a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.convolution = nn.Conv1d(3, 5, 2)
        self.experts = nn.Parameter(torch.randn(2, 5, 3))
        self.head = nn.Linear(3, 1)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x * self.scale).mean(-1)
        x = torch.einsum("bi,eij->bj", x, self.experts)
        return self.head(x) * self.temperature.exp() + self.empty.sum()


# ------------------------------------------------------------------- training, to compare


def train(
    model: GPT, mesh_shape: tuple[int, ...] | None, steps: int, optimizer: str
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final parameters; on all data in one process where there is no mesh."""
    world_size = dist.get_world_size()
    if optimizer == "adamw":
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
    else:
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        tokens = tokens_of(step % 2, world_size)
        loss = gpt_loss(model, tokens if mesh_shape is None else mine(tokens))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        optim.zero_grad()
        mean = loss.detach().clone()
        if mesh_shape is not None:
            dist.all_reduce(mean)
            mean /= world_size
        losses.append(mean.item())
    return losses, {name: full(p.detach()) for name, p in model.named_parameters()}


def compare_training(
    mesh_shape: tuple[int, ...],
    shard_dims: tuple[int, ...] | None,
    kind: ShardLayout,
    optimizer: str,
    stock: bool,
    **options: Any,
) -> float:
    """Ten steps on shards, in one process and with torch's own fully_shard; the last loss."""
    names = ("outer", "inner")[-len(mesh_shape) :]  # torch's own demands them
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = shard_gpt(make_gpt(), mesh, shard_dims=shard_dims, shard_layout=kind, **options)
    losses, parameters = train(model, mesh_shape, 10, optimizer)
    references = [train(make_gpt(), None, 10, optimizer)]
    if stock:
        # Torch has no HFSDP: the same ranks as one mesh dim compute the same.
        stock_mesh = mesh if shard_dims is None else mesh_1d()
        sharded = make_gpt()
        for block in sharded.blocks:
            stock_fully_shard(block, mesh=stock_mesh)
        references.append(
            train(stock_fully_shard(sharded, mesh=stock_mesh), mesh_shape, 10, optimizer)
        )
    for expected_losses, expected_parameters in references:
        torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-5)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected_parameters[name], rtol=1e-3, atol=1e-4)
    assert losses[-1] < losses[0]
    return losses[-1]


# ----------------------------------------------------------------------- what is gathered


class _Gathered:
    """One gather: alive from its issue until the weights are freed."""

    def __init__(self, module: str, pending: PendingBuffer) -> None:
        self.module = module
        self._pending: Any = weakref.ref(pending)
        self._storage: StorageWeakRef | None = None

        def recorded() -> DBuffer:
            buffer = PendingBuffer.wait(self._pending())
            self._storage = StorageWeakRef(buffer.local_buffer.untyped_storage())
            return buffer

        pending.wait = recorded  # without a reference to it, which would keep it alive

    def is_alive(self) -> bool:
        if self._storage is None:
            return self._pending() is not None
        return not self._storage.expired()


def record_gathers(model: Model) -> Callable[[], list[str]]:
    """Record what is gathered from now on; the result names the modules whose weights live."""
    found: list[_Gathered] = []

    def recorded(module: str, start: Callable[[], PendingBuffer]) -> Callable[[], PendingBuffer]:
        def wrapper() -> PendingBuffer:
            pending = start()
            found.append(_Gathered(module, pending))
            return pending

        return wrapper

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in module.parameter_groups:
                group.start_gather = recorded(name, group.start_gather)

    def alive() -> list[str]:
        assert found, "nothing was gathered: record before running the model"
        deadline = time.monotonic() + 0.2  # threads of gloo hold a buffer a moment longer
        while any(gathered.is_alive() for gathered in found) and time.monotonic() < deadline:
            time.sleep(0.005)
        return [gathered.module for gathered in found if gathered.is_alive()]

    return alive
