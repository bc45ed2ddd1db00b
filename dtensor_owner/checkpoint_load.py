"""One load into a live model and its optimizers: what it wants, what may fail, where it goes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from dtensor_owner import checkpoint_state as states
from dtensor_owner.checkpoint_files import CheckpointError
from dtensor_owner.checkpoint_plan import Loader, Wanted

WRAPPED = "dtensor_owner"  # before extra state of modules
_GROUPS = "optimizer.param_groups."


class Load:
    """One load: what it wants, and where that goes.

    Args:
        statefuls: What takes a part of the saved ``extra``, by its key there.
        rank: Whose random numbers to take; None for nobody's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        statefuls: Mapping[str, Stateful],
        *,
        options: str,
        rank: int | None,
    ) -> None:
        self.model, self.optimizers, self.rank = model, optimizers, rank
        self.statefuls = dict(statefuls)
        self.take_options = options == "saved"
        self._before: list[tuple[Stateful, dict[str, Any]]] = []  # what they were, to undo
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
        if tuple(found.size) == tuple(parameter.shape) and last != "step":
            tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            tensor = torch.zeros(found.size, dtype=dtype)
        wanted.tensors[key] = states.target_of(tensor, key)
        self._created.append(((optimizer, parameter), last, tensor))

    def prepare(self, loader: Loader) -> None:
        """Everything that can still fail, once this rank has read all it wants.

        Runs where an error on one rank is an error on all, which then ``undo`` it.
        """
        folder, objects = loader.folder, loader.objects
        self._group_options = self._options(loader, folder)
        self._extra = dict(objects["extra"][0]) if "extra" in objects else {}
        missing = self.statefuls.keys() - self._extra.keys()
        if missing:
            raise CheckpointError(
                f"{folder} has no extra {sorted(missing)}; it has {sorted(self._extra)}. Nothing "
                "was loaded."
            )
        for key, stateful in self.statefuls.items():
            value = self._extra.pop(key)
            self._before.append((stateful, copy.deepcopy(stateful.state_dict())))
            try:
                stateful.load_state_dict(value)
            except Exception as fault:
                raise CheckpointError(
                    f"{folder}: extra[{key!r}], of type {type(value).__name__}, cannot be loaded "
                    f"into {type(stateful).__name__}: {type(fault).__name__}: {fault}. Nothing was "
                    "loaded."
                ) from fault

    def undo(self) -> None:
        """Take back what ``prepare`` did."""
        for stateful, before in reversed(self._before):
            stateful.load_state_dict(before)

    def commit(self, loader: Loader) -> dict[str, Any]:
        """Everything has been read on all ranks: put it in place."""
        objects = loader.objects
        loader.commit()
        for name in self.state.objects:
            key, (owner, _, _) = f"model.{name}", name.rpartition(".")
            if key in objects:
                value = objects[key]
                if isinstance(value, tuple) and value[:1] == (WRAPPED,):
                    value = value[1]
                self._module(owner).set_extra_state(value)
            elif key in loader.wanted.tensors:
                self._module(owner).set_extra_state(loader.wanted.tensors[key].buffer)
        for (optimizer, parameter), key, value in self._created:
            found = objects[value] if isinstance(value, str) else value
            optimizer.state[parameter][key] = found
        for group, values in self._group_options:
            states.set_options(group, values)
        if self._rng_key is not None:
            states.set_rng_state(objects[self._rng_key][0], device_of(self.model))
        return self._extra

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


def device_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)
