"""Shards packed for their owners and results for the way back; ranks that agree on a plan.

``OwnerGatherPlan`` and ``OwnerScatterPlan`` only pack and unpack tensors, so that any
transport can carry their buffers. All dicts are keyed by tensor index or by rank, a coordinate
on the group's mesh; a rank never sends to itself and peers with nothing to say are left out.
``agree`` compares plans between ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_owner.owners import GroupOwnerLayout, ParameterLayout


@dataclass(frozen=True)
class OwnerGatherPlan:
    """This rank's part in bringing the shards of one group to their owners.

    Example: two ranks, weights (6, 4) and (4, 4), each half on either rank, both owned by
    rank 1. On rank 0 ``send_buffers`` is ``{1: 12 + 8 elements}``, all else is empty. On rank 1
    ``recv_sizes`` is ``{0: 20}``, ``recv_offsets`` is ``{(0, 0): 0, (1, 0): 12}`` and
    ``own_shards`` holds the other halves.

    Args:
        layouts: Layouts of the parameters that take part, by tensor index.
        this_rank: This rank's coordinate.
        send_buffers: Per owner, this rank's flat shards of its parameters in tensor order.
        recv_sizes: Per source rank, the elements this rank receives from it.
        own_shards: This rank's flat shards of the parameters it owns (views where possible).
        recv_offsets: Per (tensor index, source rank), where that shard starts in the buffer
            received from that rank.
    """

    layouts: Mapping[int, ParameterLayout]
    this_rank: int
    send_buffers: dict[int, Tensor]
    recv_sizes: dict[int, int]
    own_shards: dict[int, Tensor]
    recv_offsets: dict[tuple[int, int], int]

    @classmethod
    def pack(cls, plan: GroupOwnerLayout, local_shards: Mapping[int, Tensor]) -> OwnerGatherPlan:
        """Pack this rank's shards.

        Args:
            plan: Layouts and owners of the group.
            local_shards: This rank's shards by tensor index, in any shape; needed for those
                parameters of which it holds elements. One dtype.

        Raises:
            ValueError: A shard is missing, has a wrong number of elements or another dtype.
        """
        this = plan.mesh.get_local_rank()
        send: dict[int, list[Tensor]] = {}
        own: dict[int, Tensor] = {}
        recv_sizes: dict[int, int] = {}
        recv_offsets: dict[tuple[int, int], int] = {}
        for index, layout in sorted(plan.layouts.items()):
            owner = plan.owners[index]
            numel = layout.rank_numel(this)
            if numel:
                shard = _flat(local_shards, index, numel, "shard")
                if owner == this:
                    own[index] = shard
                else:
                    send.setdefault(owner, []).append(shard)
            if owner == this:
                for source, count in enumerate(layout.flat_counts):
                    if count and source != this:
                        recv_offsets[index, source] = recv_sizes.get(source, 0)
                        recv_sizes[source] = recv_sizes.get(source, 0) + count
        return cls(plan.layouts, this, _packed(send), recv_sizes, own, recv_offsets)

    def reconstruct_full(self, param_index: int, recv_buffers: Mapping[int, Tensor]) -> Tensor:
        """The whole parameter, flat, from its shards in rank order.

        Args:
            param_index: Tensor index of a parameter that this rank owns.
            recv_buffers: Per source rank, what was received from it.

        Returns:
            ``(full_numel,)``. Where this rank holds the whole parameter: its own shard, not
            a copy.
        """
        shards = []
        for source, numel in enumerate(self.layouts[param_index].flat_counts):
            if numel and source == self.this_rank:
                shards.append(self.own_shards[param_index])
            elif numel:
                offset = self.recv_offsets[param_index, source]
                shards.append(recv_buffers[source][offset : offset + numel])
        return shards[0] if len(shards) == 1 else torch.cat(shards)


@dataclass(frozen=True)
class OwnerScatterPlan:
    """This rank's part in bringing the owners' results back to the ranks that hold shards.

    Args:
        layouts: Layouts of the parameters that take part, by tensor index.
        this_rank: This rank's coordinate.
        send_buffers: Per rank, its flat shards of this rank's results in tensor order.
        recv_sizes: Per owner, the elements this rank receives from it.
        recv_offsets: Per (tensor index, owner), where that shard starts in the buffer received
            from that owner.
    """

    layouts: Mapping[int, ParameterLayout]
    this_rank: int
    send_buffers: dict[int, Tensor]
    recv_sizes: dict[int, int]
    recv_offsets: dict[tuple[int, int], int]

    @classmethod
    def pack(cls, plan: GroupOwnerLayout, full_results: Mapping[int, Tensor]) -> OwnerScatterPlan:
        """Pack the results of the parameters this rank owns.

        Args:
            plan: Layouts and owners of the group.
            full_results: The whole result, in any shape, of each parameter this rank owns. One
                dtype.

        Raises:
            ValueError: A result is missing, has a wrong number of elements or another dtype.
        """
        this = plan.mesh.get_local_rank()
        send: dict[int, list[Tensor]] = {}
        recv_sizes: dict[int, int] = {}
        recv_offsets: dict[tuple[int, int], int] = {}
        for index, layout in sorted(plan.layouts.items()):
            owner = plan.owners[index]
            if owner == this:
                result = _flat(full_results, index, layout.full_numel(), "result")
                for target, shard in enumerate(result.split(list(layout.flat_counts))):
                    if target != this and shard.numel():
                        send.setdefault(target, []).append(shard)
            elif layout.rank_numel(this):
                recv_offsets[index, owner] = recv_sizes.get(owner, 0)
                recv_sizes[owner] = recv_sizes.get(owner, 0) + layout.rank_numel(this)
        return cls(plan.layouts, this, _packed(send), recv_sizes, recv_offsets)

    def unpack(self, recv_buffers: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """This rank's flat shards of the results, by tensor index.

        Only of parameters that this rank holds elements of and does not own: the owner takes
        its own part from its result.
        """
        return {
            index: recv_buffers[owner][
                offset : offset + self.layouts[index].rank_numel(self.this_rank)
            ]
            for (index, owner), offset in self.recv_offsets.items()
        }


def _flat(tensors: Mapping[int, Tensor], index: int, numel: int, what: str) -> Tensor:
    if index not in tensors:
        raise ValueError(
            f"The {what} of tensor {index} is missing: this rank needs it with {numel} elements; "
            f"got tensors {sorted(tensors)}."
        )
    if tensors[index].numel() != numel:
        raise ValueError(
            f"The {what} of tensor {index} has shape {tuple(tensors[index].shape)}, but its layout "
            f"gives it {numel} elements on this rank."
        )
    return tensors[index].reshape(-1)


def _packed(parts: Mapping[int, Sequence[Tensor]]) -> dict[int, Tensor]:
    dtypes = {tensor.dtype for tensors in parts.values() for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(
            f"Tensors of {sorted(map(str, dtypes))} cannot share one buffer: plan each dtype as "
            "a group of its own."
        )
    return {rank: torch.cat(list(tensors)) for rank, tensors in parts.items()}


def agree(
    lines: Sequence[str], group: dist.ProcessGroup, what: str, *, error: str | None = None
) -> None:
    """Check that all ranks of a group pass the same lines; every rank of it calls this.

    One small collective where they agree.

    Args:
        lines: What must be equal, one statement per line.
        group: The ranks to compare.
        what: What the lines describe, for the message.
        error: A fault that this rank has found; it is raised on all ranks.

    Raises:
        ValueError: On every rank, with the same text: a rank found a fault, or ranks differ; then
            the first line that differs is named with its two versions.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers = gather_answers((error, digest), group)
    for rank, (fault, _) in enumerate(answers):
        if fault is not None:
            raise ValueError(f"{fault} (found on rank {_global_rank(group, rank)})")
    if all(answer == answers[0] for answer in answers):
        return
    texts = gather_answers(list(lines), group)
    rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
    for here, there in zip_longest(texts[0], texts[rank], fillvalue="nothing"):
        if here != there:
            raise ValueError(
                f"Ranks disagree on {what}. First difference:\n"
                f"  rank {_global_rank(group, 0)}: {here}\n"
                f"  rank {_global_rank(group, rank)}: {there}\n"
                "Build it from the same parameters in the same order on every rank."
            )


def gather_answers(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, by group rank; every rank of the group calls this."""
    answers = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, value, group=group)
    return answers


def _global_rank(group: dist.ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)
