"""Optimizer state: there before it is needed, and placed as its parameter is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_owner.muon_matrices import ordered_meshes
from dtensor_owner.muon_prepare import MUON, name_of
from placements import distribute_tensor

Groups = Sequence[Mapping[str, Any]]
State = Mapping[Tensor, MutableMapping[str, Any]]


def init_state(state: MutableMapping[str, Any], param: Tensor, group: Mapping[str, Any]) -> None:
    """Create what a parameter's state lacks: its keys are then the same on every rank."""
    if group["algorithm"] != MUON and "step" not in state:
        device = param.device if group["fused"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    for key in _keys(group):
        if key not in state or state[key].device != param.device:
            state[key] = torch.zeros_like(param, requires_grad=False)


def fault_of_state(groups: Groups, state: State) -> str | None:
    """State that does not belong to its parameter as it is now, in words."""
    for name, param, key, value in _values(groups, state):
        if value.shape != param.shape:
            return (
                f"{key} of {name} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(param.shape)}: build the optimizer anew after a parameter has changed "
                "its shape, and load state of the same parameters."
            )
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        if isinstance(value, DTensor) and value.device_mesh != mesh:
            return (
                f"{key} of {name} is on {value.device_mesh}, the parameter on "
                f"{mesh or 'no mesh'}: build the optimizer anew, and carry state over with a "
                "checkpoint."
            )
    return None


def misplaced(groups: Groups, state: State) -> list[tuple[DeviceMesh, str]]:
    """Which state is placed otherwise than its parameter: its mesh, and what it is in words."""
    return [
        (value.device_mesh, f"{key} of {name}: {value.placements}")
        for name, param, key, value in _values(groups, state)
        if isinstance(value, DTensor) and isinstance(param, DTensor)
        if value.placements != param.placements
    ]


@torch.no_grad()
def place_state(groups: Groups, state: State) -> None:
    """Place state as its parameter is: loaded state may come from other placements.

    A plain tensor is taken for the whole one. Every rank calls this, after they have compared
    what is ``misplaced``.
    """
    values = list(_values(groups, state))
    # Meshes in an order that all ranks share, whatever that of the parameters.
    for mesh in ordered_meshes(param for _, param, _, _ in values):
        for _, param, key, value in values:
            if not isinstance(param, DTensor) or param.device_mesh != mesh:
                continue
            if not isinstance(value, DTensor):
                value = distribute_tensor(value, mesh, param.placements, src_data_rank=None)
            elif value.placements != param.placements:
                value = value.redistribute(mesh, param.placements)
            state[param][key] = value


def _keys(group: Mapping[str, Any]) -> list[str]:
    """State that is shaped as its parameter."""
    if group["algorithm"] == MUON:
        return ["momentum_buffer"]
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


def _values(groups: Groups, state: State) -> Iterator[tuple[str, Tensor, str, Tensor]]:
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            for key in _keys(group):
                if key in state.get(param, ()):
                    yield name_of(group, number, position), param, key, state[param][key]
