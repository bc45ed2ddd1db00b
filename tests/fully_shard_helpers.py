"""A small sharded GPT, its batches, and what the fully_shard tests compare."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor_owner.buffer import DBuffer, PendingBuffer
from dtensor_owner.fully_shard import FSDPModule, fully_shard
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
        return [gathered.module for gathered in found if gathered.is_alive()]

    return alive
