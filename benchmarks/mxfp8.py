"""MXFP8: seconds to quantize beside a plain copy, and gathers beside bf16, in bytes and seconds.

    python benchmarks/mxfp8.py [--ranks 4] [--threads 1]

Prints the tables of docs/mxfp8.md. Seconds are the best of a few runs on this machine's CPU with
gloo; bytes follow from the layouts alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from padding_table import DEEPSEEK_V3_DENSE, LLAMA_3_8B
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

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

REPEATS = 7
SIZE = 4096
GATHERED = [(2048, 2048)] * 4
LAYERS = {"DeepSeek-V3, dense layer": DEEPSEEK_V3_DENSE, "Llama-3-8B layer": LLAMA_3_8B}
DP_SIZES = (4, 16, 64)


def best_seconds(function: Callable[[], object]) -> float:
    """The shortest of a few runs is the least disturbed by other processes."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def print_quantize_table(threads: int) -> None:
    torch.set_num_threads(threads)
    x = torch.randn(SIZE, SIZE)
    rowwise, columnwise = quantize_rowwise(x), quantize_columnwise(x)
    copy = best_seconds(x.clone)
    print(f"fp32 {SIZE} x {SIZE}, {x.nbytes / 2**20:.0f} MiB, {threads} thread(s)\n")
    print("| | ms | GB/s of fp32 | times a copy |\n|---|---:|---:|---:|")
    for name, function in {
        "copy": x.clone,
        "cast to bf16": lambda: x.to(torch.bfloat16),
        "quantize rowwise": lambda: quantize_rowwise(x),
        "quantize columnwise": lambda: quantize_columnwise(x),
        "dequantize rowwise": lambda: dequantize_rowwise(*rowwise),
        "dequantize columnwise": lambda: dequantize_columnwise(*columnwise),
    }.items():
        seconds = best_seconds(function)
        rate = x.nbytes / seconds / 1e9
        print(f"| {name} | {seconds * 1e3:.1f} | {rate:.2f} | {seconds / copy:.1f} |")


def print_bytes_table() -> None:
    print(
        "| layer | DP | layout | MXFP8 planes, MiB | of that padding | bf16, MiB "
        "| MXFP8 / bf16 | MXFP8 / padded bf16 |\n|---|---:|---|---:|---:|---:|---:|---:|"
    )
    for layer, shapes in LAYERS.items():
        for dp_size in DP_SIZES:
            reports = {
                kind: MXFP8GroupReport(
                    layer,
                    MXFP8Layout(
                        build_row_atomic_layout(
                            shapes.values(), dp_size, block_size=32, shard_layout=kind
                        )
                    ),
                    dp_size,
                )
                for kind in ShardLayout
            }
            padded_bf16 = reports[ShardLayout.PADDED].bf16_step_bytes
            for kind, report in reports.items():
                planes = report.planes[:2]
                padding = sum(plane.padding for plane in planes)
                mib = sum(plane.payload for plane in planes) + padding
                bf16 = report.layouts.data.size * 2
                print(
                    f"| {layer} | {dp_size} | {kind.value} | {mib / 2**20:,.0f} "
                    f"| {100 * padding / mib:.1f} % | {bf16 / 2**20:,.0f} "
                    f"| {mib / bf16:.3f} | {report.step_bytes / padded_bf16:.3f} |"
                )


def gather_seconds(rank: int, ranks: int, folder: str) -> None:
    """Print, on rank 0, what a gather to bf16 weights takes either way."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
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

    by_bf16 = best_seconds(synchronized(lambda: master.cast(bf16).redistribute([Replicate()])))
    by_mxfp8 = best_seconds(synchronized(lambda: mxfp8(master, bf16)))
    if rank == 0:
        print(f"{len(GATHERED)} matrices {GATHERED[0]}, {ranks} gloo ranks on this machine\n")
        print("| gather | bytes | ms |\n|---|---:|---:|")
        print(f"| bf16 | {master.layout.size * 2:,} | {by_bf16 * 1e3:.1f} |")
        size = mxfp8.layouts.data.size + mxfp8.layouts.rowwise_scale.size
        print(f"| MXFP8, dequantized to bf16 | {size:,} | {by_mxfp8 * 1e3:.1f} |")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    print_quantize_table(arguments.threads)
    print()
    print_bytes_table()
    print()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(gather_seconds, (arguments.ranks, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
