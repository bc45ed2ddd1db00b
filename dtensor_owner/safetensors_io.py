"""One safetensors file out of a sharded model, and back onto any layout, a shard at a time.

Every rank writes its own rows to their place in the file and reads its own rows from it; no
tensor is gathered. Both go through ``torch.distributed.checkpoint`` (DCP), whose planner decides
who writes what and whose steps hand an error on one rank to all.

File format: https://github.com/huggingface/safetensors (an 8-byte length, a JSON header with
dtype, shape and byte range of each tensor, then the values).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dtensor_owner import checkpoint_state as states
from dtensor_owner.checkpoint import faults_on_all_ranks, read_into
from dtensor_owner.checkpoint_files import (
    INCOMPLETE,
    CheckpointError,
    UnreadableMetadata,
    sync_folder,
)
from dtensor_owner.checkpoint_plan import Loader, SavePlanner, Wanted

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
ALIGNMENT = 8  # of the first value

Shape = tuple[int, ...]


def export_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    metadata: Mapping[str, str] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a model's parameters and buffers to one safetensors file; every rank calls this.

    A tied parameter is written once, under its first name. The file appears when it is complete
    and replaces an older one. A rank holds one piece of one tensor beside its shards at most.

    Args:
        path: On a file system that all ranks see.
        model: Any module.
        metadata: Texts for the file's header.
        process_group: The ranks that write; default: all.

    Raises:
        CheckpointError: On every rank: a rank could not write, or a dtype is not in the format.
    """
    file = Path(path)
    writer = _Writer(file, {"format": "pt", **(metadata or {})})
    with faults_on_all_ranks(f"{file} could not be written"), torch.no_grad():
        dcp.save(
            {},
            storage_writer=writer,
            planner=SavePlanner(lambda is_coordinator: dict(states.model_state(model).tensors)),
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )


def import_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    cast: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load a safetensors file, or a folder of them, into a model; every rank calls this.

    Names, shapes and dtypes are compared before anything changes. Values then go straight to
    the shards: a rank reads its own rows only. Needs the ``safetensors`` package.

    Args:
        path: A file, or a folder whose ``*.safetensors`` are taken together.
        model: Placed in any way.
        strict: Missing and unexpected names are errors.
        cast: Convert values of another dtype; otherwise they are an error.
        process_group: The ranks that load; default: all.

    Raises:
        CheckpointError: On every rank: the file is damaged or does not fit; it names tensors.
    """

    def want(saved: Mapping[str, Any]) -> Wanted:
        state = states.model_state(model)
        wanted = Wanted(known=set(state.aliases), checked=("",))
        for name, tensor in state.tensors.items():
            wanted.tensors[name] = target = states.target_of(tensor, name, direct=True)
            if cast and name in saved:
                target.dtype = saved[name].properties.dtype
        return wanted

    with torch.no_grad():
        loader = Loader(str(path), want, strict=strict)
        read_into(loader, _Reader(Path(path)), process_group=process_group)


# ----------------------------------------------------------------------------------- writing


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The start of a file, where each tensor's values start in it, and the file's size, in bytes.

    Larger dtypes come first, so that every value is aligned.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        if dtype not in CODES:
            raise CheckpointError(f"{name} is {dtype}, which safetensors files cannot hold.")
        starts[name], end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + start for name, start in starts.items()}, len(head) + end


def runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
    """Positions, in elements, where a box of a tensor starts anew in row-major order.

    All runs have the length ``prod(sizes) / number of runs``.
    """
    inner = len(shape)  # dims from here on are whole
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = range(max(inner - 1, 0))  # the dim before them is one range of each run
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(offset * stride for offset, stride in zip(offsets, strides))
    for steps in itertools.product(*(range(sizes[dim]) for dim in outer)):
        yield base + sum(step * strides[dim] for dim, step in zip(outer, steps))


class _Writer(dcp.StorageWriter):
    """DCP storage: one file, each piece at its place."""

    def __init__(self, file: Path, metadata: Mapping[str, str]) -> None:
        self._file, self._metadata = file, metadata
        self._part = file.with_name(file.name + INCOMPLETE)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on one rank, before any rank writes: lay the file out."""
        tensors: dict[str, tuple[torch.dtype, Shape]] = {}
        for item in itertools.chain.from_iterable(plan.items for plan in plans):
            assert item.tensor_data is not None
            data = item.tensor_data
            tensors[item.index.fqn] = data.properties.dtype, tuple(data.size)
        head, starts, size = header_of(tensors, self._metadata)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._part.open("wb") as part:
            part.write(head)
            part.truncate(size)
        return [dataclasses.replace(plan, storage_data=starts) for plan in plans]

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        with self._part.open("r+b", buffering=0) as part:
            for item in plan.items:
                assert item.tensor_data is not None
                chunk, shape = item.tensor_data.chunk, tuple(item.tensor_data.size)
                piece = planner.resolve_data(item)
                assert isinstance(piece, Tensor)
                data = _bytes_of(piece)
                places = list(runs(shape, chunk.offsets, chunk.sizes)) if data else []
                length = len(data) // max(1, len(places))
                for number, place in enumerate(places):
                    start = plan.storage_data[item.index.fqn] + place * piece.dtype.itemsize
                    _write_at(part.fileno(), data[number * length : (number + 1) * length], start)
            os.fsync(part.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Runs on one rank, after all have written."""
        os.replace(self._part, self._file)
        sync_folder(self._file.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> None:
        return None


def _bytes_of(piece: Tensor) -> memoryview:
    flat = piece.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def _write_at(file: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


# ----------------------------------------------------------------------------------- reading


class _Reader(dcp.StorageReader):
    """DCP storage: safetensors files, of which a rank reads its own rows."""

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError:
            raise ImportError(
                "Reading safetensors needs the safetensors package: pip install "
                "'dtensor-owner[safetensors]'."
            ) from None
        self.path, self._open = path, safe_open
        self._file_of: dict[str, Path] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        found: dict[str, Any] = {}
        try:
            for file in files:
                with self._open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118  no dict
                        if name in found:
                            other = self._file_of[name].name
                            raise CheckpointError(f"{name} is in {other} too")
                        self._file_of[name] = file
                        found[name] = _metadata_of(opened.get_slice(name), name)
        except Exception as fault:
            return UnreadableMetadata(
                CheckpointError(f"{file} cannot be read as safetensors: {fault}")
            )
        if not found:
            return UnreadableMetadata(CheckpointError(f"{self.path} has no safetensors in it."))
        return Metadata(found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for file in sorted(set(self._file_of.values())):
            with self._open(file, framework="pt") as opened:
                for item in plan.items:
                    name = item.storage_index.fqn
                    if self._file_of[name] != file:
                        continue
                    cut = tuple(
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths)
                    )
                    values = opened.get_slice(name)[cut] if cut else opened.get_tensor(name)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(values)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _metadata_of(entry: Any, name: str) -> TensorStorageMetadata:
    code, shape = entry.get_dtype(), torch.Size(entry.get_shape())
    if code not in DTYPES:
        raise CheckpointError(f"{name} has the dtype {code}, which is not supported")
    return TensorStorageMetadata(
        TensorProperties(DTYPES[code]),
        shape,
        [ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)],
    )
