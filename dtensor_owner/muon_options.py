"""Checks of what an optimizer is given, before anything is planned by it."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from dtensor_owner.muon_adamw import ADAMW_DEFAULTS
from dtensor_owner.muon_matrices import matrices_of
from dtensor_owner.muon_prepare import MUON, name_of, settings_of

_CHOICES = {
    "owners": ("holders", "any"),
    "nonfinite": ("raise", "skip", "propagate"),
    "transport": ("all_to_all", "point_to_point"),
}


def check_options(params: Any, options: Mapping[str, Any], adamw: Mapping[str, Any]) -> None:
    """Check the optimizer's options as a whole.

    Args:
        params: What it was given to optimize.
        options: Options of no single group; ``compile``: whether its steps are compiled.
        adamw: Defaults of AdamW groups.

    Raises:
        ValueError, TypeError: Something does not fit.
    """
    if isinstance(params, (Tensor, set, frozenset)):
        raise TypeError(
            f"params must be a list of parameters or groups, got a {type(params).__name__}: "
            "their order has to be the same on every rank."
        )
    for key, choices in _CHOICES.items():
        if options[key] not in choices:
            *some, last = (f'"{choice}"' for choice in choices)
            raise ValueError(f"{key} must be {', '.join(some)} or {last}, got {options[key]!r}.")
    if options["transport"] == "point_to_point" and options["compile"]:
        raise ValueError(
            'A compiled step needs transport="all_to_all": a graph cannot say that a buffer is '
            "in use until its send is waited for."
        )
    for key in ("ranks_per_node", "bucket_numel"):
        if not isinstance(options[key], int) or options[key] < 1:
            raise ValueError(f"{key} must be an int >= 1, got {options[key]!r}.")
    unknown = adamw.keys() - ADAMW_DEFAULTS.keys() - {"algorithm"}
    if unknown:
        raise ValueError(
            f"adamw has unknown options {sorted(unknown)}; known: {sorted(ADAMW_DEFAULTS)}."
        )


def check_group(group: Mapping[str, Any], number: int) -> None:
    """Check a parameter group, with all its options.

    Raises:
        ValueError, NotImplementedError: An option does not fit, or a parameter is not Muon's.
    """
    params = group["params"]
    if len({id(param) for param in params}) != len(params):
        raise ValueError(f"Group {number} contains a parameter twice: give each one once.")
    for key in ("lr", "weight_decay", "momentum", "eps"):
        value = group.get(key, 0.0)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{key} of group {number} must have one element, got {value}.")
        if not isinstance(value, (Real, Tensor)):
            raise TypeError(f"{key} of group {number} must be a number, got {value!r}.")
        if not float(value) >= 0.0:
            raise ValueError(f"{key} of group {number} must be >= 0, got {float(value)}.")
    if group["algorithm"] != MUON:
        _check_adamw(group, number)
    else:
        settings_of(group)
        options = {"view": group["matrices"], "split_rows": group["split_rows"]}
        for position, param in enumerate(params):
            matrices_of(param, position, name_of(group, number, position), **options)


def _check_adamw(group: Mapping[str, Any], number: int) -> None:
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas of group {number} must be two numbers, got {betas!r}.")
    if not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ValueError(f"betas of group {number} must be in [0, 1), got {betas!r}.")
    if group["foreach"] and group["fused"]:
        raise ValueError(f"Group {number} has foreach=True and fused=True: choose one.")
