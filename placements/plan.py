"""What a redistribution moves, decided before anything is sent.

A ``Plan`` is a list of ``Step``s, one mesh dimension each. Both are frozen values of integers
and placements: printable, comparable, hashable, made without tensors or a process group.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch.distributed.tensor import Partial, Placement, Replicate

from placements.boxes import (
    Box,
    box_numel,
    box_shape,
    check_placements,
    full_box,
    intersection,
    is_held,
    local_box,
    row_chain,
    same_split,
    split_chain,
    split_counts,
    split_dim,
)
from placements.geometry import ranges
from placements.owner import Owner
from placements.row_atomic import RowAtomic

# A staged collective may move up to a quarter more than the payload: below that one even
# tensor collective beats exact point-to-point messages.
STAGED_LIMIT = 1.25

_SPLITS = ("rows", "columns", "owner")


class Algorithm(enum.Enum):
    """How ranks with different row counts take part in one all_gather or reduce_scatter."""

    EVEN = "even"
    STAGED = "staged"
    UNEVEN = "uneven"


class Collective(enum.Enum):
    """What carries one step."""

    NONE = "none"
    LOCAL_SLICE = "local slice"
    POINT_TO_POINT = "point-to-point"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"


def choose_algorithm(counts: Sequence[int]) -> Algorithm:
    """Choose by the row counts alone, so that all ranks agree.

    Even when all counts are equal; staged (padded to the largest count) while that moves at
    most ``STAGED_LIMIT`` times the payload; exact messages otherwise.
    """
    largest, total = max(counts), sum(counts)
    if largest * len(counts) == total:
        return Algorithm.EVEN
    return Algorithm.STAGED if largest * len(counts) <= STAGED_LIMIT * total else Algorithm.UNEVEN


def _row_counts(boxes: Sequence[Box | None]) -> tuple[int, ...]:
    return tuple(0 if box is None else box[0][1] - box[0][0] for box in boxes)


@dataclass(frozen=True)
class Transfer:
    """One box that ``source`` holds and ``target`` wants; ``source == target`` is a local copy."""

    source: int
    target: int
    box: Box


@dataclass(frozen=True)
class Step:
    """A redistribution on one mesh dimension.

    Attributes:
        mesh_dim: The mesh dimension; ranks below are coordinates on it.
        source, target: Placements before and after.
        shape: Shape of the tensor that the ranks of this dimension hold together: the global
            shape, less what the other mesh dims cut away.
        num_ranks: Size of the mesh dimension.
        itemsize: Bytes per element.
        source_boxes, target_boxes: What each rank holds before and after, in positions of
            ``shape``. A ``Replicate`` or ``Partial`` rank holds everything, a non-owner None.
        collective: What carries the step.
        algorithm: For all_gather and reduce_scatter: how uneven counts are handled.
    """

    mesh_dim: int
    source: Placement
    target: Placement
    shape: tuple[int, ...]
    num_ranks: int
    itemsize: int
    source_boxes: tuple[Box | None, ...]
    target_boxes: tuple[Box | None, ...]
    collective: Collective
    algorithm: Algorithm | None = None

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Boxes to carry, by source, then target. Only for point-to-point steps."""
        return tuple(
            Transfer(source, target, box)
            for source, held in enumerate(self.source_boxes)
            for target, wanted in enumerate(self.target_boxes)
            if held is not None
            and wanted is not None
            and (box := intersection(held, wanted)) is not None
            and box_numel(box)
        )

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], list[Transfer]]:
        pairs: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in self.transfers:
            pairs.setdefault((transfer.source, transfer.target), []).append(transfer)
        return pairs

    def between(self, source: int, target: int) -> list[Transfer]:
        """The transfers from one rank to another, or what a rank keeps."""
        return self._by_pair.get((source, target), [])

    @cached_property
    def source_counts(self) -> tuple[int, ...]:
        """Rows of dim 0 on each rank before."""
        return _row_counts(self.source_boxes)

    @cached_property
    def target_counts(self) -> tuple[int, ...]:
        """Rows of dim 0 on each rank after."""
        return _row_counts(self.target_boxes)

    def bytes_moved(self, rank: int) -> tuple[int, int]:
        """Bytes that ``rank`` sends and receives, self-copies not counted.

        Tensor collectives count what each rank must hand to and get from the others; a
        backend's ring or tree may forward more.
        """
        return _BYTES[self.collective](self, rank)

    @property
    def total_bytes(self) -> int:
        """Bytes received by all ranks together."""
        return sum(self.bytes_moved(rank)[1] for rank in range(self.num_ranks))

    def __str__(self) -> str:
        how = self.collective.value
        if self.algorithm is not None:
            how += f" ({self.algorithm.value})"
        lines = [f"mesh dim {self.mesh_dim}: {self.source} -> {self.target}, {how}"]
        if self.collective is Collective.POINT_TO_POINT:
            lines += [f"  {_transfer_text(t, self.shape, self.itemsize)}" for t in self.transfers]
        elif self.collective not in (Collective.NONE, Collective.LOCAL_SLICE):
            for rank in range(self.num_ranks):
                sent, received = self.bytes_moved(rank)
                lines.append(f"  rank {rank} sends {sent} B, receives {received} B")
        return "\n".join(lines)


def _transfer_text(transfer: Transfer, shape: tuple[int, ...], itemsize: int) -> str:
    peer = (
        f"{transfer.source} keep"
        if transfer.source == transfer.target
        else f"{transfer.source} -> {transfer.target}"
    )
    (start, stop), rest = (transfer.box or ((0, 1),))[0], transfer.box[1:]
    parts = [f"rows [{start}, {stop})"]
    for dim, ((low, high), size) in enumerate(zip(rest, shape[1:], strict=True), start=1):
        if (low, high) != (0, size):
            parts.append(f"dim {dim} [{low}, {high})")
    return f"{peer}  {' x '.join(parts)}  {box_numel(transfer.box) * itemsize} B"


def _no_bytes(step: Step, rank: int) -> tuple[int, int]:
    return 0, 0


def _exchanged_bytes(step: Step, rank: int) -> tuple[int, int]:
    sent = received = 0
    for transfer in step.transfers:
        if transfer.source != transfer.target:
            num_bytes = box_numel(transfer.box) * step.itemsize
            sent += num_bytes * (transfer.source == rank)
            received += num_bytes * (transfer.target == rank)
    return sent, received


def _collective_numels(step: Step, boxes: tuple[Box | None, ...]) -> list[int]:
    numels = [box_numel(box) if box is not None else 0 for box in boxes]
    return [max(numels)] * len(numels) if step.algorithm is Algorithm.STAGED else numels


def _gathered_bytes(step: Step, rank: int) -> tuple[int, int]:
    numels = _collective_numels(step, step.source_boxes)
    own = numels[rank] * step.itemsize
    return own * (step.num_ranks - 1), sum(numels) * step.itemsize - own


def _scattered_bytes(step: Step, rank: int) -> tuple[int, int]:
    numels = _collective_numels(step, step.target_boxes)
    own = numels[rank] * step.itemsize
    return sum(numels) * step.itemsize - own, own * (step.num_ranks - 1)


def _broadcast_bytes(step: Step, rank: int) -> tuple[int, int]:
    num_bytes = box_numel(full_box(step.shape)) * step.itemsize
    assert isinstance(step.source, Owner)
    is_root = step.source.rank == rank
    return (num_bytes * (step.num_ranks - 1), 0) if is_root else (0, num_bytes)


def _reduced_bytes(step: Step, rank: int) -> tuple[int, int]:
    """reduce_scatter of balanced chunks, then the chunks to the owner."""
    assert isinstance(step.target, Owner)
    total = box_numel(full_box(step.shape))
    chunk = -(-total // step.num_ranks)
    scattered = chunk * (step.num_ranks - 1)
    start, stop = min(rank * chunk, total), min((rank + 1) * chunk, total)
    if step.target.rank == rank:
        return scattered * step.itemsize, (scattered + total - (stop - start)) * step.itemsize
    return (scattered + stop - start) * step.itemsize, scattered * step.itemsize


def _all_reduced_bytes(step: Step, rank: int) -> tuple[int, int]:
    """2 (N - 1) / N of the tensor each way, the floor of an all_reduce."""
    total = box_numel(full_box(step.shape)) * step.itemsize
    num_bytes = 2 * total * (step.num_ranks - 1) // step.num_ranks
    return num_bytes, num_bytes


_BYTES = {
    Collective.NONE: _no_bytes,
    Collective.LOCAL_SLICE: _no_bytes,
    Collective.POINT_TO_POINT: _exchanged_bytes,
    Collective.ALL_GATHER: _gathered_bytes,
    Collective.REDUCE_SCATTER: _scattered_bytes,
    Collective.BROADCAST: _broadcast_bytes,
    Collective.REDUCE: _reduced_bytes,
    Collective.ALL_REDUCE: _all_reduced_bytes,
}


@dataclass(frozen=True)
class Plan:
    """Steps that take a tensor from its source placements to its target placements.

    Seen from one mesh coordinate: ranks that differ on another mesh dim may hold another part
    of the tensor and so have steps of other sizes, but never other collectives.
    """

    shape: tuple[int, ...]
    source: tuple[Placement, ...]
    target: tuple[Placement, ...]
    steps: tuple[Step, ...]

    def bytes_moved(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """Bytes that the rank at ``coordinate`` (on all mesh dims) sends and receives."""
        moved = [step.bytes_moved(coordinate[step.mesh_dim]) for step in self.steps]
        return sum(sent for sent, _ in moved), sum(received for _, received in moved)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or "nothing to do"


@lru_cache(maxsize=4096)
def make_plan(
    shape: tuple[int, ...],
    itemsize: int,
    mesh_shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> Plan:
    """Plan a redistribution as seen from ``coordinate``.

    Raises:
        ValueError, NotImplementedError: As ``check_placements``; or a step has no rule.
    """
    check_placements(shape, mesh_shape, source)
    check_placements(shape, mesh_shape, target)
    for mesh_dim, (before, after) in enumerate(zip(source, target, strict=True)):
        _check_rule(mesh_dim, before, after)
    current = list(_relabelled(shape, mesh_shape, source, target))
    steps = []
    for mesh_dim, placement in _placement_changes(tuple(current), target):
        held = tuple(current)
        current[mesh_dim] = placement
        step = _make_step(shape, itemsize, mesh_shape, held, tuple(current), mesh_dim, coordinate)
        steps.append(step)
    assert tuple(current) == target
    return Plan(shape, source, target, tuple(steps))


def _relabelled(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> tuple[Placement, ...]:
    """The source, written as the target is where both cut the tensor alike: nothing moves then.

    A split that lies below another one on the same dim means the same only if that one does.
    """
    renamed = list(source)
    source_chain, target_chain = row_chain(source), row_chain(target)
    for a, b in zip(source_chain, target_chain, strict=False):
        if a != b or not same_split(shape, mesh_shape, source, target, a):
            break
        renamed[a] = target[a]
    else:
        if source_chain == target_chain:
            return tuple(renamed)
    # Nested tables are keyed by the dim applied first: both are renamed or none.
    nested = any(isinstance(p, RowAtomic) and p.is_nested for p in (*source, *target))
    return source if nested else tuple(renamed)


def _placement_changes(
    source: tuple[Placement, ...], target: tuple[Placement, ...]
) -> list[tuple[int, Placement]]:
    """One ``(mesh_dim, new placement)`` per step, in order.

    Placements that cut the same tensor dim on several mesh dims form a chain: the one applied
    last is undone first, one is applied only when all before it are in place, and none changes
    below another. Steps that shrink the local tensor come before those that grow it.
    """
    current = list(source)
    todo = [d for d in range(len(source)) if not _is_in_place(source, target, d)]
    changes: list[tuple[int, Placement]] = []
    while todo:
        ready = [d for d in todo if _can_change(current, target, d, todo)]
        ready.sort(key=lambda d: target[d].is_replicate())
        # Where nothing can go where it belongs, the last split of some chain is undone.
        undo = [d for d in todo if split_dim(current[d]) is not None and _is_last(current, d)]
        mesh_dim = ready[0] if ready else undo[-1]
        current[mesh_dim] = target[mesh_dim] if ready else Replicate()
        changes.append((mesh_dim, current[mesh_dim]))
        if ready:
            todo.remove(mesh_dim)
    return changes


def _is_in_place(source: Sequence[Placement], target: Sequence[Placement], mesh_dim: int) -> bool:
    """Whether ``mesh_dim`` keeps its placement and everything it is applied after."""
    if source[mesh_dim] != target[mesh_dim]:
        return False
    before, after = split_chain(source, mesh_dim), split_chain(target, mesh_dim)
    position = before.index(mesh_dim) + 1 if before else 0
    return before[:position] == after[:position] and all(
        source[d] == target[d] for d in before[:position]
    )


def _is_last(placements: Sequence[Placement], mesh_dim: int) -> bool:
    chain = split_chain(placements, mesh_dim)
    return not chain or chain[-1] == mesh_dim


def _can_change(
    current: Sequence[Placement], target: Sequence[Placement], mesh_dim: int, todo: list[int]
) -> bool:
    """Whether ``mesh_dim`` can take its target placement now, for good."""
    after = [*current]
    after[mesh_dim] = target[mesh_dim]
    if not (_is_last(current, mesh_dim) and _is_last(after, mesh_dim)):
        return False
    chain, wanted = split_chain(after, mesh_dim), split_chain(target, mesh_dim)
    return chain == wanted[: len(chain)] and not any(d in todo for d in chain[:-1])


def _make_step(
    shape: tuple[int, ...],
    itemsize: int,
    mesh_shape: tuple[int, ...],
    before: tuple[Placement, ...],
    after: tuple[Placement, ...],
    mesh_dim: int,
    coordinate: tuple[int, ...],
) -> Step:
    source, target = before[mesh_dim], after[mesh_dim]
    others = tuple(Replicate() if d == mesh_dim else p for d, p in enumerate(before))
    first = None
    for placements in (before, after):
        chain = row_chain(placements)
        if len(chain) > 1 and chain[0] != mesh_dim:
            first = coordinate[chain[0]]
        # A nested table of another mesh dim cannot be read without the split it is keyed by;
        # it is applied after this dim, so it never changes what this dim's ranks share.
        if len(chain) > 1 and chain[0] == mesh_dim:
            raise AssertionError(f"{placements[chain[1]]} must be undone before {source} changes")
    local = box_shape(local_box(shape, mesh_shape, others, coordinate))
    num_ranks = mesh_shape[mesh_dim]
    is_here = is_held(others, coordinate)
    source_boxes, target_boxes = (
        _boxes(placement, local, num_ranks, first) if is_here else (None,) * num_ranks
        for placement in (source, target)
    )
    collective = Collective.NONE
    if is_here and num_ranks > 1 and (source_boxes != target_boxes or isinstance(source, Partial)):
        assert source != target
        collective = _COLLECTIVES[_kind(source), _kind(target)]
    algorithm = None
    if collective is Collective.ALL_GATHER:
        algorithm = choose_algorithm(_row_counts(source_boxes))
    elif collective is Collective.REDUCE_SCATTER:
        algorithm = choose_algorithm(_row_counts(target_boxes))
    return Step(
        mesh_dim,
        source,
        target,
        local,
        num_ranks,
        itemsize,
        source_boxes,
        target_boxes,
        collective,
        algorithm,
    )


def _boxes(
    placement: Placement, shape: tuple[int, ...], num_ranks: int, first: int | None
) -> tuple[Box | None, ...]:
    full = full_box(shape)
    if isinstance(placement, Owner):
        return tuple(full if rank == placement.rank else None for rank in range(num_ranks))
    dim = split_dim(placement)
    if dim is None:
        return (full,) * num_ranks
    counts = split_counts(placement, shape[dim], num_ranks, first)
    return tuple((*full[:dim], part, *full[dim + 1 :]) for part in ranges(counts))


def _kind(placement: Placement) -> str:
    """How a placement takes part in the table below."""
    if isinstance(placement, Owner):
        return "owner"
    if isinstance(placement, Partial):
        return "partial"
    return {None: "replicate", 0: "rows"}.get(split_dim(placement), "columns")


_COLLECTIVES: dict[tuple[str, str], Collective] = {
    **{(a, b): Collective.POINT_TO_POINT for a in _SPLITS for b in _SPLITS},
    **{("replicate", b): Collective.LOCAL_SLICE for b in _SPLITS},
    ("rows", "replicate"): Collective.ALL_GATHER,
    ("columns", "replicate"): Collective.POINT_TO_POINT,
    ("owner", "replicate"): Collective.BROADCAST,
    ("partial", "rows"): Collective.REDUCE_SCATTER,
    ("partial", "columns"): Collective.ALL_REDUCE,
    ("partial", "owner"): Collective.REDUCE,
    ("partial", "replicate"): Collective.ALL_REDUCE,
}


def _check_rule(mesh_dim: int, source: Placement, target: Placement) -> None:
    """Refuse what has no rule, also where no rank would have anything to do."""
    if source != target and _kind(target) == "partial":
        raise NotImplementedError(
            f"No rule for {source} -> {target} on mesh dim {mesh_dim}: a value cannot be "
            "relabelled as a partial one; redistribute to Replicate() or a split placement."
        )
