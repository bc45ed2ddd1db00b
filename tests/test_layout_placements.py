"""What DTensor is told of a group's tensors: the same rows as the buffer holds, on every mesh."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate

from dtensor_owner.layout import (
    GlobalLayout,
    ShardLayout,
    build_row_atomic_layout,
    build_whole_tensor_layout,
)
from dtensor_owner.whole_tensors import WholeTensors
from placements.block_atomic import BlockAtomic
from placements.boxes import box_numel, check_placements, local_box
from placements.owner import Owner
from placements.row_atomic import RowAtomic

ROW = RowAtomic()
MESHES = [
    ((6,), (ROW,)),
    ((2, 3), (Replicate(), ROW)),
    ((2, 3), (ROW, ROW)),
    ((3, 2), (ROW, ROW)),
    ((1, 2, 3), (Replicate(), ROW, ROW)),
    ((2, 1, 3), (Replicate(), Replicate(), ROW)),
]
shapes = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=5)


def assert_boxes_are_what_the_buffer_holds(layout: GlobalLayout) -> None:
    for (mesh, placements), i in product(MESHES, range(len(layout.tensor_shapes))):
        shape = layout.tensor_shapes[i]
        told = layout.tensor_placements(i, mesh, placements)
        check_placements(shape, mesh, told)
        for coordinate in product(*map(range, mesh)):
            held = layout.get_rank_range(mesh, placements, coordinate)
            held = held.intersect(layout.get_tensor_range(i))
            box = local_box(shape, mesh, told, coordinate)
            assert box_numel(box) == held.numel
            if held.numel:
                first = box[0][0] * math.prod(shape[1:])
                assert layout.tensor_to_offset[i] + first == held.start


@given(shapes, st.sampled_from(ShardLayout))
def test_rows_are_placed_where_the_buffer_has_them(shapes, kind):
    assert_boxes_are_what_the_buffer_holds(build_row_atomic_layout(shapes, 6, shard_layout=kind))


@given(shapes, st.sampled_from([2, 4]))
def test_blocks_are_placed_where_the_buffer_has_them(shapes, block_size):
    assert_boxes_are_what_the_buffer_holds(
        build_row_atomic_layout(shapes, 6, block_size=block_size)
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(0, 5)), max_size=6))
def test_whole_tensors_are_placed_where_the_buffer_has_them(tensors):
    layout = build_whole_tensor_layout([t[:2] for t in tensors], 6, [t[2] for t in tensors])
    layout.validate_for_row_atomic()
    assert layout.size == layout.payload
    assert [layout.placement(i) for i in range(len(tensors))] == [Owner(t[2]) for t in tensors]
    assert_boxes_are_what_the_buffer_holds(layout)


def test_an_example_of_each_mesh():
    layout = build_row_atomic_layout([(3, 2), (7, 1)], 4)  # cut at 4, 6, 9 of 13
    assert layout.rows(1) == (0, 1, 3, 3)
    assert layout.tensor_placements(1, (4,), (ROW,)) == (RowAtomic((0, 1, 3, 3)),)
    assert layout.tensor_placements(1, (3, 2), (Replicate(), ROW)) == (
        Replicate(),
        RowAtomic((1, 6)),
    )
    # Rank (outer, inner) holds segment inner * 2 + outer: the inner dim splits first.
    assert layout.tensor_placements(1, (2, 2), (ROW, ROW)) == (
        RowAtomic(((0, 1), (3, 3))),
        RowAtomic((1, 6)),
    )
    blocks = build_row_atomic_layout([(8, 1)], 4, block_size=3)
    assert blocks.tensor_placements(0, (2, 2), (ROW, ROW)) == (
        BlockAtomic(3, ((3, 0), (3, 2))),
        BlockAtomic(3, (3, 5)),
    )
    whole = build_whole_tensor_layout([(3, 2), (7, 1)], 4, [3, 0])
    assert whole.tensor_placements(0, (2, 2), (ROW, ROW)) == (Owner(1), Owner(1))
    assert whole.tensor_placements(0, (3, 2), (Replicate(), ROW)) == (Replicate(), Owner(1))
    assert whole.tensor_placements(0, (3,), (Replicate(),)) == (Replicate(),)


def test_three_sharded_mesh_dims_have_no_placement():
    layout = build_row_atomic_layout([(3, 2)], 8)
    with pytest.raises(NotImplementedError, match=r"mesh dims \[0, 1, 2\]"):
        layout.tensor_placements(0, (2, 2, 2), (ROW, ROW, ROW))


def test_whole_tensor_errors():
    with pytest.raises(ValueError, match=r"2 tensors need one owner of 0 to 1 each, got \(0,\)"):
        build_whole_tensor_layout([(1, 2), (2, 1)], 2, [0])
    with pytest.raises(ValueError, match=r"one owner of 0 to 1 each, got \(2,\)"):
        build_whole_tensor_layout([(1, 2)], 2, [2])
    with pytest.raises(ValueError, match=r"Tensor 0 \(0, 2\) is not whole in one segment"):
        build_whole_tensor_layout([(0, 2)], 2, [0])
    with pytest.raises(ValueError, match="is not whole in one segment"):
        GlobalLayout([(2, 2)], [0], [0, 2], 4, whole_tensors=True)


def test_owners_are_balanced_over_all_calls():
    layer = [(96, 32), (32, 32), (128, 32), (32, 128)]
    policy = WholeTensors()
    for _ in range(24):
        policy.assign(layer, 5)
    assert max(policy.loads) / (sum(policy.loads) / 5) < 1.03
    # Balanced layer by layer, the rank with the largest matrix is the same each time.
    alone = [0] * 5
    for _ in range(24):
        fresh = WholeTensors()
        fresh.assign(layer, 5)
        alone = [a + b for a, b in zip(alone, fresh.loads)]
    assert max(alone) / (sum(alone) / 5) > 1.6
    assert WholeTensors().assign([(2, 2)] * 4, 2) == [0, 1, 0, 1]  # ties: the lowest rank
    with pytest.raises(ValueError, match="balances 5 shards, got a mesh with 4"):
        policy.assign(layer, 4)
