"""Which parameters a call of fully_shard takes, and which ones it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_owner.fsdp_module import FSDPModule
from dtensor_owner.parameter_group import ManagedParameter

_SHARDED_AS = "_dtensor_owner_sharded_as"  # mark on a full parameter that a group has replaced


def mark_as_sharded(managed: Sequence[ManagedParameter], module: nn.Module) -> None:
    """Note on the full parameters that they were replaced, for whoever still refers to them."""
    for m in managed:
        setattr(m.parameter, _SHARDED_AS, f"{m.name} of {type(module).__name__}")


def managed_parameters(
    module: nn.Module, ignored: Iterable[nn.Parameter]
) -> list[ManagedParameter]:
    """Parameters of the module that neither an inner ``fully_shard`` nor the caller has taken."""
    skipped = {id(parameter) for parameter in ignored}
    managed: dict[int, ManagedParameter] = {}
    for prefix, owner in _own_modules(module, ""):
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in skipped:
                continue
            if isinstance(owner, nn.RNNBase):
                raise NotImplementedError(
                    f"{prefix or 'The module'} is a {type(owner).__name__}, which keeps its "
                    "weights in a private list that gathered ones cannot be put into: pass its "
                    "parameters as ignored_params."
                )
            full_name = f"{prefix}.{name}" if prefix else name
            entry = managed.setdefault(
                id(parameter), ManagedParameter(full_name, parameter, owners=[])
            )
            entry.owners.append((owner, name))
    return list(managed.values())


def _own_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The module and those below it, up to the ones that are sharded on their own."""
    seen: set[int] = set()
    pending = [(prefix, module)]
    while pending:
        path, current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield path, current
        children = [
            (f"{path}.{name}" if path else name, child)
            for name, child in current.named_children()
            if not isinstance(child, FSDPModule)
        ]
        pending += reversed(children)


def check_parameters(managed: Sequence[ManagedParameter], mesh: DeviceMesh) -> None:
    for m in managed:
        taken = getattr(m.parameter, _SHARDED_AS, None)
        if taken is not None:
            raise ValueError(
                f"{m.name} is the same parameter as {taken}, which was sharded before: a tied "
                "parameter is gathered in one place, so apply fully_shard only to a module that "
                "contains all its uses."
            )
        if isinstance(m.parameter, DTensor):
            raise NotImplementedError(
                f"{m.name} is already a DTensor placed {m.parameter.placements}: pass it in "
                "ignored_params, or shard the plain parameter."
            )
        device = m.parameter.device.type
        if device not in (mesh.device_type, "meta"):
            raise ValueError(
                f"{m.name} is on {device}, but the mesh is of {mesh.device_type} devices: move the "
                f"module there first, module.to({mesh.device_type!r})."
            )
