"""DBuffer on gloo ranks, compared with the full tensors in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from dtensor_owner.buffer import DBuffer, contiguous_stride
from dtensor_owner.layout import ShardLayout, build_row_atomic_layout
from placements.block_atomic import BlockAtomic
from placements.row_atomic import RowAtomic
from tests.ranks import run_ranks

# The last shapes leave ranks without rows; the second has rows for nobody.
SHAPES = [(7, 3), (0, 2), (2, 5), (1, 4, 2), (1,)]
KINDS = list(ShardLayout)
ROW = RowAtomic()


def full_tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [
        torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype) + 100 * i
        for i, shape in enumerate(SHAPES)
    ]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.equal(one, other)


def locals_of(buffer: DBuffer) -> list[torch.Tensor]:
    return [buffer.get_local_tensor(i) for i in range(len(buffer.layout.tensor_shapes))]


# ------------------------------------------------------------------------------- 1-D meshes


def shard_and_gather(kind: ShardLayout, dtype: torch.dtype) -> list[tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = full_tensors(dtype)
    sharded = DBuffer.distribute_tensors(tensors, mesh, [ROW], shard_layout=kind)
    shapes = []
    for i, tensor in enumerate(tensors):
        local = sharded.get_local_tensor(i)
        rows = sharded.layout.rows(i)
        mine = tensor.split(list(rows))[dist.get_rank()]
        assert torch.equal(local, mine) and local.is_contiguous()
        dtensor = sharded.get_dtensor(i)
        assert dtensor.placements == (RowAtomic(rows),)
        assert dtensor.shape == tensor.shape and dtensor.stride() == tensor.stride()
        assert torch.equal(dtensor.full_tensor(), tensor)
        if local.numel():  # a view: writing the DTensor writes the buffer
            assert dtensor.to_local().data_ptr() == local.data_ptr()
        shapes.append(tuple(local.shape))
    before = sharded.local_buffer.clone()
    gathered = sharded.redistribute([Replicate()])
    assert_same(locals_of(gathered), tensors)
    again = gathered.redistribute([ROW])
    assert_same(locals_of(again), locals_of(sharded))
    gathered.local_buffer.zero_()  # results share nothing with their source
    again.local_buffer.zero_()
    assert torch.equal(sharded.local_buffer, before)
    out = DBuffer(mesh, [Replicate()], sharded.layout, dtype, "cpu")
    assert sharded.redistribute([Replicate()], out=out) is out
    assert_same(locals_of(out), tensors)
    return shapes


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_views_with_true_row_counts(world_size, kind):
    by_rank = run_ranks(world_size, shard_and_gather, kind, torch.float32)
    for i, shape in enumerate(SHAPES):
        assert sum(shapes[i][0] for shapes in by_rank) == shape[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float64])
def test_other_dtypes(dtype):
    run_ranks(3, shard_and_gather, ShardLayout.UNPADDED, dtype)


def one_row_on_many_ranks() -> tuple[int, ...]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = torch.arange(6.0).reshape(1, 6)
    buffer = DBuffer.distribute_tensors([tensor], mesh, [ROW])
    assert torch.equal(buffer.redistribute([Replicate()]).get_local_tensor(0), tensor)
    return tuple(buffer.get_local_tensor(0).shape)


def test_more_ranks_than_rows():
    assert sorted(run_ranks(4, one_row_on_many_ranks)) == [(0, 6), (0, 6), (0, 6), (1, 6)]


def reduce(kind: ShardLayout, op: str) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = full_tensors()
    mine = [tensor * (rank + 1) for tensor in tensors]
    partial = DBuffer.distribute_tensors(mine, mesh, [Partial(op)], shard_layout=kind)
    factor = sum(range(1, world_size + 1)) / (world_size if op == "avg" else 1)
    expected = [tensor * factor for tensor in tensors]
    before = partial.local_buffer.clone()
    for i, tensor in enumerate(expected):
        scattered = partial.redistribute([ROW]).get_dtensor(i)
        assert torch.equal(scattered.full_tensor(), tensor)
    assert_same(locals_of(partial.redistribute([Replicate()])), expected)
    assert torch.equal(partial.local_buffer, before)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_partial_values_are_summed_or_averaged_once(world_size, op):
    for kind in KINDS:
        run_ranks(world_size, reduce, kind, op)


def strided_sources() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = torch.arange(24.0).reshape(4, 6)
    sources = [base.t(), base[:, ::2], base[:1].expand(5, 6), base.reshape(2, 3, 2, 2)]
    sources[3] = sources[3].contiguous(memory_format=torch.channels_last)
    buffer = DBuffer.distribute_tensors(sources, mesh, [ROW])
    assert_same(locals_of(buffer.redistribute([Replicate()])), sources)
    assert all(local.is_contiguous() for local in locals_of(buffer))


def test_strided_sources_are_stored_contiguously():
    run_ranks(3, strided_sources)


# --------------------------------------------------------------------------- two mesh dims


def walk_a_mesh(ranks: list[list[int]], kind: ShardLayout) -> None:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("outer", "inner"))
    outer, inner = mesh.get_coordinate()
    num_outer = len(ranks)
    tensors = full_tensors()
    layout = build_row_atomic_layout(SHAPES, mesh.size(), shard_layout=kind)
    hfsdp = DBuffer.distribute_tensors(tensors, mesh, [ROW, ROW], layout=layout)
    assert hfsdp.range == layout.segments[inner * num_outer + outer]
    hsdp = hfsdp.redistribute([Replicate(), ROW])
    assert hsdp.range.numel == sum(
        layout.segments[inner * num_outer + o].numel for o in range(num_outer)
    )
    whole = [Replicate(), Replicate()]
    assert_same(locals_of(hsdp.redistribute(whole)), tensors)
    assert_same(locals_of(hfsdp.redistribute(whole)), tensors)
    back = hfsdp.redistribute(whole).redistribute([ROW, ROW])
    assert torch.equal(back.local_buffer, hfsdp.local_buffer)

    rank_factor = dist.get_rank() + 1
    partial = DBuffer.distribute_tensors(
        [tensor * rank_factor for tensor in tensors],
        mesh,
        [Partial("avg"), Partial("avg")],
        layout=layout,
    )
    mean = [tensor * 2.5 for tensor in tensors]  # of the factors 1, 2, 3, 4
    expected = DBuffer.distribute_tensors(mean, mesh, [ROW, ROW], layout=layout)
    assert torch.equal(partial.redistribute([ROW, ROW]).local_buffer, expected.local_buffer)
    assert_same(locals_of(partial.redistribute(whole)), mean)
    replicated = partial.redistribute([Replicate(), ROW])
    assert_same(locals_of(replicated.redistribute(whole)), mean)


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1], [2, 0]]])
def test_one_mesh_dim_after_the_other(ranks):
    for kind in KINDS:
        run_ranks(4, walk_a_mesh, ranks, kind)


# ---------------------------------------------------------------------------------- errors


def errors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = full_tensors()
    buffer = DBuffer.distribute_tensors(tensors, mesh, [ROW])
    with pytest.raises(TypeError, match=r"placed by RowAtomic.*got Shard\(dim=0\)"):
        DBuffer.distribute_tensors(tensors, mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"rows come from its layout: use RowAtomic\(\)"):
        DBuffer.distribute_tensors(tensors, mesh, [RowAtomic((7,))])
    with pytest.raises(ValueError, match=r"2 placements .* for a mesh of shape"):
        DBuffer.distribute_tensors(tensors, mesh, [ROW, ROW])
    with pytest.raises(ValueError, match="at least one tensor"):
        DBuffer.distribute_tensors([], mesh, [ROW])
    with pytest.raises(ValueError, match=r"share a dtype.*torch\.float32.*torch\.float64"):
        DBuffer.distribute_tensors([torch.ones(2), torch.ones(2).double()], mesh, [ROW])
    with pytest.raises(ValueError, match="0-D shape"):
        DBuffer.distribute_tensors([torch.tensor(1.0)], mesh, [ROW])
    with pytest.raises(NotImplementedError, match=r"from Replicate\(\) to Partial"):
        buffer.redistribute([Replicate()]).redistribute([Partial("sum")])
    with pytest.raises(ValueError, match="contiguous tensor of shape"):
        DBuffer.from_local(torch.ones(1000), mesh, [ROW], buffer.layout)
    with pytest.raises(ValueError, match=r"out has dtype torch\.float64, but the result"):
        buffer.redistribute(
            [Replicate()], out=DBuffer(mesh, [Replicate()], buffer.layout, torch.float64, "cpu")
        )
    assert buffer.cast(torch.float32) is buffer
    assert buffer.cast(torch.bfloat16).dtype == torch.bfloat16
    assert buffer.redistribute([BlockAtomic(2)]).range == buffer.range


def test_errors_name_what_is_wrong():
    run_ranks(2, errors)


def test_strides():
    for shape in [(3,), (2, 3), (0, 4), (4, 1, 5)]:
        assert contiguous_stride(shape) == torch.empty(shape).stride()
