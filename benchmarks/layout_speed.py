"""Seconds to lay out many tensors on many ranks.

python benchmarks/layout_speed.py [--tensors 10000] [--ranks 1024]
"""

from __future__ import annotations

import argparse
import random
import time

from dtensor_owner.layout import ShardLayout, build_row_atomic_layout

REPEATS = 5


def seconds(shapes: list[tuple[int, int]], ranks: int, shard_layout: ShardLayout) -> float:
    """Best of a few runs: the shortest is the least disturbed by other processes."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        build_row_atomic_layout(shapes, ranks, shard_layout=shard_layout)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=1024)
    arguments = parser.parse_args()
    generator = random.Random(0)
    shapes = [
        (generator.randint(1, 5000), generator.randint(1, 64) * 64)
        for _ in range(arguments.tensors)
    ]
    print(f"{arguments.tensors:,} tensors on {arguments.ranks:,} ranks, best of {REPEATS}")
    for shard_layout in ShardLayout:
        taken = seconds(shapes, arguments.ranks, shard_layout)
        print(f"{shard_layout.value:>9}: {taken:.3f} s")


if __name__ == "__main__":
    main()
