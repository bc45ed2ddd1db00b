"""What every placement of this package needs once."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from torch.distributed.tensor import Placement


class LayoutPlacement(Placement):
    """Base of ``RowAtomic``, ``BlockAtomic`` and ``Owner``: a frozen value on a C++ base.

    Subclasses are frozen dataclasses whose ``_args()`` are their constructor's positional
    arguments; pickling, copying and the repr that torch.compile evaluates follow from it.
    """

    def __post_init__(self) -> None:
        super().__init__()  # Placement is a C++ class: without this, is_shard() crashes

    def _args(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:  # pybind objects cannot be pickled field by field
        return type(self), self._args()

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Source text that rebuilds the value in a traced graph, and the names it uses."""
        name = type(self).__name__
        return f"{name}({', '.join(map(repr, self._args()))})", {name: type(self)}


def as_int(name: str, value: object, *, minimum: int) -> int:
    """``value`` as an int of at least ``minimum``: ints and what stands for one, such as numpy's.

    Bools are not numbers here.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}.")
    if number < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {number}.")
    return number
