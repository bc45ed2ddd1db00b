"""Redistribution between all placements on gloo, compared with slices of the whole tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from placements import (
    BlockAtomic,
    Owner,
    RowAtomic,
    collectives,
    distribute_tensor,
    redistribute_group,
)
from placements.boxes import check_placements, is_ours, local_box
from placements.geometry import balanced_counts
from tests.ranks import RankFailure, by_tensor_collectives, run_ranks

SHAPES = [(7, 3), (2, 5), (0, 3), (1, 1), (4, 0), (6,), (1,), (5, 2, 3)]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.complex64,
]


def whole(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Different values everywhere, exact in every dtype."""
    numbers = torch.arange(math.prod(shape)).reshape(tuple(shape)) % 13 + 1
    return (numbers % 2).bool() if dtype == torch.bool else numbers.to(dtype)


def one_dim_placements(shape: Sequence[int], ranks: int) -> list[Placement]:
    rows = shape[0]
    last = [0] * (ranks - 1) + [rows]  # fewer rows than ranks, and empty ranks
    gaps = [*balanced_counts(rows, (ranks + 1) // 2), *[0] * (ranks // 2)]
    gaps = [gaps[i // 2 + (i % 2) * ((ranks + 1) // 2)] for i in range(ranks)]
    placements: list[Placement] = [
        RowAtomic(),
        RowAtomic(last),
        RowAtomic(gaps),
        BlockAtomic(2),
        Owner(0),
        Owner(ranks - 1),
        Replicate(),
        Shard(0),
    ]
    return placements + [Shard(d) for d in range(1, len(shape))]


def piece(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """What this rank shall hold, by the stated meaning of the placements alone."""
    box = local_box(tuple(full.shape), tuple(mesh.shape), placements, mesh.get_coordinate())
    return full[tuple(slice(a, b) for a, b in box)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (torch.empty(t.shape, dtype=t.dtype).copy_(t).view(-1) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def sharded(
    full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], strided: bool = False
) -> DTensor:
    local = piece(full, mesh, placements).clone()
    if strided:
        wide = local.new_zeros((*local.shape[:-1], 2 * local.shape[-1]))
        wide[..., ::2] = local
        local = wide[..., ::2]
        if local.dim() == 2:
            local = local.t().contiguous().t()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def check_move(
    full: Tensor,
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
    strided: bool = False,
) -> list[str]:
    tensor = sharded(full, mesh, source, strided)
    local = tensor.to_local()
    before, stride = local.clone(), local.stride()
    moved = tensor.redistribute(placements=target)
    wrong = []
    if tuple(moved.placements) != tuple(target) or moved.shape != full.shape:
        wrong.append("placements")
    if not same_bits(moved.to_local(), piece(full, mesh, target)):
        wrong.append("values")
    if not moved.to_local().is_contiguous() and tuple(source) != tuple(target) and not strided:
        wrong.append("not contiguous")
    if not same_bits(local, before) or local.stride() != stride:
        wrong.append("input changed")
    # Torch's own full_tensor of (Shard(0), Shard(0)) takes the flattened mesh, and is wrong.
    if any(map(is_ours, target)) and not same_bits(moved.full_tensor(), full):
        wrong.append("full_tensor")
    return [f"{what}: {source} -> {target}, {tuple(full.shape)} {full.dtype}" for what in wrong]


def one_dim_case(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[str]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    wrong = []
    for shape, dtype in itertools.product(shapes, dtypes):
        full = whole(shape, dtype)
        placements = one_dim_placements(shape, ranks)
        pairs = [(a, b) for a in placements for b in placements if is_ours(a) or is_ours(b)]
        for index, (source, target) in enumerate(pairs):
            wrong += check_move(full, mesh, [source], [target], strided=bool(index % 3))
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_pairs_on_one_mesh_dim(ranks: int) -> None:
    shapes = [(7, 3), (0, 3), (2, 2, 2)] if ranks in (3, 5) else [(5, 2), (1,)]
    assert run_ranks(ranks, one_dim_case, shapes, [torch.float32]) == [[]] * ranks


def tensor_collectives_case() -> list[str]:
    """As on accelerators, where equal parts, padded if need be, go by tensor collectives."""
    even = collectives._start_even_all_gather
    with (
        mock.patch.object(collectives, "_start_even_all_gather", wraps=even) as gathers,
        CommDebugMode() as mode,
    ):
        wrong = one_dim_case([(7, 3)], [torch.float32]) + one_dim_case([(6,)], [torch.bool])
        wrong += partial_case((dist.get_world_size(),), [(7, 3), (6, 2)])
    reductions = mode.get_comm_counts()[torch.ops.c10d_functional.reduce_scatter_tensor]
    return wrong if gathers.call_count and reductions else ["tensor collectives were not used"]


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_pairs_by_tensor_collectives(ranks: int) -> None:
    assert run_ranks(ranks, by_tensor_collectives, tensor_collectives_case) == [[]] * ranks


def test_all_dtypes_travel() -> None:
    assert run_ranks(3, dtype_case) == [[]] * 3


def dtype_case() -> list[str]:
    mesh = init_device_mesh("cpu", (3,))
    wrong = []
    for dtype in DTYPES:
        full = whole((5, 3), dtype)
        for source, target in [
            (RowAtomic(), Replicate()),
            (RowAtomic((0, 5, 0)), Replicate()),
            (RowAtomic((3, 2, 0)), Owner(1)),
            (Owner(1), Replicate()),
            (Owner(2), Shard(1)),
            (Replicate(), RowAtomic()),
            (Shard(1), RowAtomic()),
        ]:
            for strided in (False, True):
                wrong += check_move(full, mesh, [source], [target], strided)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_all_pairs_shapes_and_dtypes(ranks: int) -> None:
    results = run_ranks(ranks, one_dim_case, SHAPES, DTYPES, timeout=600)
    assert results == [[]] * ranks


# ---------------------------------------------------------------------------- partial values


def partial_case(ranks_shape: tuple[int, ...], shapes: list[tuple[int, ...]]) -> list[str]:
    mesh = init_device_mesh("cpu", ranks_shape)
    me = mesh.get_local_rank(0)
    ranks = mesh.size(0)
    wrong = []
    for shape, op, dtype in itertools.product(
        shapes, ["sum", "avg", "max", "min"], [torch.float32, torch.bfloat16, torch.int64]
    ):
        if op == "avg" and not dtype.is_floating_point:
            continue
        base = whole(shape, dtype)
        parts = [base * (rank + 1) for rank in range(ranks)]
        stack = torch.stack(parts).double()
        want = {
            "sum": stack.sum(0),
            "avg": stack.sum(0) / ranks,
            "max": stack.amax(0),
            "min": stack.amin(0),
        }[op].to(dtype)
        rest = [Replicate()] * (mesh.ndim - 1)
        for target, strided in itertools.product(one_dim_placements(shape, ranks), (False, True)):
            local = parts[me].clone()
            if strided and local.dim() == 2:
                local = local.t().contiguous().t()
            before = local.clone()
            tensor = DTensor.from_local(local, mesh, [Partial(op), *rest])
            moved = tensor.redistribute(placements=[target, *rest])
            got, wanted = moved.to_local(), piece(want, mesh, [target, *rest])
            exact = dtype != torch.bfloat16
            equal = got.shape == wanted.shape and torch.allclose(
                got.double(), wanted.double(), rtol=0 if exact and op != "avg" else 1e-2
            )
            if not equal or got.dtype != dtype or not torch.equal(local, before):
                wrong.append(f"{op} {target} {shape} {dtype}: {got} != {wanted}")
    return wrong


def lone_piece_case() -> list[str]:
    """A result that is one piece is a tensor of its own, and not copied twice."""
    mesh = init_device_mesh("cpu", (2,))
    full = whole((4, 3))
    tensor = distribute_tensor(full, mesh, [RowAtomic((3, 1))])
    wrong = []
    for target in (RowAtomic((2, 2)), RowAtomic((0, 4)), Owner(0), Replicate()):
        local = tensor.redistribute(placements=[target]).to_local()
        if local.numel() and local.untyped_storage().data_ptr() in (
            tensor.to_local().untyped_storage().data_ptr(),
        ):
            wrong.append(f"{target} shares the input's memory")
        if local.untyped_storage().nbytes() != local.numel() * local.itemsize:
            wrong.append(f"{target} keeps {local.untyped_storage().nbytes()} B alive")
    first, second = redistribute_group([tensor, tensor], [Owner(1)])
    if first.to_local().numel():
        first.to_local().zero_()
        if not torch.equal(second.to_local(), full):
            wrong.append("results share memory")
    return wrong


def test_results_share_no_memory() -> None:
    assert run_ranks(2, lone_piece_case) == [[]] * 2


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (2, 2)], ids=str)
def test_partial_values_are_reduced_once(mesh_shape: tuple[int, ...]) -> None:
    shapes = [(5, 3), (1,), (0, 2)]
    ranks = math.prod(mesh_shape)
    assert run_ranks(ranks, partial_case, mesh_shape, shapes) == [[]] * ranks


def refused_partial_case() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Partial("avg")])
    rows = tensor.redistribute(placements=[RowAtomic()])
    for source, target in [(rows, Partial()), (rows, Partial("avg"))]:
        try:
            source.redistribute(placements=[target])
        except (NotImplementedError, RuntimeError, ValueError) as error:
            found.append(type(error).__name__)
    ints = DTensor.from_local(torch.ones(2, 2, dtype=torch.int64), mesh, [Partial("avg")])
    try:
        ints.redistribute(placements=[RowAtomic()])
    except ValueError as error:
        found.append(str(error))
    return found


def test_meaningless_partial_moves_are_refused_on_every_rank() -> None:
    first, second = run_ranks(2, refused_partial_case)
    assert first == second and len(first) == 3
    assert "'avg' needs a floating dtype" in first[2]


# ----------------------------------------------------------------------- sub-groups and meshes


def strided_meshes() -> Iterator[DeviceMesh]:
    """Meshes whose groups do not start at rank 0 or are not in rank order; all of 4 ranks."""
    for ranks in ([2, 3], [1, 3], [3, 0, 2], [3, 2, 1, 0]):
        yield DeviceMesh("cpu", ranks)


def subgroup_case() -> list[str]:
    wrong = []
    for mesh in strided_meshes():
        if mesh.get_coordinate() is None:
            continue  # ranks outside the group go on without it
        full = whole((7, 3))
        placements = one_dim_placements(full.shape, mesh.size())
        for index, (source, target) in enumerate(itertools.product(placements, repeat=2)):
            if is_ours(source) or is_ours(target):
                wrong += check_move(full, mesh, [source], [target], strided=index % 5 == 0)
        me = mesh.get_local_rank()
        for target in filter(is_ours, placements):  # torch's own go wrong on unsorted meshes
            tensor = DTensor.from_local(full * (me + 1), mesh, [Partial()])
            got = tensor.redistribute(placements=[target]).to_local()
            factor = sum(range(1, mesh.size() + 1))
            if not torch.equal(got, piece(full * factor, mesh, [target])):
                wrong.append(f"Partial -> {target} on {mesh}")
    return wrong


def test_coordinates_are_not_global_ranks() -> None:
    assert run_ranks(4, subgroup_case) == [[]] * 4


def owner_past_the_end_case() -> str:
    mesh = DeviceMesh("cpu", [1, 3])
    if mesh.get_coordinate() is None:
        return "outside"
    try:
        distribute_tensor(whole((4, 2)), mesh, [Owner(3)])
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_global_rank_is_refused_as_an_owner() -> None:
    results = run_ranks(4, owner_past_the_end_case)
    assert results[0] == results[2] == "outside"
    assert results[1] == results[3] and "the mesh dimension has 2 ranks" in results[1]


def two_dim_placements(shape: Sequence[int], mesh: Sequence[int]) -> list[tuple[Placement, ...]]:
    rows = shape[0]
    outer = [rows, *[0] * (mesh[0] - 1)]
    first = balanced_counts(rows, mesh[0])
    nested = [[n, *[0] * (mesh[1] - 1)] for n in first]
    swapped = [[*[0] * (mesh[0] - 1), n] for n in balanced_counts(rows, mesh[1])]
    return [
        (Replicate(), Replicate()),
        (Replicate(), RowAtomic()),
        (RowAtomic(outer), Replicate()),
        (RowAtomic(), RowAtomic()),
        (RowAtomic(first), RowAtomic(nested)),
        (RowAtomic(swapped), RowAtomic()),
        (Owner(mesh[0] - 1), Owner(1)),
        (Owner(0), Replicate()),
        (Owner(0), RowAtomic()),
        (RowAtomic(), Shard(1)),
        (Shard(1), RowAtomic()),
        (Shard(1), Owner(1)),
        (BlockAtomic(2), Owner(0)),
        (Shard(0), Shard(0)),
        (Shard(1), Shard(1)),
    ]


def mesh_case(order: list, shapes: list[tuple[int, ...]], every: int) -> list[str]:
    mesh = DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("a", "b"))
    if mesh.size() == dist.get_world_size() and order[0][0] == 0:
        mesh[("a", "b")]._flatten("all")  # a flat mesh exists, and must not be taken
    wrong = []
    for shape in shapes:
        full = whole(shape)
        lists = [p for p in two_dim_placements(shape, mesh.shape) if legal(shape, mesh.shape, p)]
        for index, (source, target) in enumerate(itertools.product(lists, repeat=2)):
            if index % every == 0 and any(map(is_ours, (*source, *target))):
                wrong += check_move(full, mesh, source, target)
    return wrong


def legal(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]) -> bool:
    try:
        check_placements(shape, mesh, placements)
    except NotImplementedError:
        return False
    return True


ORDERS = {
    "2x2": [[0, 1], [2, 3]],
    "strided 2x2": [[0, 2], [1, 3]],
    "backward 2x2": [[3, 1], [2, 0]],
    "2x4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "4x2": [[0, 4], [1, 5], [2, 6], [3, 7]],
}


@pytest.mark.parametrize("name", ["2x2", "strided 2x2", "backward 2x2"])
def test_two_mesh_dims(name: str) -> None:
    # 5 and 9 rows are where nested and flat cuts differ.
    every = 1 if name == "2x2" else 3
    assert run_ranks(4, mesh_case, ORDERS[name], [(5, 3)], every, timeout=120) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_two_mesh_dims_all_shapes(name: str) -> None:
    ranks = sum(map(len, ORDERS[name]))
    shapes = [(n, 3) for n in (0, 1, 2, 3, 5, 7, 9)] + [(5, 2, 2)]
    assert run_ranks(ranks, mesh_case, ORDERS[name], shapes, 1, timeout=900) == [[]] * ranks


# ------------------------------------------------------------------------------ many tensors


def group_case(order: list) -> list[str]:
    mesh = DeviceMesh("cpu", torch.tensor(order))
    ndim = mesh.ndim
    shapes = [(7, 3), (1,), (0, 2), (5, 2, 2), (3, 4), (2, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float32, torch.uint8]
    wrong = []
    for same_dtype in (True, False):
        fulls = [
            whole(shape, torch.float32 if same_dtype else dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        kinds = [RowAtomic(), Owner(0), Owner(1), Replicate(), Shard(0), BlockAtomic(2)]
        rest = [Replicate()] * (ndim - 1)
        for turn in range(len(kinds)):
            sources = [(*rest, kinds[(i + turn) % 6]) for i in range(6)]
            targets = [(*rest, kinds[(i * 5 + turn // 2) % 6]) for i in range(6)]
            tensors = [sharded(f, mesh, s) for f, s in zip(fulls, sources, strict=True)]
            moved = redistribute_group(tensors, targets)
            for full, source, target, got in zip(fulls, sources, targets, moved, strict=True):
                local = got.to_local()
                if not same_bits(local, piece(full, mesh, target)) or got.placements != target:
                    wrong.append(f"{source} -> {target} {full.shape} {full.dtype}")
                if not local.is_contiguous():
                    wrong.append(f"not contiguous: {source} -> {target} {full.shape}")
    return wrong


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [[0, 2], [1, 3]]], ids=str)
def test_many_tensors_in_one_exchange(order: list) -> None:
    ranks = torch.tensor(order).numel()
    assert run_ranks(ranks, group_case, order) == [[]] * ranks


def refused_group_case() -> list[str]:
    mesh, other = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1, 0])
    a = distribute_tensor(whole((4, 2)), mesh, [RowAtomic()])
    b = distribute_tensor(whole((4, 2)), other, [RowAtomic()])
    found = []
    for call in (
        lambda: redistribute_group([a, b], [Replicate()]),
        lambda: redistribute_group([a, a], [[Replicate()]]),
        lambda: redistribute_group([a], [[Owner(2)]]),
        lambda: redistribute_group([a], [Owner(2)]),
    ):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    assert redistribute_group([], [Replicate()]) == []
    return found


def test_bad_groups_are_refused_on_every_rank() -> None:
    first, second = run_ranks(2, refused_group_case)
    assert first == second and len(first) == 4


# ----------------------------------------------------------------------------------- controls


def broken_case() -> None:
    from placements import collectives

    mesh = init_device_mesh("cpu", (3,))
    right = collectives._split_at
    collectives._split_at = lambda counts: [0] * (len(counts) + 1)  # every slice is empty
    try:
        wrong = []
        for source, target in itertools.permutations([RowAtomic(), Owner(1), Shard(1)], 2):
            wrong += check_move(whole((5, 3)), DeviceMesh("cpu", [2, 0, 1]), [source], [target])
        assert wrong == [], mesh
    finally:
        collectives._split_at = right


def test_the_matrix_notices_a_broken_exchange() -> None:
    with pytest.raises(RankFailure):
        run_ranks(3, broken_case)
