"""Starts a benchmark's function on several ranks of this machine."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, device: str = "cpu"
) -> list[Any]:
    """Call ``function(*args)`` on each rank of a new process group; one thread a rank.

    Args:
        function: A function at the top level of a module.
        ranks: Number of processes.
        device: ``"cpu"`` takes gloo, ``"cuda"`` NCCL with one device a rank.

    Returns:
        What the function returned, by rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (function, ranks, args, device, folder), nprocs=ranks)
        return [
            torch.load(f"{folder}/{rank}.pt", weights_only=False)  # written by this program
            for rank in range(ranks)
        ]


def _rank(
    rank: int,
    function: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...],
    device: str,
    folder: str,
) -> None:
    torch.set_num_threads(1)
    # gloo looks up the host's own name otherwise, which fails on machines without a network.
    for name in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(f"{folder}/store", ranks),
        rank=rank,
        world_size=ranks,
    )
    torch.save(function(*args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
