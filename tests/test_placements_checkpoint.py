"""torch.distributed.checkpoint with our placements, into another world size and placement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor
from tests.ranks import run_ranks

FULLS = {
    "a": torch.arange(15.0).reshape(5, 3),
    "b": torch.arange(2, dtype=torch.int64),
    "c": torch.zeros(0, 3),
    "d": torch.arange(12.0).reshape(3, 2, 2).to(torch.bfloat16),
}


def placed(ranks: int) -> dict[str, list[Placement]]:
    return {
        "rows": [RowAtomic()],
        "blocks": [BlockAtomic(2)],
        "owner": [Owner(ranks - 1)],
        "shard": [Shard(0)],
        "whole": [Replicate()],
    }


def state(ranks: int, filled: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        f"{kind}.{name}": distribute_tensor(
            full if filled else torch.zeros_like(full), mesh, placements
        )
        for kind, placements in placed(ranks).items()
        for name, full in FULLS.items()
    }


def save_case(folder: str, ranks: int) -> None:
    dcp.save(state(ranks, True), checkpoint_id=folder)


def load_case(folder: str, ranks: int) -> list[str]:
    """Every kind is loaded from what another kind was saved as."""
    target = state(ranks, False)
    kinds = [*placed(ranks)]
    wrong = []
    for shift in range(len(kinds)):
        renamed = {
            f"{kinds[(kinds.index(kind) + shift) % len(kinds)]}.{name}": tensor
            for (kind, name), tensor in ((key.split("."), t) for key, t in target.items())
        }
        for tensor in renamed.values():
            tensor.zero_()
        dcp.load(renamed, checkpoint_id=folder)
        for key, tensor in renamed.items():
            if not torch.equal(tensor.full_tensor(), FULLS[key.split(".")[1]]):
                wrong.append(f"{key} into {tensor.placements}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_saved_on_three_ranks_loads_anywhere(ranks: int, tmp_path: Path) -> None:
    run_ranks(3, save_case, str(tmp_path), 3)
    assert run_ranks(ranks, load_case, str(tmp_path), ranks) == [[]] * ranks
