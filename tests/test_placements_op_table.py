"""docs/ops.md says what really happens, op by op, and nothing in it is wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.ops_table import PAGE, PLACEMENTS, RANKS, check, outcomes, page
from tests.ranks import run_ranks


def table_case() -> dict[str, dict[str, str]]:
    assert dist.get_world_size() == RANKS
    return {name: outcomes(placement) for name, placement in PLACEMENTS.items()}


def test_the_page_is_what_the_ops_do() -> None:
    columns = check(run_ranks(RANKS, table_case, timeout=150))
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the page is that of torch 2.13; nothing is wrong on this version either")
    assert page(columns) == PAGE.read_text(), (
        "docs/ops.md is out of date: run python -m benchmarks.ops_table --write"
    )
