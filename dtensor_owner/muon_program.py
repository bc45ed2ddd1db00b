"""One rank's part of a step plan, spelled out as positions and sizes: integers only.

Both sides of every transfer list it in the same order: by matrix, then by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from dtensor_owner.muon_matrices import Matrix, Piece
from dtensor_owner.muon_plan import Bucket, StepPlan
from placements.boxes import Box

At = tuple[int, int]  # (index of a matrix, number of one of its pieces)


@dataclass(frozen=True)
class Part:
    """A piece, as a box in its matrix, and where it is found.

    Args:
        place: A position in a list of tensors; which one, the field that holds the part says.
        box: Half-open ranges, counted from the matrix's first row.
    """

    place: int
    box: Box


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
        owned: Matrices that this rank owns.
        shapes: Rows and columns of each owned matrix.
        send: Positions in ``held`` of the pieces sent to owners, in order.
        gather, scatter: The way to the owners and the way back.
        assembly: Per owned matrix, its pieces: where ``place`` >= 0 in what was received, else
            ``held[~place]`` is at hand.
        batches: Positions in ``owned`` of matrices that are orthogonalized together.
        give: Parts of the results of ``owned[place]`` that are sent back, in order.
        updates: Per held matrix, its update: where ``place`` >= 0 in what came back, else part
            of the result of ``owned[~place]``.
    """

    group: int
    held: tuple[int, ...]
    local_rows: tuple[tuple[int, int], ...]
    owned: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    send: tuple[int, ...]
    gather: Leg
    assembly: tuple[tuple[Part, ...], ...]
    batches: tuple[tuple[int, ...], ...]
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
    starts = _local_starts(plan, rank)
    rows = [_piece(matrices[i], rank).box[0] for i in held]
    firsts = [starts[matrices[i].param] for i in held]
    return RankProgram(
        group=bucket.group,
        held=held,
        local_rows=tuple((a - first, b - first) for (a, b), first in zip(rows, firsts)),
        owned=owned,
        shapes=tuple(matrices[i].shape for i in owned),
        send=tuple(held_at[index] for index, _ in chain(*lists.sends)),
        gather=leg(gathers, lists.sends, lists.receives),
        assembly=_assembly(plan, held_at, owned, list(chain(*lists.receives))),
        batches=_batches(plan, owned),
        give=tuple(
            Part(owned_at[index], _inside(matrices[index].pieces[number], matrices[index]))
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


def _inside(piece: Piece, matrix: Matrix) -> Box:
    """The piece's box, counted from the matrix's first row."""
    first = matrix.box[0][0]
    (start, stop), *rest = piece.box
    return ((start - first, stop - first), *rest)


def _assembly(
    plan: StepPlan, held_at: dict[int, int], owned: Sequence[int], received: Sequence[At]
) -> tuple[tuple[Part, ...], ...]:
    places = {at: place for place, at in enumerate(received)}
    return tuple(
        tuple(
            Part(
                places[index, number] if (index, number) in places else ~held_at[index],
                _inside(piece, plan.matrices[index]),
            )
            for number, piece in enumerate(plan.matrices[index].pieces)
        )
        for index in owned
    )


def _updates(
    plan: StepPlan,
    held: Sequence[int],
    owned_at: dict[int, int],
    rank: int,
    taken: Sequence[At],
) -> tuple[Part, ...]:
    places = {index: place for place, (index, _) in enumerate(taken)}
    return tuple(
        Part(
            places[index] if index in places else ~owned_at[index],
            _inside(_piece(plan.matrices[index], rank), plan.matrices[index]),
        )
        for index in held
    )


def _batches(plan: StepPlan, owned: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Owned matrices of equal shape, wide and tall ones together."""
    batches: dict[tuple[int, ...], list[int]] = {}
    for position, index in enumerate(owned):
        batches.setdefault(tuple(sorted(plan.matrices[index].shape)), []).append(position)
    return tuple(tuple(positions) for positions in batches.values())
