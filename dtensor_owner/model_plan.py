"""What sharding a model would give, from its parameters' names and shapes: no ranks, no data."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from dtensor_owner.layout import GlobalLayout, ShardLayout, build_row_atomic_layout
from dtensor_owner.muon_groups import MuonParamGroups, muon_param_groups
from dtensor_owner.owners import OwnerPlan, ParameterLayout, ns_flops_cost_fn, plan_owners
from dtensor_owner.report import GroupReport, group_lines, stored_bytes
from dtensor_owner.usage import UsageError

#: How embeddings and heads are called in files, where nothing else tells them from matrices.
NOT_MATRICES = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "head.*", "output.weight")


def load_model(source: str) -> nn.Module:
    """The parameters of a model, on the meta device.

    Args:
        source: A ``.safetensors`` file, a folder of them (only headers are read), or
            ``package.module:function`` that returns an ``nn.Module``.

    Raises:
        UsageError: Nothing like that is there.
    """
    path = Path(source)
    if path.exists():
        return _from_files(sorted(path.glob("*.safetensors")) if path.is_dir() else [path], source)
    module_name, colon, function_name = source.partition(":")
    if not colon:
        raise UsageError(f"{source}: no such file or folder, and not package.module:function")
    if os.getcwd() not in sys.path:  # a command's own folder is there, the user's is not
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        with torch.device("meta"):
            model = function()
    except Exception as error:  # whatever the user's code raises
        raise UsageError(f"{source}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{source} returned a {type(model).__name__}, not an nn.Module")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(
                f"{source}: {name} has no shape before a first forward (a lazy module)"
            )
    return model


def _from_files(files: Sequence[Path], source: str) -> nn.Module:
    if not files:
        raise UsageError(f"{source}: no .safetensors files in this folder")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UsageError(f"{source}: reading it needs the package safetensors") from error
    model = nn.Module()
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  not a dict
                    _add(model, name, tuple(tensors.get_slice(name).get_shape()))
        except SafetensorError as error:
            raise UsageError(f"{file}: {error}") from error
    return model


def _add(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in dict(model.named_children()):
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    model.register_parameter(last, nn.Parameter(torch.empty(shape, device="meta")))


@dataclass(frozen=True)
class ModelPlan:
    """Layouts of a model's parameters and owners of its matrices; ``str()`` is the report.

    Args:
        num_shards: Ranks that the parameters are sharded over.
        replicas: Copies of the shards (HSDP).
        groups: One for each block, and one for the rest.
        choices: Which parameters are matrices, and why the others are not.
        matrices: Names of the matrices, by group, in the order of ``owners``.
        owners: Their owners.
        itemsize: Bytes of an element on the way to its owner and back.
    """

    num_shards: int
    replicas: int
    groups: tuple[GroupReport, ...]
    choices: MuonParamGroups
    matrices: tuple[tuple[str, ...], ...]
    owners: OwnerPlan
    itemsize: int

    @property
    def step_bytes(self) -> int:
        """What an optimizer step sends: pieces to their owners, results to all replicas."""
        there = self.owners.moved_numel
        back = self.owners.moved_numel + (self.replicas - 1) * self.owners.total_numel
        return (there + back) * self.itemsize

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON can hold it; sizes in bytes."""
        return {
            "num_shards": self.num_shards,
            "replicas": self.replicas,
            **stored_bytes(self.groups),
            "owners": dict(self._owned()),
            "loads": list(self.owners.loads),
            "max_over_mean": self.owners.imbalance,
            "step_bytes": self.step_bytes,
        }

    def _owned(self) -> Iterable[tuple[str, int]]:
        for names, owners in zip(self.matrices, self.owners.owners):
            yield from zip(names, owners.values())

    def __str__(self) -> str:
        copies = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return "\n".join(
            [
                f"Plan for {self.num_shards} shards{copies}",
                "",
                *group_lines(self.groups, merged=True),
                "",
                str(self.owners),
                "",
                f"An optimizer step sends {self.step_bytes:,} bytes between ranks.",
            ]
        )


def plan_model(
    model: nn.Module,
    num_shards: int,
    *,
    replicas: int = 1,
    block_size: int = 1,
    shard_layout: ShardLayout = ShardLayout.UNPADDED,
    eligible: str = "holders",
    ranks_per_node: int = 1,
    adamw_names: Sequence[str] = (),
    itemsize: int = 2,
    ns_steps: int = 5,
) -> ModelPlan:
    """Lay out a model's parameters and choose owners of its matrices.

    Args:
        model: Its parameters' names and shapes are used; blocks are what a number in the names
            tells apart, as ``fully_shard`` would be applied to them.
        num_shards, replicas: Ranks to shard over, and copies of that.
        block_size, shard_layout: As of ``fully_shard``.
        eligible, ranks_per_node: As of ``plan_owners``.
        adamw_names: Patterns of names that are no matrices, as of ``muon_param_groups``; those that
            match nothing are left out.
        itemsize: Bytes of an element, stored and sent.
        ns_steps: Newton-Schulz steps.

    Raises:
        ValueError: No parameter is a matrix, or a parameter cannot be laid out.
    """
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    patterns = [p for p in adamw_names if any(fnmatchcase(name, p) for name in parameters)]
    choices = muon_param_groups(model, adamw_names=patterns)
    by_muon = {choice.name for choice in choices.choices if choice.algorithm == "muon"}
    reports, owner_groups, names_of = [], [], []
    for group_name, names in _blocks(parameters):
        shapes = [parameters[name] or (1,) for name in names]
        layout = build_row_atomic_layout(
            shapes, num_shards, block_size=block_size, shard_layout=shard_layout
        )
        reports.append(GroupReport(group_name, layout, itemsize))
        matrices = [
            found
            for i, name in enumerate(names)
            if name in by_muon
            for found in _matrices(name, i, layout)
        ]
        names_of.append(tuple(name for name, _ in matrices))
        owner_groups.append(dict(enumerate(found for _, found in matrices)))
    owners = plan_owners(
        owner_groups,
        cost_fn=ns_flops_cost_fn(ns_steps, method="auto"),  # as Muon counts by default
        eligible=eligible,  # type: ignore[arg-type]
        replicas=replicas,
        ranks_per_node=ranks_per_node,
    )
    return ModelPlan(
        num_shards, replicas, tuple(reports), choices, tuple(names_of), owners, itemsize
    )


def _blocks(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Names by block, in order: a block's name ends with the first number in it."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        block = "the rest" if number is None else ".".join(parts[: number + 1])
        blocks.setdefault(block, []).append(name)
    return sorted(blocks.items(), key=lambda item: _natural(item[0]))


def _natural(name: str) -> list[tuple[int, Any]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _matrices(name: str, i: int, layout: GlobalLayout) -> list[tuple[str, ParameterLayout]]:
    """A parameter's matrices (those of a stack one by one) and how ranks share each."""
    start, _ = layout.get_tensor_range(i)
    shape = layout.tensor_shapes[i]
    number, matrix = (shape[0], shape[1:]) if len(shape) == 3 else (1, shape)
    size = prod(matrix)
    found = []
    for k in range(number):
        low, high = start + k * size, start + (k + 1) * size
        counts = tuple(max(0, min(high, b) - max(low, a)) for a, b in layout.segments)
        label = name if number == 1 else f"{name}[{k}]"
        found.append((label, ParameterLayout(matrix, counts)))
    return found
