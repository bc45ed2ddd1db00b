"""GradientPacking without ranks: every segment holds its gradients and everybody's flags."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor_owner.gradients import GradientPacking
from dtensor_owner.layout import ShardLayout, build_row_atomic_layout

shapes = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=5)


@given(shapes, st.integers(1, 7), st.sampled_from(ShardLayout), st.data())
def test_every_rank_finds_its_rows_and_all_flags(shapes, dp_size, kind, data):
    layout = build_row_atomic_layout(shapes, dp_size, shard_layout=kind)
    packing = GradientPacking(layout)
    used = [data.draw(st.booleans()) for _ in shapes]
    gradients = [
        torch.arange(1.0, 1 + math.prod(shape)).reshape(shape) * (i + 1) if here else None
        for i, (shape, here) in enumerate(zip(shapes, used, strict=True))
    ]
    # Strided gradients count by their values, not by their memory order.
    strided = [g if g is None else g.t().contiguous().t() for g in gradients]
    packed = packing.pack(strided, dtype=torch.float32, device=torch.device("cpu"))
    assert packed.shape == (packing.layout.size,)
    flat = torch.zeros(layout.size)
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            start, stop = layout.get_tensor_range(i)
            flat[start:stop] = gradient.flatten()
    for mine, segment in zip(layout.segments, packing.layout.segments, strict=True):
        numel = mine.numel
        local = packed[segment.start : segment.stop]
        values, nobody = packing.split(local, numel, [False] * len(shapes))
        assert torch.equal(values, flat[mine.start : mine.stop])
        assert nobody == used  # what the flags say
        assert packing.split(local, numel, [True] * len(shapes))[1] == [True] * len(shapes)


def test_equal_shards_and_nearly_equal_ones_need_no_staging_copy():
    for kind in ShardLayout:
        layout = build_row_atomic_layout([(50, 7), (33, 8)], 4, shard_layout=kind)
        sizes = {segment.numel for segment in GradientPacking(layout).layout.segments}
        assert len(sizes) == 1
    few_rows = build_row_atomic_layout([(2, 100)], 4)  # would double: sent as it is
    assert {s.numel for s in GradientPacking(few_rows).layout.segments} == {1, 101}
