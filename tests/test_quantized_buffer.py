"""QuantizedDBuffer on gloo ranks, compared with the full tensors quantized in one process."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from dtensor_owner.buffer import DBuffer
from dtensor_owner.layout import ShardLayout, build_row_atomic_layout
from dtensor_owner.mxfp8 import MXFP8Tensor
from dtensor_owner.mxfp8_layout import MXFP8Layout
from dtensor_owner.quantized_buffer import QuantizedDBuffer
from placements.block_atomic import BlockAtomic
from placements.row_atomic import RowAtomic
from tests.ranks import run_ranks

KINDS = list(ShardLayout)
ROW = RowAtomic()
THREE_BLOCKS = [(96, 64)]
GROUP = [(64, 96), (0, 32), (32, 32), (160, 64)]
PLANES = ("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale")


def layout_of(shapes, dp_size, kind=ShardLayout.UNPADDED):
    return build_row_atomic_layout(shapes, dp_size, block_size=32, shard_layout=kind)


# -------------------------------------------------------------------------- derived layouts

shapes_in_blocks = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 4)).map(lambda s: (32 * s[0], 32 * s[1])),
    min_size=1,
    max_size=4,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(shapes_in_blocks, st.integers(1, 7), st.sampled_from(KINDS))
def test_scales_are_cut_where_the_data_is(shapes, dp_size, kind):
    layouts = MXFP8Layout(layout_of(shapes, dp_size, kind))
    for i in range(len(shapes)):
        data, rowwise = layouts.data.placement(i), layouts.rowwise_scale.placement(i)
        columnwise = layouts.columnwise_scale.placement(i)
        assert data == rowwise and isinstance(rowwise, BlockAtomic) and rowwise.block_size == 32
        assert type(columnwise) is RowAtomic
        assert tuple(32 * rows for rows in columnwise.rows) == data.rows
    if kind is ShardLayout.UNPADDED:
        assert layouts.rowwise_scale.size == sum(r * c for r, c in shapes) // 32


def test_larger_blocks_may_stay_together():
    layouts = MXFP8Layout(build_row_atomic_layout([(256, 32)], 3, block_size=64))
    assert layouts.data.placement(0) == BlockAtomic(64, (64, 128, 64))
    assert layouts.rowwise_scale.placement(0) == BlockAtomic(64, (64, 128, 64))
    assert layouts.columnwise_scale.placement(0) == BlockAtomic(2, (2, 4, 2))


class Errors(expecttest.TestCase):
    def text(self, layout, names=None):
        with self.assertRaises(ValueError) as caught:
            MXFP8Layout(layout, names)
        return str(caught.exception)

    def test_shapes_are_refused_by_name(self):
        layout = layout_of([(32, 32), (33, 64)], 2)
        self.assertExpectedInline(
            self.text(layout, ("w", "odd.weight")),
            """odd.weight has shape (33, 64), but MXFP8 needs 2 dims, with dim 0 and dim 1 a multiple of 32: pad it, or keep it in another dtype.""",  # noqa: E501
        )
        self.assertExpectedInline(
            self.text(layout_of([(32,)], 2)),
            """Tensor 0 has shape (32,), but MXFP8 needs 2 dims, with dim 0 and dim 1 a multiple of 32: pad it, or keep it in another dtype.""",  # noqa: E501
        )

    def test_layouts_that_cut_blocks_are_refused(self):
        self.assertExpectedInline(
            self.text(build_row_atomic_layout([(64, 32)], 2)),
            """MXFP8 needs a layout that keeps blocks of 32 rows whole, got one with block_size=1: build it with block_size=32.""",  # noqa: E501
        )


# -------------------------------------------------------------------------------- on ranks


def full_tensors(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for rows, columns in shapes:
        size = torch.logspace(-3, 3, columns)
        tensors.append((torch.randn(rows, columns, generator=generator) * size).to(dtype))
    return tensors


def assert_same_bits(one: MXFP8Tensor, other: MXFP8Tensor) -> None:
    assert one.directions == other.directions
    for name in PLANES:
        first, second = getattr(one, name), getattr(other, name)
        if first is not None:
            assert first.dtype == second.dtype and first.shape == second.shape
            assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), name


def gather_both_ways(shapes, kind, mesh_shape, placements, dtype):
    """Quantize then gather, and gather then quantize; returns this rank's local shapes."""
    mesh = init_device_mesh("cpu", mesh_shape)
    tensors = full_tensors(shapes, dtype)
    layout = layout_of(shapes, mesh.size(), kind)
    master = DBuffer.distribute_tensors(tensors, mesh, placements, layout=layout)
    before = master.local_buffer.clone()
    sharded = QuantizedDBuffer(mesh, placements, layout, "cpu").quantize_from(master)
    gathered = sharded.all_gather()

    replicate = [Replicate()] * mesh.ndim
    gathered_master = master.redistribute(replicate)
    quantized_late = QuantizedDBuffer(mesh, replicate, layout, "cpu").quantize_from(gathered_master)
    for i, tensor in enumerate(tensors):
        assert_same_bits(gathered.get_tensor(i), quantized_late.get_tensor(i))
        assert_same_bits(gathered.get_tensor(i), MXFP8Tensor.quantize(tensor))
    shards = [sharded.get_tensor(i) for i in range(len(shapes))]
    for i, shard in enumerate(shards):
        local = master.get_local_tensor(i)
        assert torch.equal(shard.dequantize(), MXFP8Tensor.quantize(local).dequantize())
    for plane in gathered.planes.values():  # results share nothing with their source
        plane.local_buffer.fill_(1)
    for i, shard in enumerate(shards):
        assert_same_bits(sharded.get_tensor(i), shard)
    assert torch.equal(master.local_buffer, before)
    return [tuple(tuple(getattr(shard, name).shape) for name in PLANES) for shard in shards]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_quantizing_and_gathering_commute(world_size):
    for kind in KINDS:
        for shapes in (THREE_BLOCKS, GROUP):
            by_rank = run_ranks(
                world_size, gather_both_ways, shapes, kind, (world_size,), [ROW], torch.float32
            )
            for i, (rows, columns) in enumerate(shapes):
                mine = [shards[i] for shards in by_rank]
                assert sum(shard[0][0] for shard in mine) == rows
                for local in mine:
                    held = local[0][0]
                    assert held % 32 == 0
                    assert local == (
                        (held, columns),
                        (held, columns // 32),
                        (held, columns),
                        (held // 32, columns),
                    )


def test_three_blocks_leave_two_of_five_ranks_empty():
    by_rank = run_ranks(
        5, gather_both_ways, THREE_BLOCKS, ShardLayout.UNPADDED, (5,), [ROW], torch.float32
    )
    empty = ((0, 64), (0, 2), (0, 64), (0, 64))
    full = ((32, 64), (32, 2), (32, 64), (1, 64))
    assert sorted(shards[0] for shards in by_rank) == [empty, empty, full, full, full]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_masters(dtype):
    run_ranks(3, gather_both_ways, GROUP, ShardLayout.UNPADDED, (3,), [BlockAtomic(32)], dtype)


@pytest.mark.parametrize(
    "placements", [[Replicate(), ROW], [ROW, ROW], [Replicate(), Replicate()]], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_two_mesh_dims(placements, kind):
    for shapes in (THREE_BLOCKS, GROUP):
        run_ranks(4, gather_both_ways, shapes, kind, (2, 2), placements, torch.float32)


def one_direction_at_a_time(kind):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = full_tensors(GROUP)
    layout = layout_of(GROUP, mesh.size(), kind)
    master = DBuffer.distribute_tensors(tensors, mesh, [ROW], layout=layout)
    sharded = QuantizedDBuffer(mesh, [ROW], master.layout, "cpu").quantize_from(master)
    for direction, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
        gathered = sharded.all_gather([direction])
        assert gathered.directions == (direction,)
        assert set(gathered.planes) == {f"{direction}_data", f"{direction}_scale"}
        for i, tensor in enumerate(tensors):
            wanted = MXFP8Tensor.quantize(tensor)
            assert torch.equal(gathered.get_tensor(i).dequantize(), wanted.dequantize(direction))
            for dtype in (torch.float32, torch.bfloat16):  # bf16 holds these values exactly
                values = gathered.dequantize(dtype=dtype).get_local_tensor(i)
                assert values.dtype == dtype
                assert torch.equal(values.float(), wanted.dequantize(direction))
        alone = QuantizedDBuffer(mesh, [ROW], master.layout, "cpu", directions=[direction])
        assert_same_bits(
            alone.quantize_from(master).all_gather().get_tensor(0), gathered.get_tensor(0)
        )
        with pytest.raises(ValueError, match=f"holds only {direction} planes"):
            alone.all_gather([other])
        with pytest.raises(ValueError, match=f"holds only {direction} planes"):
            alone.dequantize(other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_direction_can_be_gathered_alone(kind):
    run_ranks(3, one_direction_at_a_time, kind)


def planes_as_dtensors():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    (tensor,) = full_tensors(THREE_BLOCKS)
    master = DBuffer.distribute_tensors([tensor], mesh, [ROW], block_size=32)
    sharded = QuantizedDBuffer(mesh, [ROW], master.layout, "cpu").quantize_from(master)
    wanted = MXFP8Tensor.quantize(tensor)
    placements = {}
    for name, plane in sharded.planes.items():
        dtensor = plane.get_dtensor(0)
        assert torch.equal(dtensor.full_tensor(), getattr(wanted, name).view(torch.uint8))
        placements[name] = dtensor.placements[0]
    return placements


def test_planes_have_true_placements():
    for placements in run_ranks(5, planes_as_dtensors):
        assert placements["rowwise_data"] == placements["columnwise_data"]
        assert placements["rowwise_scale"] == placements["rowwise_data"]
        assert isinstance(placements["rowwise_scale"], BlockAtomic)
        rows = placements["rowwise_data"].rows
        assert placements["columnwise_scale"] == RowAtomic(tuple(r // 32 for r in rows))


def wrong_masters():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = full_tensors(THREE_BLOCKS)
    master = DBuffer.distribute_tensors(tensors, mesh, [ROW], block_size=32)
    quantized = QuantizedDBuffer(mesh, [ROW], master.layout, "cpu")
    with pytest.raises(ValueError, match="The master has placements"):
        quantized.quantize_from(master.redistribute([Replicate()]))
    other = DBuffer.distribute_tensors(tensors * 2, mesh, [ROW], block_size=32)
    with pytest.raises(ValueError, match="The master has layout"):
        quantized.quantize_from(other)
    with pytest.raises(TypeError, match="float64"):
        quantized.quantize_from(master.cast(torch.float64))
    with pytest.raises(ValueError, match="non-empty selection"):
        QuantizedDBuffer(mesh, [ROW], master.layout, "cpu", directions=[])
    with pytest.raises(ValueError, match="Tensor 0 has shape"):
        QuantizedDBuffer(mesh, [ROW], layout_of([(30, 32)], 2), "cpu")
    return repr(quantized)


def test_wrong_masters_are_refused():
    text = "QuantizedDBuffer(1 tensors, rowwise and columnwise, (RowAtomic(),), cpu)"
    assert run_ranks(2, wrong_masters) == [text, text]
