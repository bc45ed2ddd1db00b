"""DTensor caches sharding decisions: another call must never get an earlier one's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor
from tests.ranks import run_ranks

FULL = torch.randn((6, 4), generator=torch.Generator().manual_seed(0))

# One op with different arguments each; the first call must not answer for the others.
FAMILIES: dict[str, list[Callable[..., Any]]] = {
    "sum dtype": [
        lambda x, d=d: x.sum(dtype=d) for d in (None, torch.float64, torch.float32, torch.int64)
    ],
    "sum dims": [lambda x, d=d: x.sum(d) for d in (0, 1, (0, 1))],
    "keepdim": [lambda x, k=k: x.mean(0, keepdim=k) for k in (True, False)],
    "norm order": [lambda x, p=p: torch.linalg.vector_norm(x, p) for p in (1, 2, float("inf"))],
    "foreach norm order": [lambda x, p=p: torch._foreach_norm([x], p)[0] for p in (1, 2)],
    "unfold": [lambda x, n=n: torch.clone(x).unfold(1, n, 1) for n in (1, 2, 3)],
    "optional argument": [
        lambda x: torch.diag_embed(x, 1),
        lambda x: torch.diag_embed(x),
        lambda x: torch.diag_embed(x, 2),
    ],
    "slices": [lambda x, r=r: x[r] for r in (slice(0, 3), slice(2, 5), slice(0, 6), slice(3, 3))],
    "views": [lambda x, s=s: x.reshape(s) for s in ((6, 2, 2), (6, 4), (24,), (6, 1, 4))],
    "kthvalue": [lambda x, k=k: x.kthvalue(k, 1)[0] for k in (1, 2)],
    "topk": [lambda x, k=k: x.topk(k, 1)[0] for k in (1, 2, 3)],
    "casts": [lambda x, d=d: x.to(d) for d in (torch.bfloat16, torch.float64, torch.int32)],
    "zeros_like": [lambda x, d=d: torch.zeros_like(x, dtype=d) for d in (None, torch.int64)],
    "cumsum dtype": [lambda x, d=d: x.cumsum(1, dtype=d) for d in (None, torch.float64)],
    "softmax dtype": [lambda x, d=d: x.softmax(1, dtype=d) for d in (None, torch.float64)],
    "alpha": [lambda x, a=a: torch.add(x, x, alpha=a) for a in (1, 2, 3)],
    "pow": [lambda x, n=n: x**n for n in (2, 3)],
    "repeat": [lambda x, n=n: x.repeat(1, n) for n in (1, 2)],
}


def outcomes(family: list[Callable[..., Any]], x: Any, full: torch.Tensor) -> list[str]:
    wrong = []
    for index, op in enumerate(family):
        want = op(full)
        try:
            got = op(x)
        except NotImplementedError:
            continue  # refused: never wrong
        if got.dtype != want.dtype or got.shape != want.shape:
            wrong.append(f"call {index}: {got.dtype} {got.shape} != {want.dtype} {want.shape}")
            continue
        try:
            torch.testing.assert_close(got.full_tensor(), want)
        except AssertionError as error:
            wrong.append(f"call {index}: {error}")
    return wrong


def cache_case(placement: Placement) -> list[str]:
    mesh = init_device_mesh("cpu", (3,))
    x = distribute_tensor(FULL, mesh, [placement])
    wrong = []
    for name, family in FAMILIES.items():
        for order in (family, family[::-1]):
            wrong += [f"{name}, {text}" for text in outcomes(order, x, FULL)]
    return wrong


@pytest.mark.parametrize("placement", [RowAtomic((0, 4, 2)), Owner(1)], ids=str)
def test_arguments_are_part_of_the_key(placement: Placement) -> None:
    assert run_ranks(3, cache_case, placement) == [[]] * 3


def placements_case() -> list[str]:
    """Field case 54: equal shapes on other meshes, tables, owners and blocks, in any order."""
    mesh, small = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [0, 1])
    wrong = []
    for turn in range(2):
        mesh = init_device_mesh("cpu", (4,)) if turn else mesh  # made again
        for placement in (
            RowAtomic((3, 3, 0, 0)),
            RowAtomic((0, 3, 3, 0)),
            RowAtomic(),
            BlockAtomic(2),
            BlockAtomic(3),
            BlockAtomic(32),
            Owner(0),
            Owner(1),
            Replicate(),
        ):
            x = distribute_tensor(FULL, mesh, [placement])
            for got, want in (((x * 2 + x).sum(1), (FULL * 3).sum(1)), (x.mean(), FULL.mean())):
                if not torch.allclose(got.full_tensor(), want):
                    wrong.append(f"{placement} on 4 ranks")
        if small.get_coordinate() is not None:
            for placement in (RowAtomic((4, 2)), RowAtomic(), Owner(1), Owner(0)):
                x = distribute_tensor(FULL, small, [placement])
                if not torch.allclose((x * 3).sum(1).full_tensor(), (FULL * 3).sum(1)):
                    wrong.append(f"{placement} on 2 ranks")
    return wrong


def test_placements_and_meshes_are_part_of_the_key() -> None:
    assert run_ranks(4, placements_case) == [[]] * 4


def hits_case() -> tuple[int, int]:
    """Misses of the first call and of the next ones; a changing number makes no new entry."""
    from torch.distributed.tensor.debug import _get_fast_path_sharding_prop_cache_stats as stats

    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(FULL, mesh, [RowAtomic((4, 2))])

    def call(scale: float) -> DTensor:
        return torch.add(x, x, alpha=scale).sum(1)

    call(1.0)
    call(1.0)
    before = stats()[1]
    for step in range(5):
        call(1.0 + step)
    return before, stats()[1] - before


def test_later_calls_hit_torchs_cache() -> None:
    for before, misses in run_ranks(2, hits_case):
        assert before > 0 and misses == 0
