"""The Muon step as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from types import FunctionType

import torch
from torch import Tensor

from dtensor_owner.muon_step import BucketWork, Numbers, Shards, run_step

_serial = count()

TensorLists = tuple[list[Tensor], list[Tensor], list[Tensor]]


def compile_step(
    works: Sequence[BucketWork], backend: str
) -> Callable[[Sequence[Shards], Sequence[Numbers]], None]:
    """Compile the step of these buckets; the plan's integers become constants of the graph.

    Returns:
        A function of the shards and numbers of all buckets, to be called without autograd.
    """

    def step(shards: list[TensorLists], numbers: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        run_step(works, [Shards(*lists) for lists in shards], [Numbers(*n) for n in numbers])

    compiled = torch.compile(_with_own_code(step), backend=backend, fullgraph=True, dynamic=False)

    def call(shards: Sequence[Shards], numbers: Sequence[Numbers]) -> None:
        compiled(
            [(s.params, [g.contiguous() for g in s.grads], s.momenta) for s in shards],
            [(n.lr, n.keep, n.momentum) for n in numbers],
        )

    return call


def _with_own_code(function: FunctionType | Callable[..., None]) -> Callable[..., None]:
    """A copy of a function whose code object is its own.

    Compiled graphs are kept per code object. Without this, all optimizers of a process would
    share one cache, with one recompile limit.
    """
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__.replace(co_name=f"muon_step_{next(_serial)}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
