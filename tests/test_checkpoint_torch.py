"""torch.distributed.checkpoint on a sharded model and Muon: nothing is lost, nothing moves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from dtensor_owner import Muon
from dtensor_owner.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint_helpers import build, differing, put, snapshot, step
from tests.ranks import run_ranks

OPTIONS: list[dict[str, bool]] = [
    {},
    {"cpu_offload": True},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
    {"flatten_optimizer_state_dict": True},
]


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            key: value
            for key, value in sorted(group.items())
            if key not in ("params", "differentiable")
        }
        for group in optimizer.param_groups
    ]


def _assert_as_built(optimizer: torch.optim.Optimizer) -> None:
    """State is where its parameter is, as sharded and of its dtype."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if key == "step":
                continue
            assert isinstance(value, DTensor)
            assert value.placements == parameter.placements
            assert value.dtype == parameter.dtype
            assert value.to_local().shape == parameter.to_local().shape


def _trips(layout: str) -> list[str]:
    """Get and set state with every option; returns what was not as before."""
    model, [muon] = build(layout)
    for number in range(2):
        step(model, [muon], number)
    wrong = []
    for chosen in OPTIONS:
        options = StateDictOptions(**chosen)
        other, [its] = build(layout, seed=1)
        set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)
        state = get_optimizer_state_dict(model, muon, options=options)
        set_optimizer_state_dict(other, its, state, options=options)
        _assert_as_built(its)
        wrong += differing(snapshot(model, [muon]), snapshot(other, [its]))
        wrong += [str(chosen)] if repr(_groups(muon)) != repr(_groups(its)) else []
    return wrong


@pytest.mark.parametrize("layout", ["unpadded", "whole"])
def test_state_dicts_with_every_option(layout):
    assert run_ranks(4, _trips, layout) == [[]] * 4


def _save_and_load(folder: str) -> list[str]:
    model, [muon] = build("unpadded")
    for number in range(2):
        step(model, [muon], number)
    model_state, state = get_state_dict(model, muon)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=f"{folder}/plain")
    save_checkpoint(f"{folder}/ours", model, muon)
    wrong = []
    for saved in ("plain", "ours"):  # by torch's functions
        other, [its] = build("padded", seed=1)
        model_state, state = get_state_dict(other, its)
        loaded = {"model": model_state, "optimizer": state}
        dcp.load(loaded, checkpoint_id=f"{folder}/{saved}")
        set_state_dict(
            other, its, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        wrong += differing(snapshot(model, [muon]), snapshot(other, [its]))
        wrong += [saved] if repr(_groups(muon)) != repr(_groups(its)) else []
    other, [its] = build("padded", seed=1)  # by ours
    load_checkpoint(f"{folder}/plain", other, its)
    return wrong + differing(snapshot(model, [muon]), snapshot(other, [its]))


def test_plain_checkpoints_and_ours_are_the_same_format(tmp_path):
    assert run_ranks(3, _save_and_load, str(tmp_path)) == [[]] * 3


def _save_behind_training(folder: str) -> tuple[list[str], list[str]]:
    model, [muon] = build("unpadded")
    step(model, [muon], 0)
    before = snapshot(model, [muon])
    model_state, state = get_state_dict(model, muon)
    # Its thread talks to other ranks while the step does: over a group of its own.
    saving = dcp.async_save(
        {"model": model_state, "optimizer": state},
        checkpoint_id=folder,
        process_group=dist.new_group(backend="gloo"),
    )
    step(model, [muon], 1)  # in place, while the other thread writes
    assert isinstance(saving, dcp.state_dict_saver.Future)
    saving.result()
    other, [its] = build("unpadded", seed=1)
    load_checkpoint(folder, other, its)
    loaded = snapshot(other, [its])
    return differing(before, loaded), differing(before, snapshot(model, [muon]))


def test_async_save_writes_what_was_there_when_it_was_called(tmp_path):
    for wrong, moved in run_ranks(3, _save_behind_training, str(tmp_path)):
        assert wrong == []
        assert "a" in moved and "a.momentum_buffer" in moved


# ------------------------------------------------------------- reading state changes nothing


def _reading(lr_is_tensor: bool, between: bool) -> None:
    model, _ = build("unpadded")
    named = list(model.named_parameters())
    matrices, rest = [p for p in named if p[1].ndim == 2], [p for p in named if p[1].ndim < 2]
    lr = torch.tensor(0.1) if lr_is_tensor else 0.1
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "weight_decay": 0.5}]
    muon = Muon(groups, lr=lr, weight_decay=0.5, ns_dtype=torch.float64)
    if between:  # backward and step
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
    before, grads = snapshot(model, [muon]), [copy.deepcopy(p.grad) for _, p in named]
    options = repr(_groups(muon))
    state = get_optimizer_state_dict(model, muon)
    set_optimizer_state_dict(model, muon, state)
    assert differing(before, snapshot(model, [muon])) == []
    assert repr(_groups(muon)) == options
    assert set(state["state"]) == {name for name, _ in named}
    assert all(float(values.get("step", 0)) == 0 for values in state["state"].values())
    for (_, parameter), grad in zip(named, grads):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad.to_local(), grad.to_local())


@pytest.mark.parametrize("lr_is_tensor", [False, True])
@pytest.mark.parametrize("between", [False, True])
def test_reading_and_setting_state_moves_no_weight(lr_is_tensor, between):
    run_ranks(2, _reading, lr_is_tensor, between)


def _hidden_step() -> float:
    """What torch's function does to an optimizer whose state is created by its first step."""
    weight = nn.Linear(2, 2)
    adamw = torch.optim.AdamW(weight.parameters())
    state = get_optimizer_state_dict(weight, adamw)
    return float(state["state"]["weight"]["step"])


def test_torchs_own_adamw_shows_the_hidden_step(tmp_path):
    assert run_ranks(1, _hidden_step) == [1.0]


def _save_before_first_step(folder: str) -> None:
    weight = nn.Linear(2, 2)
    adamw = torch.optim.AdamW(weight.parameters())
    save_checkpoint(folder, weight, adamw)
    assert not adamw.state
    load_checkpoint(folder, weight, adamw)
    assert not adamw.state


def test_our_save_runs_no_hidden_step(tmp_path):
    run_ranks(2, _save_before_first_step, str(tmp_path / "new"))


# -------------------------------------------------- keys on all ranks, frozen and unused weights


def _keys_of_unused(folder: str) -> list[list[str]]:
    """Keys before any step, and after one in which a weight had no gradient."""
    keys = []
    model, [muon] = build("unpadded")
    for number in range(2):
        state = get_optimizer_state_dict(model, muon)["state"]
        keys.append(sorted(f"{name}.{key}" for name, values in state.items() for key in values))
        save_checkpoint(f"{folder}/{number}", model, muon)
        other, [its] = build("unpadded", seed=1)
        load_checkpoint(f"{folder}/{number}", other, its)
        assert differing(snapshot(model, [muon]), snapshot(other, [its])) == []
        assert float(snapshot(other, [its])["b.momentum_buffer"].abs().max()) == 0
        model.b.requires_grad_(False)  # then it has no gradient
        step(model, [muon], number)
        model.b.requires_grad_(True)
    return keys


def test_keys_are_the_same_on_all_ranks_and_at_all_times(tmp_path):
    first, second = run_ranks(2, _keys_of_unused, str(tmp_path))
    assert first == second
    assert first[0] == first[1]
    assert "b.momentum_buffer" in first[0] and "e.exp_avg" in first[0]


def _frozen(folder: str, how: str) -> None:
    def start(seed: int) -> tuple[nn.Module, Muon, nn.Parameter]:
        model, [muon] = build("unpadded", seed=seed)
        return model, muon, model.a

    model, muon, weight = start(0)
    for number in range(2):
        step(model, [muon], number)
    weight.requires_grad_(False)
    step(model, [muon], 2)
    saved = snapshot(model, [muon])
    assert float(saved["a.momentum_buffer"].abs().max()) > 0
    other, its, its_weight = start(1)
    its_weight.requires_grad_(False)
    if how == "ours":
        save_checkpoint(folder, model, muon)
        load_checkpoint(folder, other, its)
    else:
        options = StateDictOptions(
            full_state_dict=how == "full", flatten_optimizer_state_dict=how == "flat"
        )
        # Copied, as optimizers keep the very tensors that they are given.
        model_state, state = copy.deepcopy(get_state_dict(model, muon, options=options))
        set_state_dict(
            other, its, model_state_dict=model_state, optim_state_dict=state, options=options
        )
    assert differing(saved, snapshot(other, [its])) == []
    for each in (weight, its_weight):
        each.requires_grad_(True)
    step(model, [muon], 3)
    step(other, [its], 3)
    assert differing(snapshot(model, [muon]), snapshot(other, [its])) == []


@pytest.mark.parametrize("how", ["ours", "sharded", "full", "flat"])
def test_momentum_of_a_frozen_weight_survives(how, tmp_path):
    run_ranks(2, _frozen, str(tmp_path / "saved"), how)


def _added_later(folder: str) -> None:
    """Saved without a weight that the resumed model has."""
    model, [muon] = build("unpadded")
    step(model, [muon], 0)
    matrices = [(name, p) for name, p in model.named_parameters() if name in "bcd"]
    part = Muon([{"params": matrices}], lr=0.02, ns_dtype=torch.float64)
    for number, (_, parameter) in enumerate(matrices):
        put(part.state[parameter]["momentum_buffer"], torch.full(parameter.shape, number + 1.0))
    save_checkpoint(folder, model, part)
    other, [its] = build("unpadded", seed=1)
    load_checkpoint(folder, other, its, strict=False, options="keep")
    momenta = snapshot(other, [its])
    assert float(momenta["a.momentum_buffer"].abs().max()) == 0
    assert torch.equal(momenta["c.momentum_buffer"], torch.full((5, 4), 2.0).double())


def test_a_weight_that_was_added_later_starts_from_zero(tmp_path):
    run_ranks(2, _added_later, str(tmp_path / "saved"))


def _half_precision(folder: str) -> None:
    def start(seed: int) -> tuple[nn.Module, Muon]:
        model, _ = build("rows", seed=seed)
        half = nn.Module()
        for name in "ab":
            parameter = nn.Parameter(getattr(model, name).detach().to(torch.bfloat16))
            half.register_parameter(name, parameter)
        return half, Muon(list(half.named_parameters()), lr=0.02)

    def train(model: nn.Module, muon: Muon, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            grad = torch.randn(parameter.shape, generator=generator)
            put(parameter.grad, grad.to(parameter.dtype))
        muon.step()

    def values(model: nn.Module, muon: Muon) -> dict[str, Tensor]:
        return snapshot(model, [muon])

    model, muon = start(0)
    for number in range(2):
        train(model, muon, number)
    other, its = start(1)
    model_state, state = get_state_dict(model, muon)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    load_checkpoint(folder, other, its)
    for parameter, of_other in zip(model.parameters(), other.parameters()):
        before = muon.state[parameter]["momentum_buffer"]
        after = its.state[of_other]["momentum_buffer"]
        assert type(after) is DTensor
        assert (after.dtype, after.placements) == (before.dtype, before.placements)
    assert differing(values(model, muon), values(other, its)) == []
    train(model, muon, 2)
    train(other, its, 2)
    assert differing(values(model, muon), values(other, its)) == []
    assert dist.get_world_size() == 2


def test_bfloat16_momentum_comes_back_as_it_was(tmp_path):
    run_ranks(2, _half_precision, str(tmp_path / "saved"))
