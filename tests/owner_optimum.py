"""The best owners there are, by search: what plans are compared with where a bound is not tight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtensor_owner.owners import CostFn, ParameterLayout

Counts = tuple[int, ...]


def fits(groups: Sequence[dict[int, ParameterLayout]], cost: CostFn, limit: float) -> bool:
    """Whether any choice of owners among holders keeps every load at or below ``limit``.

    Goes through the ranks in order and keeps the sets of items that may be left to the next
    ones; items of equal cost and holders are interchangeable. The holders of an item must be
    neighbours, as in layouts that lie back to back.
    """
    number_of: dict[tuple[int, int, float], int] = {}
    num_ranks = 1
    for layouts in groups:
        for layout in layouts.values():
            num_ranks = layout.dp_size
            holders = layout.owner_candidates()
            assert holders == tuple(range(holders[0], holders[-1] + 1))
            kind = (holders[0], holders[-1], cost(layout))
            number_of[kind] = number_of.get(kind, 0) + 1
    kinds = sorted(number_of)
    states = {tuple(number_of[kind] for kind in kinds)}
    for rank in range(num_ranks):
        allowed = [k for k, (first, last, _) in enumerate(kinds) if first <= rank <= last]
        # Of two sets, one of which is a part of the other, only the smaller one matters.
        left = {
            state
            for before in states
            for state in _after(before, allowed, kinds, limit)
            if all(not n or kinds[k][1] > rank for k, n in enumerate(state))
        }
        states = _smallest(left)
    return bool(states)


def _after(
    state: Counts, allowed: Sequence[int], kinds: Sequence[tuple[int, int, float]], room: float
) -> Iterator[Counts]:
    """What is left once a rank has taken as much as fits, in every way there is."""
    if not allowed:
        yield state
        return
    first, *rest = allowed
    cost = kinds[first][2]
    most = min(state[first], int(room // cost))
    for taken in range(most, -1, -1):
        left = (*state[:first], state[first] - taken, *state[first + 1 :])
        yield from _after(left, rest, kinds, room - taken * cost)
        if not rest:
            return


def _smallest(states: set[Counts]) -> set[Counts]:
    kept: list[Counts] = []
    for state in sorted(states, key=sum):
        if not any(all(a <= b for a, b in zip(other, state)) for other in kept):
            kept.append(state)
    return set(kept)
