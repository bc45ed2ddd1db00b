"""fully_shard beside torch's own: seconds of a training step and peak memory, in turns.

    python benchmarks/fully_shard.py [--model gpt|equal|padded] [--ranks 2] [--device cpu]

All variants train the same model on the same ranks. They take turns, a few steps each, so that
whatever else the machine does hits all of them; what counts are the ratios to torch's
fully_shard and to PADDED within a round, of which the median and the quartiles are printed. The
floor is the same model on each rank without any sharding and communication: no variant can be
faster. Memory is measured in a process of its own for each variant. Models: a GPT; blocks of
square matrices, whose shards are equal in either layout; blocks of matrices whose row sizes have
few common factors, so that PADDED pads them.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks.launch import run_on_ranks
from dtensor_owner.fully_shard import fully_shard
from dtensor_owner.layout import ShardLayout, build_row_atomic_layout
from dtensor_owner.train.model import GPT, summed_loss

FLOOR, STOCK, PADDED = "no sharding (floor)", "torch fully_shard", "PADDED"
OURS: dict[str, dict[str, Any]] = {
    "UNPADDED": {},
    "UNPADDED, prefetch=0": {"prefetch": 0},
    PADDED: {"shard_layout": ShardLayout.PADDED},
}
VARIANTS = [FLOOR, STOCK, *OURS]


class Blocks(nn.Module):
    """Blocks of matrices between the given widths, back to the first one."""

    def __init__(self, widths: tuple[int, ...], layers: int) -> None:
        super().__init__()
        pairs = list(zip(widths, (*widths[1:], widths[0])))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Sequential(nn.Linear(a, b, bias=False), nn.Tanh()) for a, b in pairs)
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


WIDTHS = {"equal": (448, 448, 448), "padded": (280, 600, 440)}


def plain_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if args.model != "gpt":
        return Blocks(WIDTHS[args.model], args.layers)
    return GPT(layers=args.layers, dim=args.dim, heads=8, hidden=args.hidden, context=args.context)


def build(variant: str, args: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    model = plain_model(args).to(args.device)
    if variant == FLOOR:
        return model
    options = OURS.get(variant, {})
    shard: Callable[..., Any] = torch_fully_shard if variant == STOCK else fully_shard
    for module in [*model.blocks, model]:  # type: ignore[misc]
        # The same for all: weights are gathered in forward and again in backward.
        shard(module, mesh=mesh, reshard_after_forward=True, **options)
    return model


class Trainee:
    def __init__(self, variant: str, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        self.model = build(variant, args, mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        shape = (args.batch, args.context + 1)
        self.tokens = torch.randint(0, 256, shape, device=args.device)
        self.rows = torch.randn(args.batch * args.context, WIDTHS.get(args.model, (1,))[0])
        self.rows = self.rows.to(args.device)
        self.is_gpt, self.is_cuda = args.model == "gpt", args.device == "cuda"

    def loss(self) -> Tensor:
        if not self.is_gpt:
            return self.model(self.rows).square().mean()
        logits = self.model(self.tokens[:, :-1])
        return summed_loss(logits, self.tokens[:, 1:]) / self.tokens[:, 1:].numel()

    def seconds(self, steps: int) -> float:
        dist.barrier()
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def measure_time(args: argparse.Namespace) -> None:
    mesh = init_device_mesh(args.device, (args.ranks,))
    trainees = {variant: Trainee(variant, args, mesh) for variant in VARIANTS}
    for trainee in trainees.values():
        trainee.seconds(2)
    rounds = []
    for number in range(args.rounds):
        shift = number % len(VARIANTS)
        order = VARIANTS[shift:] + VARIANTS[:shift]
        seconds = {variant: trainees[variant].seconds(args.steps) for variant in order}
        slowest = torch.tensor([seconds[variant] for variant in VARIANTS], device=args.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        rounds.append(dict(zip(VARIANTS, slowest.tolist())))
    if dist.get_rank() == 0:
        print("| variant | ms a step (median) | to torch fully_shard (quartiles) | to PADDED |")
        print("|---|---:|---:|---:|")
        for variant in VARIANTS:
            milliseconds = statistics.median(r[variant] for r in rounds) / args.steps * 1e3
            print(
                f"| {variant} | {milliseconds:.1f} | {ratio(rounds, variant, STOCK)} "
                f"| {ratio(rounds, variant, PADDED)} |"
            )


def ratio(rounds: list[dict[str, float]], variant: str, reference: str) -> str:
    low, middle, high = statistics.quantiles([r[variant] / r[reference] for r in rounds], n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def measure_memory(args: argparse.Namespace, variant: str) -> None:
    mesh = init_device_mesh(args.device, (args.ranks,))
    trainee = Trainee(variant, args, mesh)
    before = peak_bytes(args)
    trainee.seconds(3)
    mebibytes = torch.tensor([(peak_bytes(args) - before) / 2**20], device=args.device)
    dist.all_reduce(mebibytes, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"| {variant} | {mebibytes.item():.0f} |", flush=True)


def peak_bytes(args: argparse.Namespace) -> int:
    """The most memory so far: allocated on a GPU; resident in the process otherwise."""
    if args.device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=["gpt", *WIDTHS], default="gpt")
    for name, default in dict(
        ranks=2, layers=4, dim=256, hidden=688, context=128, batch=2, rounds=12, steps=3
    ).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model = plain_model(args)
    count = sum(parameter.numel() for parameter in model.parameters())
    shapes = [tuple(parameter.shape) for parameter in model.blocks[0].parameters()]  # type: ignore
    padded = build_row_atomic_layout(shapes, args.ranks, shard_layout=ShardLayout.PADDED)
    print(
        f"{args.model} of {count:,} parameters, {args.ranks} ranks, {args.device}; PADDED pads a "
        f"block by {padded.padding_report().percent:.1f} %\n"
    )
    run_on_ranks(measure_time, args.ranks, args, device=args.device)
    print("\n| variant | MiB that training adds to the model, at its peak (largest rank) |")
    print("|---|---:|", flush=True)
    for variant in VARIANTS:
        run_on_ranks(measure_memory, args.ranks, args, variant, device=args.device)


if __name__ == "__main__":
    main()
