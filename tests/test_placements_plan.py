"""Boxes and plans by brute force: who holds what, and that a plan really carries it over.

Plans are carried out here on element numbers, in one process, step by step on every coordinate.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from placements import BlockAtomic, Owner, RowAtomic
from placements.boxes import (
    Box,
    box_numel,
    check_placements,
    full_box,
    is_held,
    local_box,
)
from placements.geometry import balanced_counts, ranges
from placements.plan import Algorithm, Collective, Plan, Step, choose_algorithm, make_plan

quick = settings(max_examples=120, derandomize=True, deadline=None)

MESHES = [(1,), (2,), (3,), (5,), (2, 2), (2, 4), (4, 2), (1, 3), (2, 1, 3)]


@st.composite
def row_tables(draw: st.DrawFn, rows: int, ranks: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True))


@st.composite
def placements_for(
    draw: st.DrawFn, shape: tuple[int, ...], mesh: tuple[int, ...], partial: bool = False
) -> tuple[Placement, ...]:
    """A legal placement list, uneven and nested ones among it."""
    placements: list[Placement] = []
    kinds = ["replicate", "owner", "rows", "rows", "blocks", "shard"] + ["partial"] * partial
    chain: list[int] = []
    for mesh_dim, size in enumerate(mesh):
        kind = draw(st.sampled_from(kinds))
        if kind in ("rows", "blocks") and len(chain) == 2:
            kind = "owner"
        if kind == "rows":
            table = draw(row_tables(shape[0], size)) if not chain and draw(st.booleans()) else None
            placements.append(RowAtomic(table))
            chain.append(mesh_dim)
        elif kind == "blocks":
            placements.append(BlockAtomic(draw(st.integers(1, 3))))
            chain.append(mesh_dim)
        elif kind == "owner":
            placements.append(Owner(draw(st.integers(0, size - 1))))
        elif kind == "shard":
            placements.append(Shard(draw(st.integers(0, len(shape) - 1))))
        elif kind == "partial":
            placements.append(Partial(draw(st.sampled_from(["sum", "max", "avg"]))))
        else:
            placements.append(Replicate())
    if len(chain) == 2 and draw(st.booleans()):
        first, second = chain if draw(st.booleans()) else chain[::-1]
        outer = draw(row_tables(shape[0], mesh[first]))
        placements[first] = RowAtomic(outer)
        placements[second] = RowAtomic([draw(row_tables(n, mesh[second])) for n in outer])
    return tuple(placements)


@st.composite
def cases(draw: st.DrawFn, count: int = 1, partial: bool = False) -> tuple:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    mesh = draw(st.sampled_from(MESHES))
    found = [
        draw(placements_for(shape, mesh, partial=partial and index == 0)) for index in range(count)
    ]
    return (shape, mesh, *found)


def legal(shape: Sequence[int], mesh: Sequence[int], *lists: Sequence[Placement]) -> bool:
    try:
        for placements in lists:
            check_placements(shape, mesh, placements)
    except (ValueError, NotImplementedError):
        return False
    return True


def coordinates(mesh: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh)))


def cut(array: np.ndarray, box: Box | None, origin: Box | None = None) -> np.ndarray:
    if box is None:
        return np.empty((0,) * array.ndim, array.dtype)
    starts = [0] * len(box) if origin is None else [start for start, _ in origin]
    return array[
        tuple(slice(a - start, b - start) for (a, b), start in zip(box, starts, strict=True))
    ]


# ---------------------------------------------------------------------------------- boxes


@quick
@given(cases())
def test_local_boxes_tile_the_tensor_once_per_replica(case: tuple) -> None:
    shape, mesh, placements = case
    if not legal(shape, mesh, placements):
        return
    held = np.zeros(shape, int)
    for coordinate in coordinates(mesh):
        box = local_box(shape, mesh, placements, coordinate)
        assert all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
        held[tuple(slice(a, b) for a, b in box)] += 1
        if not is_held(placements, coordinate):
            assert box == tuple((0, 0) for _ in shape)
    replicas = np.prod(
        [n for n, p in zip(mesh, placements, strict=True) if isinstance(p, Replicate)], dtype=int
    )
    assert (held == replicas).all(), (placements, held)


@quick
@given(cases())
def test_row_boundaries_respect_blocks(case: tuple) -> None:
    shape, mesh, placements = case
    blocks = [p.block_size for p in placements if isinstance(p, BlockAtomic)]
    rows = [p for p in placements if isinstance(p, RowAtomic)]
    if not legal(shape, mesh, placements) or not blocks or len(rows) != len(blocks):
        return
    for coordinate in coordinates(mesh):
        (start, stop), *_ = local_box(shape, mesh, placements, coordinate)
        if start < stop:
            assert start % min(blocks) == 0 or len(set(blocks)) > 1
            assert len(set(blocks)) > 1 or stop % blocks[0] == 0 or stop == shape[0]


def test_two_owners_mean_one_rank_of_the_mesh() -> None:
    held = [c for c in coordinates((2, 3)) if is_held((Owner(1), Owner(2)), c)]
    assert held == [(1, 2)]
    assert local_box((3, 2), (2, 3), (Owner(1), Owner(2)), (1, 2)) == full_box((3, 2))
    assert local_box((3, 2), (2, 3), (Owner(1), Owner(2)), (0, 2)) == ((0, 0), (0, 0))


def test_the_second_row_placement_splits_what_the_first_left() -> None:
    placements = (RowAtomic((5, 2)), RowAtomic(((4, 1), (0, 2))))
    boxes = [local_box((7,), (2, 2), placements, c)[0] for c in coordinates((2, 2))]
    assert boxes == [(0, 4), (4, 5), (5, 5), (5, 7)]
    # Written the other way round, the nested table is still applied last.
    swapped = [local_box((7,), (2, 2), placements[::-1], c[::-1])[0] for c in coordinates((2, 2))]
    assert swapped == boxes


# ------------------------------------------------------------------- plans on element numbers


def step_inputs(
    plans: dict[tuple[int, ...], Plan], index: int, mesh: Sequence[int]
) -> list[tuple[list[tuple[int, ...]], Step]]:
    """The groups of ranks of one step, and the step, which all of a group must agree on."""
    groups: dict[tuple, list[tuple[int, ...]]] = {}
    mesh_dim = next(iter(plans.values())).steps[index].mesh_dim
    for coordinate in plans:
        key = coordinate[:mesh_dim] + coordinate[mesh_dim + 1 :]
        groups.setdefault(key, []).append(coordinate)
    found = []
    for members in groups.values():
        steps = {plans[c].steps[index] for c in members}
        assert len(steps) == 1, "ranks of one group plan different steps"
        assert len(members) == mesh[mesh_dim]
        found.append((sorted(members, key=lambda c: c[mesh_dim]), steps.pop()))
    return found


def run_step(step: Step, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Carry out one step for one group; partial values are summed or combined exactly."""
    kind = step.collective
    if kind is Collective.NONE:
        return parts
    if kind is Collective.POINT_TO_POINT:
        targets = []
        for rank, box in enumerate(step.target_boxes):
            result = np.full([b - a for a, b in box] if box else (0,) * len(step.shape), -1.0)
            for source in range(step.num_ranks):
                for transfer in step.between(source, rank):
                    piece = cut(parts[source], transfer.box, step.source_boxes[source])
                    view = cut(result, transfer.box, box)
                    assert (view == -1).all(), "an element arrives twice"
                    view[...] = piece
            assert (result != -1).all(), "an element never arrives"
            targets.append(result)
        return targets
    if kind is Collective.LOCAL_SLICE:
        whole = parts
    elif kind is Collective.ALL_GATHER:
        whole = [np.concatenate(parts)] * step.num_ranks
    elif kind is Collective.BROADCAST:
        whole = [parts[step.source.rank]] * step.num_ranks
    else:
        stack = np.stack(parts)
        reduced = {"sum": np.sum, "avg": np.mean, "max": np.max}[step.source.reduce_op](stack, 0)
        whole = [reduced] * step.num_ranks
    return [cut(w, box) for w, box in zip(whole, step.target_boxes, strict=True)]


def check_bytes(step: Step) -> None:
    moved = [step.bytes_moved(rank) for rank in range(step.num_ranks)]
    assert sum(sent for sent, _ in moved) == sum(received for _, received in moved)
    assert step.total_bytes == sum(received for _, received in moved)
    if step.num_ranks == 1 or step.collective in (Collective.NONE, Collective.LOCAL_SLICE):
        assert not any(map(any, moved))


@quick
@given(cases(count=2, partial=True))
def test_every_plan_carries_every_element_once(case: tuple) -> None:
    check_plan(*case)


@pytest.mark.parametrize(
    "pair",
    [
        ((Shard(1), RowAtomic()), (RowAtomic((4, 1)), Shard(1))),
        ((Shard(1), RowAtomic()), (Shard(1), Shard(1))),
        ((Shard(1), Shard(1)), (Owner(1), Shard(1))),
        ((RowAtomic(), RowAtomic()), (Shard(1), RowAtomic((3, 2)))),
        ((RowAtomic(((1, 2), (1, 1))), RowAtomic((3, 2))), (RowAtomic(), RowAtomic())),
        ((RowAtomic(((1, 2), (1, 1))), RowAtomic((3, 2))), (Shard(0), Shard(0))),
        ((Partial(), RowAtomic()), (RowAtomic(), Owner(1))),
        ((Owner(1), Owner(0)), (Owner(0), Owner(1))),
    ],
    ids=str,
)
def test_chains_of_splits_change_places(pair: tuple) -> None:
    check_plan((5, 5), (2, 2), *pair)


def check_plan(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> None:
    if not legal(shape, mesh, source, target):
        return
    plans = {c: make_plan(shape, 4, mesh, source, target, c) for c in coordinates(mesh)}
    assert len({len(plan.steps) for plan in plans.values()}) == 1
    full = np.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    parts = {c: cut(full, local_box(shape, mesh, source, c)) for c in coordinates(mesh)}
    # Ranks hold different partial values, so that every reduction has a known answer.
    weight = np.ones(())
    for mesh_dim, placement in enumerate(source):
        if isinstance(placement, Partial):
            values = np.arange(1, mesh[mesh_dim] + 1)
            op = {"sum": np.sum, "avg": np.mean, "max": np.max}[placement.reduce_op]
            weight = weight * op(values)
            for c in parts:
                parts[c] = parts[c] * values[c[mesh_dim]]
    for index in range(len(next(iter(plans.values())).steps)):
        for members, step in step_inputs(plans, index, mesh):
            check_bytes(step)
            parts.update(zip(members, run_step(step, [parts[c] for c in members]), strict=True))
    for c, part in parts.items():
        wanted = cut(full * weight, local_box(shape, mesh, target, c))
        assert part.shape == wanted.shape, (source, target, c, str(plans[c]))
        assert np.allclose(part, wanted), (source, target, c, str(plans[c]))


def test_the_check_above_notices_a_lost_transfer() -> None:
    step = make_plan((4,), 4, (2,), (RowAtomic((4, 0)),), (RowAtomic((1, 3)),), (0,)).steps[0]
    step.__dict__["_by_pair"] = {(0, 0): step.between(0, 0)}
    with pytest.raises(AssertionError, match="never arrives"):
        run_step(step, [np.arange(4.0), np.empty(0)])
    del step.__dict__["_by_pair"]  # the plan is cached; leave it whole


@quick
@given(cases(count=2))
def test_both_sides_of_an_exchange_list_the_same_transfers(case: tuple) -> None:
    shape, mesh, source, target = case
    if not legal(shape, mesh, source, target):
        return
    for step in make_plan(shape, 4, mesh, source, target, (0,) * len(mesh)).steps:
        if step.collective is not Collective.POINT_TO_POINT:
            continue
        pairs = Counter((t.source, t.target) for t in step.transfers)
        ranks = range(step.num_ranks)
        assert pairs == Counter(
            {(a, b): len(step.between(a, b)) for a in ranks for b in ranks if step.between(a, b)}
        )
        sizes = {
            (a, b): sum(box_numel(t.box) for t in step.between(a, b)) for a in ranks for b in ranks
        }
        for rank in ranks:
            sent = 4 * sum(sizes[rank, b] for b in ranks if b != rank)
            received = 4 * sum(sizes[a, rank] for a in ranks if a != rank)
            assert step.bytes_moved(rank) == (sent, received)


@quick
@given(cases(count=1))
def test_equal_layouts_move_nothing(case: tuple) -> None:
    shape, mesh, placements = case
    if not legal(shape, mesh, placements):
        return
    at = (0,) * len(mesh)
    assert make_plan(shape, 4, mesh, placements, placements, at).steps == ()
    rows = [d for d, p in enumerate(placements) if isinstance(p, RowAtomic)]
    if len(rows) == 1 and placements[rows[0]].rows is None:
        counts = placements[rows[0]].counts(shape[0], mesh[rows[0]])
        spelled = tuple(RowAtomic(counts) if d in rows else p for d, p in enumerate(placements))
        assert make_plan(shape, 4, mesh, placements, spelled, at).steps == ()


def test_other_spellings_of_the_same_split_are_no_ops() -> None:
    for source, target in [
        ((RowAtomic(),), (RowAtomic((3, 2)),)),
        ((RowAtomic((3, 2)),), (Shard(0),)),
        ((BlockAtomic(1),), (RowAtomic(),)),
    ]:
        assert make_plan((5, 2), 4, (2,), source, target, (0,)).steps == ()
    nested = (RowAtomic((3, 2)), RowAtomic(((2, 1), (1, 1))))
    for source, target in itertools.permutations([nested, (RowAtomic(), RowAtomic())], 2):
        assert make_plan((5, 2), 4, (2, 2), source, target, (1, 0)).steps == ()
    moved = make_plan((5, 2), 4, (2, 2), (RowAtomic((4, 1)), RowAtomic()), nested, (1, 0))
    assert moved.steps  # control: another split is not taken for the same


# ------------------------------------------------------------------- the way of a collective


@quick
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_the_algorithm_follows_from_the_counts(counts: list[int]) -> None:
    found = choose_algorithm(counts)
    padded, payload = max(counts) * len(counts), sum(counts)
    assert (found is Algorithm.EVEN) == (len(set(counts)) == 1)
    assert found is not Algorithm.STAGED or padded <= 1.25 * payload
    assert found is not Algorithm.UNEVEN or padded > 1.25 * payload


def test_staged_steps_count_their_padding() -> None:
    counts = (5, 5, 4)
    assert choose_algorithm(counts) is Algorithm.STAGED
    step = make_plan((14, 2), 4, (3,), (RowAtomic(counts),), (Replicate(),), (0,)).steps[0]
    assert [step.bytes_moved(r) for r in range(3)] == [(80, 80)] * 3
    exact = make_plan((14, 2), 4, (3,), (RowAtomic((9, 5, 0)),), (Replicate(),), (0,)).steps[0]
    assert exact.algorithm is Algorithm.UNEVEN
    assert [exact.bytes_moved(r) for r in range(3)] == [(144, 40), (80, 72), (0, 112)]


def test_balanced_rows_are_the_ranges_of_a_plan() -> None:
    step = make_plan((7,), 4, (3,), (RowAtomic(),), (Replicate(),), (0,)).steps[0]
    assert step.source_boxes == tuple((r,) for r in ranges(balanced_counts(7, 3)))
