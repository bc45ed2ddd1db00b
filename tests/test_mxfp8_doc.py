"""docs/mxfp8.md shows what the code does and what the benchmark prints."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from pathlib import Path

from dtensor_owner.layout import build_row_atomic_layout
from dtensor_owner.mxfp8_layout import MXFP8Layout

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "mxfp8.md").read_text(encoding="utf-8")


def test_first_example_prints_what_it_says():
    code, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/mxfp8.md", "exec"), {})
    assert printed.getvalue() == output


def test_planes_of_three_blocks_on_five_ranks():
    layouts = MXFP8Layout(build_row_atomic_layout([(96, 64)], 5, block_size=32))
    for name, layout in (
        ("rowwise data", layouts.data),
        ("rowwise scales", layouts.rowwise_scale),
        ("columnwise scales", layouts.columnwise_scale),
    ):
        columns = layout.tensor_shapes[0][1]
        line = name.ljust(22) + "".join(f"({rows}, {columns})".ljust(10) for rows in layout.rows(0))
        assert line.rstrip() in PAGE.splitlines()


def test_bytes_are_those_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    try:
        table = importlib.import_module("mxfp8").bytes_table()
    finally:
        for name in ("mxfp8", "padding_table"):
            sys.modules.pop(name, None)
    assert PAGE.split("<!-- mxfp8.py -->\n")[1].split("\n<!-- end -->")[0] == table
