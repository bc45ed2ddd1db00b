"""What one Muon step of the trainer's model stores, orthogonalizes and sends, counted as it runs.

``python benchmarks/step_counts.py [RANKS]`` starts that many gloo ranks (default 4), does one step
and sets the counts beside the plan's and beside the sum of rows that are not at their owner.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.launch import run_on_ranks
from dtensor_owner import muon_step
from dtensor_owner.train import TrainConfig
from dtensor_owner.train.setup import build_sharded, parameter_groups

BYTES_PER_ELEMENT = 4  # Newton-Schulz in float32, as the trainer's default on CPUs


def run(ranks: int) -> None:
    """Do one step on this rank; rank 0 prints the counts of all."""
    trainee = build_sharded(TrainConfig(), init_device_mesh("cpu", (ranks,)))
    matrices, _ = parameter_groups(trainee.model, TrainConfig())
    for parameter in trainee.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    counts = {"sent": 0, "orthogonalized": 0}
    exchange, newton_schulz = muon_step.exchange_flat_async, muon_step.newton_schulz

    def counted_exchange(send: Any, send_numels: Any, *rest: Any) -> Any:
        counts["sent"] += sum(send_numels) * send.element_size()
        return exchange(send, send_numels, *rest)

    def counted_newton_schulz(batch: Any, *rest: Any) -> Any:
        counts["orthogonalized"] += batch.shape[0] if batch.dim() > 2 else 1
        return newton_schulz(batch, *rest)

    with (
        mock.patch.object(muon_step, "exchange_flat_async", counted_exchange),
        mock.patch.object(muon_step, "newton_schulz", counted_newton_schulz),
    ):
        trainee.optimizers[0].step()
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, counts)
    held: list[Any] = [None] * ranks
    dist.all_gather_object(held, [parameter.to_local().numel() for _, parameter in matrices])
    if dist.get_rank() == 0:
        _report(trainee.plan, found, held, len(matrices))


def _report(plan: Any, found: list[Any], held: list[Any], num_matrices: int) -> None:
    owners = [matrix.owner for matrix in plan.matrices]
    away = sum(
        shard
        for rank, shards in enumerate(held)
        for shard, owner in zip(shards, owners)
        if rank != owner
    )
    print(f"padded elements           {sum(group.padding_bytes for group in plan.groups)}")
    print(f"matrices                  {num_matrices}")
    print(f"orthogonalized, all ranks {sum(counts['orthogonalized'] for counts in found)}")
    print(f"bytes sent, all ranks     {sum(counts['sent'] for counts in found):,}")
    print(f"bytes in the plan         {sum(matrix.moved_bytes for matrix in plan.matrices):,}")
    print(f"shards not at owner, x2   {2 * away * BYTES_PER_ELEMENT:,}")


if __name__ == "__main__":
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    run_on_ranks(run, world_size, world_size)
