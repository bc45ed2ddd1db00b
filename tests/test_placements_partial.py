"""Tensors that are still to be reduced on one mesh dim and ours on another."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from placements import RowAtomic
from tests.ranks import run_ranks


def partial_case() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    rows = (1, 4)
    local = torch.ones(rows[mesh.get_local_rank(1)], 4)
    x = DTensor.from_local(
        local, mesh, [Partial(), RowAtomic(rows)], shape=torch.Size((5, 4)), stride=(4, 1)
    )
    with pytest.raises(NotImplementedError, match="fill_"):
        x.fill_(3.0)
    with pytest.raises(NotImplementedError, match="view"):
        x.view(torch.int32)
    wrong = [] if torch.equal(x.full_tensor(), torch.full((5, 4), 2.0)) else ["changed"]
    x.zero_()
    return wrong if torch.equal(x.full_tensor(), torch.zeros(5, 4)) else [*wrong, "zero_"]


def test_values_are_not_set_rank_by_rank() -> None:
    assert run_ranks(4, partial_case) == [[]] * 4
