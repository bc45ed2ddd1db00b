"""A small model in every layout, its state as full tensors, and steps with known gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from dtensor_owner import (
    BlockAtomic,
    Muon,
    Owner,
    RowAtomic,
    ShardLayout,
    WholeTensors,
    distribute_tensor,
    fully_shard,
)

SHAPES = {"a": (10, 6), "b": (6, 10), "c": (5, 4), "d": (1, 3)}  # d: fewer rows than ranks
VECTORS: dict[str, tuple[int, ...]] = {"e": (7,), "f": (1,), "g": ()}

#: Layouts by name; those with a number need that many ranks.
LAYOUTS = ["unpadded", "padded", "blocks", "whole", "hsdp", "hfsdp"]
LAYOUTS += ["fsdp2", "rows", "block_atomic", "owner", "replicate", "plain", "buckets", "adamw"]


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in {**SHAPES, **VECTORS}.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(values))
        self.register_buffer("table", torch.randn(3, generator=generator))

    def forward(self) -> None: ...


def build(layout: str, seed: int = 0) -> tuple[nn.Module, list[Optimizer]]:
    """The model in a layout, with optimizers that suit it."""
    model = shard(Net(seed), layout)
    named = dict(model.named_parameters())
    matrices = [(name, named[name]) for name in SHAPES]
    vectors = [(name, named[name]) for name in VECTORS]
    if layout == "adamw":  # the vectors alone in torch's own optimizer
        owner = Muon([{"params": matrices}], lr=0.02, ns_dtype=torch.float64)
        return model, [owner, torch.optim.AdamW(named[name] for name in VECTORS)]
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]
    options: dict[str, Any] = {"ns_dtype": torch.float64}
    if layout == "buckets":  # other owners, more exchanges, other groups
        groups = [{"params": vectors, "algorithm": "adamw"}]
        groups += [{"params": matrices[:1]}, {"params": matrices[1:]}]
        options |= {"owners": "any", "bucket_numel": 8}
    return model, [Muon(groups, lr=0.02, **options)]


def shard(model: nn.Module, layout: str) -> nn.Module:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    if layout in ("unpadded", "buckets", "adamw"):
        return fully_shard(model, mesh=mesh)
    if layout == "padded":
        return fully_shard(model, mesh=mesh, shard_layout=ShardLayout.PADDED)
    if layout == "blocks":
        return fully_shard(model, mesh=mesh, block_size=4)
    if layout == "whole":
        return fully_shard(model, mesh=mesh, whole_tensors=WholeTensors())
    if layout == "fsdp2":
        # FSDP2 refuses parameters of no dims.
        return stock_fully_shard(model, mesh=mesh, ignored_params={model.g})
    if layout in ("hsdp", "hfsdp"):
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("outer", "inner"))
        dims = ("outer", "inner") if layout == "hfsdp" else "inner"
        return fully_shard(model, mesh=mesh, shard_dims=dims)
    if layout == "plain":
        return model
    for number, (name, parameter) in enumerate(list(model.named_parameters())):
        owner = Owner((number + 1) % ranks)
        placement = {
            "rows": RowAtomic() if parameter.ndim else owner,
            "block_atomic": BlockAtomic(2) if parameter.ndim else owner,
            "owner": owner,
            "replicate": Replicate(),
        }[layout]
        placed = distribute_tensor(parameter.detach(), mesh, [placement])
        model.register_parameter(name, nn.Parameter(placed))
    return model


def full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def snapshot(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Parameters, buffers and state as full tensors; every rank calls this."""
    found = {name: full(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = full(value)
    return found


def put(tensor: Tensor, whole: Tensor) -> None:
    """Give a tensor, placed however, the values of a full one."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(
                distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
            )
        else:
            tensor.copy_(whole)


def put_snapshot(
    model: nn.Module, optimizers: list[Optimizer], values: Mapping[str, Tensor]
) -> None:
    """What a load should do, without any checkpoint."""
    for name, tensor in model.state_dict().items():
        put(tensor, values[name])
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            if any(parameter is other for g in optimizer.param_groups for other in g["params"]):
                for key, value in optimizer.state[parameter].items():
                    put(value, values[f"{name}.{key}"])


def step(model: nn.Module, optimizers: list[Optimizer], number: int) -> None:
    """A step with the same full gradients in every layout."""
    generator = torch.Generator().manual_seed(1000 + number)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        if parameter.requires_grad:
            parameter.grad = whole
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Keys that only one of the two has, or whose values or dtypes differ in any bit."""
    return [
        key
        for key in sorted(one.keys() | other.keys())
        if key not in one
        or key not in other
        or one[key].dtype != other[key].dtype
        or not torch.equal(one[key], other[key])
    ]


def mesh_of(model: nn.Module) -> DeviceMesh:
    return next(p for p in model.parameters() if isinstance(p, DTensor)).device_mesh
