"""Unpadded sharding and owner-computed Muon on top of the ``placements`` package."""

from dtensor_owner.layout import (
    GlobalLayout,
    PaddingReport,
    ShardLayout,
    build_row_atomic_layout,
)

__all__ = [
    "GlobalLayout",
    "PaddingReport",
    "ShardLayout",
    "build_row_atomic_layout",
]
