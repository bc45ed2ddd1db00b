"""Owner: the whole tensor on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from placements.base import LayoutPlacement, as_int


@dataclass(frozen=True)
class Owner(LayoutPlacement):
    """The whole tensor on one rank of a mesh dimension, nothing on the others.

    A global tensor ``(d0, d1, ...)`` has local shape ``(d0, d1, ...)`` on the owner and
    ``(0, 0, ...)`` elsewhere; no rank pads. Every dim is zero on purpose: with ``(0, d1)``
    the product ``x.mT @ x`` would be a ``(d1, d1)`` matrix of zeros on every non-owner.

    Args:
        rank: The owner's coordinate on the mesh dimension, not its global rank.

    Raises:
        TypeError, ValueError: ``rank`` is not an int, or negative. A rank past the end of
            the mesh dimension is refused where the mesh is known.

    Source: ``TensorAtomic`` in the Megatron-FSDP v2 design note; ``Owned`` in torchtitan.
    """

    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        rank = as_int("Owner's rank (a coordinate on the mesh dimension)", self.rank, minimum=0)
        object.__setattr__(self, "rank", rank)

    def check_rank(self, num_ranks: int) -> int:
        """The owner's coordinate, after checking it against the size of the mesh dimension."""
        if self.rank >= num_ranks:
            raise ValueError(
                f"{self} names coordinate {self.rank}, but the mesh dimension has {num_ranks} "
                f"ranks: use 0 to {num_ranks - 1} (coordinates on the mesh dimension, not "
                "global ranks)."
            )
        return self.rank
