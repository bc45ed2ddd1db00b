"""Carry plans out: one tensor step by step, or many tensors in one packed exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement

from placements.boxes import Box, box_numel, box_shape, local_box
from placements.collectives import (
    DimGroup,
    all_gather_rows,
    all_reduce,
    as_bytes,
    broadcast,
    exchange_flat,
    exchange_slices,
    reduce_scatter_rows,
)
from placements.geometry import chunk_counts
from placements.owner import Owner
from placements.plan import Collective, Plan, Step, make_plan

_EXCHANGED = (Collective.POINT_TO_POINT, Collective.ALL_GATHER, Collective.BROADCAST)


def redistribute_local(
    local: Tensor,
    shape: Sequence[int],
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
) -> Tensor:
    """Redistribute this rank's part of one tensor.

    Args:
        local: What this rank holds under ``source``.
        shape: Global shape.
        mesh: Mesh of both placement lists; every rank of it calls this.

    Returns:
        What this rank holds under ``target``; never a view of ``local`` unless both describe
        the same bytes.

    Raises:
        ValueError: ``local`` does not have the shape that ``source`` gives this rank, or a
            placement does not fit the shape or mesh. Nothing has been sent then.
    """
    plan = plan_for(shape, local.dtype, mesh, source, target)
    _check_local(local, plan, mesh)
    for step in plan.steps:
        local = _run_step(local, step, mesh)
    return local


def plan_for(
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
) -> Plan:
    """The plan of a redistribution as seen from this rank."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"This rank is not part of {mesh}: only its ranks may redistribute.")
    return make_plan(
        tuple(int(size) for size in shape),
        dtype.itemsize,
        tuple(mesh.shape),
        tuple(source),
        tuple(target),
        tuple(coordinate),
    )


def redistribute_locals(
    locals_: Sequence[Tensor], plans: Sequence[Plan], mesh: DeviceMesh
) -> list[Tensor]:
    """Carry out many plans on one mesh with one packed exchange per mesh dim.

    Args:
        locals_: This rank's parts, one per plan.
        plans: Equal lists (up to this rank's coordinate) on every rank of the mesh.

    Returns:
        This rank's parts under the plans' targets.
    """
    for local, plan in zip(locals_, plans, strict=True):
        _check_local(local, plan, mesh)
    results = list(locals_)
    todo = [list(plan.steps) for plan in plans]
    while mesh_dims := [steps[0].mesh_dim for steps in todo if steps]:
        # The lowest mesh dim goes first; the sequence of dims is the same on every rank.
        mesh_dim = min(mesh_dims)
        batch = [i for i, steps in enumerate(todo) if steps and steps[0].mesh_dim == mesh_dim]
        steps = {i: todo[i].pop(0) for i in batch}
        packed = [i for i in batch if steps[i].collective in _EXCHANGED]
        if packed:
            group = DimGroup.of(mesh, mesh_dim)
            exchanged = _exchange([results[i] for i in packed], [steps[i] for i in packed], group)
            for i, result in zip(packed, exchanged, strict=True):
                results[i] = result
        for i in batch:
            if i not in packed:
                results[i] = _run_step(results[i], steps[i], mesh)
    return results


def _check_local(local: Tensor, plan: Plan, mesh: DeviceMesh) -> None:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    expected = _held_shape(plan.shape, tuple(mesh.shape), plan.source, tuple(coordinate))
    if tuple(local.shape) != expected:
        raise ValueError(
            f"The local tensor has shape {tuple(local.shape)}, but {plan.source} of a tensor of "
            f"shape {plan.shape} gives mesh coordinate {tuple(coordinate)} shape {expected}."
        )


@lru_cache(maxsize=4096)
def _held_shape(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[int, ...]:
    return box_shape(local_box(shape, mesh_shape, placements, coordinate))


# ------------------------------------------------------------------------------ steps


def _run_step(local: Tensor, step: Step, mesh: DeviceMesh) -> Tensor:
    if step.collective is Collective.NONE:
        return local
    return _RUN[step.collective](local, step, DimGroup.of(mesh, step.mesh_dim))


def _run_local_slice(local: Tensor, step: Step, group: DimGroup) -> Tensor:
    box = step.target_boxes[group.coordinate]
    if box is None:
        return _not_held(local)
    return _cut(local, box).clone(memory_format=torch.contiguous_format)


def _run_point_to_point(local: Tensor, step: Step, group: DimGroup) -> Tensor:
    return _exchange([local], [step], group)[0]


def _run_all_gather(local: Tensor, step: Step, group: DimGroup) -> Tensor:
    return all_gather_rows(local, step.source_counts, group)


def _run_broadcast(local: Tensor, step: Step, group: DimGroup) -> Tensor:
    assert isinstance(step.source, Owner)
    if group.coordinate != step.source.rank:
        local = local.new_empty(step.shape)
    return broadcast(local, step.source.rank, group)


def _run_reduce_scatter(local: Tensor, step: Step, group: DimGroup) -> Tensor:
    return reduce_scatter_rows(local, step.target_counts, _reduce_op(step), group)


def _run_reduce(local: Tensor, step: Step, group: DimGroup) -> Tensor:
    """reduce_scatter of even chunks, then the chunks to the owner: no rank receives N tensors."""
    assert isinstance(step.target, Owner)
    counts = chunk_counts(local.numel(), group.size)
    chunk = reduce_scatter_rows(local.reshape(-1), counts, _reduce_op(step), group)
    owner = step.target.rank
    is_owner = group.coordinate == owner
    send = [chunk.numel() if c == owner and not is_owner else 0 for c in range(group.size)]
    recv = [n if is_owner and c != owner else 0 for c, n in enumerate(counts)]
    received = exchange_flat(chunk if not is_owner else chunk[:0], send, recv, group)
    if not is_owner:
        return _not_held(local)
    before = sum(counts[:owner])
    return torch.cat([received[:before], chunk, received[before:]]).view(step.shape)


def _run_all_reduce(local: Tensor, step: Step, group: DimGroup) -> Tensor:
    reduced = all_reduce(local, _reduce_op(step), group)
    box = step.target_boxes[group.coordinate]
    assert box is not None
    return _cut(reduced, box).contiguous()


_RUN: dict[Collective, Callable[[Tensor, Step, DimGroup], Tensor]] = {
    Collective.LOCAL_SLICE: _run_local_slice,
    Collective.POINT_TO_POINT: _run_point_to_point,
    Collective.ALL_GATHER: _run_all_gather,
    Collective.BROADCAST: _run_broadcast,
    Collective.REDUCE_SCATTER: _run_reduce_scatter,
    Collective.REDUCE: _run_reduce,
    Collective.ALL_REDUCE: _run_all_reduce,
}


def _reduce_op(step: Step) -> str:
    assert isinstance(step.source, Partial)
    return step.source.reduce_op


def _not_held(like: Tensor) -> Tensor:
    return like.new_zeros((0,) * like.dim())


def _cut(tensor: Tensor, box: Box, origin: Box | None = None) -> Tensor:
    """The part of ``tensor`` in ``box``; ``tensor`` starts at ``origin``."""
    for dim, (start, stop) in enumerate(box):
        base = origin[dim][0] if origin is not None else 0
        if (start, stop) != (base, base + tensor.shape[dim]):
            tensor = tensor.narrow(dim, start - base, stop - start)
    return tensor


# --------------------------------------------------------------------- packed exchange


def _exchange(locals_: list[Tensor], steps: list[Step], group: DimGroup) -> list[Tensor]:
    """Carry the transfers of many steps in one exchange, packed by peer, then step, then box."""
    me = group.coordinate
    # One dtype travels as it is; several share one buffer of bytes.
    mixed = len({local.dtype for local in locals_}) > 1
    send: list[Tensor] = []
    send_numels, recv_numels = [0] * group.size, [0] * group.size
    for peer in range(group.size):
        for local, step in zip(locals_, steps, strict=True):
            unit = local.dtype.itemsize if mixed else 1
            for transfer in step.between(me, peer) if peer != me else ():
                piece = _cut(local, transfer.box, step.source_boxes[me]).reshape(-1)
                send.append(as_bytes(piece) if mixed else piece)
                send_numels[peer] += piece.numel() * unit
            if peer != me:
                recv_numels[peer] += sum(box_numel(t.box) for t in step.between(peer, me)) * unit
    dtype = torch.uint8 if mixed else locals_[0].dtype
    if len(send) == 1:
        flat = send[0]
    else:
        flat = torch.cat(send) if send else locals_[0].new_empty(0, dtype=dtype)
    received = exchange_slices(flat, send_numels, recv_numels, group)
    return _unpack(received, recv_numels, locals_, steps, group, mixed)


def _unpack(
    received: list[Tensor],
    recv_numels: list[int],
    locals_: list[Tensor],
    steps: list[Step],
    group: DimGroup,
    mixed: bool,
) -> list[Tensor]:
    me = group.coordinate
    pieces: list[list[tuple[Box, Tensor]]] = [[] for _ in steps]
    total = sum(recv_numels)
    for peer in range(group.size):
        position = 0
        for found, local, step in zip(pieces, locals_, steps, strict=True):
            for transfer in step.between(peer, me):
                if peer == me:
                    piece = _cut(local, transfer.box, step.source_boxes[me])
                    is_shared = True
                else:
                    numel = box_numel(transfer.box) * (local.dtype.itemsize if mixed else 1)
                    piece = received[peer][position : position + numel]
                    position += numel
                    is_shared = numel < total
                    if mixed:  # a fresh tensor is aligned for any dtype
                        piece, is_shared = piece.clone().view(local.dtype), False
                    piece = piece.view(box_shape(transfer.box))
                if is_shared and transfer.box == step.target_boxes[me]:
                    # Alone in its result, it would be a view of the input or of other results.
                    piece = piece.clone(memory_format=torch.contiguous_format)
                found.append((transfer.box, piece))
        assert position == recv_numels[peer]
    return [
        _join(step.target_boxes[me], found, local)
        for step, found, local in zip(steps, pieces, locals_, strict=True)
    ]


def _join(box: Box | None, pieces: list[tuple[Box, Tensor]], like: Tensor) -> Tensor:
    """Put the pieces of one target box together; they lie one after the other along one dim."""
    if box is None:
        return _not_held(like)
    if not pieces:
        return like.new_empty(box_shape(box))
    if len(pieces) == 1:
        return pieces[0][1]
    first, second = pieces[0][0], pieces[1][0]
    dim = next(d for d in range(len(box)) if first[d] != second[d])
    ordered = sorted(pieces, key=lambda piece: piece[0][dim])
    return torch.cat([piece for _, piece in ordered], dim)
