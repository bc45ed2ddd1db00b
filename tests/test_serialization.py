"""torch.save, the safe loader and deepcopy on placed tensors, modules and optimizers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from placements import BlockAtomic, Owner, RowAtomic
from tests.checkpoint_helpers import build, differing, snapshot, step
from tests.ranks import run_ranks

PLACEMENTS = [RowAtomic(), RowAtomic((3, 0)), BlockAtomic(4), BlockAtomic(2, (2, 1)), Owner(1)]


def _trip(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_bare_placements_where_no_process_group_is(placement):
    assert not torch.distributed.is_initialized()
    for found in (_trip([placement])[0], pickle.loads(pickle.dumps(placement))):
        assert found == placement
        assert type(found) is type(placement)
        assert hash(found) == hash(placement)


def _tensors(layout: str) -> list[str]:
    model, [muon] = build(layout)
    step(model, [muon], 0)
    wrong = []
    for name, value in model.state_dict().items():
        found = _trip(value)
        if isinstance(value, DTensor):
            same = (
                type(found) is DTensor
                and found.placements == value.placements
                and found.device_mesh == value.device_mesh
                and torch.equal(found.to_local(), value.to_local())
                and torch.equal(found.full_tensor(), value.full_tensor())
            )
        else:
            same = torch.equal(found, value)
        wrong += [] if same else [name]
    other, [its] = build(layout, seed=1)
    other.load_state_dict(_trip(model.state_dict()))
    its.load_state_dict(_trip(muon.state_dict()))
    return wrong + differing(snapshot(model, [muon]), snapshot(other, [its]))


@pytest.mark.parametrize("layout", ["unpadded", "whole", "hfsdp", "block_atomic", "owner"])
def test_placed_tensors_through_the_safe_loader(layout):
    assert run_ranks(4, _tensors, layout) == [[]] * 4


def _copies() -> None:
    model, [muon] = build("unpadded")
    step(model, [muon], 0)
    twin, its = copy.deepcopy((model, muon))
    before = snapshot(model, [muon])
    assert differing(before, snapshot(twin, [its])) == []
    assert {id(p) for g in its.param_groups for p in g["params"]} == set(map(id, twin.parameters()))
    step(twin, [its], 1)
    assert differing(before, snapshot(model, [muon])) == []  # no shared storage
    step(model, [muon], 1)
    assert differing(snapshot(model, [muon]), snapshot(twin, [its])) == []


def test_a_deep_copy_of_module_and_optimizer_trains_alone():
    run_ranks(2, _copies)
