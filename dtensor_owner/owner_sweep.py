"""Owners found in one sweep over the ranks, for work whose holders are neighbours.

In layouts that lie back to back every matrix is held by a range of ranks. Then ranks can be filled
in order: what a rank leaves is for the next ones, and what it is the last holder of it must take.
For a given capacity a greedy sweep takes what ends first; an exact one keeps all sets of items that
may be left, of which there are few where items come in few kinds (layers of one shape).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dtensor_owner.owner_work import Window, Work

Counts = tuple[int, ...]
Taken = list[dict[int, int]]  # per rank, how many items of each kind it owns

# Sets of items looked at in one exact sweep; beyond, it gives up.
_SETS_PER_SWEEP = 4_000
# Capacities tried.
_TRIES = 12


class Sweep:
    """The work of one plan, by kinds: equal cost and equal holders."""

    def __init__(self, works: Sequence[Work], num_ranks: int) -> None:
        kinds: dict[tuple[Window, int], list[int]] = {}
        for item, work in enumerate(works):
            if work.windows:
                kinds.setdefault((work.windows[0], work.cost), []).append(item)
        self.num_ranks = num_ranks
        self.order = sorted(kinds, key=lambda kind: (kind[0][1], -kind[1], kind[0][0]))
        self.items = [kinds[kind] for kind in self.order]
        self.costs = [cost for _, cost in self.order]
        self.free = [item for item, work in enumerate(works) if not work.windows]
        # Per rank, the kinds it may own, those that end first in front.
        self.open: list[list[int]] = [[] for _ in range(num_ranks)]
        for kind, ((start, stop), _) in enumerate(self.order):
            for rank in range(start, stop):
                self.open[rank].append(kind)

    def owners(self, taken: Taken) -> list[int]:
        """Owners of the items."""
        waiting = [list(items) for items in self.items]
        owners = [0] * (sum(map(len, self.items)) + len(self.free))
        for rank, counts in enumerate(taken):
            for kind, count in counts.items():
                for item in waiting[kind][:count]:
                    owners[item] = rank
                del waiting[kind][:count]
        return owners

    def ends_at(self, kind: int, rank: int) -> bool:
        return self.order[kind][0][1] == rank + 1

    def greedily(self, capacity: int) -> Taken | None:
        """Each rank takes what ends first, as much as fits; None where something is left over."""
        left = [len(items) for items in self.items]
        taken: Taken = []
        for rank in range(self.num_ranks):
            room, mine = capacity, {}
            for kind in self.open[rank]:
                count = min(
                    left[kind], room // self.costs[kind] if self.costs[kind] else left[kind]
                )
                if count:
                    mine[kind] = count
                    left[kind] -= count
                    room -= count * self.costs[kind]
                if left[kind] and self.ends_at(kind, rank):
                    return None
            taken.append(mine)
        return taken

    def exactly(self, capacity: int) -> Taken | None:
        """As ``greedily``, but all ways to fill a rank are tried; None where there are too many."""
        start = tuple(len(items) for items in self.items)
        # Per rank, each set that may be left, with the one before it.
        steps: list[dict[Counts, Counts]] = []
        states, looked = {start: start}, 0
        for rank in range(self.num_ranks):
            after: dict[Counts, Counts] = {}
            for state in states:
                for left in self._fillings(state, self.open[rank], capacity):
                    looked += 1
                    if looked > _SETS_PER_SWEEP:
                        return None
                    if not any(left[k] and self.ends_at(k, rank) for k in self.open[rank]):
                        after.setdefault(left, state)
            states = _smallest(after)
            if not states:
                return None
            steps.append(states)
        taken: Taken = []
        state = next(iter(states))
        for before in reversed(steps):
            earlier = before[state]
            taken.append({k: a - b for k, (a, b) in enumerate(zip(earlier, state)) if a > b})
            state = earlier
        return taken[::-1]

    def _fillings(self, state: Counts, kinds: Sequence[int], room: int) -> Iterator[Counts]:
        """What is left once a rank has taken as much as fits, in every way there is."""
        if not kinds:
            yield state
            return
        first, *rest = kinds
        cost = self.costs[first]
        most = min(state[first], room // cost) if cost else state[first]
        for count in range(most, -1 if rest else most - 1, -1):
            left = (*state[:first], state[first] - count, *state[first + 1 :])
            yield from self._fillings(left, rest, room - count * cost)


def _smallest(states: dict[Counts, Counts]) -> dict[Counts, Counts]:
    """Without the sets of which another one is a part."""
    kept: dict[Counts, Counts] = {}
    for state in sorted(states, key=sum):
        if not any(all(a <= b for a, b in zip(other, state)) for other in kept):
            kept[state] = states[state]
    return kept


def sweep(works: Sequence[Work], num_ranks: int, bound: int, best: int) -> list[int] | None:
    """Owners whose highest load is below ``best``, if a sweep finds any.

    Args:
        works: The work; each item's holders are neighbours, else there is no answer.
        num_ranks: Number of ranks.
        bound: No owners have a highest load below this.
        best: The highest load known.
    """
    if any(len(work.windows) > 1 for work in works):
        return None
    plan = Sweep(works, num_ranks)
    ways: list[Callable[[int], Taken | None]] = [plan.greedily]
    if len(plan.order) <= 12:
        ways.append(plan.exactly)
    found: list[int] | None = None
    for way in ways:
        low, high = bound, best - 1  # the least capacity that works is looked for in between
        for _ in range(_TRIES):
            if low > high:
                break
            capacity = (low + high) // 2
            taken = way(capacity)
            if taken is None:
                low = capacity + 1
            else:
                loads = [sum(plan.costs[k] * n for k, n in mine.items()) for mine in taken]
                best = max(loads)
                found, high = plan.owners(taken), best - 1
    return found
