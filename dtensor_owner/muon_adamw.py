"""AdamW groups of the Muon optimizer: torch's own AdamW on the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw

from dtensor_owner.muon_prepare import local_of

ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "fused": None,
}


def adamw_step(
    group: Mapping[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Update some parameters of a group.

    Args:
        group: The group's options.
        params: The parameters, plain or DTensors.
        grads: This rank's part of each gradient, placed as the parameter is.
        states: Their states.
    """

    def local(key: str) -> list[Tensor]:
        return [local_of(state[key]) for state in states]

    adamw(
        [local_of(param) for param in params],
        list(grads),
        local("exp_avg"),
        local("exp_avg_sq"),
        local("max_exp_avg_sq") if group["amsgrad"] else [],
        [state["step"] for state in states],
        foreach=group["foreach"],
        fused=group["fused"],
        has_complex=any(param.is_complex() for param in params),
        amsgrad=group["amsgrad"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
