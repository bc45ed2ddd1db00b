"""A plan as text and as JSON: what is stored where, who owns what, what a step moves.

Everything is computed from layouts and owners alone, before a run and without ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dtensor_owner.layout import GlobalLayout, ShardLayout, build_row_atomic_layout
from dtensor_owner.muon_plan import StepPlan
from dtensor_owner.mxfp8_report import MXFP8GroupReport, mxfp8_lines
from dtensor_owner.tables import table


@dataclass(frozen=True)
class GroupReport:
    """One parameter group and the layout its parameters are stored in.

    Args:
        name: What to call it, e.g. the module's path.
        layout: The group's layout.
        itemsize: Bytes of an element.
    """

    name: str
    layout: GlobalLayout
    itemsize: int

    @property
    def payload_bytes(self) -> int:
        return self.layout.payload * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes that the layout in use stores beside the parameters."""
        return (self.layout.size - self.layout.payload) * self.itemsize

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        return self.layout.padding_report(itemsize=self.itemsize).rank_bytes

    @property
    def padded_padding_bytes(self) -> int:
        """Bytes of padding that the padded layout of the same parameters stores.

        It takes whole blocks only: parameters that end within a block count as rounded up.
        """
        block = self.layout.block_size
        padded = build_row_atomic_layout(
            [(-(-rows // block) * block, *rest) for rows, *rest in self.layout.tensor_shapes],
            self.layout.dp_size,
            block_size=block,
            shard_layout=ShardLayout.PADDED,
        )
        return (padded.size - self.layout.payload) * self.itemsize


@dataclass(frozen=True)
class MatrixReport:
    """One matrix, the split of its rows, and its owner.

    Args:
        name: The parameter's name.
        shape: Rows and columns.
        rows: Rows that each rank holds.
        owner: The rank that orthogonalizes it.
        cost: What that costs, in multiply-adds.
        moved_bytes: What a step sends to the owner, and what it sends back.
    """

    name: str
    shape: tuple[int, int]
    rows: tuple[int, ...]
    owner: int
    cost: int
    moved_bytes: int


def stored_bytes(groups: Sequence[GroupReport]) -> dict[str, Any]:
    """What groups take together, as JSON can hold it."""
    return {
        "payload_bytes": sum(group.payload_bytes for group in groups),
        "padding_bytes": sum(group.padding_bytes for group in groups),
        "padded_layout_padding_bytes": sum(group.padded_padding_bytes for group in groups),
        "rank_bytes": [sum(ranks) for ranks in zip(*(group.rank_bytes for group in groups))],
    }


def group_lines(groups: Sequence[GroupReport], *, merged: bool = False) -> list[str]:
    """A table of groups; ``merged``: blocks of one layout that follow each other are one line."""
    header = ("parameter group", "tensors", "payload", "padding", "if padded", "bytes a rank")
    kinds = [[group] for group in groups]
    if merged:
        same = groupby(groups, key=lambda group: (group.layout, group.itemsize))
        kinds = [list(alike) for _, alike in same]
    rows = [
        _row(f"{kind[0].name} to {kind[-1].name}, each" if kind[1:] else kind[0].name, kind[:1])
        for kind in kinds
    ]
    return table([header, *rows, _row("all", groups)], left=1)


def _row(name: str, groups: Sequence[GroupReport]) -> tuple[str, str, str, str, str, str]:
    stored = stored_bytes(groups)
    return (
        name,
        f"{sum(len(group.layout.tensor_shapes) for group in groups):,}",
        f"{stored['payload_bytes']:,}",
        f"{stored['padding_bytes']:,}",
        f"{stored['padded_layout_padding_bytes']:,}",
        _span(stored["rank_bytes"]),
    )


def matrix_reports(plan: StepPlan) -> list[MatrixReport]:
    """The matrices of a Muon plan, in the plan's order."""
    bucket_of = {index: bucket for bucket in plan.buckets for index in bucket.matrices}
    reports = []
    for index, matrix in enumerate(plan.matrices):
        bucket = bucket_of[index]
        there = plan.gather_numel(index) * bucket.gather_dtype.itemsize
        back = plan.scatter_numel(index) * bucket.result_dtype.itemsize
        columns = matrix.shape[1]
        reports.append(
            MatrixReport(
                name=matrix.name,
                shape=matrix.shape,
                rows=tuple(numel // columns for numel in matrix.held_counts(plan.num_ranks)),
                owner=plan.owners[index],
                cost=plan.costs[index],
                moved_bytes=there + back,
            )
        )
    return reports


@dataclass(frozen=True)
class PlanReport:
    """The plan of a run on ``world_size`` ranks; ``str()`` is the text shown before it starts."""

    world_size: int
    groups: Sequence[GroupReport]
    matrices: Sequence[MatrixReport]
    mxfp8: Sequence[MXFP8GroupReport] = ()

    @property
    def step_bytes(self) -> int:
        """Bytes that the optimizer step moves between ranks, all ranks together."""
        return sum(matrix.moved_bytes for matrix in self.matrices)

    @property
    def loads(self) -> list[int]:
        """Newton-Schulz multiply-adds by rank."""
        loads = [0] * self.world_size
        for matrix in self.matrices:
            loads[matrix.owner] += matrix.cost
        return loads

    @property
    def imbalance(self) -> float:
        """Highest load over mean load; 1.0 where there is no work."""
        total = sum(self.loads)
        return max(self.loads) * self.world_size / total if total else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON can hold it; sizes in bytes."""
        return {
            **stored_bytes(self.groups),
            "owners": {matrix.name: matrix.owner for matrix in self.matrices},
            "newton_schulz_loads": self.loads,
            "newton_schulz_max_over_mean": self.imbalance,
            "step_bytes": self.step_bytes,
            "mxfp8": [group.to_dict() for group in self.mxfp8],
        }

    def __str__(self) -> str:
        lines = [f"Plan for {self.world_size} ranks", "", *group_lines(self.groups)]
        if self.mxfp8:
            lines += ["", *mxfp8_lines(self.mxfp8)]
        if self.matrices:
            lines += ["", *self._matrix_lines(), "", *self._load_lines()]
        lines += ["", f"The optimizer step moves {self.step_bytes:,} bytes between ranks."]
        return "\n".join(lines)

    def _matrix_lines(self) -> list[str]:
        header = ("matrix", "shape", "rows by rank", "owner", "bytes moved")
        rows = [
            (
                matrix.name,
                " x ".join(map(str, matrix.shape)),
                " ".join(map(str, matrix.rows)),
                str(matrix.owner),
                f"{matrix.moved_bytes:,}",
            )
            for matrix in self.matrices
        ]
        return table([header, *rows], left=3)

    def _load_lines(self) -> list[str]:
        mean = sum(self.loads) / self.world_size or 1.0
        counts = [0] * self.world_size
        for matrix in self.matrices:
            counts[matrix.owner] += 1
        rows = [
            (f"rank {rank}", str(count), f"{load / mean:.3f}")
            for rank, (count, load) in enumerate(zip(counts, self.loads))
        ]
        return table([("owner", "matrices", "Newton-Schulz load / mean"), *rows], left=1)


def _span(values: Sequence[int]) -> str:
    if not values:
        return "0"
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
