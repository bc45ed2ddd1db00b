"""The matrices inside parameters, and which rank holds which piece of them.

Read once from shapes, placements and meshes; from then on everything is integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from placements.boxes import (
    Box,
    box_numel,
    check_placements,
    full_box,
    intersection,
    is_ours,
    local_box,
    split_counts,
    split_dim,
)
from placements.collectives import DimGroup
from placements.geometry import ranges
from placements.owner import Owner

FLATTEN, STACK = "flatten", "stack"


@dataclass(frozen=True)
class Domain:
    """The ranks that share some parameters: those of one mesh, or this process alone.

    Coordinates are positions in the mesh's ranks, first mesh dim outermost.

    Args:
        mesh: The mesh; None for plain tensors, of which the domain is this process alone.
        size: Number of ranks.
        coordinate: This rank's coordinate.
        group: How to reach the others; None where there are none.
    """

    mesh: DeviceMesh | None
    size: int
    coordinate: int
    group: DimGroup | None = None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return None if self.group is None else self.group.process_group

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return (1,) if self.mesh is None else tuple(self.mesh.shape)

    def __str__(self) -> str:
        return "this process alone" if self.mesh is None else f"mesh {self.mesh.mesh.tolist()}"


ALONE = Domain(None, 1, 0)


def domain_of(param: Tensor) -> Domain:
    """The ranks that share ``param``."""
    if not isinstance(param, DTensor):
        return ALONE
    return domain_of_mesh(param.device_mesh)


def domain_of_mesh(mesh: DeviceMesh) -> Domain:
    """The ranks of a mesh; the first call may make a group of them, with all of them."""
    return _mesh_domain(mesh, dist.group.WORLD)


def ordered_meshes(params: Iterable[Any]) -> list[DeviceMesh]:
    """The meshes of the parameters in an order that all ranks share, the widest first."""

    def key(mesh: DeviceMesh) -> tuple[Any, ...]:
        ranks = mesh.mesh.flatten().tolist()
        return -len(ranks), ranks, tuple(mesh.shape), mesh.mesh_dim_names or ()

    return sorted(dict.fromkeys(p.device_mesh for p in params if isinstance(p, DTensor)), key=key)


@lru_cache(maxsize=64)
def _mesh_domain(mesh: DeviceMesh, world: dist.ProcessGroup | None) -> Domain:
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise ValueError(
            f"Global rank {dist.get_rank()} is not part of {mesh}: build the optimizer only on "
            "the ranks of its parameters' mesh."
        )
    if mesh.size() == 1:
        return Domain(mesh, 1, 0)
    process_group = _process_group(mesh, world)
    ranks = mesh.mesh.flatten().tolist()
    coordinate = ranks.index(dist.get_rank())
    order = tuple(dist.get_group_rank(process_group, rank) for rank in ranks)
    group = DimGroup(process_group.group_name, len(ranks), coordinate, order, process_group)
    return Domain(mesh, len(ranks), coordinate, group)


def _process_group(mesh: DeviceMesh, world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """One group of all ranks of the mesh."""
    if mesh.ndim == 1:
        return mesh.get_group(0)
    if world is not None and mesh.size() == dist.get_world_size():
        return world
    ranks = sorted(mesh.mesh.flatten().tolist())
    return dist.new_group(ranks, use_local_synchronization=True)


@dataclass(frozen=True)
class Piece:
    """A part of a matrix that some ranks hold.

    Args:
        box: Position in the parameter, one half-open range per tensor dim.
        holders: Coordinates of the ranks that hold it, ascending.
    """

    box: Box
    holders: tuple[int, ...]

    @property
    def numel(self) -> int:
        return box_numel(self.box)


@dataclass(frozen=True)
class Matrix:
    """One matrix to orthogonalize: some rows of a parameter, all other dims whole.

    Args:
        name: For plans and messages.
        param: Index of the parameter.
        box: Position in the parameter.
        shape: Rows and columns under which it is orthogonalized.
        pieces: Disjoint; together the whole matrix. Each rank holds at most one.
    """

    name: str
    param: int
    box: Box
    shape: tuple[int, int]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return box_numel(self.box)

    def piece_of(self, coordinate: int) -> Piece | None:
        """The piece that the rank at ``coordinate`` holds."""
        return next((piece for piece in self.pieces if coordinate in piece.holders), None)

    def held_counts(self, num_ranks: int) -> list[int]:
        """Elements of the matrix on each rank."""
        counts = [0] * num_ranks
        for piece in self.pieces:
            for rank in piece.holders:
                counts[rank] = piece.numel
        return counts


def matrices_of(
    param: Tensor,
    index: int,
    name: str,
    *,
    view: str = FLATTEN,
    split_rows: Sequence[int] | None = None,
) -> list[Matrix]:
    """The matrices of one parameter.

    Args:
        param: A plain tensor or a DTensor.
        index: Its index, kept in the matrices.
        name: Its name.
        view: ``"flatten"``: one matrix ``(shape[0], rest)``. ``"stack"``: a 3-D parameter is a
            stack of ``shape[0]`` matrices.
        split_rows: Rows of each of several matrices stacked along dim 0, as in a fused QKV
            weight; they sum to ``shape[0]``.

    Raises:
        ValueError: Fewer than two dims, a dtype that cannot be orthogonalized, or options that
            do not fit the shape.
        NotImplementedError: Placements without a rule.
    """
    shape = tuple(param.shape)
    _check(param, name)
    cuts = _row_cuts(shape, name, view, split_rows)
    pieces = _pieces(param, name)
    found = []
    for number, (start, stop) in enumerate(cuts):
        box = ((start, stop), *full_box(shape)[1:])
        rows_cols = shape[1:] if view == STACK and len(shape) == 3 else (stop - start, -1)
        rows = rows_cols[0]
        common = [(intersection(piece.box, box), piece.holders) for piece in pieces]
        found.append(
            Matrix(
                name=name if len(cuts) == 1 else f"{name}[{number}]",
                param=index,
                box=box,
                shape=(rows, box_numel(box) // rows if rows else prod(shape[1:])),
                pieces=tuple(Piece(part, ranks) for part, ranks in common if part is not None),
            )
        )
    return found


def _check(param: Tensor, name: str) -> None:
    if param.ndim < 2:
        raise ValueError(
            f"{name} has shape {tuple(param.shape)}: Muon orthogonalizes matrices, so 0-D and 1-D "
            'parameters belong in a group with algorithm="adamw".'
        )
    if not param.dtype.is_floating_point or param.dtype.itemsize < 2:
        raise ValueError(
            f"{name} has dtype {param.dtype}: Muon works on float16, bfloat16, float32 and "
            "float64 parameters."
        )


def _row_cuts(
    shape: tuple[int, ...], name: str, view: str, split_rows: Sequence[int] | None
) -> list[tuple[int, int]]:
    if view not in (FLATTEN, STACK):
        raise ValueError(f'matrices must be "flatten" or "stack", got {view!r}.')
    if split_rows is not None:
        if not isinstance(split_rows, (tuple, list)) or any(type(n) is not int for n in split_rows):
            raise ValueError(
                f"split_rows must be rows of each matrix, such as (q, k, v), got {split_rows!r}."
            )
        if view == STACK and len(shape) > 2:
            raise ValueError(f'{name}: give split_rows or matrices="stack", not both.')
        if sum(split_rows) != shape[0] or min(split_rows, default=0) < 1:
            raise ValueError(
                f"split_rows={tuple(split_rows)} sums to {sum(split_rows)}, but {name} has shape "
                f"{shape}: the parts must be positive and sum to its {shape[0]} rows."
            )
        return list(ranges(split_rows))
    if view == STACK and len(shape) > 2:
        if len(shape) != 3:
            raise ValueError(
                f'{name} has shape {shape}: matrices="stack" takes 3-D parameters (stack, rows, '
                'columns); use "flatten" for (shape[0], rest).'
            )
        return [(row, row + 1) for row in range(shape[0])]
    return [(0, shape[0])]


def _pieces(param: Tensor, name: str) -> list[Piece]:
    """Distinct parts of the parameter and the ranks that hold them, in row order."""
    shape = tuple(param.shape)
    if not isinstance(param, DTensor):
        return [Piece(full_box(shape), (0,))]
    for mesh_dim, placement in enumerate(param.placements):
        if type(placement) not in (Shard, Replicate) and not is_ours(placement):
            raise NotImplementedError(
                f"{name} has {placement} on mesh dim {mesh_dim}: Muon has no rule for it; use "
                "Shard, Replicate, RowAtomic, BlockAtomic or Owner."
            )
    check_placements(shape, tuple(param.device_mesh.shape), param.placements)
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(rank_boxes(param)):
        if box_numel(box):
            holders.setdefault(box, []).append(rank)
    return [Piece(box, tuple(ranks)) for box, ranks in sorted(holders.items())]


def rank_boxes(param: DTensor) -> list[Box]:
    """What each rank of the mesh holds, by coordinate."""
    shape, mesh_shape = tuple(param.shape), tuple(param.device_mesh.shape)
    if len(mesh_shape) == 1:
        return _boxes_on_one_dim(shape, mesh_shape[0], param.placements[0])
    coordinates = [
        tuple(int(x) for x in torch.unravel_index(torch.tensor(rank), mesh_shape))
        for rank in range(prod(mesh_shape))
    ]
    return [local_box(shape, mesh_shape, param.placements, at) for at in coordinates]


def _boxes_on_one_dim(shape: tuple[int, ...], num_ranks: int, placement: object) -> list[Box]:
    full = full_box(shape)
    if isinstance(placement, Owner):
        empty = tuple((0, 0) for _ in shape)
        return [full if rank == placement.rank else empty for rank in range(num_ranks)]
    dim = split_dim(placement)  # type: ignore[arg-type]
    if dim is None:
        return [full] * num_ranks
    counts = split_counts(placement, shape[dim], num_ranks)  # type: ignore[arg-type]
    return [(*full[:dim], span, *full[dim + 1 :]) for span in ranges(counts)]
