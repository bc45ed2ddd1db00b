"""What a checkpoint holds, by name, and where it goes in a live model and its optimizers.

Keys are those of ``torch.distributed.checkpoint.state_dict.get_state_dict`` saved as
``{"model": ..., "optimizer": ...}``: ``model.<name>``, ``optimizer.state.<name>.<key>`` and
``optimizer.param_groups.<number>.<option>``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# Modules that wrap another one and leave a step in the names of its parameters.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
# Options of how an optimizer computes, not of what: a resumed run keeps its own.
_HOW = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
EXTRA_STATE = "_extra_state"


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers around its modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass
class ModelState:
    """Tensors and other state of a model by name; a tied tensor has its first name only.

    Args:
        tensors: Parameters and persistent buffers.
        objects: What modules give as extra state.
        aliases: Further names of tied tensors, with the first one.
        names: Of parameters, by their identity.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)


def model_state(model: nn.Module) -> ModelState:
    if isinstance(model, DistributedDataParallel):
        model = model.module
    found = ModelState()
    for key, value in model.state_dict(keep_vars=True).items():
        name = plain_name(key)
        if not isinstance(value, Tensor) or name.rpartition(".")[2] == EXTRA_STATE:
            found.objects[name] = value
        elif id(value) in found.names:
            found.aliases[name] = found.names[id(value)]
        else:
            found.names[id(value)] = name
            found.tensors[name] = value
    for key, parameter in model.named_parameters():  # those a module keeps out of its state
        found.names.setdefault(id(parameter), plain_name(key))
    return found


def name_of(parameter: Tensor, names: Mapping[int, str], group: int) -> str:
    if id(parameter) not in names:
        raise ValueError(
            f"Group {group} of the optimizer has a parameter of shape {tuple(parameter.shape)} "
            "that the model does not have: build the optimizer from this model's parameters, after "
            "the model was sharded."
        )
    return names[id(parameter)]


def named_parameters(
    optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor, Optimizer]]:
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                yield name_of(parameter, names, number), parameter, optimizer


def optimizer_state(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[str, Any]:
    """State and groups by parameter name. Nothing is created: unlike torch's
    ``get_optimizer_state_dict``, this runs no step on an optimizer without state."""
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        saved = optimizer.state_dict()
        name_by_number: dict[int, str] = {}
        for number, (group, live) in enumerate(zip(saved["param_groups"], optimizer.param_groups)):
            own = [name_of(parameter, names, number) for parameter in live["params"]]
            name_by_number.update(zip(group["params"], own))
            groups.append({**group, "params": own})
        for number, values in saved["state"].items():
            kept = {key: value for key, value in values.items() if value is not None}
            state[name_by_number[number]] = kept
    return {"state": state, "param_groups": groups}


@dataclass
class Target:
    """Where a saved tensor, or this rank's part of it, is read to.

    Args:
        shape: Of the whole tensor.
        dtype: Must be the saved one.
        chunk: This rank's part; None where it holds nothing.
        live: The local tensor that is overwritten in the end; None for one without a place.
        buffer: Where the part waits until everything has been read, on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk: ChunkStorageMetadata | None
    live: Tensor | None
    buffer: Tensor

    def commit(self) -> None:
        if self.live is not None and self.live is not self.buffer:
            self.live.copy_(self.buffer)


def target_of(tensor: Tensor, name: str, *, direct: bool = False) -> Target:
    """The place of a live tensor's values; ``direct`` reads into it without a buffer."""
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device: give it memory first, by to_empty().")
    if not isinstance(tensor, DTensor):
        live = tensor.detach()
        buffer = live if direct else _buffer(live)
        return Target(tuple(tensor.shape), tensor.dtype, whole(live.shape), live, buffer)
    with torch.no_grad():
        live = tensor.to_local()
    if tensor.device_mesh.get_coordinate() is None:
        return Target(tuple(tensor.shape), tensor.dtype, None, None, torch.empty(0))
    chunks = [chunk for chunk in tensor.__create_chunk_list__() if math.prod(chunk.sizes)]
    if not chunks:  # nothing, or the element that stands for nothing of a 0-D tensor
        return Target(tuple(tensor.shape), tensor.dtype, None, None, torch.empty(0))
    if [tuple(chunk.sizes) for chunk in chunks] != [tuple(live.shape)]:
        raise NotImplementedError(
            f"{name}, placed {tensor.placements}, is not one piece on this rank: load it with "
            "torch.distributed.checkpoint.load."
        )
    buffer = live if direct else _buffer(live)
    return Target(tuple(tensor.shape), tensor.dtype, chunks[0], live, buffer)


def loose_target(shape: Sequence[int], dtype: torch.dtype) -> Target:
    """A whole tensor that no live one waits for."""
    return Target(tuple(shape), dtype, whole(shape), None, torch.zeros(shape, dtype=dtype))


def whole(shape: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))


def _buffer(live: Tensor) -> Tensor:
    return torch.empty(live.shape, dtype=live.dtype, device="cpu")


# ------------------------------------------------------------------------ options of groups


def saved_options(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options of each parameter's group, from whatever lay below ``optimizer.param_groups``.

    Keys are ``<number>.<option>``, or ``<name>.<option>`` where the checkpoint was saved with
    ``flatten_optimizer_state_dict``.
    """
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    numbered: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        owner, _, option = key.rpartition(".")
        if owner in options:
            options[owner][option] = value
        else:
            numbered.setdefault(owner, {})[option] = value
    for group in numbered.values():
        for name in group.get("params", ()):
            if name in options:
                options[name] = group
    return {
        name: {key: value for key, value in group.items() if key not in _HOW}
        for name, group in options.items()
    }


def merged_options(
    names: Sequence[str], options: Mapping[str, Mapping[str, Any]], group: int
) -> dict[str, Any]:
    """The options that all of a group's parameters were saved with.

    Raises:
        ValueError: They were in groups of different options.
    """
    merged: dict[str, tuple[str, Any]] = {}
    for name in names:
        for key, value in options[name].items():
            first, known = merged.setdefault(key, (name, value))
            if not _same(known, value):
                raise ValueError(
                    f"Group {group} has parameters that were saved with different options: {key} "
                    f"is {known!r} for {first} and {value!r} for {name}. Pass options='keep' to "
                    "keep the options that the optimizer has now."
                )
    return {key: value for key, (_, value) in merged.items()}


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) if type(one) is type(other) else False


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Put saved options into a live group; a tensor keeps its identity, a dtype its type."""
    for key, value in options.items():
        live = group.get(key)
        if isinstance(live, Tensor):
            live.fill_(float(value))
        elif isinstance(live, torch.dtype) and isinstance(value, str):
            group[key] = getattr(torch, value)
        elif isinstance(value, Tensor):
            group[key] = value.item() if isinstance(live, float) else value
        else:
            group[key] = value


# --------------------------------------------------------------------------- random numbers


def rng_state(device: torch.device | None) -> dict[str, Any]:
    """States of this rank's generators: Python's and torch's on the CPU and on its GPU."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device | None) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
