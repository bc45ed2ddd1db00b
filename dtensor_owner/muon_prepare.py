"""From parameters to plans: everything a Muon step needs that does not change between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_owner.muon_matrices import (
    Domain,
    Matrix,
    domain_of,
    domain_of_mesh,
    matrices_of,
    ordered_meshes,
    rank_boxes,
)
from dtensor_owner.muon_plan import Settings, StepPlan, plan_step
from dtensor_owner.muon_program import rank_program
from dtensor_owner.muon_step import BucketWork
from dtensor_owner.ns_schedule import as_schedule, check_method

MUON, ADAMW = "muon", "adamw"
MUON_OPTIONS = (
    *("lr", "weight_decay", "momentum", "nesterov", "adjust_lr_fn", "matrices", "split_rows"),
    *("eps", "ns_coefficients", "ns_steps", "ns_dtype", "ns_method"),
)


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
        for position, param in enumerate(group["params"]):
            name = name_of(group, number, position)
            domain, signature = domain_of(param), signature_of(param)
            members.append(Member(param, name, number, group["algorithm"], domain, signature))
    return members


def name_of(group: Mapping[str, Any], number: int, position: int) -> str:
    """What messages call a parameter."""
    names = group.get("param_names")
    return names[position] if names else f"parameter {position} of group {number}"


def settings_of(group: Mapping[str, Any]) -> Settings:
    """The settings of a Muon group, checked."""
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(
            'adjust_lr_fn must be None, "original" or "match_rms_adamw", got '
            f"{group['adjust_lr_fn']!r}."
        )
    dtype = group["ns_dtype"]
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"ns_dtype must be float16, bfloat16, float32 or float64, got {dtype}.")
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
        transport: How exchanges are done.
    """

    members: list[Member]
    settings: list[Settings | None]
    plans: dict[Domain, StepPlan]
    transport: str
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
                    self.transport == "point_to_point",
                )
            )
        return works


def prepare(
    groups: Sequence[Mapping[str, Any]],
    *,
    eligible: Literal["holders", "any"],
    bucket_numel: int,
    ranks_per_node: int,
    transport: str,
) -> Prepared:
    """Plan the step of all groups, by what all ranks of each domain have agreed on."""
    members = members_of(groups)
    settings = [settings_of(g) if g["algorithm"] == MUON else None for g in groups]
    # Ranks take the exchanges of several meshes in one order, whatever that of the parameters.
    meshes = ordered_meshes(member.param for member in members)
    by_domain: dict[Domain, list[Matrix]] = {domain_of_mesh(mesh): [] for mesh in meshes}
    for matrix in group_matrices(members, groups):
        by_domain.setdefault(members[matrix.param].domain, []).append(matrix)
    plans = {}
    for domain, matrices in by_domain.items():
        if not matrices:
            continue
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
            ranks_per_node=ranks_per_node,
        )
    return Prepared(members, settings, plans, transport)


def fault_of_parameters(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Two parameters that start at the same address, in words; they would be updated twice."""
    seen: dict[tuple[Any, ...], str] = {}
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            name = name_of(group, number, position)
            local = local_of(param)
            if local.numel() and not local.is_meta:
                key = (local.device, local.data_ptr())
                if key in seen:
                    return (
                        f"{seen[key]} and {name} share their memory: give a tied parameter to "
                        "the optimizer once."
                    )
                seen[key] = name
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
    here, there = (x.device_mesh if isinstance(x, DTensor) else None for x in (param, grad))
    if here != there or grad.shape != param.shape:
        return (
            f"The gradient of {member.name} has shape {tuple(grad.shape)} on {there or 'no mesh'}, "
            f"the parameter {tuple(param.shape)} on {here or 'no mesh'}: give one of the same kind."
        )
    wide = torch.promote_types(grad.dtype, param.dtype)
    if member.algorithm == MUON and wide != param.dtype:
        return (
            f"The gradient of {member.name} is {grad.dtype}, the parameter {param.dtype}: its "
            f"momentum would lose precision. Keep the parameter in {wide}."
        )
    return None


def describe_gradient(member: Member) -> str:
    """A gradient as far as the exchange that brings it to its parameter's placement depends on it.

    Ranks whose descriptions differ would enter different collectives.
    """
    param, grad = member.param, member.param.grad
    if grad is None:
        return NO_GRADIENT
    if not (isinstance(param, DTensor) and isinstance(grad, DTensor)) or same_bytes(grad, param):
        return PLACED_ALIKE
    return f"a {grad.dtype} gradient placed {grad.placements}"


NO_GRADIENT, PLACED_ALIKE = "no gradient", "a gradient placed as the parameter is"


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
