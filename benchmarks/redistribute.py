"""Redistribution beside the raw collective of the same bytes, and op dispatch beside stock Shard.

    python benchmarks/redistribute.py [--ranks 2] [--device cpu] [--megabytes 1 4 16]

Three tables. The first: seconds of ``redistribute``, divided by those of one collective called
directly (``torch.distributed``, output allocated anew each time) that carries the same payload.
The second: seconds of a small op or redistribution on our placements, divided by those on stock
``Shard(0)`` with rows that divide evenly. The third: misses of DTensor's sharding cache in the
first call and in the next hundred. The two sides of a ratio take turns within every round, so that
other jobs of the machine hit both; medians and quartiles are over rounds, of the slowest rank.
Processor time (of all threads of a process, the backend's too) is given beside wall time, because
on a machine with fewer free cores than ranks wall time is mostly waiting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import _get_fast_path_sharding_prop_cache_stats as cache_stats

from benchmarks.launch import run_on_ranks
from placements import Owner, RowAtomic, distribute_tensor

COLUMNS = 1024
Run = Callable[[], Any]


# ------------------------------------------------------------- against raw collectives


def skewed_rows(rows: int, ranks: int) -> tuple[int, ...]:
    """Most rows on rank 0, so that the uneven way is taken; whole thirds of the tensor."""
    return (rows - rows // 8 * (ranks - 1), *[rows // 8] * (ranks - 1))


def nearly_even_rows(rows: int, ranks: int) -> tuple[int, ...]:
    """One row from the last rank to the first: staged."""
    share = rows // ranks
    return (share + 1, *[share] * (ranks - 2), share - 1)


class Moves:
    """Pairs of a redistribution and the collective that carries the same bytes."""

    def __init__(self, mesh: DeviceMesh, num_bytes: int) -> None:
        self.mesh, self.ranks, self.me = mesh, mesh.size(), dist.get_rank()
        self.device = mesh.device_type
        self.rows = num_bytes // 4 // COLUMNS // self.ranks * self.ranks
        self.full = torch.randn(self.rows, COLUMNS, device=self.device)
        even = (self.rows // self.ranks,) * self.ranks
        skewed, nearly = skewed_rows(self.rows, self.ranks), nearly_even_rows(self.rows, self.ranks)
        last = self.ranks - 1
        whole = [0] * last + [self.rows]
        self.pairs: dict[str, tuple[Run, Run]] = {
            "stock Shard(0) -> Replicate: all_gather": (
                self.move(Shard(0), Replicate()),
                self.all_gather,
            ),
            "RowAtomic -> Replicate, even: all_gather": (
                self.move(RowAtomic(), Replicate()),
                self.all_gather,
            ),
            "RowAtomic -> Replicate, staged: all_gather": (
                self.move(RowAtomic(nearly), Replicate()),
                self.all_gather,
            ),
            "RowAtomic -> Replicate, uneven: broadcasts": (
                self.move(RowAtomic(skewed), Replicate()),
                lambda: self.broadcasts(skewed),
            ),
            "Partial -> RowAtomic, even: reduce_scatter": (
                self.move(Partial(), RowAtomic()),
                self.reduce_scatter,
            ),
            "Partial -> RowAtomic, staged: reduce_scatter": (
                self.move(Partial(), RowAtomic(nearly)),
                self.reduce_scatter,
            ),
            "Owner -> Replicate: broadcast": (
                self.move(Owner(last), Replicate()),
                lambda: self.broadcasts(whole),
            ),
            "RowAtomic -> Owner: all_to_all": (
                self.move(RowAtomic(), Owner(last)),
                lambda: self.exchange(even, whole),
            ),
            "Owner -> RowAtomic: all_to_all": (
                self.move(Owner(last), RowAtomic()),
                lambda: self.exchange(whole, even),
            ),
            "RowAtomic -> RowAtomic: all_to_all": (
                self.move(RowAtomic(skewed), RowAtomic(skewed[::-1])),
                lambda: self.exchange(skewed, skewed[::-1]),
            ),
        }

    def move(self, source: Placement, target: Placement) -> Run:
        if source.is_partial():
            tensor = DTensor.from_local(self.full, self.mesh, [source], run_check=False)
        else:
            tensor = distribute_tensor(self.full, self.mesh, [source])
        return lambda: tensor.redistribute(placements=[target])

    def all_gather(self) -> None:
        part = self.full.chunk(self.ranks)[self.me]
        dist.all_gather_single(torch.empty_like(self.full), part)

    def reduce_scatter(self) -> None:
        part = torch.empty(self.rows // self.ranks, COLUMNS, device=self.device)
        dist.reduce_scatter_single(part, self.full)

    def broadcasts(self, rows: Any) -> None:
        """Each rank's rows arrive in a whole tensor; the own ones are copied into it."""
        parts = torch.empty_like(self.full).split(list(rows))
        parts[self.me].copy_(self.full.split(list(rows))[self.me])
        for root, part in enumerate(parts):
            if part.shape[0]:
                dist.broadcast(part, root)

    def exchange(self, before: Any, after: Any) -> None:
        """The rows that change ranks, in one all_to_all; the kept ones are copied."""
        starts = [sum(before[:r]) for r in range(self.ranks + 1)]
        wanted = [sum(after[:r]) for r in range(self.ranks + 1)]

        def shared(source: int, target: int) -> tuple[int, int]:
            start = max(starts[source], wanted[target])
            return start, max(start, min(starts[source + 1], wanted[target + 1]))

        me, first = self.me, wanted[self.me]
        result = torch.empty(after[me], COLUMNS, device=self.device)
        low, high = shared(me, me)
        result[low - first : high - first] = self.full[low:high]
        send, receive = [], []
        for rank in range(self.ranks):
            low, high = shared(me, rank) if rank != me else (0, 0)
            send.append((high - low) * COLUMNS)
            low, high = shared(rank, me) if rank != me else (0, 0)
            receive.append((high - low) * COLUMNS)
        # As few copies as can be: at most one run of rows goes out and comes in besides the own.
        outgoing = torch.cat(
            [
                self.full[slice(*shared(me, rank))].reshape(-1)
                for rank in range(self.ranks)
                if rank != me
            ]
        )
        incoming = torch.empty(sum(receive), device=self.device)
        dist.all_to_all_single(incoming, outgoing, receive, send)
        position = 0
        for rank, numel in enumerate(receive):
            low, high = shared(rank, me) if rank != me else (first, first)
            result[low - first : high - first] = incoming[position : position + numel].view(
                -1, COLUMNS
            )
            position += numel


# ------------------------------------------------------------------- small ops


def small_ops(x: DTensor) -> dict[str, Run]:
    """Ops that send nothing, and the cheapest redistributions, on a tensor of a few rows."""
    lists = [x, x, x, x]
    scale = torch.tensor(0.5, device=x.device)
    return {
        "x * 2": lambda: x * 2,
        "x + x": lambda: x + x,
        "x.sum(1)": lambda: x.sum(1),
        "x.view(rows, 2, -1)": lambda: x.view(x.shape[0], 2, -1),
        "x.add_(x, alpha)": lambda: x.add_(x, alpha=1e-9),
        "_foreach_mul_(4 tensors)": lambda: torch._foreach_mul_(lists, scale),
        "redistribute to Replicate": lambda: x.redistribute(placements=[Replicate()]),
        "full_tensor()": lambda: x.full_tensor(),
    }


def small_variants(mesh: DeviceMesh) -> dict[str, dict[str, Run]]:
    rows = 2 * mesh.size()
    full = torch.ones(rows, 8, device=mesh.device_type)
    uneven = (3, *[2] * (mesh.size() - 2), 1)
    placements = {
        "Shard(0)": Shard(0),
        "RowAtomic()": RowAtomic(),
        f"RowAtomic({uneven})": RowAtomic(uneven),
        "Owner(0)": Owner(0),
    }
    return {
        name: small_ops(distribute_tensor(full, mesh, [placement]))
        for name, placement in placements.items()
    }


def cache_misses(mesh: DeviceMesh) -> list[tuple[str, int, int]]:
    """Misses of the first call on a new shape and of the next hundred, for each op."""
    found = []
    rows = 5 * mesh.size()
    x = distribute_tensor(torch.ones(rows, 16, device=mesh.device_type), mesh, [RowAtomic()])
    for name, run in small_ops(x).items():
        before = cache_stats()[1]
        run()
        first = cache_stats()[1]
        for _ in range(100):
            run()
        found.append((name, first - before, cache_stats()[1] - first))
    return found


# ------------------------------------------------------------------------- measuring


def seconds(run: Run, times: int) -> tuple[float, float]:
    """Wall and processor time of one call."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(times):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - wall) / times, (time.process_time() - processor) / times


Rounds = list[list[float]]  # by round: seconds of each run on the slowest rank


def in_turns(runs: list[Run], rounds: int, times: int, device: str) -> tuple[Rounds, Rounds]:
    """Wall and processor time of every run; the order is turned round by round."""
    for run in runs:
        run()
    found: tuple[Rounds, Rounds] = ([], [])
    for number in range(rounds):
        taken = torch.zeros(2, len(runs), dtype=torch.float64, device=device)
        for position in range(len(runs)):
            i = (position + number) % len(runs)
            taken[:, i] = torch.tensor(seconds(runs[i], times))
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        for kind, values in zip(found, taken.tolist()):
            kind.append(values)
    return found


def ratio_text(rounds: Rounds, i: int, reference: int) -> str:
    low, middle, high = statistics.quantiles([r[i] / r[reference] for r in rounds], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def measure_moves(mesh: DeviceMesh, args: argparse.Namespace) -> list[str]:
    lines = [
        "| redistribution: collective | MB | raw, ms | ratio of wall time (quartiles) "
        "| of processor time |",
        "|---|---:|---:|---:|---:|",
    ]
    for megabytes in args.megabytes:
        times = max(1, int(args.times * 4 / (4 + megabytes)))
        for name, pair in Moves(mesh, int(megabytes * 1e6)).pairs.items():
            wall, processor = in_turns(list(pair), args.rounds, times, args.device)
            raw = statistics.median(r[1] for r in wall) * 1e3
            ratios = f"{ratio_text(wall, 0, 1)} | {ratio_text(processor, 0, 1)}"
            lines.append(f"| {name} | {megabytes:g} | {raw:.2f} | {ratios} |")
    return lines


def measure_small(mesh: DeviceMesh, args: argparse.Namespace) -> list[str]:
    """Ratios of processor time: ops send nothing, and waiting is no part of dispatch."""
    variants = small_variants(mesh)
    names = list(variants)
    lines = [f"| op | {names[0]}, us | " + " | ".join(f"{n}: ratio" for n in names[1:]) + " |"]
    lines.append("|---" + "|---:" * len(names) + "|")
    for op in variants[names[0]]:
        runs = [variants[name][op] for name in names]
        _, processor = in_turns(runs, args.rounds, args.times * 10, args.device)
        stock = statistics.median(r[0] for r in processor) * 1e6
        ratios = [ratio_text(processor, i, 0) for i in range(1, len(names))]
        lines.append(f"| `{op}` | {stock:.0f} | {' | '.join(ratios)} |")
    return lines


def work(args: argparse.Namespace) -> None:
    mesh = init_device_mesh(args.device, (args.ranks,))
    tables = [measure_small(mesh, args), measure_moves(mesh, args)]
    misses = ["| op on RowAtomic() | misses, first call | misses, next 100 |", "|---|---:|---:|"]
    misses += [f"| `{name}` | {first} | {later} |" for name, first, later in cache_misses(mesh)]
    if dist.get_rank() == 0:
        print("\n\n".join("\n".join(lines) for lines in [*tables, misses]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--times", type=int, default=10)
    args = parser.parse_args()
    run_on_ranks(work, args.ranks, args, device=args.device)


if __name__ == "__main__":
    main()
