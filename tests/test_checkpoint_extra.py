"""What belongs to a run beside its tensors: schedules, positions, random numbers, options."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtensor_owner.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from tests.checkpoint_helpers import build, differing, snapshot, step
from tests.ranks import run_ranks


def _scheduled(folder: str) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model, [muon] = build("unpadded")
        return model, muon, torch.optim.lr_scheduler.CosineAnnealingLR(muon, T_max=10)

    model, muon, scheduler = start()
    for number in range(3):
        step(model, [muon], number)
        scheduler.step()
    torch.manual_seed(100 + dist.get_rank())
    random.seed(dist.get_rank())
    save_checkpoint(folder, model, muon, extra={"scheduler": scheduler, "position": [3, "shard"]})
    expected = torch.rand(3), random.random()
    other, its, its_scheduler = start()
    rest = load_checkpoint(folder, other, its, extra={"scheduler": its_scheduler})
    assert rest == {"position": [3, "shard"]}
    found = torch.rand(3), random.random()
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    for number in range(3, 6):
        for each, optimizer, schedule in ((model, muon, scheduler), (other, its, its_scheduler)):
            step(each, [optimizer], number)
            schedule.step()
    assert [g["lr"] for g in muon.param_groups] == [g["lr"] for g in its.param_groups]
    assert muon.param_groups[0]["lr"] != 0.02
    assert differing(snapshot(model, [muon]), snapshot(other, [its])) == []


def test_schedule_position_and_random_numbers_go_on(tmp_path):
    run_ranks(2, _scheduled, str(tmp_path / "step-3"))


class _Counter:
    """Takes what it is given, and only then looks whether that was a number."""

    def __init__(self) -> None:
        self.value = 7

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if not isinstance(self.value, int):
            raise TypeError("no number")


def _unfit_extra(folder: str) -> list[str]:
    model, optimizers = build("unpadded")
    save_checkpoint(folder, model, optimizers, extra={"a": {"value": 1}, "b": {"value": "x"}})
    model, optimizers = build("unpadded", seed=1)
    before = snapshot(model, optimizers)
    first, second = _Counter(), _Counter()
    one_rank = {"c": second} if dist.get_rank() == 1 else {"a": first}
    told = []
    for extra in ({"a": first, "b": second}, one_rank):
        with pytest.raises(CheckpointError) as fault:
            load_checkpoint(folder, model, optimizers, extra=extra)
        told.append(str(fault.value))
        assert (first.value, second.value) == (7, 7)
        assert differing(before, snapshot(model, optimizers)) == []
    return told


def test_extra_that_does_not_fit_changes_nothing(tmp_path):
    """Neither what was loaded before it, nor anything on ranks where it fits."""
    for told in run_ranks(2, _unfit_extra, str(tmp_path / "step-1")):
        assert "extra['b'], of type dict, cannot be loaded into _Counter: TypeError" in told[0]
        assert "has no extra ['c']; it has ['a', 'b']" in told[1]


def _other_groups(folder: str) -> str:
    model, [muon] = build("unpadded")
    muon.param_groups[0]["lr"] = 0.5
    save_checkpoint(folder, model, muon)
    other, [its] = build("buckets")  # three groups
    load_checkpoint(folder, other, its)
    assert [group["lr"] for group in its.param_groups] == [0.001, 0.5, 0.5]
    its.param_groups[2]["lr"] = 0.25
    save_checkpoint(folder + "-2", other, its)
    before = snapshot(model, [muon])
    with pytest.raises(CheckpointError) as fault:
        load_checkpoint(folder + "-2", model, muon)
    assert differing(before, snapshot(model, [muon])) == []
    load_checkpoint(folder + "-2", model, muon, options="keep")
    assert muon.param_groups[0]["lr"] == 0.5
    return str(fault.value)


def test_options_follow_the_parameters_into_other_groups(tmp_path):
    for told in run_ranks(2, _other_groups, str(tmp_path / "step")):
        assert "lr is 0.5 for a and 0.25 for b" in told
