"""The text and the numbers of a plan."""

from __future__ import annotations

import json
from typing import Any

from expecttest import TestCase

from dtensor_owner.layout import ShardLayout, build_row_atomic_layout
from dtensor_owner.report import GroupReport, MatrixReport, PlanReport

SHAPES: list[Any] = [(6, 4), (5, 8), (4,)]


def _plan(shard_layout: ShardLayout = ShardLayout.UNPADDED) -> PlanReport:
    layout = build_row_atomic_layout(SHAPES, 3, shard_layout=shard_layout)
    matrices = [
        MatrixReport("weight.0", SHAPES[0], layout.rows(0), owner=0, cost=100, moved_bytes=0),
        MatrixReport("weight.1", SHAPES[1], layout.rows(1), owner=2, cost=300, moved_bytes=192),
    ]
    return PlanReport(
        3, [GroupReport("block", layout, 4), GroupReport("rest", layout, 2)], matrices
    )


class TestPlanReport(TestCase):
    def test_text(self):
        self.assertExpectedInline(
            str(_plan()),
            """\
Plan for 3 ranks

parameter group  tensors  payload  padding  if padded  bytes a rank
block                  3      272        0         16      80 to 96
rest                   3      136        0          8      40 to 48
all                    6      408        0         24    120 to 144

matrix    shape  rows by rank  owner  bytes moved
weight.0  6 x 4  6 0 0             0            0
weight.1  5 x 8  0 3 2             2          192

owner   matrices  Newton-Schulz load / mean
rank 0         1                      0.750
rank 1         0                      0.000
rank 2         1                      2.250

The optimizer step moves 192 bytes between ranks.""",
        )

    def test_without_matrices(self):
        self.assertExpectedInline(
            str(PlanReport(3, _plan().groups[:1], [])),
            """\
Plan for 3 ranks

parameter group  tensors  payload  padding  if padded  bytes a rank
block                  3      272        0         16      80 to 96
all                    3      272        0         16      80 to 96

The optimizer step moves 0 bytes between ranks.""",
        )


def test_numbers():
    plan = _plan()
    numbers = json.loads(json.dumps(plan.to_dict()))
    assert numbers["payload_bytes"] == 68 * 4 + 68 * 2
    assert numbers["padding_bytes"] == 0
    assert sum(numbers["rank_bytes"]) == numbers["payload_bytes"]
    assert numbers["step_bytes"] == 192
    assert numbers["owners"] == {"weight.0": 0, "weight.1": 2}
    assert numbers["newton_schulz_loads"] == [100, 0, 300]
    assert numbers["newton_schulz_max_over_mean"] == 300 / (400 / 3)


def test_padded_layout_counts_the_same_padding_in_both_columns():
    for group in _plan(ShardLayout.PADDED).groups:
        assert group.padding_bytes == group.padded_padding_bytes > 0
    unpadded = _plan().groups[0]
    assert (unpadded.padding_bytes, unpadded.padded_padding_bytes > 0) == (0, True)
