"""2-D weights of known models, per layer, and how an unpadded layout splits them over ranks."""

from __future__ import annotations

from math import prod

from dtensor_owner.layout import ShardLayout, build_row_atomic_layout
from dtensor_owner.owners import ParameterLayout

Shape = tuple[int, ...]

LLAMA_3_8B_LAYER: list[Shape] = [
    (4096, 4096),  # q
    (1024, 4096),  # k
    (1024, 4096),  # v
    (4096, 4096),  # o
    (14336, 4096),  # gate
    (14336, 4096),  # up
    (4096, 14336),  # down
]
GPT_2_LAYER: list[Shape] = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
_MLA: list[Shape] = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]
DEEPSEEK_V3_DENSE_LAYER: list[Shape] = [*_MLA, (18432, 7168), (18432, 7168), (7168, 18432)]
DEEPSEEK_V3_EXPERT: list[Shape] = [(2048, 7168), (2048, 7168), (7168, 2048)]
DEEPSEEK_V3_MOE_LAYER: list[Shape] = [*_MLA, (256, 7168), *DEEPSEEK_V3_EXPERT * 257]


def split_unpadded(shapes: list[Shape], num_ranks: int) -> dict[int, ParameterLayout]:
    """Layouts of one group of tensors laid out back to back."""
    layout = build_row_atomic_layout(
        shapes, num_ranks, block_size=1, shard_layout=ShardLayout.UNPADDED
    )
    bounds = [*layout.rank_to_offset[:num_ranks], layout.size]
    layouts = {}
    for index, shape in enumerate(shapes):
        start = layout.tensor_to_offset[index]
        stop = start + prod(shape)
        counts = [max(0, min(b, stop) - max(a, start)) for a, b in zip(bounds, bounds[1:])]
        layouts[index] = ParameterLayout(tuple(shape), tuple(counts))
    return layouts
