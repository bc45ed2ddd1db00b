"""Bytes of MXFP8 groups, by hand and as text."""

from __future__ import annotations

import expecttest

from dtensor_owner.layout import ShardLayout, build_row_atomic_layout
from dtensor_owner.mxfp8_layout import MXFP8Layout
from dtensor_owner.mxfp8_report import MXFP8GroupReport, mxfp8_lines

SHAPES = [(128, 128), (96, 64), (352, 128)]


def report(kind=ShardLayout.UNPADDED, shapes=SHAPES, ranks=4, **more):
    layout = build_row_atomic_layout(shapes, ranks, block_size=32, shard_layout=kind)
    return MXFP8GroupReport("blocks.0", MXFP8Layout(layout), ranks, **more)


class Text(expecttest.TestCase):
    def test_one_group(self):
        group = report(
            ShardLayout.PADDED,
            ordinary={"norm": "it has 1 dims, not 2", "bias": "it has 1 dims, not 2"},
        )
        text = "\n".join(mxfp8_lines([group, group]))
        self.assertExpectedInline(
            text,
            """\
MXFP8     rowwise data  rowwise scales  columnwise data  columnwise scales  padding  kernel padding
blocks.0        67,584           2,112           67,584              2,112   29,568             896
blocks.0        67,584           2,112           67,584              2,112   29,568             896
all            135,168           4,224          135,168              4,224   59,136           1,792

A step's gathers bring 1,013,760 bytes to the ranks; bf16: 1,966,080 (51.6 %).
Not quantized, as it has 1 dims, not 2: norm in 2 groups, bias in 2 groups.""",
        )

    def test_no_groups(self):
        assert mxfp8_lines([]) == []


def test_bytes_of_planes():
    payload = 128 * 128 + 96 * 64 + 352 * 128
    for kind in ShardLayout:
        group = report(kind)
        padding = group.layouts.data.size - payload
        assert (padding > 0) == (kind is ShardLayout.PADDED)
        data, rowwise, columns_data, columnwise = group.planes
        assert (data.payload, data.padding, data.kernel_padding) == (payload, padding, 0)
        assert (columns_data.payload, columns_data.padding) == (payload, padding)
        for scales in (rowwise, columnwise):
            assert (scales.payload, scales.padding) == (payload // 32, padding // 32)


def test_kernel_padding_is_that_of_whole_tiles():
    (group,) = [report(shapes=[(352, 160)])]
    # Rowwise: 352 x 5 scales in 3 x 2 tiles; columnwise, transposed: 160 x 11 in 2 x 3 tiles.
    assert group.planes[1].kernel_padding == 6 * 128 * 4 - 352 * 5
    assert group.planes[3].kernel_padding == 6 * 128 * 4 - 160 * 11
    assert all(plane.padding == 0 for plane in group.planes)


def test_step_bytes():
    payload = 128 * 128 + 96 * 64 + 352 * 128
    blocks = payload // 32
    for twice in (True, False):
        group = report(gathers_twice=twice)
        assert group.step_bytes == 3 * (1 + twice) * (payload + blocks)
        assert group.bf16_step_bytes == 3 * (1 + twice) * payload * 2
    assert report(ranks=1).step_bytes == report(ranks=1).bf16_step_bytes == 0
