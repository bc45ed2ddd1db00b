"""One rank's part of a step plan, spelled out as positions and sizes: integers only.

Both sides of every transfer list it in the same order: by matrix, then by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from dtensor_owner.muon_matrices import Matrix, Piece
from dtensor_owner.muon_plan import Bucket, StepPlan
from placements.boxes import box_shape

At = tuple[int, int]  # (index of a matrix, number of one of its pieces)


Cut = tuple[int, int, int]  # (tensor dim, first position, length), as ``Tensor.narrow`` takes them


@dataclass(frozen=True)
class Part:
    """A piece of a matrix, and where it is found.

    Args:
        place: A position in a list of tensors; which one, the field that holds the part says.
        shape: Shape of the piece.
        cuts: How to cut the piece out of the matrix; empty where it is the whole.
    """

    place: int
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]


@dataclass(frozen=True)
class Owned:
    """A matrix that this rank owns.

    Args:
        index: Index of the matrix.
        shape: Its shape in the dims of its parameter.
        parts: Its pieces. Where ``place`` >= 0 it is a position among the pieces received, else
            ``~place`` is one among the pieces this rank holds itself.
        batch, slot: Where it is orthogonalized.
        tall: Whether it has more rows than columns; it is transposed in its batch then.
    """

    index: int
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    batch: int
    slot: int
    tall: bool


@dataclass(frozen=True)
class Leg:
    """One way of an exchange, as this rank sees it.

    Args:
        needed: Whether any rank sends anything; if not, no rank communicates.
        send_numels, recv_numels: Elements to and from each rank, by coordinate.
        recv_sizes: Elements of each piece received, in order.
    """

    needed: bool
    send_numels: tuple[int, ...]
    recv_numels: tuple[int, ...]
    recv_sizes: tuple[int, ...]


@dataclass(frozen=True)
class RankProgram:
    """One rank's part of a bucket.

    Args:
        group: Index of the parameter group.
        held: Matrices of which this rank holds a piece.
        local_rows: Per held matrix, its rows in this rank's tensor of the parameter.
        pack: Positions in ``held`` of the pieces that are needed, in order: first those that are
            sent to owners, then those that this rank owns itself.
        pack_sizes: Their numbers of elements.
        gather, scatter: The way to the owners and the way back.
        owned: Matrices that this rank owns.
        batches: Shapes ``(number, rows, cols)``, ``rows <= cols``, of the batches in which they
            are orthogonalized.
        give: Parts of the results of ``owned[place]`` that are sent back, in order.
        updates: Per held matrix, its update: where ``place`` >= 0 among the pieces that came back,
            else a part of the result of ``owned[~place]``.
    """

    group: int
    held: tuple[int, ...]
    local_rows: tuple[tuple[int, int], ...]
    pack: tuple[int, ...]
    pack_sizes: tuple[int, ...]
    gather: Leg
    owned: tuple[Owned, ...]
    batches: tuple[tuple[int, int, int], ...]
    give: tuple[Part, ...]
    scatter: Leg
    updates: tuple[Part, ...]


class _Lists:
    """The transfers of a bucket that concern one rank, by peer."""

    def __init__(self, plan: StepPlan, bucket: Bucket, rank: int) -> None:
        empty: list[list[At]] = [[] for _ in range(plan.num_ranks)]
        self.sends, self.receives = empty, [list(x) for x in empty]
        self.gives, self.takes = [list(x) for x in empty], [list(x) for x in empty]
        for index in bucket.matrices:
            owner = plan.owners[index]
            for number, piece in enumerate(plan.matrices[index].pieces):
                self._add((index, number), piece, owner, plan, rank)

    def _add(self, at: At, piece: Piece, owner: int, plan: StepPlan, rank: int) -> None:
        holds = rank in piece.holders
        if owner == rank:
            if not holds:
                self.receives[plan.source_of(piece, owner)].append(at)
            for holder in piece.holders:
                if holder != rank:
                    self.gives[holder].append(at)
        elif holds:
            self.takes[owner].append(at)
            if owner not in piece.holders and plan.source_of(piece, owner) == rank:
                self.sends[owner].append(at)


def rank_program(plan: StepPlan, bucket: Bucket, rank: int) -> RankProgram:
    """Spell out what ``rank`` does in ``bucket``."""
    matrices = plan.matrices
    lists = _Lists(plan, bucket, rank)
    held = tuple(i for i in bucket.matrices if matrices[i].piece_of(rank) is not None)
    owned = tuple(i for i in bucket.matrices if plan.owners[i] == rank)
    gathers, scatters = plan.moves(bucket)

    def leg(needed: bool, out: list[list[At]], back: list[list[At]]) -> Leg:
        def sizes(ats: Sequence[At]) -> tuple[int, ...]:
            return tuple(matrices[index].pieces[number].numel for index, number in ats)

        return Leg(
            needed,
            send_numels=tuple(sum(sizes(ats)) for ats in out),
            recv_numels=tuple(sum(sizes(ats)) for ats in back),
            recv_sizes=sizes(list(chain(*back))),
        )

    held_at, owned_at = _positions(held), _positions(owned)
    sent = [index for index, _ in chain(*lists.sends)]
    own = [index for index in owned if index in held_at]
    starts = _local_starts(plan, rank)
    rows = [_piece(matrices[i], rank).box[0] for i in held]
    firsts = [starts[matrices[i].param] for i in held]
    batches, slots = _batches(plan, owned)
    return RankProgram(
        group=bucket.group,
        held=held,
        local_rows=tuple((a - first, b - first) for (a, b), first in zip(rows, firsts)),
        pack=tuple(held_at[index] for index in [*sent, *own]),
        pack_sizes=tuple(_piece(matrices[index], rank).numel for index in [*sent, *own]),
        gather=leg(gathers, lists.sends, lists.receives),
        owned=tuple(
            Owned(index, box_shape(matrices[index].box), parts, *slot)
            for index, parts, slot in zip(
                owned, _assembly(plan, owned, own, list(chain(*lists.receives))), slots
            )
        ),
        batches=batches,
        give=tuple(
            _part(owned_at[index], matrices[index].pieces[number], matrices[index])
            for index, number in chain(*lists.gives)
        ),
        scatter=leg(scatters, lists.gives, lists.takes),
        updates=_updates(plan, held, owned_at, rank, list(chain(*lists.takes))),
    )


def _positions(indices: Sequence[int]) -> dict[int, int]:
    return {index: position for position, index in enumerate(indices)}


def _piece(matrix: Matrix, rank: int) -> Piece:
    piece = matrix.piece_of(rank)
    assert piece is not None
    return piece


def _local_starts(plan: StepPlan, rank: int) -> dict[int, int]:
    """First row that ``rank`` holds of each parameter."""
    starts: dict[int, int] = {}
    for matrix in plan.matrices:
        piece = matrix.piece_of(rank)
        if piece is not None:
            start = piece.box[0][0]
            starts[matrix.param] = min(start, starts.get(matrix.param, start))
    return starts


def _part(place: int, piece: Piece, matrix: Matrix) -> Part:
    first = matrix.box[0][0]
    (start, stop), *rest = piece.box
    box = ((start - first, stop - first), *rest)
    whole = box_shape(matrix.box)
    shape = box_shape(box)
    cuts = tuple(
        (dim, start, length)
        for dim, ((start, _), length) in enumerate(zip(box, shape))
        if length != whole[dim]
    )
    return Part(place, shape, cuts)


def _assembly(
    plan: StepPlan, owned: Sequence[int], own: Sequence[int], received: Sequence[At]
) -> list[tuple[Part, ...]]:
    """Where the pieces of each owned matrix are."""
    places = {at: place for place, at in enumerate(received)}
    own_places = _positions(own)
    return [
        tuple(
            _part(
                places[index, number] if (index, number) in places else ~own_places[index],
                piece,
                plan.matrices[index],
            )
            for number, piece in enumerate(plan.matrices[index].pieces)
        )
        for index in owned
    ]


def _updates(
    plan: StepPlan,
    held: Sequence[int],
    owned_at: dict[int, int],
    rank: int,
    taken: Sequence[At],
) -> tuple[Part, ...]:
    places = {index: place for place, (index, _) in enumerate(taken)}
    return tuple(
        _part(
            places[index] if index in places else ~owned_at[index],
            _piece(plan.matrices[index], rank),
            plan.matrices[index],
        )
        for index in held
    )


def _batches(
    plan: StepPlan, owned: Sequence[int]
) -> tuple[tuple[tuple[int, int, int], ...], list[tuple[int, int, bool]]]:
    """Put matrices of equal shape together, tall ones transposed.

    Returns:
        Shapes of the batches; per owned matrix its batch, its slot there, and whether it is tall.
    """
    number_of: dict[tuple[int, int], int] = {}
    sizes: list[int] = []
    slots = []
    for index in owned:
        rows, cols = plan.matrices[index].shape
        batch = number_of.setdefault((min(rows, cols), max(rows, cols)), len(sizes))
        if batch == len(sizes):
            sizes.append(0)
        slots.append((batch, sizes[batch], rows > cols))
        sizes[batch] += 1
    return tuple((n, *shape) for n, shape in zip(sizes, number_of)), slots
