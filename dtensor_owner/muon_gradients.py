"""Which parameters take part in a step: the same answer on every rank, or the same error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_owner.exchange import gather_answers
from dtensor_owner.muon_agree import is_shared
from dtensor_owner.muon_matrices import Domain, domain_of_mesh, ordered_meshes
from dtensor_owner.muon_prepare import (
    NO_GRADIENT,
    PLACED_ALIKE,
    Member,
    describe_gradient,
    fault_of,
    local_of,
)
from placements.collectives import all_reduce


@dataclass(frozen=True)
class Gradients:
    """What all ranks know of a step's gradients.

    Args:
        present: Per parameter, whether it has a gradient: on all ranks that share it, or on none.
        finite: Whether all gradients on all ranks are finite; True if not asked.
        stale: Whether any rank has to plan anew, or ranks have other options; all of them compare
            what they have then.
    """

    present: tuple[bool, ...]
    finite: bool
    stale: bool


def agree_on_gradients(
    members: Sequence[Member], *, check_finite: bool, stale: bool = False, options: int = 0
) -> Gradients:
    """Compare gradients between ranks: one small all_reduce per mesh.

    Args:
        members: All parameters of the optimizer, as they were planned. Those that are not sharded
            are compared with the other ranks of the widest mesh.
        check_finite: Whether to look for inf and nan.
        stale: Whether this rank's parameters or settings are no longer those planned.
        options: Equal on ranks whose options are equal.

    Raises:
        RuntimeError: On every rank of the mesh, with the same text: a parameter has a gradient
            on some ranks only, or placed in another way, or a gradient cannot be used. Nothing
            has been changed then.
    """
    codes = [_code(describe_gradient(member)) for member in members]
    faults = [fault for member in members if (fault := fault_of(member)) is not None]
    finite = faults != [] or not check_finite or _all_finite(members)
    meshes = ordered_meshes(member.param for member in members)
    domains = [domain for mesh in meshes if (domain := domain_of_mesh(mesh)).group is not None]
    if not domains and faults:
        raise RuntimeError(faults[0])
    mixed: dict[tuple[str, int], int] = {}  # by mesh and number on it, which all its ranks share
    trouble = bool(faults)
    # The widest mesh comes last: whoever waits for a rank of a smaller one is told then.
    for domain in reversed(domains):
        alone_too = domain == domains[0]
        indices = [
            index
            for index, member in enumerate(members)
            if member.domain == domain or (alone_too and not is_shared(member.param))
        ]
        mine = [codes[index] for index in indices]
        flags = [trouble, not finite, stale]
        values = [*mine, options, *(-code for code in mine), -options, *flags]
        assert domain.group is not None
        device = next(m.param.device for m in members if m.domain == domain)
        shared = torch.tensor(values, dtype=torch.int64, device=device)
        *extremes, trouble, bad, stale = all_reduce(shared, "max", domain.group).tolist()
        half = len(extremes) // 2
        differs = [high != -low for high, low in zip(extremes[:half], extremes[half:])]
        mixed |= {(str(domain), k): i for k, i in enumerate(indices) if differs[k]}
        trouble = bool(trouble or any(differs[:-1]))
        finite, stale = not bad, bool(stale or differs[-1])
    # Ranks with other parameters or options compare those first: it explains the rest.
    if trouble and domains and not stale:
        raise RuntimeError(_explain(members, mixed, faults, domains[0]))
    return Gradients(tuple(code > 0 for code in codes), finite, stale)


def _code(description: str) -> int:
    if description == NO_GRADIENT:
        return 0
    return 1 if description == PLACED_ALIKE else 2 + crc32(description.encode())


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
    members: Sequence[Member],
    mixed: Mapping[tuple[str, int], int],
    faults: Sequence[str],
    domain: Domain,
) -> str:
    """The same words on every rank: they compare notes, as all of them are about to raise."""
    group = domain.process_group
    assert group is not None
    notes = {
        key: (members[index].name, describe_gradient(members[index]))
        for key, index in mixed.items()
    }
    answers = gather_answers((faults[:1], notes), group)
    found = [fault for fault, _ in answers if fault]
    if found:
        return found[0][0]
    first, number = next((next(iter(notes)), len(notes)) for _, notes in answers if notes)
    name = next(notes[first][0] for _, notes in answers if first in notes)
    ranks_of: dict[str, list[int]] = {}
    for rank, (_, notes) in enumerate(answers):
        if first in notes:
            ranks_of.setdefault(notes[first][1], []).append(dist.get_global_rank(group, rank))
    more = f" and {number - 1} more parameters" if number > 1 else ""
    texts = [f"{what} on ranks {ranks}" for what, ranks in sorted(ranks_of.items(), reverse=True)]
    return (
        f"{name}{more}: {', '.join(texts)} of {domain}. A step needs the gradient on all ranks, "
        "placed in the same way, or on none: let every rank run the same parameters, or set .grad "
        "to zeros where there is none."
    )
