"""Small things that users of ``Shard`` expect of every placement, beside redistribution and ops."""

from __future__ import annotations

import sys
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor
from placements.torch_hooks import _replace_everywhere
from tests.ranks import run_ranks

ROWS: list[Placement] = [RowAtomic(), RowAtomic((0, 5, 2)), BlockAtomic(2)]
ALL: list[Placement] = [*ROWS, Owner(1)]
FULL = torch.arange(28.0).reshape(7, 4)


def source_rank_case() -> list[str]:
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    own = FULL + 100 * rank  # every rank has other values
    wrong = []
    for placement in ALL:
        for source in (0, 2):
            placed = distribute_tensor(own, mesh, [placement], src_data_rank=source)
            if not torch.equal(placed.full_tensor(), FULL + 100 * source):
                wrong.append(f"{placement} from rank {source}")
        local = distribute_tensor(own, mesh, [placement], src_data_rank=None)
        shape, offset = compute_local_shape_and_global_offset(FULL.shape, mesh, [placement])
        if tuple(local.to_local().shape) != tuple(shape):
            wrong.append(f"{placement}: local shape {shape}")
        if 0 in shape:
            continue
        cut = own[tuple(slice(start, start + size) for start, size in zip(offset, shape))]
        if not torch.equal(local.to_local(), cut):
            wrong.append(f"{placement}: own values at {offset}")
    return wrong


def test_whose_values_are_distributed_and_where_a_part_lies() -> None:
    assert run_ranks(3, source_rank_case) == [[]] * 3


def clip_value_case() -> list[str]:
    mesh = init_device_mesh("cpu", (3,))
    wrong = []
    for foreach in (True, False):
        plain = [nn.Parameter(FULL.clone()) for _ in ALL]
        placed = [nn.Parameter(distribute_tensor(FULL, mesh, [p])) for p in ALL]
        for parameter, placement in zip(placed, ALL):
            parameter.grad = distribute_tensor(FULL - 10, mesh, [placement])
        for parameter in plain:
            parameter.grad = FULL - 10
        for parameters in (plain, placed):
            nn.utils.clip_grad_value_(parameters, 4.0, foreach=foreach)
        for parameter, reference, placement in zip(placed, plain, ALL):
            assert isinstance(parameter.grad, DTensor)
            if not torch.equal(parameter.grad.full_tensor(), reference.grad):  # type: ignore[arg-type]
                wrong.append(f"{placement}, foreach {foreach}")
    return wrong


def test_clip_grad_value_clips_every_part() -> None:
    assert run_ranks(3, clip_value_case) == [[]] * 3


def mixed_list_case() -> tuple[list[bool], list[str]]:
    """Positions of a list may be placed differently; a plain tensor beside them is refused."""
    mesh = init_device_mesh("cpu", (3,))
    kinds: list[Placement] = [Shard(0), *ALL, Shard(1), Replicate()]
    placed: list[Tensor] = [distribute_tensor(FULL.clone(), mesh, [p]) for p in kinds]
    torch._foreach_mul_(placed, 2.0)
    torch._foreach_add_(placed, [p * 2 for p in placed], alpha=0.5)
    right = [torch.equal(p.full_tensor(), FULL * 4) for p in placed]  # type: ignore[attr-defined]
    errors = []
    for lists in ([[placed[1], FULL]], [[placed[1]], [FULL]]):
        with pytest.raises(RuntimeError) as error:
            torch._foreach_mul(*lists, *([2.0] if len(lists) == 1 else []))
        errors.append(str(error.value))
    right += [torch.equal(p.full_tensor(), FULL * 4) for p in placed]  # type: ignore[attr-defined]
    return right, errors


def test_lists_may_mix_placements_but_not_plain_tensors() -> None:
    for right, errors in run_ranks(3, mixed_list_case):
        assert all(right)
        assert all("mixed torch.Tensor and DTensor" in error for error in errors), errors


def test_a_function_imported_by_name_before_us_is_replaced_too() -> None:
    home, user = ModuleType("home"), ModuleType("user")
    home.answer = user.answer = lambda: 1  # type: ignore[attr-defined]
    user.other = lambda: 5  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, home=home, user=user):
        _replace_everywhere("answer", home, lambda stock: lambda: stock() + 1)
    assert home.answer() == user.answer() == 2 and user.other() == 5
