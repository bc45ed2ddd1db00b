"""What one Muon step computes where and moves to whom, decided once: integers only.

A ``StepPlan`` is the same on every rank. Each matrix has one owner, buckets group matrices whose
pieces travel together; ``muon_program`` spells out one rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

import torch

from dtensor_owner.muon_matrices import Matrix, Piece
from dtensor_owner.newton_schulz import keeps_range
from dtensor_owner.ns_schedule import Coefficients, Method, multiply_adds, uses_gram
from dtensor_owner.owner_balance import balance
from dtensor_owner.owner_work import Work, fill_buckets

Shape = tuple[int, int]

# Owners anywhere: how far above the bound the highest load may be where that moves less.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Settings:
    """What the matrices of one parameter group share, beside the numbers that may change
    between steps (lr, weight decay, momentum).

    Args:
        coefficients: Newton-Schulz coefficients of each step.
        eps: Its lower bound of the norm.
        dtype: Its dtype.
        nesterov: Whether the gradient is mixed with the momentum once more.
        adjust_lr_fn: How the step size depends on the shape.
        method: Form of Newton-Schulz.
    """

    coefficients: tuple[Coefficients, ...]
    eps: float
    dtype: torch.dtype
    nesterov: bool
    adjust_lr_fn: str | None = None
    method: Method = "auto"

    def lr_ratio(self, shape: Shape) -> float:
        """Step size over lr for a matrix, as ``torch.optim.Muon`` adjusts it.

        ``"original"`` (and None): ``sqrt(max(1, rows / cols))``; ``"match_rms_adamw"``:
        ``0.2 sqrt(max(rows, cols))``, after "Muon is Scalable for LLM Training".
        """
        rows, cols = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * max(rows, cols) ** 0.5
        return max(1.0, rows / cols) ** 0.5 if cols else 1.0

    def cost(self, shape: Shape, device_type: str) -> int:
        """Newton-Schulz multiply-adds of a matrix."""
        gram = uses_gram(self.method, shape, itemsize=self.dtype.itemsize, device_type=device_type)
        return multiply_adds(shape, self.coefficients, gram=gram)

    def gather_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What Newton-Schulz inputs of a parameter of ``dtype`` travel in.

        In the dtype of the iteration where that has their exponent range: the owner would cast
        to it first thing. Otherwise in their own, fp32 at least.
        """
        wide = torch.promote_types(dtype, torch.float32)
        return self.dtype if keeps_range(self.dtype, of=wide) else wide


@dataclass(frozen=True)
class Bucket:
    """Matrices whose pieces travel in one exchange each way.

    Args:
        group: Index of their parameter group.
        matrices: Indices of the matrices.
        gather_dtype: Dtype of the pieces on the way to the owners.
        result_dtype: Dtype of the results on the way back.
    """

    group: int
    matrices: tuple[int, ...]
    gather_dtype: torch.dtype
    result_dtype: torch.dtype


@dataclass(frozen=True)
class StepPlan:
    """Owners and buckets of the matrices on one domain of ranks.

    Args:
        mesh_shape: Sizes of the mesh dims; owners are positions in the mesh's ranks.
        matrices: All matrices, in parameter order.
        owners: Owner of each.
        buckets: In the order of their exchanges.
        costs: Newton-Schulz multiply-adds of each matrix.
    """

    mesh_shape: tuple[int, ...]
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    costs: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return prod(self.mesh_shape)

    def source_of(self, piece: Piece, owner: int) -> int:
        """The rank that sends a piece to an owner who lacks it: a holder as near as can be.

        On a mesh with replicas that is the one in the owner's replica.
        """
        at = self._coordinates(owner)

        def distance(rank: int) -> int:
            return sum(a != b for a, b in zip(self._coordinates(rank), at))

        return min(piece.holders, key=distance)

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        coordinates = []
        for size in reversed(self.mesh_shape):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return tuple(coordinates)

    def gather_numel(self, index: int) -> int:
        """Elements of a matrix that its owner lacks."""
        owner = self.owners[index]
        return sum(p.numel for p in self.matrices[index].pieces if owner not in p.holders)

    def scatter_numel(self, index: int) -> int:
        """Elements of a matrix's result that other ranks need, once per rank that does."""
        owner = self.owners[index]
        return sum(
            piece.numel * (len(piece.holders) - (owner in piece.holders))
            for piece in self.matrices[index].pieces
        )

    def moves(self, bucket: Bucket) -> tuple[bool, bool]:
        """Whether any rank sends anything, on the way to the owners and on the way back."""
        gathers = any(self.gather_numel(i) for i in bucket.matrices)
        return gathers, any(self.scatter_numel(i) for i in bucket.matrices)

    def bucket_bytes(self, bucket: Bucket) -> tuple[int, int]:
        """Bytes that all ranks together send to the owners and get back."""
        return (
            sum(map(self.gather_numel, bucket.matrices)) * bucket.gather_dtype.itemsize,
            sum(map(self.scatter_numel, bucket.matrices)) * bucket.result_dtype.itemsize,
        )

    @cached_property
    def num_bytes(self) -> int:
        """Bytes that all ranks together send in one step."""
        return sum(sum(self.bucket_bytes(bucket)) for bucket in self.buckets)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Newton-Schulz multiply-adds of each rank."""
        loads = [0] * self.num_ranks
        for owner, cost in zip(self.owners, self.costs):
            loads[owner] += cost
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """Highest load over mean load."""
        total = sum(self.loads)
        return max(self.loads) * self.num_ranks / total if total else 1.0

    def restricted_to(self, keep: Callable[[int], bool]) -> StepPlan:
        """The same plan for those matrices only whose parameter index ``keep`` accepts."""
        buckets = []
        for bucket in self.buckets:
            kept = tuple(i for i in bucket.matrices if keep(self.matrices[i].param))
            if kept:
                buckets.append(Bucket(bucket.group, kept, bucket.gather_dtype, bucket.result_dtype))
        return replace(self, buckets=tuple(buckets))

    def __str__(self) -> str:
        lines = [
            f"{len(self.matrices)} matrices on {self.num_ranks} ranks in {len(self.buckets)} "
            f"buckets; {self.num_bytes:,} B per step; Newton-Schulz load max/mean "
            f"{self.imbalance:.3f}"
        ]
        for number, bucket in enumerate(self.buckets):
            there, back = self.bucket_bytes(bucket)
            dtypes = f"{_short(bucket.gather_dtype)}/{_short(bucket.result_dtype)}"
            lines.append(f"bucket {number} ({dtypes}): gather {there:,} B, scatter {back:,} B")
            lines += [f"  {self._matrix_text(index, bucket)}" for index in bucket.matrices]
        mean = sum(self.loads) / self.num_ranks or 1
        for rank, load in enumerate(self.loads):
            number = self.owners.count(rank)
            lines.append(f"rank {rank} owns {number}, load {load / mean:.3f} of mean")
        return "\n".join(lines)

    def _matrix_text(self, index: int, bucket: Bucket) -> str:
        matrix = self.matrices[index]
        rows, cols = matrix.shape
        there = self.gather_numel(index) * bucket.gather_dtype.itemsize
        back = self.scatter_numel(index) * bucket.result_dtype.itemsize
        return (
            f"{matrix.name} {rows} x {cols} -> rank {self.owners[index]}, {there:,} B there, "
            f"{back:,} B back"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan_step(
    matrices: Sequence[Matrix],
    groups: Sequence[int],
    dtypes: Sequence[torch.dtype],
    settings: Sequence[Settings],
    mesh_shape: tuple[int, ...],
    *,
    eligible: Literal["holders", "any"] = "holders",
    bucket_numel: int,
    device_type: str = "cpu",
    ranks_per_node: int = 1,
) -> StepPlan:
    """Choose owners for all matrices together, then form buckets.

    Args:
        matrices: All matrices of one domain, in parameter order.
        groups: Parameter group of each.
        dtypes: Dtype of each one's parameter.
        settings: Settings of each parameter group.
        mesh_shape: Sizes of the domain's mesh dims.
        eligible: Who may own: ``"holders"`` of some of the matrix, or ``"any"`` rank.
        bucket_numel: Elements that one owner collects in one bucket at most (a larger matrix
            is alone with its owner in a bucket).
        device_type: Where Newton-Schulz runs.
        ranks_per_node: Consecutive ranks that share a node.
    """
    num_ranks = prod(mesh_shape)
    costs = tuple(
        settings[group].cost(matrix.shape, device_type) for matrix, group in zip(matrices, groups)
    )
    works = [
        Work.from_counts(cost, matrix.held_counts(num_ranks))
        for cost, matrix in zip(costs, matrices)
    ]
    owners = tuple(
        balance(
            works,
            num_ranks,
            anywhere=eligible == "any",
            ranks_per_node=ranks_per_node,
            tolerance=_TOLERANCE,
        )
    )
    plan = StepPlan(mesh_shape, tuple(matrices), owners, (), costs)
    kinds: dict[tuple[int, bool, torch.dtype], list[int]] = {}
    for index, (group, dtype) in enumerate(zip(groups, dtypes)):
        if not matrices[index].numel:
            continue
        exchanged = bool(plan.gather_numel(index) or plan.scatter_numel(index))
        kind = (group, exchanged, settings[group].gather_dtype(dtype))
        kinds.setdefault(kind, []).append(index)
    buckets = [
        Bucket(group, tuple(indices[k] for k in members), gather_dtype, settings[group].dtype)
        for (group, exchanged, gather_dtype), indices in kinds.items()
        for members in fill_buckets(
            [owners[index] for index in indices],
            [plan.matrices[index].numel for index in indices],
            # The costliest first, equal shapes together.
            [(-costs[i], sorted(plan.matrices[i].shape)) for i in indices],
            bucket_numel,
        )
    ]
    # What needs no exchange comes first: it is computed while the first exchange is under way.
    buckets.sort(key=lambda bucket: any(plan.moves(bucket)))
    return replace(plan, buckets=tuple(buckets))
