"""fully_shard on meshes of two dims: replicas of shards (HSDP), and shards of shards (HFSDP)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode

from dtensor_owner.fully_shard import fully_shard
from dtensor_owner.layout import ShardLayout
from dtensor_owner.whole_tensors import WholeTensors
from placements.owner import Owner
from placements.row_atomic import RowAtomic
from tests.fully_shard_helpers import (
    Shapes,
    assert_same_gradients,
    assert_same_parameters,
    compare_training,
    gpt_loss,
    make_gpt,
    mine,
    record_gathers,
    shard_gpt,
    tokens_of,
)
from tests.ranks import by_tensor_collectives, run_ranks

HSDP, HFSDP = None, (0, 1)


@pytest.mark.parametrize("shard_dims", [HSDP, HFSDP])
def test_ten_steps_equal_one_process_and_stock_fsdp(shard_dims):
    arguments = (2, 2), shard_dims, ShardLayout.UNPADDED, "adamw", True
    assert len(set(run_ranks(4, compare_training, *arguments))) == 1


MESHES = [
    *(((n,), None) for n in (2, 3, 4, 6, 8)),
    *((shape, dims) for shape in ((2, 1), (1, 3), (2, 2), (3, 2), (2, 3), (2, 4), (4, 2))
      for dims in (HSDP, HFSDP)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", list(ShardLayout))
@pytest.mark.parametrize("mesh_shape, shard_dims", MESHES)
def test_every_mesh_layout_and_optimizer(mesh_shape, shard_dims, kind, optimizer):
    arguments = mesh_shape, shard_dims, kind, optimizer, True
    world_size = torch.Size(mesh_shape).numel()
    assert len(set(run_ranks(world_size, compare_training, *arguments, timeout=600))) == 1


def train_shapes(
    mesh_shape: tuple[int, ...], shard_dims: tuple[int, ...] | None, kind: ShardLayout, adam: bool
) -> None:
    """Ten steps of a convolution, a 3-D stack and fewer rows than ranks, beside one process."""
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :]
    )
    torch.manual_seed(0)
    model = Shapes()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=mesh, shard_dims=shard_dims, shard_layout=kind)
    make = torch.optim.AdamW if adam else torch.optim.SGD
    optimizers = [make(m.parameters(), lr=0.01) for m in (model, reference)]
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2 * dist.get_world_size(), 3, 6, generator=generator)
        reference(x).square().mean().backward()
        model(mine(x)).square().mean().backward()
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shard_dims", [HSDP, HFSDP])
def test_ten_steps_of_odd_shapes(shard_dims):
    run_ranks(4, train_shapes, (2, 2), shard_dims, ShardLayout.PADDED, True)


@pytest.mark.slow
@pytest.mark.parametrize("adam", [True, False])
@pytest.mark.parametrize("kind", list(ShardLayout))
@pytest.mark.parametrize("mesh_shape, shard_dims", MESHES)
def test_odd_shapes_on_every_mesh(mesh_shape, shard_dims, kind, adam):
    world_size = torch.Size(mesh_shape).numel()
    run_ranks(world_size, train_shapes, mesh_shape, shard_dims, kind, adam, timeout=300)


def odd_shapes(
    ranks: list[list[int]], shard_dims: tuple[int, ...] | None, options: dict
) -> list[tuple[tuple, tuple[int, ...]]]:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("outer", "inner"))
    torch.manual_seed(0)
    model = Shapes()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=mesh, shard_dims=shard_dims, **options)
    assert_same_parameters(model, reference, rtol=0, atol=0)
    x = torch.randn(2 * dist.get_world_size(), 3, 6)
    for step in range(3):
        for trained, batch in ((reference, x), (model, mine(x))):
            trained.zero_grad()
            (trained(batch) - step).square().mean().backward()
            nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        assert_same_gradients(model, reference)
        for trained in (reference, model):
            torch.optim.SGD(trained.parameters(), lr=0.5).step()
    assert_same_parameters(model, reference)
    assert all(isinstance(p, (Owner, Replicate)) for p in model.temperature.placements)
    return [(p.placements, tuple(p.to_local().shape)) for p in model.parameters() if p.ndim]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([[0, 1], [2, 3]], marks=pytest.mark.slow),
        pytest.param([[0, 2], [1, 3]], marks=pytest.mark.slow),
        [[3, 1], [2, 0]],
    ],
)
@pytest.mark.parametrize("shard_dims", [HSDP, HFSDP])
def test_odd_shapes_empty_ranks_and_meshes_in_any_order(ranks, shard_dims):
    for options in (
        {},
        {"shard_layout": ShardLayout.PADDED, "prefetch": 0},
        {"block_size": 2},
        {"whole_tensors": WholeTensors()},
    ):
        by_rank = run_ranks(4, odd_shapes, ranks, shard_dims, options)
        replicas = 2 if shard_dims is HSDP else 1
        # Names are in order of registration: scale, experts, empty, then the children.
        for i, rows in enumerate([1, 2, 0, 5, 5, 1, 1]):
            assert sum(shapes[i][1][0] for shapes in by_rank) == rows * replicas
        matrix = by_rank[0][1][0][-1]
        assert isinstance(matrix, Owner if "whole_tensors" in options else RowAtomic)
        assert isinstance(by_rank[0][1][0][0], Replicate) == (shard_dims is HSDP)


class RankCoded(nn.Module):
    """Its gradient is what its input says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight * factor).sum()


def averaged_once(shape: tuple[int, ...], shard_dims: tuple[int, ...] | None) -> None:
    model = RankCoded()
    fully_shard(model, mesh=init_device_mesh("cpu", shape), shard_dims=shard_dims)
    for _ in range(2):
        model(float(dist.get_rank() + 1)).backward()
    mean = sum(range(1, dist.get_world_size() + 1)) / dist.get_world_size()
    gradient = model.weight.grad
    assert gradient.placements == model.weight.placements
    assert torch.equal(gradient.full_tensor(), torch.full((5, 3), 2 * mean))


@pytest.mark.parametrize("world_size", [1, 4])
def test_gradients_are_averaged_once_over_all_ranks(world_size):
    shapes = [(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2)] if world_size == 4 else [(1,), (1, 1)]
    for shape in shapes:
        for dims in (None, (-2, -1)) if len(shape) > 1 else (None,):
            run_ranks(world_size, averaged_once, shape, dims)


def named_dims_of_a_larger_mesh() -> None:
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("stage", "replicate", "shard"))
    stage = whole["stage"].get_local_rank()
    mesh = whole["replicate", "shard"]
    for shard_dims in ("shard", ("replicate", "shard")):
        model = make_gpt()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + stage)  # each stage has weights and data of its own
        reference = copy.deepcopy(model)
        shard_gpt(model, mesh, shard_dims=shard_dims)
        tokens = tokens_of(stage, 2)
        gpt_loss(reference, tokens).backward()
        gpt_loss(model, tokens.chunk(2)[mesh["shard"].get_local_rank()]).backward()
        assert_same_gradients(model, reference)
        assert {len(p.placements) for p in model.parameters()} == {2}


def test_mesh_dims_by_name_in_a_part_of_a_larger_mesh():
    run_ranks(4, named_dims_of_a_larger_mesh)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.odd = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use_odd: bool) -> torch.Tensor:
        return self.odd(self.always(x)) if use_odd else self.always(x)


def used_on_one_rank(shard_dims: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2)), shard_dims=shard_dims)
    x = torch.randn(8, 4)
    for user in range(4):
        for trained in (model, reference):
            trained.zero_grad()
        parts = [reference(part, rank == user) for rank, part in enumerate(x.chunk(4))]
        (sum(part.square().mean() for part in parts) / 4).backward()
        model(mine(x), dist.get_rank() == user).square().mean().backward()
        assert_same_gradients(model, reference)
        assert model.odd.weight.grad is not None


@pytest.mark.parametrize("shard_dims", [HSDP, HFSDP])
def test_a_parameter_used_on_one_rank_gets_a_gradient_on_all(shard_dims):
    run_ranks(4, used_on_one_rank, shard_dims)


def gathers_over_the_outer_dim() -> list[int]:
    """HFSDP: forward makes weights sharded over the inner dim, which backward uses again."""
    model = shard_gpt(make_gpt(), init_device_mesh("cpu", (2, 2)), shard_dims=HFSDP)
    alive = record_gathers(model)
    tokens = mine(tokens_of(0, 4))
    counts = []
    for _ in range(2):
        with CommDebugMode() as mode:
            loss = gpt_loss(model, tokens)
        counts.append(mode.get_total_counts())
        assert alive() == []
        with CommDebugMode() as mode:
            loss.backward()
        counts.append(mode.get_total_counts())
        assert alive() == []
    return counts


def test_hfsdp_gathers_over_the_outer_dim_once_in_forward_and_backward():
    forward, inner_gathers, reductions = 3 * 2, 3, 3 * 2
    for counts in run_ranks(4, by_tensor_collectives, gathers_over_the_outer_dim):
        assert counts == [forward, inner_gathers + reductions] * 2
