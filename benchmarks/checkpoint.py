"""Saving beside ``dcp.save`` of the same model under torch's fully_shard, in turns.

    python benchmarks/checkpoint.py [--ranks 2] [--dim 512] [--rounds 9] [--folder DIR]

Model and momentum, a tensor each, are saved to new folders on one disk by all variants in turns,
and synced as DCP does it. What counts are the ratios to FSDP2 within a round. The bytes are those
of all files of a checkpoint; the payload is what the tensors hold.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks.launch import run_on_ranks
from dtensor_owner.checkpoint import save_checkpoint
from dtensor_owner.fully_shard import fully_shard
from dtensor_owner.layout import ShardLayout
from dtensor_owner.train.model import GPT

STOCK, SAVE = "torch fully_shard, dcp.save", "UNPADDED, save_checkpoint"
UNPADDED, PADDED = "UNPADDED, dcp.save", "PADDED, dcp.save"
VARIANTS = [STOCK, UNPADDED, PADDED, SAVE]


class Saver:
    def __init__(self, variant: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (args.ranks,))
        self.model = GPT(layers=args.layers, dim=args.dim, heads=8, hidden=args.hidden, context=128)
        shard: Callable[..., Any] = torch_fully_shard if variant == STOCK else fully_shard
        options = {"shard_layout": ShardLayout.PADDED} if variant == PADDED else {}
        for module in [*self.model.blocks, self.model]:
            shard(module, mesh=mesh, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        self.variant = variant

    def save(self, folder: str) -> None:
        if self.variant == SAVE:
            save_checkpoint(folder, self.model, self.optimizer, rng=False)
            return
        # What torch's get_state_dict gives, without the time that it takes.
        named = dict(self.model.named_parameters())
        state = {name: self.optimizer.state[parameter] for name, parameter in named.items()}
        dcp.save({"model": named, "optimizer": {"state": state}}, checkpoint_id=folder)


def measure(args: argparse.Namespace, folder: str) -> None:
    savers = {variant: Saver(variant, args) for variant in VARIANTS}
    rounds, sizes = [], {}
    for number in range(-1, args.rounds):  # the first round warms up
        shift = number % len(VARIANTS)
        seconds = {}
        for variant in VARIANTS[shift:] + VARIANTS[:shift]:
            target = f"{folder}/checkpoint"
            dist.barrier()
            start = time.perf_counter()
            savers[variant].save(target)
            seconds[variant] = time.perf_counter() - start
            dist.barrier()
            if dist.get_rank() == 0:
                sizes[variant] = sum(file.stat().st_size for file in Path(target).iterdir())
                shutil.rmtree(target)
        slowest = torch.tensor([seconds[variant] for variant in VARIANTS])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if number >= 0:
            rounds.append(dict(zip(VARIANTS, slowest.tolist())))
    if dist.get_rank() == 0:
        report(savers[STOCK].model, rounds, sizes)


def report(model: nn.Module, rounds: list[dict[str, float]], sizes: dict[str, int]) -> None:
    payload = 2 * sum(parameter.numel() * 4 for parameter in model.parameters())
    print(f"payload {payload:,} bytes\n")
    print("| variant | ms a save (median) | to FSDP2: median | quartiles | bytes over payload |")
    print("|---|---:|---:|---:|---:|")
    for variant in VARIANTS:
        milliseconds = statistics.median(r[variant] for r in rounds) * 1e3
        low, middle, high = statistics.quantiles([r[variant] / r[STOCK] for r in rounds], n=4)
        over = sizes[variant] / payload - 1
        print(
            f"| {variant} | {milliseconds:.0f} | {middle:.3f} | {low:.3f} to {high:.3f} | "
            f"{over:.2%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where to save (default: a temporary folder)")
    for name, default in dict(ranks=2, layers=6, dim=512, hidden=1365, rounds=9).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run_on_ranks(measure, args.ranks, args, folder)


if __name__ == "__main__":
    main()
