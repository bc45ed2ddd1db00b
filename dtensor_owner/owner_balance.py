"""Which rank gets which piece of work: load balancing with ints and the standard library only.

The problem is makespan scheduling where each work item may run on some ranks only
("restricted assignment"). Longest-processing-time-first gives a start, chains of moves
lower the highest load while that is possible, and a last pass moves work towards the
ranks that hold most of its data as long as no load passes the highest one.
Everything is deterministic: equal inputs give equal owners on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial

from dtensor_owner.owner_sweep import sweep
from dtensor_owner.owner_work import Loads, Window, Work, lower_bound

# Ranks looked at in one search for a chain of moves, and in all searches of one plan.
_RANKS_PER_SEARCH = 4_000
_RANKS_PER_PLAN = 120_000
# Elements-held entries read in the last pass.
_HELD_PER_PLAN = 1_000_000
# Up to this many items, a start that misses the bound is checked against all assignments.
_ITEMS_OF_EXACT_SEARCH = 12
_NODES_OF_EXACT_SEARCH = 20_000
# Up to this many items, a third start is worth its time.
_ITEMS_OF_THIRD_START = 5_000
# Plans in which the second way to start would look at more ranks than this do without it.
_LOOKS_OF_FULL_START = 1_000_000
# Stop lowering the highest load once it is this close (in 1/1000) to the lower bound.
_GOOD_ENOUGH_PERMILLE = 2
# What giving up balance must save, in 1/1000 of the elements moved.
_LEAST_SAVING_PERMILLE = 100
# Up to so many items times ranks, owners anywhere are also looked for from those of holders alone.
_SIZE_OF_THRIFT = 20_000_000


class Balancer:
    """One assignment in the making."""

    def __init__(self, works: Sequence[Work], num_ranks: int, *, anywhere: bool) -> None:
        self.works = works
        self.loads = Loads(num_ranks)
        self.owners: list[int] = [-1] * len(works)
        everywhere = ((0, num_ranks),)
        self.allowed = [
            everywhere if anywhere or not work.windows else work.windows for work in works
        ]
        # Items of a kind are interchangeable: same cost, same allowed ranks.
        self._kind_of = [(work.cost, windows) for work, windows in zip(works, self.allowed)]
        self._on_rank: list[dict[tuple[int, tuple[Window, ...]], list[int]]] = [
            {} for _ in range(num_ranks)
        ]
        self._budget = _RANKS_PER_PLAN
        self._near: dict[int, list[int]] = {}

    def highest(self) -> int:
        return max(self.loads.of)

    def assign(self, item: int, rank: int) -> None:
        cost = self.works[item].cost
        kind = self._kind_of[item]
        before = self.owners[item]
        if before >= 0:
            self.loads.add(before, -cost)
            siblings = self._on_rank[before][kind]
            siblings.remove(item)
            if not siblings:
                del self._on_rank[before][kind]
        self.owners[item] = rank
        self.loads.add(rank, cost)
        self._on_rank[rank].setdefault(kind, []).append(item)

    def start(self, *, prefer_holders_up_to: int = 0) -> None:
        """Longest processing time first, after the work that has one holder only.

        Work that may go anywhere stays with a holder whose load would not pass
        ``prefer_holders_up_to``.
        """
        for item in self._order():
            work = self.works[item]
            rank = self.loads.least(self.allowed[item])
            if work.windows and self.allowed[item] != work.windows:
                holder = self.loads.least(work.windows)
                load = self.loads.of[holder]
                if load == self.loads.of[rank] or load + work.cost <= prefer_holders_up_to:
                    rank = holder
            self.assign(item, rank)

    def start_full(self, capacity: int) -> None:
        """Largest first, each to the fullest rank it still fits, else to the least loaded one."""
        loads = self.loads.of
        for item in self._order():
            room = capacity - self._cost(item)
            fullest, most = -1, -1
            for start, stop in self.allowed[item]:
                for rank in range(start, stop):
                    if most < loads[rank] <= room:
                        fullest, most = rank, loads[rank]
            self.assign(item, fullest if fullest >= 0 else self.loads.least(self.allowed[item]))

    def _order(self) -> list[int]:
        return sorted(range(len(self.works)), key=lambda i: (not self._pinned(i), -self._cost(i)))

    def _cost(self, item: int) -> int:
        return self.works[item].cost

    def _pinned(self, item: int) -> bool:
        windows = self.allowed[item]
        return len(windows) == 1 and windows[0][1] - windows[0][0] == 1

    def moved(self) -> int:
        """Elements that the owners do not hold themselves."""
        return sum(work.numel - work.held_by(owner) for work, owner in zip(self.works, self.owners))

    def shed(self, cap: int) -> None:
        """Move work off ranks loaded beyond ``cap``, the fewest elements for its cost first.

        Single moves to the least loaded rank; where none fits, swaps with a few such ranks.
        """
        everyone = ((0, self.loads.num_ranks),)
        while (highest := self.highest()) > cap:
            rank, target = self.loads.of.index(highest), self.loads.least(everyone)
            trades = self._trades(rank, target, cap, swap=False) or [
                trade
                for other in sorted(range(self.loads.num_ranks), key=self.loads.of.__getitem__)[:4]
                for trade in self._trades(rank, other, cap, swap=True)
            ]
            if not trades:
                return
            _, item, back, target = min(trades)
            self.assign(item, target)
            if back >= 0:
                self.assign(back, rank)

    def _trades(
        self, rank: int, target: int, cap: int, *, swap: bool
    ) -> list[tuple[Fraction, int, int, int]]:
        """What ``target`` has room for: (elements moved for each unit of load, item, item that
        comes back or -1, target)."""
        room, trades = cap - self.loads.of[target], []
        returns = self._some_of(target) if swap else [-1]
        for item in self._some_of(rank):
            for back in returns:
                cost = self._cost(item) - (self._cost(back) if back >= 0 else 0)
                if 0 < cost <= room:
                    moved = self._more_moved(item, rank, target)
                    moved += self._more_moved(back, target, rank) if back >= 0 else 0
                    trades.append((Fraction(moved, cost), item, back, target))
        return trades

    def _some_of(self, rank: int) -> list[int]:
        """A few items of each kind on the rank."""
        return [item for items in self._on_rank[rank].values() for item in items[:8]]

    def _more_moved(self, item: int, rank: int, target: int) -> int:
        return self.works[item].held_by(rank) - self.works[item].held_by(target)

    def lower_highest(self, bound: int, good: int | None = None) -> None:
        """Move work off the most loaded rank, along chains of ranks, until none helps.

        ``good`` is the highest load to stop at, by default one close to ``bound``.
        """
        if good is None:
            good = bound + bound * _GOOD_ENOUGH_PERMILLE // 1000
        while self._budget > 0:
            highest = self.highest()
            if highest <= good:
                return
            rank = self.loads.of.index(highest)
            # Ask for a large gain first: many small gains would need many searches.
            for limit in ((bound + highest) // 2, highest - max(1, highest // 500), highest - 1):
                chain = self._find_chain(rank, limit)
                if chain:
                    break
            if not chain:
                return
            for item, target in chain:
                self.assign(item, target)

    def _find_chain(self, start: int, limit: int) -> list[tuple[int, int]]:
        """Moves (item, new rank) after which every rank touched has a load of at most ``limit``.

        Breadth first: a rank that takes an item over may pass one of its own on.
        """
        loads = self.loads.of
        came: dict[int, tuple[int, int]] = {}  # rank -> (previous rank, item that arrives)
        queue = [start]
        seen = {start}
        looked = 0
        for rank in queue:
            arrived = self._kind_of[came[rank][1]] if rank in came else (0, ())
            for kind, items in self._on_rank[rank].items():
                cost, windows = kind
                if loads[rank] + arrived[0] - cost > limit or kind == arrived:
                    continue
                least = self.loads.least(windows)
                if loads[least] + cost <= limit and least not in self._path(came, rank):
                    return [*self._moves(came, rank), (items[-1], least)]
                for low, high in windows:
                    for target in range(low, high):
                        if target not in seen:
                            seen.add(target)
                            came[target] = (rank, items[-1])
                            queue.append(target)
                    looked += high - low
            if looked > _RANKS_PER_SEARCH:
                break
        self._budget -= looked + 1
        return []

    @staticmethod
    def _path(came: dict[int, tuple[int, int]], rank: int) -> set[int]:
        path = {rank}
        while rank in came:
            rank = came[rank][0]
            path.add(rank)
        return path

    @staticmethod
    def _moves(came: dict[int, tuple[int, int]], rank: int) -> list[tuple[int, int]]:
        moves = []
        while rank in came:
            previous, item = came[rank]
            moves.append((item, rank))
            rank = previous
        return moves[::-1]

    def search_exactly(self, bound: int) -> None:
        """Try all assignments that could be better, depth first; for a few items only."""
        loads = [0] * self.loads.num_ranks
        order = self._order()
        best = self.highest()
        chosen: list[int] = []
        found: list[int] = []
        budget = _NODES_OF_EXACT_SEARCH

        def visit(depth: int, highest: int) -> None:
            nonlocal best, found, budget
            budget -= 1
            if depth == len(order):
                best, found = highest, list(chosen)
                return
            cost = self._cost(order[depth])
            for start, stop in self.allowed[order[depth]]:
                for rank in range(start, stop):
                    load = loads[rank] + cost
                    if load < best > bound and budget > 0:
                        loads[rank] = load
                        chosen.append(rank)
                        visit(depth + 1, max(highest, load))
                        chosen.pop()
                        loads[rank] -= cost

        visit(0, 0)
        for item, rank in zip(order, found):
            self.assign(item, rank)

    def prefer_near(self, ranks_per_node: int) -> None:
        """Move or swap work towards the ranks, and nodes, that hold most of it.

        No load passes the highest one of now. Large matrices first.
        """
        highest = self.highest()
        looked = 0
        for item in sorted(range(len(self.works)), key=lambda i: -self.works[i].numel):
            looked += len(self.works[item].held)
            if looked > _HELD_PER_PLAN:
                return
            now = self._distance(item, self.owners[item], ranks_per_node)
            for rank in self._nearest(item, ranks_per_node):
                gain = _minus(now, self._distance(item, rank, ranks_per_node))
                if gain <= (0, 0):
                    break
                if self.loads.of[rank] + self._cost(item) <= highest:
                    self.assign(item, rank)
                    break
                other = self._swap_partner(item, rank, gain, ranks_per_node)
                if other is not None:
                    here = self.owners[item]
                    self.assign(item, rank)
                    self.assign(other, here)
                    break

    def _distance(self, item: int, rank: int, ranks_per_node: int) -> tuple[int, int]:
        """Elements that cross between nodes, and elements that move at all, if ``rank`` owns."""
        work = self.works[item]
        moved = work.numel - work.held_by(rank)
        if ranks_per_node == 1:
            return moved, moved
        node = rank // ranks_per_node * ranks_per_node
        return work.numel - work.held_within(node, node + ranks_per_node), moved

    def _nearest(self, item: int, ranks_per_node: int) -> list[int]:
        """The few allowed holders with the least distance, nearest first."""
        work = self.works[item]
        near = self._near.get(id(work))
        if near is None:  # read once for all layers of a kind
            ranks = [rank for start, stop in work.windows for rank in range(start, stop)]
            if ranks_per_node == 1:
                by_held = sorted(range(len(ranks)), key=lambda i: (-work.held[i], i))
                near = [ranks[i] for i in by_held[:4]]
                if len(set(work.held)) == 1:
                    near = near[:1]
            else:
                ranks.sort(key=lambda rank: (self._distance(item, rank, ranks_per_node), rank))
                near = ranks[:4]
            self._near[id(work)] = near
        return near

    def _swap_partner(
        self, item: int, rank: int, gain: tuple[int, int], ranks_per_node: int
    ) -> int | None:
        """An item of the same kind on ``rank`` whose way back costs less than ``gain``."""
        here = self.owners[item]
        for other in self._on_rank[rank].get(self._kind_of[item], ())[:16]:
            loss = _minus(
                self._distance(other, here, ranks_per_node),
                self._distance(other, rank, ranks_per_node),
            )
            if loss < gain:
                return other
        return None


def _minus(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return first[0] - second[0], first[1] - second[1]


def balance(
    works: Sequence[Work],
    num_ranks: int,
    *,
    anywhere: bool = False,
    ranks_per_node: int = 1,
    tolerance: float = 0.0,
) -> list[int]:
    """Return the owner of each work item.

    Args:
        works: The items. One without holders (no elements) may go to any rank.
        num_ranks: Number of ranks; windows are ranges of ``range(num_ranks)``.
        anywhere: Whether a rank that holds nothing of an item may own it.
        ranks_per_node: Ranks ``[k * n, (k + 1) * n)`` share a node; transfers inside a node
            are preferred. 1 means that all transfers cost the same.
        tolerance: How far above the bound, as a part of it, the highest load may be where
            work may go anywhere and that saves a tenth of the elements moved or more.

    The highest load is close to the lower bound; see ``docs/owner_planning.md`` for how close.
    """
    bound = lower_bound(works, num_ranks, anywhere=anywhere)
    best: Balancer | None = None
    for start in _starts(works, num_ranks, bound, anywhere=anywhere):
        attempt = Balancer(works, num_ranks, anywhere=anywhere)
        start(attempt)
        attempt.lower_highest(bound)
        if best is None or attempt.highest() < best.highest():
            best = attempt
        if best.highest() <= bound + bound // 100:
            break
    assert best is not None
    if not anywhere and best.highest() > bound + bound // 100:
        swept = sweep(works, num_ranks, bound, best.highest())
        if swept is not None:
            best = Balancer(works, num_ranks, anywhere=anywhere)
            for item, rank in enumerate(swept):
                best.assign(item, rank)
            best.lower_highest(bound)
    if best.highest() > bound and len(works) <= _ITEMS_OF_EXACT_SEARCH:
        best.search_exactly(bound)
    cap = max(best.highest(), bound + bound * round(tolerance * 1000) // 1000)
    best.prefer_near(ranks_per_node)
    if anywhere and tolerance and len(works) * num_ranks <= _SIZE_OF_THRIFT:
        thrifty = _from_holders(works, num_ranks, bound, cap, ranks_per_node)
        saved = best.moved() - thrifty.moved()
        if thrifty.highest() <= cap and saved * 1000 >= best.moved() * _LEAST_SAVING_PERMILLE:
            best = thrifty
    return best.owners


def _from_holders(
    works: Sequence[Work], num_ranks: int, bound: int, cap: int, ranks_per_node: int
) -> Balancer:
    """The owners that holders alone would be, less the work that takes a load beyond ``cap``."""
    attempt = Balancer(works, num_ranks, anywhere=True)
    for item, rank in enumerate(balance(works, num_ranks, ranks_per_node=ranks_per_node)):
        attempt.assign(item, rank)
    attempt.shed(cap)
    attempt.lower_highest(bound, cap)
    attempt.prefer_near(ranks_per_node)
    return attempt


def _starts(
    works: Sequence[Work], num_ranks: int, bound: int, *, anywhere: bool
) -> Iterator[Callable[[Balancer], None]]:
    """First assignments to try, in this order, until one leads close to the bound."""
    # Keeping work with its holders costs balance: allow more only where no load suffers.
    yield partial(Balancer.start, prefer_holders_up_to=bound)
    if anywhere:
        yield Balancer.start
        if len(works) <= _ITEMS_OF_THIRD_START:
            yield partial(Balancer.start, prefer_holders_up_to=bound + bound // 100)
    looks = sum(num_ranks if anywhere else len(work.held) for work in works)
    if looks < _LOOKS_OF_FULL_START:
        for permille in (0, 20, 50, 100):
            yield partial(Balancer.start_full, capacity=bound + bound * permille // 1000)
