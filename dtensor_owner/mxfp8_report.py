"""Bytes of a group in MXFP8, plane by plane, and of its gathers beside bf16: integers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtensor_owner.layout import GlobalLayout
from dtensor_owner.mxfp8 import BLOCK
from dtensor_owner.mxfp8_layout import MXFP8Layout
from dtensor_owner.mxfp8_products import TILE_BLOCKS, TILE_ROWS
from dtensor_owner.tables import table

BF16_BYTES = 2


@dataclass(frozen=True)
class PlaneReport:
    """Bytes of one plane of a gathered group.

    Args:
        name: Direction and content.
        payload: Bytes that belong to tensors.
        padding: Bytes of gaps that the layout leaves to keep blocks whole. Sent and stored.
        kernel_padding: Bytes that a kernel's own format of the scales would add. Neither sent
            nor stored here: a kernel's copy has them.
    """

    name: str
    payload: int
    padding: int
    kernel_padding: int


@dataclass(frozen=True)
class MXFP8GroupReport:
    """One parameter group in MXFP8.

    Args:
        name: What to call it, e.g. the module's path.
        layouts: Its layouts.
        num_shards: Ranks that a gather takes place between.
        gathers_twice: Whether weights are freed after forward and gathered again for backward.
        ordinary: Parameters of the same module that stay in an ordinary group, with the reason.
    """

    name: str
    layouts: MXFP8Layout
    num_shards: int
    gathers_twice: bool = True
    ordinary: Mapping[str, str] = field(default_factory=dict)

    @property
    def planes(self) -> tuple[PlaneReport, ...]:
        """Data and scales, rowwise and columnwise."""
        shapes = self.layouts.data.tensor_shapes
        rowwise = sum(_tile_padding(rows, columns // BLOCK) for rows, columns in shapes)
        columnwise = sum(_tile_padding(columns, rows // BLOCK) for rows, columns in shapes)
        return (
            _plane("rowwise data", self.layouts.data, 0),
            _plane("rowwise scales", self.layouts.rowwise_scale, rowwise),
            _plane("columnwise data", self.layouts.data, 0),
            _plane("columnwise scales", self.layouts.columnwise_scale, columnwise),
        )

    @property
    def step_bytes(self) -> int:
        """Bytes that a step's gathers bring to all ranks of one replica together.

        Each rank receives what the others hold: all ranks together ``num_shards - 1`` times
        the whole rowwise planes. Columnwise planes are not gathered to train.
        """
        return self._gathered(self.layouts.data.size + self.layouts.rowwise_scale.size)

    @property
    def bf16_step_bytes(self) -> int:
        """What the same would be in bf16."""
        return self._gathered(self.layouts.data.size * BF16_BYTES)

    def _gathered(self, num_bytes: int) -> int:
        return (self.num_shards - 1) * (2 if self.gathers_twice else 1) * num_bytes

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; sizes in bytes."""
        return {
            "name": self.name,
            "planes": {
                plane.name: {
                    "payload": plane.payload,
                    "padding": plane.padding,
                    "kernel_padding": plane.kernel_padding,
                }
                for plane in self.planes
            },
            "step_bytes": self.step_bytes,
            "bf16_step_bytes": self.bf16_step_bytes,
            "ordinary": dict(self.ordinary),
        }


def _plane(name: str, layout: GlobalLayout, kernel_padding: int) -> PlaneReport:
    return PlaneReport(name, layout.payload, layout.size - layout.payload, kernel_padding)


def _tile_padding(rows: int, blocks: int) -> int:
    """Scales that whole tiles hold beyond ``(rows, blocks)``."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * -(-blocks // TILE_BLOCKS) * TILE_BLOCKS - (
        rows * blocks
    )


def mxfp8_lines(groups: Sequence[MXFP8GroupReport]) -> list[str]:
    """The report of a model's groups as lines of text; none without groups."""
    if not groups:
        return []
    header = (
        "MXFP8",
        *(plane.name for plane in groups[0].planes),
        "padding",
        "kernel padding",
    )
    rows = [header, *(_group_row(group.name, [group]) for group in groups)]
    rows.append(_group_row("all", groups))
    step = sum(group.step_bytes for group in groups)
    bf16 = sum(group.bf16_step_bytes for group in groups)
    share = f" ({100 * step / bf16:.1f} %)" if bf16 else ""
    return [
        *table(rows, left=1),
        "",
        f"A step's gathers bring {step:,} bytes to the ranks; bf16: {bf16:,}{share}.",
        *_ordinary_lines(groups),
    ]


def _group_row(name: str, groups: Sequence[MXFP8GroupReport]) -> tuple[str, ...]:
    """Payload of each plane, padding of all planes, and what kernels would pad the scales by."""
    planes = [[group.planes[i] for group in groups] for i in range(len(groups[0].planes))]
    every = [plane for same in planes for plane in same]
    counts = [
        *(sum(plane.payload for plane in same) for same in planes),
        sum(plane.padding for plane in every),
        sum(plane.kernel_padding for plane in every),
    ]
    return name, *(f"{count:,}" for count in counts)


def _ordinary_lines(groups: Sequence[MXFP8GroupReport]) -> list[str]:
    """Which parameters are not quantized, and why; those with one reason in one line."""
    by_reason: dict[str, Counter[str]] = {}
    for group in groups:
        for name, reason in group.ordinary.items():
            by_reason.setdefault(reason, Counter())[name] += 1
    lines = []
    for reason, names in by_reason.items():
        texts = (f"{name} in {n} groups" if n > 1 else name for name, n in names.items())
        lines.append(f"Not quantized, as {reason}: {', '.join(texts)}.")
    return lines
