"""Weights kept between forward and backward by a few neighbours, who gather them again."""

from __future__ import annotations

from functools import lru_cache

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from placements.collectives import DimGroup, Pending, all_gather_rows_async
from placements.geometry import balanced_counts, ranges


class Neighbours:
    """Runs of ranks along the last mesh dim that together keep all gathered weights.

    Args:
        mesh: The mesh; its last dim is sharded.
        num_ranks: Ranks in a run, a divisor of the last mesh dim.
    """

    def __init__(self, mesh: DeviceMesh, num_ranks: int) -> None:
        self._group = _group(mesh, num_ranks, mesh.get_group(mesh.ndim - 1))

    def part(self, flat: Tensor) -> Tensor:
        """This rank's part of the flat weights, a copy."""
        counts = balanced_counts(flat.numel(), self._group.size)
        start, stop = ranges(counts)[self._group.coordinate]
        return flat[start:stop].clone()

    def gather_async(self, part: Tensor, numel: int) -> Pending:
        """All ``numel`` weights; every rank of the run must call it."""
        counts = balanced_counts(numel, self._group.size)
        return all_gather_rows_async(part, counts, self._group)


@lru_cache(maxsize=64)
def _group(mesh: DeviceMesh, num_ranks: int, whole_dim: dist.ProcessGroup) -> DimGroup:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    along = mesh.mesh[tuple(coordinate[:-1])].tolist()
    first = coordinate[-1] // num_ranks * num_ranks
    members = along[first : first + num_ranks]
    group = dist.new_group(sorted(members), use_local_synchronization=True)
    order = tuple(dist.get_group_rank(group, rank) for rank in members)
    return DimGroup(group.group_name, num_ranks, coordinate[-1] - first, order)
