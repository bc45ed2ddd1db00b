"""Checkpoint folders on disk: complete at once or not there at all, every byte read is checked.

Both classes are storage back ends of ``torch.distributed.checkpoint`` (DCP) and use its format.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dtensor_owner import checkpoint_checksums as checksums
from dtensor_owner.checkpoint_checksums import Checksums

METADATA = ".metadata"
INCOMPLETE = ".incomplete"  # suffix of a folder while it is written
REMOVED = ".removed"  # suffix of one while it is removed


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is incomplete or damaged, or does not fit the model."""


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint's save came to its end; one that was interrupted is not complete."""
    path = Path(folder)
    return not path.name.endswith((INCOMPLETE, REMOVED)) and (path / METADATA).is_file()


def remove(folder: Path) -> None:
    """Remove a checkpoint so that it is never there in part: what a kill leaves is marked."""
    doomed = folder.with_name(folder.name + REMOVED)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


class AtomicWriter(FileSystemWriter):
    """Writes beside the folder and renames at the end, when all ranks have written all files.

    Args:
        folder: Must not exist, or be empty. All ranks see the same file system.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.with_name(folder.name + INCOMPLETE))
        self._folder = folder

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        Path(self.path).mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on one rank, before any rank writes."""
        if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
            raise CheckpointError(
                f"{self._folder} exists already: save to a new folder, or remove it first."
            )
        for left_over in Path(self.path).iterdir():  # of a save that was interrupted
            left_over.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Each result's place in the files goes on together with the record's fingerprint."""
        results = super().write_data(plan, planner).wait()
        marked = []
        for name in sorted({result.storage_data.relative_path for result in results}):
            file = os.open(Path(self.path) / name, os.O_RDONLY)
            try:
                for result in results:
                    place = result.storage_data
                    if place.relative_path == name:
                        mark = checksums.fingerprint_at(file, place.offset, place.length)
                        marked.append(dataclasses.replace(result, storage_data=(place, mark)))
            finally:
                os.close(file)
        done: Future[list[WriteResult]] = Future()
        done.set_result(marked)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Runs on one rank, after all ranks have written and synced."""
        records: dict[str, dict[int, int]] = {}
        plain: list[list[WriteResult]] = []
        for of_rank in results:
            plain.append([])
            for result in of_rank:
                place, mark = result.storage_data
                records.setdefault(place.relative_path, {})[place.offset] = mark
                plain[-1].append(dataclasses.replace(result, storage_data=place))
        super().finish(metadata, plain)
        folder = Path(self.path)
        Checksums(zlib.crc32((folder / METADATA).read_bytes()), records).write(folder)
        sync_folder(folder)
        os.rename(folder, self._folder)
        sync_folder(self._folder.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder last through a loss of power."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class UnreadableMetadata(Metadata):
    """Stands for metadata that could not be read; DCP would look for others and log at length."""

    def __init__(self, fault: CheckpointError) -> None:
        super().__init__({}, storage_data={})
        self.fault = fault


class CheckedReader(FileSystemReader):
    """Reads what DCP's file system writer wrote, and compares every record with its checksum.

    ``torch.load`` does not: a flipped bit would become a weight. What :class:`AtomicWriter` wrote
    is also known to be the record that was saved there.

    Args:
        folder: Of the checkpoint.
        then: Called when this rank has read everything, in the same step: what it raises is an
            error on all ranks.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, then: Callable[[], None] | None = None
    ) -> None:
        super().__init__(folder)
        self._then = then
        self._checksums: Checksums | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path)
        if path.exists() and not path.is_dir():
            return UnreadableMetadata(
                CheckpointError(f"{path} is a file, and a checkpoint is a folder.")
            )
        try:
            self._checksums = Checksums.read(path)
        except ValueError as fault:
            return UnreadableMetadata(CheckpointError(f"{path / checksums.FILE} {fault}."))
        except OSError as fault:
            return UnreadableMetadata(
                CheckpointError(f"{path / checksums.FILE} cannot be read: {fault.strerror}.")
            )
        try:
            if self._checksums is not None:
                found = zlib.crc32((path / METADATA).read_bytes())
                if found != self._checksums.metadata:
                    return UnreadableMetadata(
                        CheckpointError(
                            f"{path / METADATA} is damaged: it is not the one that "
                            f"{checksums.FILE} was written with. If something else has saved to "
                            "this folder since, remove that file."
                        )
                    )
            return super().read_metadata(*args, **kwargs)
        except FileNotFoundError:
            missing = "there is no such folder" if not path.is_dir() else f"it has no {METADATA}"
            return UnreadableMetadata(
                CheckpointError(f"{path} is not a complete checkpoint: {missing}.")
            )
        except Exception as fault:
            told = f"{type(fault).__name__}: {fault}"
            return UnreadableMetadata(
                CheckpointError(f"{path / METADATA} is damaged or cannot be read ({told}).")
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            info = self.storage_data.get(item.storage_index)
            if info is None:
                raise CheckpointError(
                    f"{self.path}: the metadata names no file for {item.storage_index.fqn}."
                )
            by_file.setdefault(info.relative_path, []).append(item)
        for name, items in by_file.items():
            path = Path(self.path) / name
            try:
                with path.open("rb") as file:
                    for item in items:
                        self._read(item, file, path, planner)
            except OSError as fault:
                raise CheckpointError(
                    f"{path}, which holds (a part of) {items[0].storage_index.fqn}, cannot be "
                    f"read: {fault.strerror}."
                ) from None
        if self._then is not None:
            self._then()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, file: IO[bytes], path: Path, planner: LoadPlanner) -> None:
        key, info = item.storage_index.fqn, self.storage_data[item.storage_index]
        if info.transform_descriptors:
            raise CheckpointError(
                f"{key} is stored through {info.transform_descriptors} in {path}: only plain "
                "files are read here. Use torch.distributed.checkpoint.load."
            )
        file.seek(info.offset)
        data = file.read(info.length)
        record = checked_record(data, info.length, f"{path}: {key}")
        if self._checksums is not None:
            saved = self._checksums.records.get(info.relative_path, {}).get(info.offset)
            if saved != checksums.fingerprint(data):
                raise CheckpointError(
                    f"{path}: {key} is not what was saved there: the file is of another rank or "
                    "another checkpoint. Take an older checkpoint."
                )
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, record)
            return
        tensor = _tensor_of(record, f"{path}: {key}")
        target = planner.resolve_tensor(item).detach()
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
            if start + length > tensor.shape[dim]:
                raise CheckpointError(
                    f"{path}: {key} has shape {tuple(tensor.shape)} in the file, another one than "
                    "the metadata says."
                )
            tensor = tensor.narrow(dim, start, length)
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def _tensor_of(record: io.BytesIO, what: str) -> Tensor:
    try:
        found = torch.load(record, map_location="cpu", weights_only=True)
    except Exception as fault:  # whole, but not what the metadata says
        told = str(fault).splitlines()[:1]
        raise CheckpointError(
            f"{what} cannot be read as a tensor ({type(fault).__name__}: {' '.join(told)[:100]})."
        ) from None
    if not isinstance(found, Tensor):
        raise CheckpointError(f"{what} is {type(found).__name__} in the file, not a tensor.")
    return found


def checked_record(data: bytes, length: int, what: str) -> io.BytesIO:
    """The bytes of one ``torch.save``, once they equal their checksums.

    Raises:
        CheckpointError: They do not, naming ``what``.
    """
    record = io.BytesIO(data)
    try:
        broken = len(data) < length or zipfile.ZipFile(record).testzip() is not None
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, pickle.PickleError):
        broken = True
    if broken:
        raise CheckpointError(f"{what} is damaged. Take an older checkpoint.")
    record.seek(0)
    return record
