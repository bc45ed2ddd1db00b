"""The collectives of this package: the only file here that communicates.

Whatever compiled code may call is built on torch's functional collectives, so that it traces into
one graph. Every rank of the group must make the same calls in the same order; all
decisions here depend on counts that all ranks share. Results are waited for, or handed out
as ``Pending``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from placements.plan import Algorithm, choose_algorithm

_ops = torch.ops._c10d_functional

# What gloo and NCCL both carry. Other dtypes (float8, int16, complex, ...) travel as bytes.
_WIRE_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)

# Devices on which collectives of equal parts are left for broadcasts into place and exchanges:
# gloo takes 1.2 to 2.4 times as long for an all_gather, 1.6 to 5 times for a reduce_scatter.
_DIRECT_DEVICES = frozenset({"cpu"})

_ALIGNED_BYTES = 64  # what follows so many bytes is aligned as a tensor of its own would be


@dataclass(frozen=True)
class DimGroup:
    """The ranks along one mesh dimension, as seen from this rank.

    Args:
        name: Name of the process group.
        size: Number of ranks.
        coordinate: This rank's coordinate on the mesh dimension.
        order: Group rank of each coordinate. A process group sorts its global ranks, a mesh
            dimension does not, so the two numberings can differ.
        process_group: The process group of that name.
    """

    name: str
    size: int
    coordinate: int
    order: tuple[int, ...]
    process_group: dist.ProcessGroup = field(compare=False, repr=False)

    @property
    def in_order(self) -> bool:
        return self.order == tuple(range(self.size))

    @staticmethod
    def of(mesh: DeviceMesh, mesh_dim: int) -> DimGroup:
        """The group of the ranks that differ from this one only in ``mesh_dim``."""
        return _dim_group(mesh, mesh_dim, mesh.get_group(mesh_dim))

    @staticmethod
    def of_group(group: dist.ProcessGroup) -> DimGroup:
        """A process group whose group ranks are the coordinates."""
        size = dist.get_world_size(group)
        return DimGroup(group.group_name, size, dist.get_rank(group), tuple(range(size)), group)


_outside_tracing: Callable[[], AbstractContextManager[Any]] = nullcontext


def set_outside_tracing(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Give a context that leaves the modes of a trace: a mesh may be met there for the first time,
    and its ranks are real numbers, not traced ones."""
    global _outside_tracing
    _outside_tracing = context


@lru_cache(maxsize=1024)
def _dim_group(mesh: DeviceMesh, mesh_dim: int, group: dist.ProcessGroup) -> DimGroup:
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise RuntimeError(
            f"This rank (global rank {dist.get_rank()}) is not part of {mesh}: only ranks of the "
            "mesh may communicate on it."
        )
    index: list[int | slice] = list(coordinates)
    index[mesh_dim] = slice(None)
    with _outside_tracing():
        global_ranks = mesh.mesh[tuple(index)].tolist()
    order = tuple(dist.get_group_rank(group, global_rank) for global_rank in global_ranks)
    return DimGroup(group.group_name, len(order), coordinates[mesh_dim], order, group)


class _Issued(NamedTuple):
    """Issued outside of functional collectives: what it fills, what to wait for, what it sends."""

    received: Tensor
    works: Sequence[dist.Work]
    sent: Tensor


_Raw = Tensor | list[Tensor] | _Issued


def _wait(raw: _Raw) -> Any:
    if isinstance(raw, _Issued):
        for work in raw.works:
            work.wait()
        return raw.received
    if isinstance(raw, list):
        return [_ops.wait_tensor(part) for part in raw]
    return _ops.wait_tensor(raw)


class Pending:
    """A result on its way: ``wait()`` returns it, on any number of calls."""

    def __init__(self, raw: _Raw, finish: Callable[[Any], Tensor]) -> None:
        self._raw, self._finish = raw, finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            self._result = self._finish(_wait(self._raw))
        return self._result

    def then(self, finish: Callable[[Tensor], Tensor]) -> Pending:
        """A ``Pending`` that applies ``finish`` to this one's result."""
        first = self._finish
        return Pending(self._raw, lambda raw: finish(first(raw)))


def _done(result: Tensor) -> Pending:
    pending = Pending(result, lambda tensor: tensor)
    pending._result = result
    return pending


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes; a copy only where its last dim is not dense."""
    if not tensor.dim():
        tensor = tensor.reshape(1)
    if tensor.stride(-1) != 1:  # also one element with an odd stride, which counts as contiguous
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)


def _to_wire(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _WIRE_DTYPES else as_bytes(tensor)


def _split_at(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]


# ---------------------------------------------------------------------------- exchange


def exchange_flat(
    send: Tensor, send_numels: Sequence[int], recv_numels: Sequence[int], group: DimGroup
) -> Tensor:
    """Send a slice of a flat buffer to every rank and receive one from each.

    Args:
        send: ``(sum(send_numels),)``, slices in coordinate order.
        send_numels: Elements for each coordinate; zeros send nothing.
        recv_numels: Elements from each coordinate; ``recv_numels[s]`` on this rank is
            ``send_numels[this]`` on rank ``s``.

    Returns:
        ``(sum(recv_numels),)``, slices in coordinate order.
    """
    return exchange_flat_async(send, send_numels, recv_numels, group).wait()


def exchange_flat_async(
    send: Tensor, send_numels: Sequence[int], recv_numels: Sequence[int], group: DimGroup
) -> Pending:
    """As ``exchange_flat``, but returns before the data has arrived."""
    raw, slices = _start_exchange(send, send_numels, recv_numels, group)
    total = sum(recv_numels)

    def finish(received: Tensor) -> Tensor:
        if group.in_order and received.numel() * received.itemsize == total * send.itemsize:
            return received.view(send.dtype)
        found = [part for part in slices(received) if part.numel()]
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else send.new_empty(0)

    return Pending(raw, finish)


def exchange_by_pairs(
    send: Tensor,
    send_numels: Sequence[int],
    recv_numels: Sequence[int],
    group: DimGroup,
) -> Pending:
    """As ``exchange_flat_async``, by one batch of point-to-point sends and receives.

    Only pairs that have something to say take part. Not for compiled code: a graph cannot tell
    that a buffer is in use until its send is waited for.
    """
    assert not send_numels[group.coordinate], "a rank sends nothing to itself"
    scale = 1 if send.dtype in _WIRE_DTYPES else send.dtype.itemsize
    wire = _to_wire(send.contiguous())
    received = wire.new_empty(sum(recv_numels) * scale)
    parts = wire.split([numel * scale for numel in send_numels])
    places = received.split([numel * scale for numel in recv_numels])
    # Peers by distance, so that not all ranks start with the same one.
    peers = [(group.coordinate + step) % group.size for step in range(1, group.size)]
    transfers: list[tuple[Callable[..., Any], Tensor, int]]
    transfers = [(dist.irecv, places[peer], peer) for peer in reversed(peers) if recv_numels[peer]]
    transfers += [(dist.isend, parts[peer], peer) for peer in peers if send_numels[peer]]
    operations = [
        dist.P2POp(operation, tensor, group=group.process_group, group_peer=group.order[peer])
        for operation, tensor, peer in transfers
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Pending(_Issued(received, works, wire), lambda arrived: arrived.view(send.dtype))


def exchange_slices(
    send: Tensor, send_numels: Sequence[int], recv_numels: Sequence[int], group: DimGroup
) -> list[Tensor]:
    """As ``exchange_flat``, but returns the received slices one by one, by coordinate."""
    raw, slices = _start_exchange(send, send_numels, recv_numels, group)
    return slices(_ops.wait_tensor(raw))


def _start_exchange(
    send: Tensor, send_numels: Sequence[int], recv_numels: Sequence[int], group: DimGroup
) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Issue an exchange; returns what to wait for, and what finds the slices in it."""
    assert send.dim() == 1 and send.numel() == sum(send_numels), (send.shape, send_numels)
    assert len(send_numels) == len(recv_numels) == group.size
    dtype = send.dtype
    wire = _to_wire(send.contiguous())
    scale = 1 if wire.dtype == dtype else dtype.itemsize
    send_sizes = [numel * scale for numel in send_numels]
    recv_sizes = [numel * scale for numel in recv_numels]
    if not group.in_order:
        wire, send_sizes = _by_group_rank(wire, send_sizes, group.order)
        recv_sizes = _sizes_by_group_rank(recv_sizes, group.order)

    # The fake process group refuses an empty input; a few elements that go to nobody but this
    # rank itself cost nothing and keep the call the same everywhere.
    extra = [0] * group.size
    if sum(send_sizes) == 0:
        this = group.order[group.coordinate]
        extra[this] = _ALIGNED_BYTES // wire.itemsize
        wire, send_sizes = torch.zeros(extra[this], dtype=wire.dtype, device=wire.device), extra
    recv_and_extra = [size + more for size, more in zip(recv_sizes, extra, strict=True)]
    raw = _ops.all_to_all_single(wire, recv_and_extra, send_sizes, group.name)
    starts = _split_at(recv_and_extra)

    def slices(received: Tensor) -> list[Tensor]:
        return [received[starts[g] : starts[g] + recv_sizes[g]].view(dtype) for g in group.order]

    return raw, slices


def _sizes_by_group_rank(sizes: list[int], order: tuple[int, ...]) -> list[int]:
    in_group = [0] * len(order)
    for group_rank, size in zip(order, sizes, strict=True):
        in_group[group_rank] = size
    return in_group


def _by_group_rank(
    wire: Tensor, sizes: list[int], order: tuple[int, ...]
) -> tuple[Tensor, list[int]]:
    slices = dict(zip(order, wire.split(sizes), strict=True))
    in_group = torch.cat([slices[group_rank] for group_rank in range(len(order))])
    return in_group, _sizes_by_group_rank(sizes, order)


# -------------------------------------------------------------------------- all_gather


def all_gather_rows(
    local: Tensor,
    counts: Sequence[int],
    group: DimGroup,
    *,
    algorithm: Algorithm | None = None,
) -> Tensor:
    """Concatenate every rank's rows.

    Args:
        local: ``(counts[coordinate], ...)``; trailing dims equal on all ranks.
        counts: Rows of each rank, by coordinate.
        algorithm: How; ``None`` chooses by ``counts`` and the kind of device alone, so that all
            ranks agree.

    Returns:
        ``(sum(counts), ...)``, contiguous.
    """
    return all_gather_rows_async(local, counts, group, algorithm=algorithm).wait()


def all_gather_rows_async(
    local: Tensor,
    counts: Sequence[int],
    group: DimGroup,
    *,
    algorithm: Algorithm | None = None,
) -> Pending:
    """As ``all_gather_rows``, but returns before the data has arrived."""
    counts = tuple(counts)
    assert local.shape[0] == counts[group.coordinate], (local.shape, counts, group)
    shape = (sum(counts), *local.shape[1:])
    if group.size == 1 or 0 in shape:
        return _done(local.contiguous() if group.size == 1 else local.new_empty(shape))
    algorithm = algorithm or _choose_algorithm(local, counts)
    if algorithm is Algorithm.UNEVEN:
        return _all_gather_uneven(local, counts, group)
    staging_rows = max(counts)
    row_shape = local.shape[1:]
    staging = local.contiguous()
    if local.shape[0] != staging_rows:
        staging = local.new_empty((staging_rows, *row_shape))  # its padding is never read
        staging[: local.shape[0]].copy_(local)
    dtype = local.dtype
    raw = _start_even_all_gather(_to_wire(staging), group)

    def finish(gathered: Tensor) -> Tensor:
        gathered = gathered.view(dtype)
        if algorithm is Algorithm.EVEN and group.in_order:
            return gathered
        starts = [group.order[c] * staging_rows for c in range(group.size)]
        return torch.cat(
            [
                gathered[start : start + rows]
                for start, rows in zip(starts, counts, strict=True)
                if rows
            ]
        )

    return Pending(raw, finish)


def _choose_algorithm(tensor: Tensor, counts: Sequence[int]) -> Algorithm:
    """By what all ranks share: whether a rank runs a graph is known to that rank alone."""
    if tensor.device.type in _DIRECT_DEVICES:
        return Algorithm.UNEVEN
    return choose_algorithm(counts)


def _start_even_all_gather(wire: Tensor, group: DimGroup) -> Tensor | _Issued:
    """Issue an all_gather of equal parts; returns what to wait for.

    Not by the functional collective outside of graphs: on gloo that is a coalesced all_gather,
    and two of those under way at once damage the heap (torch 2.13: one crash in about 20,000
    pairs, none in 280,000 pairs of the plain all_gather).
    """
    if not _runs_in_place(wire):
        return _ops.all_gather_into_tensor(wire, group.size, group.name)
    out = wire.new_empty((group.size * wire.shape[0], *wire.shape[1:]))
    sent = wire.detach()
    work = dist.all_gather_single(out, sent, group=group.process_group, async_op=True)
    return _Issued(out, [work], sent)


def _all_gather_uneven(local: Tensor, counts: tuple[int, ...], group: DimGroup) -> Pending:
    """Every rank with rows broadcasts them into place: exact bytes, no staging buffer.

    An uneven list all_gather of NCCL is the same; gloo has none.
    """
    full = local.new_empty((sum(counts), *local.shape[1:]))
    parts = full.split(list(counts))
    parts[group.coordinate].copy_(local.detach())
    roots = [(part, root) for part, root in zip(parts, group.order, strict=True) if part.shape[0]]
    if not _runs_in_place(local):
        # Each part is a tensor of its own there.
        raws = [_ops.broadcast(_to_wire(part), root, group.name) for part, root in roots]
        return Pending(raws, lambda arrived: torch.cat([x.view(local.dtype) for x in arrived]))
    raws = [_ops.broadcast_(_to_wire(part), root, group.name) for part, root in roots]
    return Pending(raws, lambda _: full)


# ---------------------------------------------------------------------- reduce_scatter


def reduce_scatter_rows(
    full: Tensor,
    counts: Sequence[int],
    op: str,
    group: DimGroup,
    *,
    algorithm: Algorithm | None = None,
) -> Tensor:
    """Reduce every rank's full tensor and keep this rank's rows of the result.

    Args:
        full: ``(sum(counts), ...)`` on every rank.
        counts: Rows each rank keeps, by coordinate.
        op: "sum", "avg", "max", "min" or "product".
        algorithm: How; ``None`` chooses by ``counts`` and the kind of device alone.

    Returns:
        ``(counts[coordinate], ...)``, contiguous. "avg" divides by the number of ranks once.
    """
    return reduce_scatter_rows_async(full, counts, op, group, algorithm=algorithm).wait()


def reduce_scatter_rows_async(
    full: Tensor,
    counts: Sequence[int],
    op: str,
    group: DimGroup,
    *,
    algorithm: Algorithm | None = None,
) -> Pending:
    """As ``reduce_scatter_rows``, but returns before the data has arrived."""
    counts = tuple(counts)
    assert full.shape[0] == sum(counts), (full.shape, counts)
    _check_reduce_op(op, full.dtype)
    mine = counts[group.coordinate]
    if group.size == 1:
        return _done(full.contiguous().clone())
    if full.numel() == 0:
        return _done(full.new_empty((mine, *full.shape[1:])))
    algorithm = algorithm or _choose_algorithm(full, counts)
    if algorithm is Algorithm.UNEVEN:
        return _reduce_scatter_uneven(full, counts, op, group)
    chunks = full.split(list(counts))
    chunk_rows = max(counts)
    if algorithm is Algorithm.EVEN and group.in_order:
        staging = full.contiguous()
    else:
        staging = full.new_zeros((group.size * chunk_rows, *full.shape[1:]))
        for group_rank, chunk in zip(group.order, chunks, strict=True):
            staging.narrow(0, group_rank * chunk_rows, chunk.shape[0]).copy_(chunk)
    raw = _ops.reduce_scatter_tensor(staging, _wire_op(op), group.size, group.name)
    return Pending(raw, lambda reduced: _finish_op(reduced[:mine], op, group.size))


def _reduce_scatter_uneven(
    full: Tensor, counts: tuple[int, ...], op: str, group: DimGroup
) -> Pending:
    row_shape = full.shape[1:]
    row_numel = row_shape.numel()
    mine = counts[group.coordinate]
    send_numels = [rows * row_numel for rows in counts]
    recv_numels = [mine * row_numel] * group.size
    pending = exchange_flat_async(full.reshape(-1), send_numels, recv_numels, group)

    def finish(received: Tensor) -> Tensor:
        # In coordinate order on every rank, so the result is repeatable.
        reduced = _reduce_stack(received.view(group.size, mine, *row_shape), op)
        return _finish_op(reduced, op, group.size)

    return pending.then(finish)


# ------------------------------------------------------------------ reduce, broadcast


def all_reduce(tensor: Tensor, op: str, group: DimGroup) -> Tensor:
    """Reduce over the ranks; every rank gets the whole result. The input stays unchanged."""
    _check_reduce_op(op, tensor.dtype)
    if group.size == 1 or tensor.numel() == 0:
        return tensor.clone()
    raw = _ops.all_reduce(tensor.contiguous(), _wire_op(op), group.name)
    return _finish_op(_ops.wait_tensor(raw), op, group.size)


def broadcast(tensor: Tensor, root: int, group: DimGroup) -> Tensor:
    """Copy the tensor of the rank at coordinate ``root`` to all ranks.

    ``tensor`` has the same shape and dtype on every rank; only the root's values matter.
    """
    if group.size == 1 or tensor.numel() == 0:
        return tensor.clone()
    contiguous = tensor.detach().contiguous() if _runs_in_place(tensor) else tensor.contiguous()
    wire, group_root = _to_wire(contiguous), group.order[root]
    if not _runs_in_place(tensor):
        result = _ops.wait_tensor(_ops.broadcast(wire, group_root, group.name))
    elif group.coordinate == root:
        sent = _ops.broadcast_(wire, group_root, group.name)  # writes nothing here
        result = wire.clone()  # while it is sent
        _ops.wait_tensor(sent)
    else:
        result = torch.empty_like(wire)
        result = _ops.wait_tensor(_ops.broadcast_(result, group_root, group.name))
    return result.view(tensor.dtype).view(tensor.shape)


def _runs_in_place(tensor: Tensor) -> bool:
    """Whether in-place collectives may be used: they cannot be traced."""
    return not torch.compiler.is_compiling() and type(tensor) in (Tensor, Parameter)


_REDUCE_STACK: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "avg": lambda stack: stack.sum(0, dtype=stack.dtype),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "product": lambda stack: stack.prod(0, dtype=stack.dtype),
}


def _reduce_stack(stack: Tensor, op: str) -> Tensor:
    return _REDUCE_STACK[op](stack)


def _wire_op(op: str) -> str:
    return "sum" if op == "avg" else op  # gloo takes "avg" and returns the sum


def _finish_op(reduced: Tensor, op: str, size: int) -> Tensor:
    return reduced / size if op == "avg" else reduced


def _check_reduce_op(op: str, dtype: torch.dtype) -> None:
    if op not in _REDUCE_STACK:
        raise NotImplementedError(
            f"Cannot reduce with op {op!r}: {', '.join(_REDUCE_STACK)} are supported."
        )
    if op == "avg" and not dtype.is_floating_point and not dtype.is_complex:
        raise ValueError(f"'avg' needs a floating dtype, got {dtype}: reduce with 'sum'.")
    if dtype not in _WIRE_DTYPES:
        raise NotImplementedError(
            f"Cannot reduce {dtype} over ranks: cast to a dtype that backends reduce "
            "(float32, bfloat16, int64, ...) first."
        )
