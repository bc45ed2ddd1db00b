"""Ranks that build or change an optimizer compare what they have, before they plan by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_owner.exchange import agree, gather_answers
from dtensor_owner.muon_adamw import ADAMW_DEFAULTS
from dtensor_owner.muon_matrices import domain_of_mesh, ordered_meshes
from dtensor_owner.muon_prepare import MUON_OPTIONS

_WHAT = "the optimizer's parameters"
_OPTIONS = frozenset({"algorithm", *MUON_OPTIONS, *ADAMW_DEFAULTS})

Groups = Sequence[Mapping[str, Any]]


def agree_on_parameters(
    groups: Groups,
    options: Mapping[str, Any],
    misplaced: Sequence[tuple[DeviceMesh, str]],
    fault: str | None,
) -> None:
    """Compare parameters and options with the ranks of every mesh; all of them call this.

    Args:
        groups: Parameter groups of the optimizer.
        options: Options of the optimizer as a whole.
        misplaced: State that has to be moved before a step: its mesh, and what it is in words.
        fault: What this rank has found wrong; it is raised on all ranks.

    Raises:
        ValueError: On every rank, with the same text: a rank found a fault, or ranks differ.
    """
    # Meshes in an order that all ranks share, the widest first: what is wrong with a smaller one
    # is then told to all. Each group of ranks is made when its turn comes.
    for number, mesh in enumerate(ordered_meshes(_params(groups))):
        process_group = domain_of_mesh(mesh).process_group
        if process_group is None:
            continue
        lines = [_number_text(groups, mesh), *option_lines(groups, options)]
        lines += _member_lines(groups, mesh, with_plain=number == 0)
        lines += [text for state_mesh, text in misplaced if state_mesh == mesh]
        agree(lines, process_group, _WHAT, error=fault)
        if number == 0:
            _check_meshes(groups, process_group)
    if fault:
        raise ValueError(fault)


def tell_others(fault: Exception, params: Iterable[Any]) -> None:
    """Let the ranks that wait in ``agree_on_parameters`` know that this one will not get there."""
    with suppress(Exception):  # what this rank has to say is the fault itself
        lists = (x.get("params", ()) if isinstance(x, dict) else [x] for x in params)
        items = (item for some in lists for item in ([some] if isinstance(some, Tensor) else some))
        for mesh in ordered_meshes(x[1] if isinstance(x, tuple) else x for x in items):
            if mesh.get_coordinate() is not None and mesh.size() > 1:
                process_group = domain_of_mesh(mesh).process_group
                assert process_group is not None
                agree([], process_group, _WHAT, error=f"{type(fault).__name__}: {fault}")
                return


def options_code(groups: Groups, options: Mapping[str, Any]) -> int:
    """A number that is equal on ranks whose options are equal, for a cheap look in every step."""
    return crc32("\n".join(option_lines(groups, options)).encode())


def option_lines(groups: Groups, options: Mapping[str, Any]) -> list[str]:
    """All options in words, one per line."""
    lines = [f"{key}={_named(value)}" for key, value in options.items()]
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key in _OPTIONS:  # groups may carry notes of their users, too
                plain = isinstance(value, Tensor) and value.numel() == 1
                lines.append(f"{key}={float(value) if plain else value!r} in group {number}")
    return lines


def _named(value: Any) -> str:
    """A value in words that are the same on every rank; a function's address is not."""
    if callable(value):
        kind = value if hasattr(value, "__qualname__") else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"
    return repr(value)


def _params(groups: Groups) -> Iterator[Tensor]:
    for group in groups:
        yield from group["params"]


def is_shared(param: Tensor) -> bool:
    """Whether other ranks take part in this parameter's step."""
    return isinstance(param, DTensor) and param.device_mesh.size() > 1


def _number_text(groups: Groups, mesh: DeviceMesh) -> str:
    shared = [p for p in _params(groups) if isinstance(p, DTensor) and p.device_mesh == mesh]
    return f"{len(shared)} parameters on this mesh, {len(groups)} groups"


def _member_lines(groups: Groups, mesh: DeviceMesh, *, with_plain: bool) -> Iterator[str]:
    for number, group in enumerate(groups):
        names = group.get("param_names") or [None] * len(group["params"])
        here = alone = 0  # numbers among their like: parameters on other meshes may lie between
        for name, param in zip(names, group["params"]):
            text = f"{tuple(param.shape)} {param.dtype}"
            if isinstance(param, DTensor) and param.device_mesh == mesh:
                yield f"{name or f'parameter {here}'}: {text} {param.placements} in group {number}"
                here += 1
            elif with_plain and not is_shared(param):
                # Names may differ: what is not sharded may be one of several experts.
                yield f"parameter {alone} that is not sharded: {text} in group {number}"
                alone += 1


def _check_meshes(groups: Groups, process_group: dist.ProcessGroup) -> None:
    """Whoever has parameters on a smaller mesh must find all ranks of it there."""
    mine = [mesh.mesh.tolist() for mesh in ordered_meshes(_params(groups)) if mesh.size() > 1]
    meshes_of = {
        dist.get_global_rank(process_group, rank): meshes
        for rank, meshes in enumerate(gather_answers(mine, process_group))
    }
    for rank, meshes in meshes_of.items():
        for mesh in meshes:
            for other in _flat(mesh):
                if mesh not in meshes_of.get(other, [mesh]):
                    raise ValueError(
                        f"Ranks disagree on {_WHAT}. First difference:\n"
                        f"  rank {rank}: parameters on mesh {mesh}\n"
                        f"  rank {other}: none on that mesh\n"
                        "Build it from the same parameters on every rank of a mesh."
                    )


def _flat(ranks: Any) -> Iterator[int]:
    for item in ranks if isinstance(ranks, list) else [ranks]:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield item
