"""MXFP8: seconds to quantize beside a plain copy, and gathers beside bf16, in bytes and seconds.

    python benchmarks/mxfp8.py [--ranks 4] [--threads 1]

Prints the tables of docs/mxfp8.md. Seconds are the best of a few runs on this machine's CPU with
gloo; bytes follow from the layouts alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from padding_table import DEEPSEEK_V3_DENSE, LLAMA_3_8B
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from benchmarks.launch import run_on_ranks
from dtensor_owner.buffer import DBuffer
from dtensor_owner.layout import ShardLayout, build_row_atomic_layout
from dtensor_owner.mxfp8 import (
    dequantize_columnwise,
    dequantize_rowwise,
    quantize_columnwise,
    quantize_rowwise,
)
from dtensor_owner.mxfp8_layout import MXFP8Layout
from dtensor_owner.mxfp8_report import MXFP8GroupReport
from dtensor_owner.mxfp8_weights import MXFP8Gather
from placements.row_atomic import RowAtomic

REPEATS = 15
SIZE = 2048
GATHERED = [(2048, 2048)] * 4
LAYERS = {"DeepSeek-V3, dense layer": DEEPSEEK_V3_DENSE, "Llama-3-8B layer": LLAMA_3_8B}
DP_SIZES = (4, 16, 64)


def best_seconds(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest of a few runs, which is the least disturbed by other processes; in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(REPEATS):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: min(seconds) for name, seconds in times.items()}


def print_quantize_table(threads: int) -> None:
    torch.set_num_threads(threads)
    x = torch.randn(SIZE, SIZE)
    rowwise, columnwise = quantize_rowwise(x), quantize_columnwise(x)
    seconds = best_seconds(
        {
            "copy": x.clone,
            "cast to bf16": lambda: x.to(torch.bfloat16),
            "quantize rowwise": lambda: quantize_rowwise(x),
            "quantize columnwise": lambda: quantize_columnwise(x),
            "dequantize rowwise": lambda: dequantize_rowwise(*rowwise),
            "dequantize columnwise": lambda: dequantize_columnwise(*columnwise),
        }
    )
    print(f"fp32 {SIZE} x {SIZE}, {x.nbytes / 2**20:.0f} MiB, {threads} thread(s)\n")
    print("| | ms | GB/s of fp32 | times a copy |\n|---|---:|---:|---:|")
    for name, taken in seconds.items():
        rate = x.nbytes / taken / 1e9
        print(f"| {name} | {taken * 1e3:.1f} | {rate:.2f} | {taken / seconds['copy']:.1f} |")


def bytes_table() -> str:
    """MiB that a gather of one layer's weights brings to each rank, as a Markdown table."""
    lines = [
        "| layer | DP | bf16, padded | bf16, unpadded | MXFP8, padded | MXFP8, unpadded |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for layer, shapes in LAYERS.items():
        for dp_size in DP_SIZES:
            sizes = []
            for kind in (ShardLayout.PADDED, ShardLayout.UNPADDED):
                layout = build_row_atomic_layout(
                    shapes.values(), dp_size, block_size=32, shard_layout=kind
                )
                planes = MXFP8GroupReport(layer, MXFP8Layout(layout), dp_size).planes[:2]
                sizes.append((layout.size * 2, sum(p.payload + p.padding for p in planes)))
            texts = (f"{size / 2**20:,.1f}" for column in zip(*sizes) for size in column)
            lines.append(f"| {layer} | {dp_size} | {' | '.join(texts)} |")
    return "\n".join(lines)


def gather_seconds(ranks: int) -> None:
    """Print, on rank 0, what a gather to bf16 weights takes either way."""
    mesh = init_device_mesh("cpu", (ranks,))
    tensors = [torch.randn(shape) for shape in GATHERED]
    master = DBuffer.distribute_tensors(tensors, mesh, [RowAtomic()], block_size=32)
    mxfp8 = MXFP8Gather(master.layout, [str(i) for i in range(len(tensors))])
    bf16 = torch.bfloat16

    def synchronized(function: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            function()
            dist.barrier()

        return run

    seconds = best_seconds(
        {
            "bf16": synchronized(lambda: master.cast(bf16).redistribute([Replicate()])),
            "MXFP8": synchronized(lambda: mxfp8.start(master, bf16).wait()),
        }
    )
    if dist.get_rank() == 0:
        print(f"{len(GATHERED)} matrices {GATHERED[0]}, {ranks} gloo ranks on this machine\n")
        print("| gather | bytes | ms |\n|---|---:|---:|")
        print(f"| bf16 | {master.layout.size * 2:,} | {seconds['bf16'] * 1e3:.1f} |")
        size = mxfp8.layouts.data.size + mxfp8.layouts.rowwise_scale.size
        print(f"| MXFP8, dequantized to bf16 | {size:,} | {seconds['MXFP8'] * 1e3:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    print_quantize_table(arguments.threads)
    print()
    print(bytes_table())
    print()
    run_on_ranks(gather_seconds, arguments.ranks, arguments.ranks)


if __name__ == "__main__":
    main()
