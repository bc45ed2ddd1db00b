"""WholeTensors: which parameters stay whole, each on one rank, and on which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from torch import nn


class WholeTensors:
    """How ``fully_shard`` keeps matrices whole: each on one rank, placed ``Owner``.

    An optimizer that needs whole matrices then steps without communication. A matrix goes to the
    rank with the least load so far, costly ones first; the object remembers the loads, so that
    one object passed to all calls for a model balances the ranks over the whole model, while a
    single block has too few matrices for that.

    Args:
        eligible_fn: Takes the name and the parameter; False has it sharded by rows. By default
            everything with two or more dims is whole.
        cost_fn: Takes a shape; by default its number of elements, which balances memory and
            what gathers send.
    """

    def __init__(
        self,
        *,
        eligible_fn: Callable[[str, nn.Parameter], bool] | None = None,
        cost_fn: Callable[[tuple[int, ...]], float] = prod,
    ) -> None:
        self._eligible_fn = eligible_fn
        self._cost_fn = cost_fn
        self.loads: list[float] = []

    def is_whole(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter stays whole; one without elements never does."""
        if parameter.ndim < 2 or not parameter.numel():
            return False
        return self._eligible_fn is None or self._eligible_fn(name, parameter)

    def assign(self, shapes: Sequence[tuple[int, ...]], num_shards: int) -> list[int]:
        """Owners of some more matrices, added to the loads.

        Raises:
            ValueError: Earlier calls were for another number of shards.
        """
        if not self.loads:
            self.loads = [0] * num_shards
        if len(self.loads) != num_shards:
            raise ValueError(
                f"This WholeTensors balances {len(self.loads)} shards, got a mesh with "
                f"{num_shards}: use one object for each mesh."
            )
        costs = [self._cost_fn(tuple(shape)) for shape in shapes]
        owners = [0] * len(costs)
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            owners[i] = min(range(num_shards), key=self.loads.__getitem__)
            self.loads[owners[i]] += costs[i]
        return owners
