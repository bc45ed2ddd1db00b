"""DCP planners: what to save is asked for, and what to load is checked, where all ranks listen.

DCP runs a planner's methods inside steps whose errors it hands to all ranks. A rank on which
something is wrong therefore fails together with the others instead of leaving them waiting.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dtensor_owner.checkpoint_files import CheckpointError, UnreadableMetadata
from dtensor_owner.checkpoint_state import Target

_SHOWN = 5


class SavePlanner(DefaultSavePlanner):
    """Saves what a function returns; its argument says whether the rank is the coordinator."""

    def __init__(self, make: Callable[[bool], dict[str, Any]]) -> None:
        super().__init__()
        self._make = make

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(self._make(is_coordinator), storage_meta, is_coordinator)


@dataclass
class Wanted:
    """What is to be loaded.

    Args:
        tensors: By key; all of them must be in the checkpoint.
        objects: Keys of other values to read, all in the checkpoint.
        known: Keys that the checkpoint may have besides.
        checked: Keys below these prefixes that nobody wants are errors.
    """

    tensors: dict[str, Target] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    checked: tuple[str, ...] = ()


class Loader(LoadPlanner):
    """Compares a checkpoint with what is wanted, then reads into buffers.

    Args:
        folder: Named in errors.
        want: Tells what is wanted, given the checkpoint's metadata by key.
        strict: Whether missing and unexpected keys are errors; otherwise they are left alone.
    """

    def __init__(
        self, folder: str, want: Callable[[Mapping[str, Any]], Wanted], *, strict: bool
    ) -> None:
        self.folder, self._want, self._strict = folder, want, strict
        self.wanted = Wanted()
        self.objects: dict[str, Any] = {}
        self._saved: Mapping[str, Any] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if isinstance(metadata, UnreadableMetadata):
            raise metadata.fault
        assert metadata is not None
        self._saved = metadata.state_dict_metadata
        self.wanted = self._want(self._saved)
        faults = list(compare(self.wanted, self._saved, strict=self._strict))
        if faults:
            more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
            raise CheckpointError(
                f"{self.folder} does not fit; nothing was loaded.\n  "
                + "\n  ".join([*faults[:_SHOWN], *more])
            )

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, target in self.wanted.tensors.items():
            if key in self._saved and target.chunk is not None:
                items += create_read_items_for_chunk_list(key, self._saved[key], [target.chunk])
        none = torch.Size([0])
        for key in sorted(self.wanted.objects):
            index = MetadataIndex(key)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.objects[key] = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as fault:
            raise CheckpointError(
                f"{self.folder}: {key} holds objects that are not loaded for safety: {fault}"
            ) from None

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        buffer = self.wanted.tensors[read_item.dest_index.fqn].buffer
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            buffer = buffer.narrow(dim, start, length)
        return buffer

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the buffer has it."""

    def commit(self) -> None:
        """Copy everything that was read to its place."""
        with torch.no_grad():
            for key, target in self.wanted.tensors.items():
                if key in self._saved:
                    target.commit()


def compare(wanted: Wanted, saved: Mapping[str, Any], *, strict: bool) -> Sequence[str]:
    """What does not fit between a checkpoint and what is wanted from it, one line a key."""
    faults = []
    for key, target in wanted.tensors.items():
        if key not in saved:
            if strict:
                faults.append(f"{key} is missing in the checkpoint")
            continue
        found = saved[key]
        if not isinstance(found, TensorStorageMetadata):
            faults.append(f"{key} was saved as an object, and is a tensor here")
        elif tuple(found.size) != target.shape:
            faults.append(f"{key} was saved with shape {tuple(found.size)}, here {target.shape}")
        elif found.properties.dtype != target.dtype:
            faults.append(f"{key} was saved as {found.properties.dtype}, here {target.dtype}")
        elif sum(prod(chunk.sizes) for chunk in found.chunks) != prod(found.size):
            faults.append(f"{key} is incomplete: a shard of it is missing in the metadata")
    if strict:
        for key in saved:
            if key.startswith(wanted.checked) and not (
                key in wanted.tensors or key in wanted.objects or key in wanted.known
            ):
                faults.append(f"{key} is in the checkpoint, and nothing here takes it")
    return faults
