"""Weights kept between forward and backward by a few neighbours, who gather them again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from placements.collectives import DimGroup, Pending, exchange_flat_async
from placements.geometry import balanced_counts, ranges


class Neighbours:
    """Runs of ranks along the last mesh dim that together keep all gathered weights.

    They exchange their parts within the process group of that mesh dim, in which ranks of
    different runs send each other nothing: a process group for each run would have to be made.

    Args:
        mesh: The mesh; its last dim is sharded.
        num_ranks: Ranks in a run, a divisor of the last mesh dim.
    """

    def __init__(self, mesh: DeviceMesh, num_ranks: int) -> None:
        self._group = DimGroup.of(mesh, mesh.ndim - 1)
        self._num_ranks = num_ranks
        self._first = self._group.coordinate // num_ranks * num_ranks

    def part(self, flat: Tensor) -> Tensor:
        """This rank's part of the flat weights, a copy."""
        counts = balanced_counts(flat.numel(), self._num_ranks)
        start, stop = ranges(counts)[self._group.coordinate - self._first]
        return flat[start:stop].clone()

    def gather_async(self, part: Tensor, numel: int) -> Pending:
        """All ``numel`` weights; every rank along the mesh dim must call it."""
        counts = list(balanced_counts(numel, self._num_ranks))
        place = self._group.coordinate - self._first
        before = sum(counts[:place])
        counts[place] = 0  # a rank sends itself nothing
        received = [0] * self._group.size
        received[self._first : self._first + self._num_ranks] = counts
        others = range(self._first, self._first + self._num_ranks)
        sent = [
            part.numel() if c in others and c != self._group.coordinate else 0
            for c in range(self._group.size)
        ]
        pending = exchange_flat_async(part.repeat(self._num_ranks - 1), sent, received, self._group)
        return pending.then(lambda rest: torch.cat([rest[:before], part, rest[before:]]))
