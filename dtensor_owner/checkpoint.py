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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
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
from dtensor_owner.checkpoint_plan import Loader, SavePlanner, Wanted

__all__ = ["CheckpointError", "is_complete", "latest_checkpoint", "load_checkpoint"]
__all__ += ["load_extra", "save_checkpoint"]

Optimizers = Optimizer | Sequence[Optimizer]
_GROUPS = "optimizer.param_groups."
_WRAPPED = "dtensor_owner"  # before extra state of modules


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
        objects = {name: (_WRAPPED, value) for name, value in model_state.objects.items()}
        saved: dict[str, Any] = {"model": {**model_state.tensors, **objects}}
        if optimizers:
            saved["optimizer"] = states.optimizer_state(optimizers, model_state.names)
            if not is_coordinator:
                del saved["optimizer"]["param_groups"]
        if extra is not None and is_coordinator:
            saved["extra"] = (_plain_extra(extra),)
        if rng:
            saved["rng"] = {str(rank): (states.rng_state(_device_of(model)),)}
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
    load = _Load(model, optimizers, options=options, rank=rank if rng else None)
    loader = read_into(CheckedReader(folder), load.want, strict=strict, process_group=process_group)
    return load.commit(loader, dict(extra or {}), str(folder))


def load_extra(
    folder: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Read only what was saved as ``extra``; every rank calls this, and raises alike."""

    def want(saved: Mapping[str, Any]) -> Wanted:
        return Wanted(objects={"extra"} & saved.keys())

    loader = read_into(CheckedReader(folder), want, strict=False, process_group=process_group)
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
    reader: dcp.StorageReader,
    want: Callable[[Mapping[str, Any]], Wanted],
    *,
    strict: bool,
    process_group: dist.ProcessGroup | None,
) -> Loader:
    """Compare and read on all ranks; what was read waits in the result for its ``commit``."""
    folder = str(getattr(reader, "path", ""))
    loader = Loader(folder, want, strict=strict)
    with faults_on_all_ranks(f"{folder} could not be loaded"):
        dcp.load(
            {},
            storage_reader=reader,
            planner=loader,
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )
    return loader


class _Load:
    """One load: what it wants, and where that goes.

    Args:
        rank: Whose random numbers to take; None for nobody's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        options: str,
        rank: int | None,
    ) -> None:
        self.model, self.optimizers, self.rank = model, optimizers, rank
        self.take_options = options == "saved"
        #: State that an optimizer lacks: (state of the parameter, key, the tensor or its key).
        self._created: list[tuple[Any, str, Any]] = []
        self._rng_key: str | None = None

    def want(self, saved: Mapping[str, Any]) -> Wanted:
        self.state = states.model_state(self.model)
        wanted = Wanted(checked=("model.", "optimizer.state.") if self.optimizers else ("model.",))
        for name, tensor in self.state.tensors.items():
            wanted.tensors[f"model.{name}"] = states.target_of(tensor, name)
        wanted.known |= {f"model.{name}" for name in self.state.aliases}
        for key in {f"model.{name}" for name in self.state.objects} & saved.keys():
            found = saved[key]
            if isinstance(found, TensorStorageMetadata):  # saved by torch's own functions
                wanted.tensors[key] = states.loose_target(found.size, found.properties.dtype)
            else:
                wanted.objects.add(key)
        self._want_optimizers(wanted, saved)
        if "extra" in saved:
            wanted.objects.add("extra")
        ranks = sum(key.startswith("rng.") for key in saved)
        if self.rank is not None and ranks:
            self._rng_key = f"rng.{self.rank % ranks}"
            wanted.objects.add(self._rng_key)
        return wanted

    def _want_optimizers(self, wanted: Wanted, saved: Mapping[str, Any]) -> None:
        keys_of: dict[str, list[str]] = {}
        for key in saved:
            if key.startswith("optimizer.state."):
                owner, _, last = key.removeprefix("optimizer.state.").rpartition(".")
                keys_of.setdefault(owner, []).append(last)
        for name, parameter, optimizer in states.named_parameters(
            self.optimizers, self.state.names
        ):
            state = optimizer.state.get(parameter, {})
            for last, value in state.items():
                if isinstance(value, Tensor):
                    key = f"optimizer.state.{name}.{last}"
                    wanted.tensors[key] = states.target_of(value, key)
            for last in keys_of.get(name, ()):
                key = f"optimizer.state.{name}.{last}"
                if key not in wanted.tensors:
                    self._want_new_state(wanted, optimizer, parameter, key, saved[key])
        if not self.optimizers or not self.take_options:
            return
        for key, found in saved.items():
            if not key.startswith(_GROUPS):
                continue
            if isinstance(found, TensorStorageMetadata):
                wanted.tensors[key] = states.loose_target(found.size, found.properties.dtype)
            else:
                wanted.objects.add(key)

    def _want_new_state(
        self, wanted: Wanted, optimizer: Optimizer, parameter: Tensor, key: str, found: Any
    ) -> None:
        """State that this optimizer makes in its first step, such as torch's own AdamW."""
        last = key.rpartition(".")[2]
        if not isinstance(found, TensorStorageMetadata):
            wanted.objects.add(key)
            self._created.append(((optimizer, parameter), last, key))
            return
        if optimizer.state.get(parameter):
            return  # the optimizer has made its state, and this is none of it
        dtype = found.properties.dtype
        if tuple(found.size) == tuple(parameter.shape) and parameter.ndim:
            tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            tensor = torch.zeros(found.size, dtype=dtype)
        wanted.tensors[key] = states.target_of(tensor, key)
        self._created.append(((optimizer, parameter), last, tensor))

    def commit(self, loader: Loader, statefuls: dict[str, Stateful], folder: str) -> dict[str, Any]:
        """Everything has been read on all ranks: put it in place."""
        objects = loader.objects
        options = self._options(loader, folder)
        extra = dict(objects["extra"][0]) if "extra" in objects else {}
        missing = statefuls.keys() - extra.keys()
        if missing:
            raise CheckpointError(
                f"{folder} has no extra {sorted(missing)}; it has {sorted(extra)}. Nothing was "
                "loaded."
            )
        for key, stateful in statefuls.items():
            stateful.load_state_dict(extra.pop(key))
        loader.commit()
        for name in self.state.objects:
            key, (owner, _, _) = f"model.{name}", name.rpartition(".")
            if key in objects:
                value = objects[key]
                if isinstance(value, tuple) and value[:1] == (_WRAPPED,):
                    value = value[1]
                self._module(owner).set_extra_state(value)
            elif key in loader.wanted.tensors:
                self._module(owner).set_extra_state(loader.wanted.tensors[key].buffer)
        for (optimizer, parameter), key, value in self._created:
            found = objects[value] if isinstance(value, str) else value
            optimizer.state[parameter][key] = found
        for group, values in options:
            states.set_options(group, values)
        if self._rng_key is not None:
            states.set_rng_state(objects[self._rng_key][0], _device_of(self.model))
        return extra

    def _module(self, name: str) -> nn.Module:
        return next(
            module for path, module in self.model.named_modules() if states.plain_name(path) == name
        )

    def _options(self, loader: Loader, folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        found = {
            key.removeprefix(_GROUPS): value
            for key, value in loader.objects.items()
            if key.startswith(_GROUPS)
        }
        for key, target in loader.wanted.tensors.items():
            if key.startswith(_GROUPS):
                found[key.removeprefix(_GROUPS)] = target.buffer
        if not found:
            return []
        named = [name for name, _, _ in states.named_parameters(self.optimizers, self.state.names)]
        by_name = states.saved_options(found, named)
        merged = []
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                names = [self.state.names[id(parameter)] for parameter in group["params"]]
                try:
                    merged.append((group, states.merged_options(names, by_name, number)))
                except ValueError as fault:
                    raise CheckpointError(f"{folder}: {fault} Nothing was loaded.") from None
        return merged


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


def _device_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)


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
