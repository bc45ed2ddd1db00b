"""Work items with the ranks that hold their data, and loads of ranks: integers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Window = tuple[int, int]  # half-open range of ranks


@dataclass(frozen=True)
class Work:
    """One matrix to orthogonalize.

    Args:
        cost: Load it puts on its owner; any unit, the same for all items.
        numel: Elements of the whole matrix.
        windows: Ranges of ranks that hold elements of it, ascending, not touching each other.
        held: Elements held by each rank of the windows, in rank order.
    """

    cost: int
    numel: int
    windows: tuple[Window, ...]
    held: tuple[int, ...]

    @classmethod
    def from_counts(cls, cost: int, counts: Sequence[int], *, replicas: int = 1) -> Work:
        """Build from the number of elements each rank holds.

        With ``replicas`` the same shards are held again by the ranks that follow: replica
        ``i`` holds them on ranks ``i * len(counts)`` and up.
        """
        first = _first_held(counts)
        last = len(counts) - _first_held(counts[::-1])
        middle = tuple(counts[first:last]) if first < last else ()
        if 0 in middle:
            windows = _joined((rank, rank + 1) for rank, n in enumerate(counts) if n)
            held = tuple(n for n in middle if n)
        else:
            windows = ((first, last),) if middle else ()
            held = middle
        shifted = [
            (start + shift, stop + shift)
            for shift in range(0, replicas * len(counts), len(counts))
            for start, stop in windows
        ]
        return cls(cost, sum(middle), _joined(shifted), held * replicas)

    def held_by(self, rank: int) -> int:
        """Elements of the matrix that ``rank`` holds."""
        position = 0
        for start, stop in self.windows:
            if start <= rank < stop:
                return self.held[position + rank - start]
            position += stop - start
        return 0

    def held_within(self, start: int, stop: int) -> int:
        """Elements held by the ranks ``[start, stop)``, a node for example."""
        total = position = 0
        for first, last in self.windows:
            low, high = max(first, start), min(last, stop)
            if low < high:
                total += sum(self.held[position + low - first : position + high - first])
            position += last - first
        return total


def _first_held(counts: Sequence[int]) -> int:
    return counts.index(next(filter(None, counts))) if any(counts) else len(counts)


def _joined(windows: Iterable[Window]) -> tuple[Window, ...]:
    """Ascending windows, those that touch each other made one."""
    joined: list[Window] = []
    for start, stop in windows:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


class Loads:
    """Loads of all ranks, with the least loaded rank of a range in O(log ranks)."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._size = 1 << max(0, (num_ranks - 1).bit_length())
        # A leaf is load * size + rank, so that the minimum names the first rank on ties.
        never = 1 << 200
        self._tree = [never] * (2 * self._size)
        self._tree[self._size : self._size + num_ranks] = range(num_ranks)
        for node in range(self._size - 1, 0, -1):
            self._tree[node] = min(self._tree[2 * node], self._tree[2 * node + 1])
        self.of = [0] * num_ranks

    def add(self, rank: int, cost: int) -> None:
        self.of[rank] += cost
        tree = self._tree
        node = self._size + rank
        tree[node] += cost * self._size
        node >>= 1
        while node:
            left, right = tree[2 * node], tree[2 * node + 1]
            least = left if left < right else right
            if tree[node] == least:
                break
            tree[node] = least
            node >>= 1

    def least(self, windows: Sequence[Window]) -> int:
        """The least loaded rank of the windows, the first one on ties."""
        tree, best = self._tree, 1 << 201
        for start, stop in windows:
            low, high = start + self._size, stop + self._size
            while low < high:
                if low & 1:
                    best = min(best, tree[low])
                    low += 1
                if high & 1:
                    high -= 1
                    best = min(best, tree[high])
                low >>= 1
                high >>= 1
        return best & (self._size - 1)


def lower_bound(works: Sequence[Work], num_ranks: int, *, anywhere: bool) -> int:
    """No assignment has a highest load below this.

    The largest of: the largest cost; the mean load; with one more item than ranks (times
    k), k + 1 of the largest items share a rank; and, unless work may go anywhere, the mean
    load of each range of ranks that some work cannot leave.
    """
    if not works:
        return 0
    costs = sorted((work.cost for work in works), reverse=True)
    bound = max(costs[0], -(-sum(costs) // num_ranks))
    for k in range(1, (len(costs) - 1) // num_ranks + 1):
        bound = max(bound, sum(costs[k * num_ranks - k : k * num_ranks + 1]))
    if not anywhere:
        bound = max(bound, _confined_bound(works))
    return bound


def _confined_bound(works: Sequence[Work]) -> int:
    """Largest bound over ranges of ranks, counting only the work that must stay inside.

    Per range: the mean load; and of ``n`` items that cost at least ``c`` each, some rank
    gets ``ceil(n / ranks)``.
    """
    costs_of_span: dict[Window, dict[int, int]] = {}
    for work in works:
        if work.windows:
            costs = costs_of_span.setdefault((work.windows[0][0], work.windows[-1][1]), {})
            costs[work.cost] = costs.get(work.cost, 0) + 1
    starts = sorted({start for start, _ in costs_of_span})
    spans = sorted(costs_of_span.items(), key=lambda item: item[0][1])
    if len(starts) * len(spans) > 200_000:  # the bound is a help, not worth seconds
        starts = starts[:: len(starts) * len(spans) // 200_000 + 1]
    bound = 0
    for start in starts:
        inside: dict[int, int] = {}
        for (low, stop), costs in spans:
            if low >= start:
                for cost, number in costs.items():
                    inside[cost] = inside.get(cost, 0) + number
                bound = max(bound, _bound_of_range(inside, stop - start))
    return bound


def _bound_of_range(number_of: dict[int, int], num_ranks: int) -> int:
    total = items = bound = 0
    for cost in sorted(number_of, reverse=True):
        items += number_of[cost]
        total += number_of[cost] * cost
        bound = max(bound, -(-items // num_ranks) * cost)
    return max(bound, -(-total // num_ranks))


def fill_buckets(
    owners: Sequence[int], numels: Sequence[int], order: Sequence[Any], cap: int
) -> list[tuple[int, ...]]:
    """Cut each owner's items, in the order given, into buckets of at most ``cap`` elements.

    Bucket ``k`` has a slice of every owner's work, so that all owners are busy in each. An item
    larger than the cap is alone with its owner in a bucket.

    Args:
        owners: Owner of each item.
        numels: Elements of each item.
        order: A sort key for each item.
        cap: Elements that one owner collects in a bucket.

    Returns:
        Positions of the items in each bucket, ascending.
    """
    buckets: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}  # owner -> (bucket, elements in it)
    for item in sorted(range(len(owners)), key=lambda item: (order[item], item)):
        bucket, numel = filled.get(owners[item], (0, 0))
        if numel and numel + numels[item] > cap:
            bucket, numel = bucket + 1, 0
        filled[owners[item]] = bucket, numel + numels[item]
        while len(buckets) <= bucket:
            buckets.append([])
        buckets[bucket].append(item)
    return [tuple(sorted(bucket)) for bucket in buckets]
