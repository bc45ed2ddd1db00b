"""The Muon step as one compiled graph.

The graph holds the exchanges, and Newton-Schulz once per distinct shape. What lies between them,
packing, unpacking and updating, are operators of their own that reach the shards by a key: to a
compiler they would be some ten small kernels and three inputs per matrix, so that compile time and
the checks before every call would grow with the number of matrices, for work that a few foreach
calls do as fast. No shard is an input of the graph, so the compiler neither copies nor reorders
accesses to one; each operator's result leads on to the graph's outputs, so none is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dtensor_owner import muon_step
from dtensor_owner.muon_step import BucketWork, Numbers, Shards, run_step

_serial = count()


@dataclass(eq=False)
class _Bucket:
    """What the operators of one bucket reach by its key.

    Args:
        work: The bucket's plan on this rank.
        row: Row of its numbers in the graph's input.
        shards: Its shards, while a step runs.
    """

    work: BucketWork
    row: int
    shards: Shards | None = None

    def numbers(self, table: Tensor) -> Numbers:
        return Numbers(*table[self.row].tolist())


_buckets: WeakValueDictionary[int, _Bucket] = WeakValueDictionary()


def _at(key: int) -> tuple[_Bucket, Shards]:
    bucket = _buckets[key]
    assert bucket.shards is not None
    return bucket, bucket.shards


@torch.library.custom_op("dtensor_owner::muon_advance", mutates_args=())
def _advance(table: Tensor, key: int) -> Tensor:
    bucket, shards = _at(key)
    return muon_step.advance(bucket.work, shards, bucket.numbers(table))


@_advance.register_fake
def _(table: Tensor, key: int) -> Tensor:
    work = _buckets[key].work
    size = sum(work.program.pack_sizes)
    return torch.empty(size, dtype=work.gather_dtype, device=work.device)


@torch.library.custom_op("dtensor_owner::muon_assemble", mutates_args=())
def _assemble(own: Tensor, received: Tensor, key: int) -> list[Tensor]:
    return muon_step.assemble(_buckets[key].work, own, received)


@_assemble.register_fake
def _(own: Tensor, received: Tensor, key: int) -> list[Tensor]:
    work = _buckets[key].work
    options: dict[str, Any] = {"dtype": work.gather_dtype, "device": work.device}
    return [torch.empty(shape, **options) for shape in work.program.batches]


@torch.library.custom_op("dtensor_owner::muon_give", mutates_args=())
def _give(results: list[Tensor], key: int) -> Tensor:
    return muon_step.give(_buckets[key].work, results)


@_give.register_fake
def _(results: list[Tensor], key: int) -> Tensor:
    work = _buckets[key].work
    size = sum(work.program.scatter.send_numels)
    return torch.empty(size, dtype=work.settings.dtype, device=work.device)


@torch.library.custom_op("dtensor_owner::muon_apply", mutates_args=())
def _apply(own: Tensor, results: list[Tensor], taken: Tensor, table: Tensor, key: int) -> Tensor:
    bucket, shards = _at(key)
    muon_step.apply(bucket.work, shards, results, taken, bucket.numbers(table))
    return torch.empty(0, device=bucket.work.device)


@_apply.register_fake
def _(own: Tensor, results: list[Tensor], taken: Tensor, table: Tensor, key: int) -> Tensor:
    return torch.empty(0, device=_buckets[key].work.device)


class _OperatorStages:
    """The stages of a bucket as operators that a compiler does not look into."""

    def __init__(self, key: int, table: Tensor) -> None:
        self.key, self.table = key, table

    def advance(self) -> Tensor:
        return _advance(self.table, self.key)

    def assemble(self, own: Tensor, received: Tensor) -> list[Tensor]:
        return _assemble(own, received, self.key)

    def give(self, results: list[Tensor]) -> Tensor:
        return _give(results, self.key)

    def apply(self, own: Tensor, results: list[Tensor], taken: Tensor) -> Tensor:
        # ``own`` is not needed, but after it the momentum has been advanced.
        return _apply(own, results, taken, self.table, self.key)


def compile_step(
    works: Sequence[BucketWork], backend: str
) -> Callable[[Sequence[Shards], Sequence[Numbers]], None]:
    """Compile the step of these buckets; the plan's integers become constants of the graph.

    Returns:
        A function of the shards and numbers of all buckets, to be called without autograd.
    """
    keys = [next(_serial) for _ in works]
    buckets = [_Bucket(work, row) for row, work in enumerate(works)]
    _buckets.update(zip(keys, buckets))

    def step(table: Tensor) -> list[Tensor]:
        return run_step(works, [_OperatorStages(key, table) for key in keys])

    compiled = torch.compile(
        _with_own_code(step),
        backend=backend,
        fullgraph=True,
        dynamic=False,
        options={"guard_filter_fn": _without_plan},
    )

    def call(shards: Sequence[Shards], numbers: Sequence[Numbers]) -> None:
        for bucket, some in zip(buckets, shards):
            bucket.shards = some
        try:
            # A tensor, so that other values do not compile anew.
            compiled(torch.tensor([list(three) for three in numbers], dtype=torch.float64))
        finally:
            for bucket in buckets:
                bucket.shards = None

    return call


def _without_plan(guards: Sequence[Any]) -> list[bool]:
    """Do not check the plan in every step: the code is compiled for this plan alone."""
    return [not guard.name.startswith(("L['works']", "L['keys']")) for guard in guards]


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
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
