"""The owner step beside what people use today, and beside its floors.

    python benchmarks/owner_step.py [--ranks 4] [--layers 8 --dim 512 --ffn 1376] [--dtype float32]
    python benchmarks/owner_step.py --compile-times

All variants run in every round, one after the other, on gloo ranks of this machine with one thread
each; times are medians over rounds, ratios are medians of the per-round ratios to the hand-written
owner step (flat buffers, balanced owners, one all_to_all each way, the plain quintic). Counts are
counted, not computed: matrices and multiply-adds by a wrapper around Newton-Schulz, bytes by one
around the exchange, memory by the allocator. ``--compile-times`` reports how long the step of
models of several sizes takes to compile, on one rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.launch import run_on_ranks
from dtensor_owner import (
    Muon,
    Owner,
    ParameterLayout,
    build_row_atomic_layout,
    distribute_tensor,
    muon_step,
    newton_schulz,
    ns_flops_cost_fn,
    plan_owners,
)

OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
MOMENTUM = 0.95


@dataclass
class Variant:
    """One way to do the step, with what it counted in its last step."""

    name: str
    step: Callable[[], None]
    num_bytes: int | None = None
    matrices: int = 0
    multiply_adds: int = 0
    sent: int = 0
    collectives: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)


def layer_shapes(dim: int, ffn: int) -> list[tuple[int, int]]:
    return [(dim, dim)] * 4 + [(ffn, dim)] * 2 + [(dim, ffn)]


def data(shapes: list[tuple[int, int]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def owner_variant(
    name: str,
    mesh: DeviceMesh,
    shapes: list[tuple[int, int]],
    placements: list[Placement],
    arguments: argparse.Namespace,
    **options: Any,
) -> Variant:
    def placed(seed: int) -> list[Tensor]:
        return [
            distribute_tensor(x, mesh, [p], src_data_rank=None)
            for x, p in zip(data(shapes, seed), placements)
        ]

    params = [torch.nn.Parameter(p) for p in placed(0)]
    for param, grad in zip(params, placed(1)):
        param.grad = grad
    compiled = {"compile": True, "backend": arguments.backend} if arguments.backend else {}
    ns_dtype = getattr(torch, arguments.dtype)
    optimizer = Muon(params, ns_dtype=ns_dtype, **OPTIONS, **compiled, **options)
    return Variant(name, optimizer.step, optimizer.bytes_per_step)


def rows_of_groups(layers: int, dim: int, ffn: int, ranks: int) -> list[Placement]:
    """Placements of layers that are laid out back to back, one group each."""
    layout = build_row_atomic_layout(layer_shapes(dim, ffn), ranks)
    return [layout.placement(i) for i in range(len(layout.tensor_shapes))] * layers


class FullTensors:
    """``torch.optim.Muon`` after ``full_tensor()``: every rank gathers and computes everything."""

    def __init__(self, mesh: DeviceMesh, shapes: list[tuple[int, int]], dtype: str) -> None:
        self.patched = dtype == "float32"  # torch's Muon always iterates in bfloat16
        self.shards, self.grads = (
            [distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) for x in data(shapes, seed)]
            for seed in (0, 1)
        )
        self.full = [torch.nn.Parameter(x) for x in data(shapes, 0)]
        self.optimizer = torch.optim.Muon(self.full, **OPTIONS)

    def step(self) -> None:
        for full, shard, grad in zip(self.full, self.shards, self.grads):
            full.data = shard.full_tensor()
            full.grad = grad.full_tensor()
        as_is = mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
        if self.patched:
            with as_is:
                self.optimizer.step()
        else:
            self.optimizer.step()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for full, shard in zip(self.full, self.shards):
            rows = -(-full.shape[0] // ranks)
            shard.to_local().copy_(full.detach()[rank * rows : (rank + 1) * rows])


class HandWritten:
    """An owner step for this one case: equal shards of flat buffers, equal work for all."""

    def __init__(self, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.dtype = dtype
        layouts = {
            i: ParameterLayout(shape, (shape[0] * shape[1] // self.ranks,) * self.ranks)
            for i, shape in enumerate(shapes)
        }
        owners = plan_owners([layouts], cost_fn=ns_flops_cost_fn(5)).owners[0]
        self.owned = [[i for i in owners if owners[i] == rank] for rank in range(self.ranks)]
        self.shapes = shapes
        order = [i for owned in self.owned for i in owned]
        self.shard_numels = [shapes[i][0] * shapes[i][1] // self.ranks for i in order]
        self.by_owner = [
            sum(shapes[i][0] * shapes[i][1] for i in owned) // self.ranks for owned in self.owned
        ]

        def flat(seed: int) -> Tensor:
            full = data(shapes, seed)
            return torch.cat([full[i].chunk(self.ranks)[self.rank].reshape(-1) for i in order])

        self.params, self.grads = flat(0), flat(1)
        self.momenta = torch.zeros_like(self.params)
        ratio = {i: max(1.0, shapes[i][0] / shapes[i][1]) ** 0.5 for i in order}
        self.ratios = torch.cat(
            [torch.full((n,), ratio[i]) for i, n in zip(order, self.shard_numels)]
        )

    def step(self) -> None:
        self.momenta.lerp_(self.grads, 1 - MOMENTUM)
        send = self.grads.lerp(self.momenta, MOMENTUM).to(self.dtype)
        mine = self.by_owner[self.rank]
        received = torch.empty(mine * self.ranks, dtype=self.dtype)
        dist.all_to_all_single(received, send, [mine] * self.ranks, self.by_owner)
        back = self.orthogonalize(received.view(self.ranks, mine))
        update = torch.empty_like(send)
        dist.all_to_all_single(update, back, self.by_owner, [mine] * self.ranks)
        self.params.mul_(1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
        self.params.sub_(update * self.ratios, alpha=OPTIONS["lr"])

    def orthogonalize(self, received: Tensor) -> Tensor:
        owned = [self.shapes[i] for i in self.owned[self.rank]]
        columns = received.split([rows * cols // self.ranks for rows, cols in owned], dim=1)
        batches: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
        for position, (shape, column) in enumerate(zip(owned, columns)):
            matrix = column.reshape(shape)
            wide = matrix.mT if shape[0] > shape[1] else matrix
            batches.setdefault(tuple(wide.shape), []).append((position, wide))
        results: list[Any] = [None] * len(owned)
        for members in batches.values():
            stack = torch.stack([m for _, m in members])
            batch = newton_schulz(stack, dtype=self.dtype, method="plain")
            for (position, _), result in zip(members, batch):
                tall = owned[position][0] > owned[position][1]
                results[position] = (result.mT if tall else result).reshape(self.ranks, -1)
        return torch.cat(results, dim=1).reshape(-1)


@contextmanager
def counted(variant: Variant) -> Iterator[None]:
    """Count one step's matrices, bytes sent to other ranks, and collectives, outside of graphs."""
    variant.matrices = variant.multiply_adds = variant.sent = variant.collectives = 0
    inner, all_to_all = newton_schulz, dist.all_to_all_single
    exchange, pairs = muon_step.exchange_flat_async, muon_step.exchange_by_pairs

    def orthogonalize(batch: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with FlopCounterMode(display=False) as flops:
            result = inner(batch, *args, **kwargs)
        variant.matrices += batch.shape[0] if batch.ndim == 3 else 1
        variant.multiply_adds += flops.get_total_flops() // 2
        return result

    def send(tensor: Tensor, send_numels: Any, *rest: Any) -> Any:
        variant.collectives += 1
        variant.sent += tensor.numel() * tensor.itemsize
        return exchange(tensor, send_numels, *rest)

    def send_pairs(tensor: Tensor, send_numels: Any, *rest: Any) -> Any:
        variant.collectives += 1
        variant.sent += tensor.numel() * tensor.itemsize
        return pairs(tensor, send_numels, *rest)

    def send_all(out: Tensor, tensor: Tensor, out_sizes: list[int], sizes: list[int]) -> None:
        variant.collectives += 1
        variant.sent += (tensor.numel() - sizes[dist.get_rank()]) * tensor.itemsize
        all_to_all(out, tensor, out_sizes, sizes)

    with (
        torch.compiler.set_stance("force_eager"),
        mock.patch.object(muon_step, "newton_schulz", orthogonalize),
        mock.patch.object(muon_step, "exchange_flat_async", send),
        mock.patch.object(muon_step, "exchange_by_pairs", send_pairs),
        mock.patch.dict(globals(), newton_schulz=orthogonalize),
        mock.patch.object(dist, "all_to_all_single", send_all),
    ):
        yield


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    ranks, layers = dist.get_world_size(), arguments.layers
    mesh = init_device_mesh("cpu", (ranks,))
    one_layer = layer_shapes(arguments.dim, arguments.ffn)
    shapes = one_layer * layers
    dtype = getattr(torch, arguments.dtype)
    by_hand = HandWritten(shapes, dtype)
    split = {
        i: ParameterLayout(s, (s[0] * s[1],) + (0,) * (ranks - 1)) for i, s in enumerate(shapes)
    }
    cost = ns_flops_cost_fn(5, method="auto")  # of the form that will run
    homes = plan_owners([split], cost_fn=cost, eligible="any", tolerance=0).owners[0]
    sharded: list[Placement] = [Shard(0)] * len(shapes)
    rows = rows_of_groups(layers, arguments.dim, arguments.ffn, ranks)
    at_rest: list[Placement] = [Owner(homes[i]) for i in range(len(shapes))]
    kinds: dict[str, tuple[list[Placement], dict[str, Any]]] = {
        "Shard(0), plain form": (sharded, {"ns_method": "plain"}),
        "Shard(0)": (sharded, {}),
        "RowAtomic groups, plain form": (rows, {"ns_method": "plain"}),
        "RowAtomic groups": (rows, {}),
        'RowAtomic groups, owners="any"': (rows, {"owners": "any"}),
        "Owner at rest": (at_rest, {}),
    }
    if not arguments.backend:
        kinds["Shard(0), point-to-point"] = (sharded, {"transport": "point_to_point"})
    share = [data([shapes[i]], 3)[0] for i in by_hand.owned[dist.get_rank()]]
    mine = by_hand.by_owner[dist.get_rank()]
    sent = torch.zeros(sum(by_hand.by_owner), dtype=dtype)
    received = torch.empty(mine * ranks, dtype=dtype)

    def only_newton_schulz() -> None:
        for shape in {tuple(sorted(x.shape)) for x in share}:
            wide = [x if x.shape[0] <= x.shape[1] else x.mT for x in share]
            same = torch.stack([x for x in wide if tuple(x.shape) == shape])
            newton_schulz(same, dtype=dtype, method="plain")

    def only_all_to_all() -> None:
        dist.all_to_all_single(received, sent, [mine] * ranks, by_hand.by_owner)
        dist.all_to_all_single(sent, received, by_hand.by_owner, [mine] * ranks)

    return [
        Variant("hand-written owner step", by_hand.step),
        *(owner_variant(n, mesh, shapes, p, arguments, **o) for n, (p, o) in kinds.items()),
        Variant("torch.optim.Muon, full_tensor()", FullTensors(mesh, shapes, arguments.dtype).step),
        Variant("floor: its Newton-Schulz alone", only_newton_schulz),
        Variant("floor: its two all_to_all alone", only_all_to_all),
    ]


def run_rank(arguments: argparse.Namespace) -> None:
    variants = variants_of(arguments)
    for variant in variants:
        with counted(variant):
            variant.step()
        if arguments.backend:
            variant.step()  # compiled here, without the counters
        variant.peak = peak_of(variant.step)
    for _ in range(arguments.rounds):
        for variant in variants:
            dist.barrier()
            start = time.perf_counter()
            variant.step()
            dist.barrier()
            variant.seconds.append(time.perf_counter() - start)
    counts = [(v.matrices, v.sent, v.collectives, v.multiply_adds, v.peak) for v in variants]
    everyone: list[Any] = [None] * arguments.ranks
    dist.all_gather_object(everyone, counts)
    if dist.get_rank() == 0:
        report(variants, everyone, arguments)


def peak_of(step: Callable[[], None]) -> int:
    """Most bytes that the step had allocated at once, beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    now = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def report(variants: list[Variant], everyone: list[Any], arguments: argparse.Namespace) -> None:
    matrices = 7 * arguments.layers
    print(
        f"{matrices} matrices, {arguments.ranks} ranks, {arguments.dtype}, "
        f"{arguments.rounds} rounds, {arguments.backend or 'eager'}\n"
    )
    print(
        "| | seconds | ratio | NS runs per matrix | NS GMAC, busiest rank | max/mean | MB sent "
        "| MB planned | collectives | peak MB |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    first = variants[0].seconds
    for position, variant in enumerate(variants):
        counts = [of_rank[position] for of_rank in everyone]
        loads = [multiply_adds for *_, multiply_adds, _ in counts]
        runs, sent = sum(c[0] for c in counts) / matrices, sum(c[1] for c in counts)
        ratio = statistics.median(a / b for a, b in zip(variant.seconds, first))
        cells = [f"{statistics.median(variant.seconds):.3f}", f"{ratio:.2f}", f"{runs:.2f}"]
        if sum(loads):
            cells += [f"{max(loads) / 1e9:.1f}", f"{max(loads) * len(loads) / sum(loads):.3f}"]
        else:
            cells += ["", ""]
        planned = "" if variant.num_bytes is None else f"{variant.num_bytes / 1e6:.1f}"
        cells += [f"{sent / 1e6:.1f}", planned, str(counts[0][2])]
        cells += [f"{max(c[4] for c in counts) / 1e6:.0f}"]
        if "full_tensor" in variant.name:  # it calls what is not counted here
            cells[2:8] = [f"{arguments.ranks}.00", "", "", "", "", ""]
        print(f"| {variant.name} | {' | '.join(cells)} |")


def compile_times(arguments: argparse.Namespace) -> None:
    """Seconds to compile the step, for models of several sizes and numbers of shapes."""
    torch.set_num_threads(1)
    print(
        "| matrices | shapes | backend | first step, s | later step, s |\n|---:|---:|---|---:|---:|"
    )
    for number, distinct in ((12, 3), (48, 3), (48, 12), (30, 12)):
        for backend in ("aot_eager", "inductor"):
            torch.compiler.reset()
            shapes = [(64, 64 + 32 * (i % distinct)) for i in range(number)]
            params = [torch.nn.Parameter(x) for x in data(shapes, 0)]
            optimizer = Muon(params, compile=True, backend=backend, ns_dtype=torch.float32)
            for param, grad in zip(params, data(shapes, 1)):
                param.grad = grad
            seconds = []
            for _ in range(4):
                start = time.perf_counter()
                optimizer.step()
                seconds.append(time.perf_counter() - start)
            later = statistics.median(seconds[2:])
            print(
                f"| {number} | {distinct} | {backend} | {seconds[0]:.1f} | {later:.3f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1376)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--backend", default="", help="compile the owner step by this backend")
    parser.add_argument("--compile-times", action="store_true")
    arguments = parser.parse_args()
    if arguments.compile_times:
        compile_times(arguments)
        return
    if arguments.dim % arguments.ranks or arguments.ffn % arguments.ranks:
        parser.error("--dim and --ffn must be multiples of --ranks: the hand-written step needs it")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_on_ranks(run_rank, arguments.ranks, arguments)


if __name__ == "__main__":
    main()
