"""Save and load training state with ``torch.distributed.checkpoint`` (DCP), all or nothing.

A save is complete or not there. A load has read and checked everything before it changes
anything. An error on one rank is the same error on all ranks. The format is DCP's: what is saved
here loads with plain ``dcp.load``, and the other way round.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dtensor_owner import checkpoint_state as states
from dtensor_owner.checkpoint_files import (
    AtomicWriter,
    CheckedReader,
    CheckpointError,
    is_complete,
)
from dtensor_owner.checkpoint_load import WRAPPED, Load, device_of
from dtensor_owner.checkpoint_plan import Loader, SavePlanner, Wanted

__all__ = ["CheckpointError", "is_complete", "latest_checkpoint", "load_checkpoint"]
__all__ += ["load_extra", "save_checkpoint"]

Optimizers = Optimizer | Sequence[Optimizer]


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    rng: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save model, optimizers and whatever else a run needs; every rank calls this.

    Nothing is created or changed by saving: an optimizer that has no state yet is saved
    without. A tied parameter is written once.

    Args:
        folder: A new folder on a file system that all ranks see. It appears under this name
            when everything has been written.
        model: Any module; DTensors are saved shard by shard.
        optimizer: One or several.
        extra: More to save, from the first rank: numbers, texts, plain tensors, lists, tuples
            and dicts of them, and objects with ``state_dict()`` such as a lr scheduler.
        rng: Save each rank's random number generators.
        process_group: The ranks that save; default: all.

    Raises:
        CheckpointError: On every rank: a rank could not write, the folder exists already, or
            ``extra`` cannot be loaded again.
    """
    optimizers = _listed(optimizer)
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0

    def make(is_coordinator: bool) -> dict[str, Any]:
        # Tuples around objects: DCP would take dicts and lists apart, and lose empty ones.
        model_state = states.model_state(model)
        objects = {name: (WRAPPED, value) for name, value in model_state.objects.items()}
        saved: dict[str, Any] = {"model": {**model_state.tensors, **objects}}
        if optimizers:
            saved["optimizer"] = states.optimizer_state(optimizers, model_state.names)
            if not is_coordinator:
                del saved["optimizer"]["param_groups"]
        if extra is not None and is_coordinator:
            saved["extra"] = (_plain_extra(extra),)
        if rng:
            saved["rng"] = {str(rank): (states.rng_state(device_of(model)),)}
        return saved

    path = Path(folder)
    with faults_on_all_ranks(f"{path} could not be saved"), torch.no_grad():
        dcp.save(
            {},
            storage_writer=AtomicWriter(path),
            planner=SavePlanner(make),
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Stateful] | None = None,
    options: Literal["saved", "keep"] = "saved",
    rng: bool = True,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a live model and its optimizers; every rank calls this.

    Number of ranks, placements, meshes, layouts and optimizer groups may differ from when it
    was saved. Values are read into buffers on the CPU, of the size of this rank's shards, and
    copied when all ranks have read all of them: if anything is wrong, nothing has changed.

    Args:
        folder: What ``save_checkpoint`` wrote, or ``dcp.save`` of ``get_state_dict``'s results
            under the keys ``model`` and ``optimizer``.
        model: Sharded as it is to run.
        optimizer: Built from the model's parameters; state it lacks is created.
        extra: Objects with ``load_state_dict()``, by their keys in the saved ``extra``.
        options: Whether groups take the saved lr, weight decay and so on, or keep theirs.
        rng: Set the random number generators, if they were saved. With another number of ranks
            rank ``r`` takes those of rank ``r`` modulo the saved number.
        strict: Missing and unexpected keys are errors; otherwise what has no counterpart
            stays as it is. Shapes and dtypes must fit in any case.
        process_group: The ranks that load; default: all.

    Returns:
        The saved ``extra``, less what ``extra`` took; empty if there was none.

    Raises:
        CheckpointError: On every rank, with nothing changed: the checkpoint is incomplete or
            damaged, or keys, shapes or dtypes do not fit; it names them.
    """
    if options not in ("saved", "keep"):
        raise ValueError(f'options must be "saved" or "keep", got {options!r}.')
    optimizers = _listed(optimizer)
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    load = Load(model, optimizers, extra or {}, options=options, rank=rank if rng else None)
    loader = Loader(str(folder), load.want, strict=strict)
    try:
        read_into(
            loader,
            CheckedReader(folder, then=lambda: load.prepare(loader)),
            process_group=process_group,
        )
    except BaseException:
        load.undo()
        raise
    return load.commit(loader)


def load_extra(
    folder: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Read only what was saved as ``extra``; every rank calls this, and raises alike."""

    def want(saved: Mapping[str, Any]) -> Wanted:
        return Wanted(objects={"extra"} & saved.keys())

    loader = Loader(str(folder), want, strict=False)
    read_into(loader, CheckedReader(folder), process_group=process_group)
    return dict(loader.objects["extra"][0]) if loader.objects else {}


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint: the folder itself, or the one in it with the highest number.

    Checkpoints are told apart by the last number in their names, such as ``step-120``. Those
    whose saving was interrupted are left alone.
    """
    path = Path(folder)
    if is_complete(path):
        return path
    numbered = [
        (int(numbers[-1]), entry)
        for entry in (path.iterdir() if path.is_dir() else ())
        if is_complete(entry) and (numbers := re.findall(r"\d+", entry.name))
    ]
    return max(numbered)[1] if numbered else None


def read_into(
    loader: Loader, reader: dcp.StorageReader, *, process_group: dist.ProcessGroup | None
) -> None:
    """Compare and read on all ranks; what was read waits in the loader for its ``commit``."""
    with faults_on_all_ranks(f"{loader.folder} could not be loaded"):
        dcp.load(
            {},
            storage_reader=reader,
            planner=loader,
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )


def _plain_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Extra values as they are saved, once it is sure that they can be loaded."""
    plain = {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in extra.items()
    }
    for key, value in plain.items():
        if _has_dtensor(value):
            raise CheckpointError(
                f"extra[{key!r}] has a DTensor in it, of which only the first rank's part would be "
                "saved: give it to a module as a parameter or buffer."
            )
        record = io.BytesIO()
        try:
            torch.save(value, record)
            record.seek(0)
            torch.load(record, weights_only=True)
        except Exception as fault:
            raise CheckpointError(
                f"extra[{key!r}] of type {type(value).__name__} cannot be saved so that it can "
                f"be loaded safely: {str(fault).splitlines()[0]}"
            ) from None
    return plain


def _has_dtensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_dtensor, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(_has_dtensor, value))
    return isinstance(value, DTensor)


def _listed(optimizer: Optimizers | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


@contextmanager
def faults_on_all_ranks(what: str) -> Iterator[None]:
    """Turn DCP's report of errors by rank into one error with a text for people."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as report:
        ranks = sorted(report.failures)
        fault = report.failures[ranks[0]][0]
        own = isinstance(fault, CheckpointError)
        told = str(fault) if own else f"{what}: {type(fault).__name__}: {fault}"
        where = f" (rank {', '.join(map(str, ranks))})" if len(ranks) > 0 and not own else ""
        raise CheckpointError(told + where) from fault
