"""From parameters to plans: everything a Muon step needs that does not change between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_owner.exchange import agree
from dtensor_owner.muon_matrices import Domain, Matrix, domain_of, matrices_of, rank_boxes
from dtensor_owner.muon_plan import Settings, StepPlan, plan_step
from dtensor_owner.muon_program import rank_program
from dtensor_owner.muon_step import BucketWork
from dtensor_owner.ns_schedule import as_schedule, check_method

MUON, ADAMW = "muon", "adamw"


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of the optimizer.

    Args:
        param: The parameter.
        name: Its name, or its place.
        group: Index of its parameter group.
        algorithm: ``"muon"`` or ``"adamw"``.
        domain: The ranks that share it.
        signature: What plans depend on; checked in every step.
    """

    param: Tensor
    name: str
    group: int
    algorithm: str
    domain: Domain
    signature: tuple[Any, ...]


def signature_of(param: Tensor) -> tuple[Any, ...]:
    """What the plan of a parameter depends on."""
    placed = (param.placements, param.device_mesh) if isinstance(param, DTensor) else ()
    return (param.shape, param.dtype, *placed)


def members_of(groups: Sequence[Mapping[str, Any]]) -> list[Member]:
    """All parameters of the groups, in order."""
    members = []
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            name = names[position] if names else f"parameter {position} of group {number}"
            members.append(
                Member(
                    param, name, number, group["algorithm"], domain_of(param), signature_of(param)
                )
            )
    return members


def settings_of(group: Mapping[str, Any]) -> Settings:
    """The settings of a Muon group, checked."""
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(
            'adjust_lr_fn must be None, "original" or "match_rms_adamw", got '
            f"{group['adjust_lr_fn']!r}."
        )
    if not group["ns_dtype"].is_floating_point or group["ns_dtype"].itemsize < 2:
        raise ValueError(
            f"ns_dtype must be float16, bfloat16, float32 or float64, got {group['ns_dtype']}."
        )
    return Settings(
        as_schedule(group["ns_coefficients"], group["ns_steps"]),
        float(group["eps"]),
        group["ns_dtype"],
        bool(group["nesterov"]),
        group["adjust_lr_fn"],
        check_method(group["ns_method"]),
    )


def group_matrices(members: Sequence[Member], groups: Sequence[Mapping[str, Any]]) -> list[Matrix]:
    """The matrices of all Muon members; ``Matrix.param`` is the member's index."""
    found = []
    for index, member in enumerate(members):
        if member.algorithm == MUON:
            group = groups[member.group]
            found += matrices_of(
                member.param,
                index,
                member.name,
                view=group["matrices"],
                split_rows=group["split_rows"],
            )
    return found


@dataclass
class Prepared:
    """Plans of all domains, and this rank's part of them.

    Args:
        members: All parameters of the optimizer.
        settings: By group; None for AdamW groups.
        plans: By domain.
    """

    members: list[Member]
    settings: list[Settings | None]
    plans: dict[Domain, StepPlan]
    _works: dict[tuple[int, ...], list[BucketWork]] = field(default_factory=dict)

    def is_current(self, settings: Sequence[Settings | None]) -> bool:
        """Whether parameters and settings are still those that were planned."""
        return self.settings == settings and all(
            member.signature == signature_of(member.param) for member in self.members
        )

    def works(self, present: tuple[bool, ...]) -> list[BucketWork]:
        """This rank's part of the step of those members that have a gradient."""
        taking_part = tuple(
            index
            for index, member in enumerate(self.members)
            if member.algorithm == MUON and present[index]
        )
        if taking_part not in self._works:
            if len(self._works) >= 32:  # patterns rarely come back once there are that many
                self._works.clear()
            self._works[taking_part] = [
                work
                for domain, plan in self.plans.items()
                for work in self._domain_works(domain, plan.restricted_to(present.__getitem__))
            ]
        return self._works[taking_part]

    def _domain_works(self, domain: Domain, plan: StepPlan) -> list[BucketWork]:
        works = []
        for bucket in plan.buckets:
            program = rank_program(plan, bucket, domain.coordinate)
            settings = self.settings[bucket.group]
            assert settings is not None
            works.append(
                BucketWork(
                    program,
                    settings,
                    tuple(settings.lr_ratio(plan.matrices[i].shape) for i in program.held),
                    tuple(plan.matrices[i].param for i in program.held),
                    bucket.gather_dtype,
                    self.members[plan.matrices[bucket.matrices[0]].param].param.device,
                    domain.group,
                )
            )
        return works


def prepare(
    groups: Sequence[Mapping[str, Any]],
    *,
    eligible: Literal["holders", "any"],
    bucket_numel: int,
    nonfinite: str,
) -> Prepared:
    """Plan the step of all groups, and check that all ranks of each domain plan the same.

    Raises:
        ValueError: On every rank: ranks have different parameters, in number, order, shape,
            dtype, placement or group, or two parameters share their memory.
    """
    members = members_of(groups)
    settings = [settings_of(g) if g["algorithm"] == MUON else None for g in groups]
    by_domain: dict[Domain, list[Matrix]] = {}
    for matrix in group_matrices(members, groups):
        by_domain.setdefault(members[matrix.param].domain, []).append(matrix)
    options = f"owners={eligible!r}, bucket_numel={bucket_numel}, nonfinite={nonfinite!r}"
    _check_agreement(members, groups, options)
    plans = {}
    for domain, matrices in by_domain.items():
        owners = [members[matrix.param] for matrix in matrices]
        plans[domain] = plan_step(
            matrices,
            [member.group for member in owners],
            [member.param.dtype for member in owners],
            settings,  # type: ignore[arg-type]
            domain.mesh_shape,
            eligible=eligible,
            bucket_numel=bucket_numel,
            device_type=owners[0].param.device.type,
        )
    return Prepared(members, settings, plans)


def _check_agreement(
    members: Sequence[Member], groups: Sequence[Mapping[str, Any]], options: str
) -> None:
    fault = _shared_memory(members)
    texts = [*(_group_text(number, group) for number, group in enumerate(groups)), options]
    domains = dict.fromkeys(member.domain for member in members)
    for domain in domains:
        if domain.process_group is not None:
            lines = [_member_text(member) for member in members if member.domain == domain]
            agree([*lines, *texts], domain.process_group, _WHAT, error=fault)
    if fault:
        raise ValueError(fault)


_WHAT = "the optimizer's parameters"


def tell_others(fault: Exception, params: Iterable[Any]) -> None:
    """Let the ranks that wait in ``prepare`` know that this one will not get there."""
    for item in params:
        for param in item["params"] if isinstance(item, dict) else [item]:
            tensor = param[1] if isinstance(param, tuple) else param
            if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
                process_group = domain_of(tensor).process_group
                if process_group is not None:
                    with suppress(ValueError):  # what it raises is what the caller raises
                        agree([], process_group, _WHAT, error=str(fault))
                    return


def _member_text(member: Member) -> str:
    param = member.param
    placed = f" {param.placements}" if isinstance(param, DTensor) else ""
    return f"{member.name}: {tuple(param.shape)} {param.dtype}{placed} in group {member.group}"


def _group_text(number: int, group: Mapping[str, Any]) -> str:
    options = {
        key: float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    return f"group {number}: {options}"


def _shared_memory(members: Sequence[Member]) -> str | None:
    """Two parameters that start at the same address, in words; they would be updated twice."""
    seen: dict[tuple[Any, ...], str] = {}
    for member in members:
        local = local_of(member.param)
        if local.numel() and not local.is_meta:
            key = (local.device, local.data_ptr())
            if key in seen:
                return (
                    f"{seen[key]} and {member.name} share their memory: give a tied parameter to "
                    "the optimizer once."
                )
            seen[key] = member.name
    return None


@torch.no_grad()
def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, outside of autograd and without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def same_bytes(first: DTensor, second: DTensor) -> bool:
    """Whether two DTensors of one shape and mesh hold the same parts on every rank."""
    if first.placements == second.placements:
        return True
    if any(placement.is_partial() for placement in first.placements):
        return False
    return rank_boxes(first) == rank_boxes(second)


def fault_of(member: Member) -> str | None:
    """Why a gradient cannot be used, if it cannot."""
    param, grad = member.param, member.param.grad
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        return f"The gradient of {member.name} is sparse ({grad.layout}): give a dense one."
    wide = torch.promote_types(grad.dtype, param.dtype)
    if member.algorithm == MUON and wide != param.dtype:
        return (
            f"The gradient of {member.name} is {grad.dtype}, the parameter {param.dtype}: its "
            f"momentum would lose precision. Keep the parameter in {wide}."
        )
    return None


def local_grad(member: Member) -> Tensor:
    """This rank's part of a parameter's gradient, placed as the parameter is.

    A gradient with other placements (``Partial``, ``Replicate``) is redistributed first; every
    rank of the mesh calls this then.
    """
    param, grad = member.param, member.param.grad
    assert grad is not None
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and not same_bytes(grad, param):
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_of(grad)
