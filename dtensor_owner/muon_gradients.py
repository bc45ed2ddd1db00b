"""Which parameters take part in a step: the same answer on every rank, or the same error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_owner.exchange import gather_answers
from dtensor_owner.muon_matrices import Domain
from dtensor_owner.muon_prepare import Member, fault_of, local_of
from placements.collectives import all_reduce


@dataclass(frozen=True)
class Gradients:
    """What all ranks know of a step's gradients.

    Args:
        present: Per parameter, whether it has a gradient: on all ranks that share it, or on none.
        finite: Whether all gradients on all ranks are finite; True if not asked.
        stale: Whether any rank has to plan anew; all do so together then.
    """

    present: tuple[bool, ...]
    finite: bool
    stale: bool


def agree_on_gradients(
    members: Sequence[Member], *, check_finite: bool, stale: bool = False
) -> Gradients:
    """Compare gradients between ranks: one small all_reduce per mesh.

    Args:
        members: All parameters of the optimizer, as they were planned.
        check_finite: Whether to look for inf and nan.
        stale: Whether this rank's parameters or settings are no longer those planned.

    Raises:
        RuntimeError: On every rank of the mesh, with the same text: a parameter has a gradient
            on some ranks only, or a gradient cannot be used. Nothing has been changed then.
    """
    present = [member.param.grad is not None for member in members]
    faults = [fault for member in members if (fault := fault_of(member)) is not None]
    finite = faults != [] or not check_finite or _all_finite(members)
    for domain in dict.fromkeys(member.domain for member in members):
        indices = [i for i, member in enumerate(members) if member.domain == domain]
        if domain.group is None:
            if faults:
                raise RuntimeError(faults[0])
            continue
        device = members[indices[0]].param.device
        missing = [not present[i] for i in indices]
        flags = [*missing, *(present[i] for i in indices), bool(faults), not finite, stale]
        shared = torch.tensor(flags, dtype=torch.int32, device=device)
        shared = all_reduce(shared, "max", domain.group)
        *some, fault, bad, anyone_stale = shared.tolist()
        mixed = [i for i, a, b in zip(indices, some, some[len(indices) :]) if a and b]
        if mixed or fault:
            raise RuntimeError(_explain(members, mixed, faults, domain))
        finite, stale = not bad, bool(anyone_stale)
    return Gradients(tuple(present), finite, stale)


def _all_finite(members: Sequence[Member]) -> bool:
    by_device: dict[torch.device, list[Tensor]] = {}
    for member in members:
        if member.param.grad is not None:
            grad = local_of(member.param.grad)
            if grad.numel():  # the largest magnitude of nothing is an error
                by_device.setdefault(grad.device, []).append(grad)
    for grads in by_device.values():
        largest = torch._foreach_norm(grads, float("inf"))
        if not torch.stack([norm.isfinite() for norm in largest]).all():
            return False
    return True


def _explain(
    members: Sequence[Member], mixed: Sequence[int], faults: Sequence[str], domain: Domain
) -> str:
    """The same words on every rank: they compare notes, as all of them are about to raise."""
    assert domain.process_group is not None
    here = (faults[:1], [members[i].param.grad is None for i in mixed])
    answers = gather_answers(here, domain.process_group)
    found = [fault for fault, _ in answers if fault]
    if found:
        return found[0][0]
    lacking = [rank for rank, (_, missing) in enumerate(answers) if missing[0]]
    more = f" and {len(mixed) - 1} more parameters" if len(mixed) > 1 else ""
    return (
        f"{members[mixed[0]].name}{more}: no gradient on ranks {lacking} of {domain}, but on the "
        "others there is one. A step needs the gradient on all ranks or on none: let every rank "
        "run the same parameters, or set .grad to zeros where there is none."
    )
