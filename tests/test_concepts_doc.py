"""The table of who holds which rows in docs/concepts.md says what the placements do."""

from __future__ import annotations

import re
from pathlib import Path

from placements import BlockAtomic, Owner, RowAtomic, explain
from placements.boxes import box_shape, local_box

DOC = (Path(__file__).parent.parent / "docs" / "concepts.md").read_text()
PLACEMENTS = [RowAtomic(), RowAtomic((5, 0, 1, 4)), BlockAtomic(4), Owner(2)]


def test_every_row_is_where_the_table_says() -> None:
    rows = re.findall(r"^row (\d+) +(rank \d) +(rank \d) +(rank \d) +(rank \d)$", DOC, re.M)
    assert len(rows) == 10
    for row, *ranks in rows:
        for placement, rank in zip(PLACEMENTS, ranks):
            holders = [
                f"rank {r}"
                for r in range(4)
                if (box := local_box((10, 4), (4,), [placement], (r,)))[0][0]
                <= int(row)
                < box[0][1]
            ]
            assert holders == [rank], (placement, row)


def test_local_shapes_are_those_of_the_table() -> None:
    lines = [line for line in DOC.splitlines() if line.startswith(("local ", "shapes "))]
    shown = [re.findall(r"\((\d+),(\d+)\)", line) for line in lines]
    for index, placement in enumerate(PLACEMENTS):
        want = [box_shape(local_box((10, 4), (4,), [placement], (r,))) for r in range(4)]
        got = [tuple(map(int, line[2 * index + k])) for line in shown for k in range(2)]
        assert got == want, placement


def test_the_printed_plan_is_the_real_one() -> None:
    assert str(explain(RowAtomic((5, 1, 2)), Owner(1), (8, 4), mesh_shape=3)) in DOC
