"""Shapes on torch's fake process group: eight ranks seen from one process, no data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor, redistribute_group
from placements.boxes import box_shape, local_box


@pytest.fixture(params=[0, 7], ids=["rank 0", "rank 7"])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=8)
    # DTensor's cache of sharding decisions belongs to one rank, and this process plays two.
    _clear_sharding_prop_cache()
    try:
        yield request.param
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


PLACEMENTS = [
    RowAtomic(),
    BlockAtomic(2),
    Owner(0),
    Owner(7),
    Replicate(),
    Shard(0),
    Shard(1),
]


@pytest.mark.parametrize("rows", [17, 5, 2, 0])
def test_every_move_gives_the_planned_shape(rank: int, rows: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    shape = (rows, 3)
    uneven = RowAtomic((0, rows, *[0] * 6))
    for source, target in itertools.product(
        [*PLACEMENTS, uneven, Partial()], [*PLACEMENTS, uneven]
    ):
        if isinstance(source, Partial):
            tensor = DTensor.from_local(torch.ones(shape), mesh, [source])
        else:
            tensor = distribute_tensor(torch.ones(shape), mesh, [source])
        moved = tensor.redistribute(placements=[target])
        wanted = box_shape(local_box(shape, (8,), [target], [rank]))
        assert tuple(moved.to_local().shape) == wanted, (source, target)
        assert tuple(moved.full_tensor().shape) == shape
    groups = [distribute_tensor(torch.ones(shape), mesh, [p]) for p in (Owner(0), RowAtomic())]
    for got in redistribute_group(groups, [Owner(7)]):
        assert got.to_local().shape == (shape if rank == 7 else (0, 0))


def test_two_mesh_dims(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    at = divmod(rank, 4)
    lists = [
        (RowAtomic(), RowAtomic()),
        (Owner(1), Owner(3)),
        (Replicate(), RowAtomic()),
        (RowAtomic(), Shard(1)),
        (Replicate(), Replicate()),
    ]
    for shape, source, target in itertools.product([(5, 3), (0, 2)], lists, lists):
        tensor = distribute_tensor(torch.ones(shape), mesh, source)
        moved = tensor.redistribute(placements=target)
        wanted = box_shape(local_box(shape, (2, 4), target, at))
        assert tuple(moved.to_local().shape) == wanted, (source, target)


def test_ops_keep_the_planned_shape(rank: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    for placement in (RowAtomic(), Owner(7)):
        x = distribute_tensor(torch.ones(5, 3), mesh, [placement])
        held = tuple(x.to_local().shape)
        assert (x * 2 + x).to_local().shape == held
        assert x.sum().full_tensor().shape == ()
