"""GlobalLayout: hand-checked layouts, error texts, and brute force over small cases."""

from __future__ import annotations

import importlib.util
import math
import pickle
import random
import time
from itertools import pairwise, product
from pathlib import Path

import expecttest
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_owner.layout import (
    GlobalLayout,
    ShardLayout,
    build_row_atomic_layout,
)
from dtensor_owner.mesh_ranges import Range, sharded_mesh_dims
from placements.block_atomic import BlockAtomic
from placements.row_atomic import RowAtomic

REFERENCE = [(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)]
DEEPSEEK_V3_DENSE_LAYER = [
    (1536, 7168),
    (24576, 1536),
    (576, 7168),
    (32768, 512),
    (7168, 16384),
    (18432, 7168),
    (18432, 7168),
    (7168, 18432),
]


class LayoutTexts(expecttest.TestCase):
    def test_padded_reference(self):
        layout = build_row_atomic_layout(REFERENCE, 5, shard_layout=ShardLayout.PADDED)
        self.assertEqual(layout.tensor_to_offset, (0, 12, 32, 28, 48))
        self.assertEqual(layout.rank_to_offset, (0, 12, 24, 36, 48))
        self.assertEqual(layout.size, 60)
        self.assertExpectedInline(
            str(layout),
            """\
5 tensors on 5 ranks, size 60 = payload 52 + padding 8 (15.4 %)
rank 0 [0, 12): tensor 0 rows [0, 2)
rank 1 [12, 24): tensor 1 rows [0, 3)
rank 2 [24, 36): tensor 1 rows [3, 4) | tensor 3 rows [0, 1) | gap 2 | tensor 2 rows [0, 1)
rank 3 [36, 48): tensor 2 rows [1, 4)
rank 4 [48, 60): tensor 4 rows [0, 1) | gap 6""",
        )

    def test_unpadded_reference(self):
        # 52 / 5 = 10.4: the ideal cuts 10.4, 20.8, 31.2 and 41.6 move to rows of 6, 4, 4 and 4.
        layout = build_row_atomic_layout(REFERENCE, 5)
        self.assertExpectedInline(
            str(layout),
            """\
5 tensors on 5 ranks, size 52 = payload 52 + padding 0 (0.0 %)
rank 0 [0, 12): tensor 0 rows [0, 2)
rank 1 [12, 20): tensor 1 rows [0, 2)
rank 2 [20, 32): tensor 1 rows [2, 4) | tensor 2 rows [0, 1)
rank 3 [32, 40): tensor 2 rows [1, 3)
rank 4 [40, 52): tensor 2 rows [3, 4) | tensor 3 rows [0, 1) | tensor 4 rows [0, 1)""",
        )

    def test_more_ranks_than_rows(self):
        layout = build_row_atomic_layout([(1, 3), (0, 5), (2, 2)], 6)
        self.assertExpectedInline(
            str(layout),
            """\
3 tensors on 6 ranks, size 7 = payload 7 + padding 0 (0.0 %)
rank 0 [0, 0): nothing
rank 1 [0, 3): tensor 0 rows [0, 1)
rank 2 [3, 3): nothing
rank 3 [3, 5): tensor 2 rows [0, 1)
rank 4 [5, 5): nothing
rank 5 [5, 7): tensor 2 rows [1, 2)""",
        )
        self.assertEqual(layout.padding_report().empty_ranks, (0, 2, 4))
        self.assertEqual(layout.placement(1), RowAtomic((0,) * 6))

    def test_blocks_with_a_short_last_block(self):
        layout = build_row_atomic_layout([(70, 2), (32, 4)], 3, block_size=32)
        self.assertExpectedInline(
            str(layout),
            """\
2 tensors on 3 ranks, size 268 = payload 268 + padding 0 (0.0 %)
rank 0 [0, 64): tensor 0 rows [0, 32)
rank 1 [64, 140): tensor 0 rows [32, 70)
rank 2 [140, 268): tensor 1 rows [0, 32)""",
        )
        self.assertEqual(layout.placement(0), BlockAtomic(32, (32, 38, 0)))

    def test_report(self):
        layout = build_row_atomic_layout(
            DEEPSEEK_V3_DENSE_LAYER, 16, block_size=32, shard_layout=ShardLayout.PADDED
        )
        self.assertExpectedInline(
            str(layout.padding_report(itemsize=2)),
            """\
payload 583,467,008, padding 473,497,600 (81.2 %), \
132,120,576 bytes per rank, 7 of 16 ranks empty""",
        )

    def assert_error(self, expected: str, shapes, dp_size, **options):
        with self.assertRaises(ValueError) as caught:
            build_row_atomic_layout(shapes, dp_size, **options)
        self.assertEqual(str(caught.exception), expected)

    def test_errors(self):
        self.assert_error("dp_size must be >= 1, got 0.", [(2, 3)], 0)
        self.assert_error("block_size must be >= 1, got 0.", [(2, 3)], 2, block_size=0)
        self.assert_error(
            "Tensor 1 has the 0-D shape (): it has no rows. Give it shape (1,).", [(2, 3), ()], 2
        )
        self.assert_error(
            "Tensor 0 has shape (4, 0): only dim 0 may be 0, and no dim negative.", [(4, 0)], 2
        )
        self.assert_error(
            "Tensor 0 (33, 2) has 33 rows, not a multiple of block_size=32, which a padded layout "
            "needs: use ShardLayout.UNPADDED, whose last block may be short.",
            [(33, 2)],
            2,
            block_size=32,
            shard_layout=ShardLayout.PADDED,
        )


@pytest.mark.parametrize(
    "shapes, dp_size, offsets, size",
    [
        # Offsets that Megatron-FSDP v2's builder gives for the same input.
        ([(5, 4), (2, 6), (3,)], 2, (0, 24, 20), 48),
        ([(4, 4), (1, 6)], 2, (0, 18), 24),
    ],
)
def test_padded_offsets_of_the_reference_implementation(shapes, dp_size, offsets, size):
    layout = build_row_atomic_layout(shapes, dp_size, shard_layout=ShardLayout.PADDED)
    assert (layout.tensor_to_offset, layout.size) == (offsets, size)


@pytest.mark.parametrize("dp_size, percent, empty", [(4, 13.2, 0), (16, 81.2, 7), (64, 262.3, 46)])
def test_padding_of_a_deepseek_v3_layer(dp_size, percent, empty):
    shapes = DEEPSEEK_V3_DENSE_LAYER
    padded = build_row_atomic_layout(
        shapes, dp_size, block_size=32, shard_layout=ShardLayout.PADDED
    ).padding_report()
    assert padded.payload == 583_467_008
    assert (round(padded.percent, 1), len(padded.empty_ranks)) == (percent, empty)
    unpadded = build_row_atomic_layout(shapes, dp_size, block_size=32).padding_report()
    assert (unpadded.padding, unpadded.percent, unpadded.empty_ranks) == (0, 0.0, ())


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(tensor_to_offset=(0, 5)), "Tensors overlap: tensor 0 ends at 6, but tensor 1"),
        (dict(tensor_to_offset=(0, 9)), r"Tensor 1 \(2, 2\) at \[9, 13\) leaves"),
        (dict(tensor_to_offset=(-1, 6)), r"Tensor 0 \(2, 3\) at \[-1, 5\) leaves"),
        (dict(tensor_to_offset=(0,)), "2 tensor shapes, but 1 offsets"),
        (dict(size=-1), "size must be >= 0, got -1"),
        (dict(rank_to_offset=()), "rank_to_offset is empty"),
        (dict(rank_to_offset=(1, 3)), "must start at 0"),
        (dict(rank_to_offset=(0, 11)), "within the size 10"),
        (dict(rank_to_offset=(0, 6, 3)), "rank 1 starts at 6 and rank 2 at 3"),
        (dict(block_size=0), "block_size must be >= 1"),
    ],
)
def test_wrong_layouts_are_refused(fields, message):
    good = dict(
        tensor_shapes=((2, 3), (2, 2)), tensor_to_offset=(0, 6), rank_to_offset=(0, 6), size=10
    )
    GlobalLayout(**good)
    with pytest.raises(ValueError, match=message):
        GlobalLayout(**(good | fields))


def test_a_boundary_within_a_row_is_refused():
    layout = GlobalLayout(((4, 3),), (0,), (0, 4), 12)
    with pytest.raises(ValueError, match=r"starts at 4, element 4 of tensor 0.* cuts a row"):
        layout.validate_for_row_atomic(1)
    with pytest.raises(ValueError, match="cuts a row"):
        layout.placement(0)
    rows = GlobalLayout(((4, 3),), (0,), (0, 3), 12)
    rows.validate_for_row_atomic(1)
    with pytest.raises(ValueError, match="cuts a block of 2 rows"):
        rows.validate_for_row_atomic(2)


def test_layouts_are_values():
    layout = build_row_atomic_layout(REFERENCE, 5)
    again = build_row_atomic_layout([list(shape) for shape in REFERENCE], 5)
    assert layout == again and hash(layout) == hash(again)
    assert pickle.loads(pickle.dumps(layout)) == layout
    others = [
        build_row_atomic_layout(REFERENCE, 4),
        build_row_atomic_layout(REFERENCE, 5, block_size=2),
        build_row_atomic_layout(REFERENCE, 5, shard_layout=ShardLayout.PADDED),
    ]
    assert len({layout, *others}) == 4


# ------------------------------------------------------------------------------ brute force

shapes = st.lists(
    st.lists(st.integers(1, 5), max_size=2).flatmap(
        lambda rest: st.integers(0, 9).map(lambda rows: (rows, *rest))
    ),
    max_size=6,
)


def padded_shapes(draw_shapes, block_size):
    return [(shape[0] * block_size, *shape[1:]) for shape in draw_shapes]


def holders(layout: GlobalLayout) -> list[list[tuple[int, int]]]:
    """The (tensor, element) pairs each rank holds, element by element."""
    stops = [*layout.rank_to_offset[1:], layout.size]
    held = []
    for start, stop in zip(layout.rank_to_offset, stops, strict=True):
        pairs = []
        for i, shape in enumerate(layout.tensor_shapes):
            offset = layout.tensor_to_offset[i]
            pairs += [(i, e) for e in range(math.prod(shape)) if start <= offset + e < stop]
        held.append(pairs)
    return held


@given(shapes, st.integers(1, 9), st.integers(1, 4), st.sampled_from(ShardLayout))
def test_every_element_lies_on_one_rank_and_blocks_stay_whole(shapes, dp_size, block, kind):
    if kind is ShardLayout.PADDED:
        shapes = padded_shapes(shapes, block)
    layout = build_row_atomic_layout(shapes, dp_size, block_size=block, shard_layout=kind)
    held = holders(layout)
    everything = [(i, e) for i, shape in enumerate(shapes) for e in range(math.prod(shape))]
    assert sorted(pair for pairs in held for pair in pairs) == everything
    for i, shape in enumerate(shapes):
        unit = block * math.prod(shape[1:])
        first_rank_of_block: dict[int, int] = {}
        rows = [0] * dp_size
        for rank, pairs in enumerate(held):
            elements = [e for t, e in pairs if t == i]
            rows[rank] = len(elements) // math.prod(shape[1:])
            for e in elements:
                assert first_rank_of_block.setdefault(e // unit, rank) == rank
        assert layout.rows(i) == tuple(rows)
        expected = RowAtomic(rows) if block == 1 else BlockAtomic(block, rows)
        assert layout.placement(i) == expected
    empty = tuple(rank for rank, pairs in enumerate(held) if not pairs)
    assert layout.padding_report().empty_ranks == empty
    assert layout.padding_report().payload == len(everything)


@given(shapes, st.integers(1, 9), st.integers(1, 4))
def test_unpadded_cuts_are_the_nearest_boundaries(shapes, dp_size, block):
    layout = build_row_atomic_layout(shapes, dp_size, block_size=block)
    size = sum(map(math.prod, shapes))
    assert layout.size == size and layout.padding_report().padding == 0
    ends = [0, *(sum(map(math.prod, shapes[: i + 1])) for i in range(len(shapes)))]
    assert layout.tensor_to_offset == tuple(ends[:-1])
    for k, boundary in enumerate(layout.rank_to_offset):
        if not size:
            assert boundary == 0
            continue
        # The tensor that contains the ideal point size * k / dp_size, and all its boundaries.
        i = next(i for i in range(len(shapes)) if size * k < ends[i + 1] * dp_size)
        cuts = [*range(ends[i], ends[i + 1], block * math.prod(shapes[i][1:])), ends[i + 1]]
        nearest = min(abs(cut * dp_size - size * k) for cut in cuts)
        assert boundary == max(c for c in cuts if abs(c * dp_size - size * k) == nearest)


@given(shapes, st.integers(1, 9), st.integers(1, 4))
def test_padded_shards_are_equal_multiples_of_the_chunk(shapes, dp_size, block):
    shapes = padded_shapes(shapes, block)
    layout = build_row_atomic_layout(
        shapes, dp_size, block_size=block, shard_layout=ShardLayout.PADDED
    )
    chunk = math.lcm(*(block * math.prod(shape[1:]) for shape in shapes))
    assert len({segment.numel for segment in layout.segments}) == 1
    assert layout.segments[0].numel % chunk == 0
    for offset, shape in zip(layout.tensor_to_offset, shapes, strict=True):
        assert offset % (block * math.prod(shape[1:])) == 0
    # Something is stored in the last round of chunks, so no smaller multiple would have done.
    assert layout.size - chunk * dp_size < max(
        (o + math.prod(s) for o, s in zip(layout.tensor_to_offset, shapes, strict=True)), default=1
    )


# -------------------------------------------------------------------------------- meshes


class Other:
    """Stands for a placement that does not shard the buffer."""


@given(shapes, st.sampled_from([(2, 3), (3, 2), (1, 4), (4, 1), (2, 2)]))
def test_sharding_a_second_mesh_dim_only_narrows_ranges(shapes, mesh):
    outer, inner = mesh
    layout = build_row_atomic_layout(shapes, outer * inner)
    row = RowAtomic()
    seen = []
    for o, i in product(range(outer), range(inner)):
        both = layout.get_rank_range(mesh, (row, row), (o, i))
        one = layout.get_rank_range(mesh, (Other(), row), (o, i))
        none = layout.get_rank_range(mesh, (Other(), Other()), (o, i))
        assert both == layout.segments[i * outer + o]
        assert one == Range(
            layout.segments[i * outer].start, layout.segments[(i + 1) * outer - 1].stop
        )
        assert none == Range(0, layout.size)
        assert both == one.intersect(both) and one == none.intersect(one)
        assert both == layout.get_rank_range(mesh, (row, row), o * inner + i)
        seen.append(both)
    assert sorted(seen) == sorted(layout.segments)


def test_mesh_errors():
    layout = build_row_atomic_layout([(3, 2)], 4)
    with pytest.raises(ValueError, match="must come last"):
        sharded_mesh_dims((RowAtomic(), Other()))
    with pytest.raises(ValueError, match="4 segments cannot be dealt out to 3 ranks"):
        layout.get_rank_range((3,), (RowAtomic(),), 0)
    for rank in (4, -1, (4,), (0, 0)):
        with pytest.raises(ValueError, match="not in a mesh of shape"):
            layout.get_rank_range((4,), (RowAtomic(),), rank)


def test_ten_thousand_tensors_on_1024_ranks():
    generator = random.Random(0)
    shapes = [(generator.randint(1, 500), generator.randint(1, 400)) for _ in range(10_000)]
    start = time.perf_counter()
    layout = build_row_atomic_layout(shapes, 1024)
    seconds = time.perf_counter() - start
    assert all(a <= b for a, b in pairwise(layout.rank_to_offset))
    # Quadratic code would take minutes. The measured time is in benchmarks/layout_speed.py.
    assert seconds < 10


# ---------------------------------------------------------------------------------- docs


def _script(name: str):
    path = Path(__file__).parent.parent / "benchmarks" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_docs_page_shows_what_the_script_and_the_layouts_print():
    page = (Path(__file__).parent.parent / "docs" / "layouts.md").read_text(encoding="utf-8")
    table = page.split("<!-- padding_table.py -->\n")[1].split("\n<!-- end -->")[0]
    assert table == _script("padding_table.py").tables()
    for kind in ShardLayout:
        assert str(build_row_atomic_layout(REFERENCE, 5, shard_layout=kind)) in page
    assert repr(build_row_atomic_layout(REFERENCE, 5).placement(1)) in page
