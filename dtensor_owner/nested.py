"""Tensors inside the arguments and results of a module: tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nested value, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in _items(value):
            yield from tensors_in(item)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nested value with ``function`` applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: map_tensors(function, getattr(value, name)) for name in fields}
        return dataclasses.replace(value, **changed)
    return value
