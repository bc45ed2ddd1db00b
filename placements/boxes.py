"""Which part of a tensor each mesh coordinate holds, for our placements and the stock ones.

A box is one half-open range per tensor dim, in global positions. Integers only.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from placements.base import LayoutPlacement
from placements.block_atomic import BlockAtomic
from placements.geometry import chunk_counts, overlap, ranges
from placements.owner import Owner
from placements.row_atomic import RowAtomic

Box = tuple[tuple[int, int], ...]


def is_ours(placement: Placement) -> bool:
    """Whether the placement is one of this package, which torch knows nothing about."""
    return isinstance(placement, LayoutPlacement)


def split_dim(placement: Placement) -> int | None:
    """The tensor dim that the placement cuts, None where it cuts none."""
    if isinstance(placement, RowAtomic):
        return 0
    return placement.dim if type(placement) is Shard else None


def normalized(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Negative shard dims made positive, as torch does."""
    return tuple(Shard(p.dim + ndim) if type(p) is Shard and p.dim < 0 else p for p in placements)


def full_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def box_numel(box: Box) -> int:
    numel = 1
    for start, stop in box:
        numel *= stop - start
    return numel


def intersection(first: Box, second: Box) -> Box | None:
    """The common box of two boxes, or None where they share no element."""
    common = [overlap(a, b) for a, b in zip(first, second, strict=True)]
    return None if None in common else tuple(common)  # type: ignore[arg-type]


def application_order(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Mesh dims in the order in which their placements cut the tensor.

    Left to right, as torch does, but a nested row table comes last: it is keyed by the
    coordinate on the row placement applied before it.
    """
    nested = [d for d, p in enumerate(placements) if isinstance(p, RowAtomic) and p.is_nested]
    return (*(d for d in range(len(placements)) if d not in nested), *nested)


def row_chain(placements: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh dims that cut tensor dim 0, in application order."""
    return tuple(d for d in application_order(placements) if split_dim(placements[d]) == 0)


def split_chain(placements: Sequence[Placement], mesh_dim: int) -> tuple[int, ...]:
    """The mesh dims that cut the tensor dim that ``mesh_dim`` cuts, in application order."""
    dim = split_dim(placements[mesh_dim])
    if dim is None:
        return ()
    return tuple(d for d in application_order(placements) if split_dim(placements[d]) == dim)


def check_placements(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> None:
    """Refuse what has no meaning or no rule, naming mesh dims and placements.

    Raises:
        ValueError: Wrong number of placements, an owner past the mesh dimension, row counts
            that do not fit, a row placement of a 0-dim tensor, a dim the tensor lacks.
        NotImplementedError: ``RowAtomic`` beside another kind of split of dim 0, more than two
            row placements, or a private stock placement beside ours.
    """
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"Got {len(placements)} placements {tuple(placements)} for a mesh of shape "
            f"{tuple(mesh_shape)}: give one placement per mesh dim."
        )
    for mesh_dim, placement in enumerate(placements):
        dim = split_dim(placement)
        if dim is not None and not 0 <= dim < len(shape):
            raise ValueError(
                f"{placement} on mesh dim {mesh_dim} splits dim {dim}, but the tensor has shape "
                f"{tuple(shape)}: use Owner or Replicate() for it."
            )
        if isinstance(placement, Owner):
            placement.check_rank(mesh_shape[mesh_dim])
        # Exact types: torch's private ones (strided shards, norms, masks) mean something else.
        if not is_ours(placement) and type(placement) not in (Replicate, Partial, Shard):
            raise NotImplementedError(
                f"{placement} on mesh dim {mesh_dim} has no rule beside "
                f"{[p for p in placements if is_ours(p)]}: use Shard, Replicate or Partial there."
            )
    _check_row_chain(placements)
    for coordinate in _first_coordinates(mesh_shape, placements):
        local_box(shape, mesh_shape, placements, coordinate)
    _check_nested_blocks(shape, mesh_shape, placements)


def _check_row_chain(placements: Sequence[Placement]) -> None:
    chain = row_chain(placements)
    rows = [d for d in chain if isinstance(placements[d], RowAtomic)]
    if rows and len(rows) != len(chain):
        other = next(d for d in chain if d not in rows)
        raise NotImplementedError(
            f"{placements[rows[0]]} on mesh dim {rows[0]} and {placements[other]} on mesh dim "
            f"{other} both split dim 0: use RowAtomic on both, or Replicate() on one."
        )
    if len(rows) > 2:
        raise NotImplementedError(
            f"RowAtomic on {len(rows)} mesh dims {tuple(rows)}: at most two may split dim 0."
        )
    nested = [d for d in rows if placements[d].is_nested]  # type: ignore[attr-defined]
    if len(nested) > 1 or (nested and len(rows) < 2):
        raise ValueError(
            f"Nested row tables on mesh dims {nested} of {tuple(placements)}: exactly one of two "
            "row placements may be nested; it is keyed by the coordinate on the other."
        )


def _check_nested_blocks(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> None:
    """Blocks count from row 0 of the whole tensor, also where another mesh dim cuts it first."""
    chain = row_chain(placements)
    for mesh_dim in chain[1:]:
        placement = placements[mesh_dim]
        if not isinstance(placement, BlockAtomic):
            continue
        tables = split_tables(shape, mesh_shape, placements, mesh_dim)
        for (start, _), table in zip(
            ranges(split_tables(shape, mesh_shape, placements, chain[0])[0]), tables, strict=True
        ):
            for low, high in ranges(table):
                row = start + low
                if low < high and row % placement.block_size:
                    raise ValueError(
                        f"{placement} on mesh dim {mesh_dim} beside {placements[chain[0]]} on mesh "
                        f"dim {chain[0]} cuts a block: boundary at row {row} is not a multiple of "
                        f"block_size={placement.block_size}. Use BlockAtomic on both, or RowAtomic."
                    )


def _first_coordinates(
    mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[int, ...]]:
    """Coordinates that together meet every row table once."""
    origin = [0] * len(mesh_shape)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Owner):
            origin[mesh_dim] = placement.rank
    chain = row_chain(placements)
    if len(chain) < 2:
        return [tuple(origin)]
    first = chain[0]
    return [
        tuple(index if d == first else at for d, at in enumerate(origin))
        for index in range(mesh_shape[first])
    ]


def is_held(placements: Sequence[Placement], coordinate: Sequence[int]) -> bool:
    """Whether no ``Owner`` keeps the tensor away from this coordinate."""
    return all(
        placement.rank == at
        for placement, at in zip(placements, coordinate, strict=True)
        if isinstance(placement, Owner)
    )


def local_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Box:
    """The part of the global tensor at ``coordinate``; all dims empty where an Owner elsewhere
    holds it. ``Replicate`` and ``Partial`` cut nothing.
    """
    if not is_held(placements, coordinate):
        return tuple((0, 0) for _ in shape)
    box = list(full_box(shape))
    chain = row_chain(placements)
    for mesh_dim in application_order(placements):
        dim = split_dim(placements[mesh_dim])
        if dim is None:
            continue
        start, stop = box[dim]
        first = coordinate[chain[0]] if dim == 0 and mesh_dim != chain[0] else None
        counts = split_counts(placements[mesh_dim], stop - start, mesh_shape[mesh_dim], first)
        low, high = ranges(counts)[coordinate[mesh_dim]]
        box[dim] = (start + low, start + high)
    return tuple(box)


def split_tables(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_dim: int,
) -> tuple[tuple[int, ...], ...]:
    """Sizes of the dim that ``mesh_dim`` splits, by coordinate on it: one table, or for the
    second of two row placements one per coordinate on the mesh dim applied first.
    """
    dim = split_dim(placements[mesh_dim])
    assert dim is not None
    num_ranks = mesh_shape[mesh_dim]
    chain = split_chain(placements, mesh_dim)
    before = chain[: chain.index(mesh_dim)]
    sizes = [shape[dim]]
    for d in before:
        sizes = [
            part
            for index, size in enumerate(sizes)
            for part in split_counts(placements[d], size, mesh_shape[d], index)
        ]
    return tuple(
        split_counts(placements[mesh_dim], size, num_ranks, index if before else None)
        for index, size in enumerate(sizes)
    )


def same_split(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    first: Sequence[Placement],
    second: Sequence[Placement],
    mesh_dim: int,
) -> bool:
    """Whether two placement lists cut the tensor alike on ``mesh_dim``, however it is written:
    ``RowAtomic()``, the counts it stands for, a ``Shard(0)`` that cuts at the same rows.
    """
    a, b = first[mesh_dim], second[mesh_dim]
    dim = split_dim(a)
    if dim is None or dim != split_dim(b):
        return a == b
    if a == b and split_dim(a) != 0:
        return True
    return split_tables(shape, mesh_shape, first, mesh_dim) == split_tables(
        shape, mesh_shape, second, mesh_dim
    )


def split_counts(
    placement: Placement, size: int, num_ranks: int, first_coordinate: int | None = None
) -> tuple[int, ...]:
    """Sizes of the split dim on each rank, by coordinate."""
    if isinstance(placement, RowAtomic):
        return placement.counts(size, num_ranks, first_coordinate)
    return chunk_counts(int(size), num_ranks)
