"""The tensor work of a Muon step, on plain local tensors: what a plan says, carried out.

Weights and momenta are updated in place, gradients only read. A bucket's step has five stages;
the ones beside Newton-Schulz and the exchanges move many small pieces with few foreach calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dtensor_owner.muon_plan import Settings
from dtensor_owner.muon_program import Leg, Owned, Part, RankProgram
from dtensor_owner.newton_schulz import newton_schulz
from placements.collectives import DimGroup, Pending, exchange_by_pairs, exchange_flat_async


@dataclass(frozen=True)
class BucketWork:
    """What does not change from step to step in one bucket on this rank.

    Args:
        program: Positions and sizes.
        settings: Settings of the bucket's parameter group.
        lr_ratios: Step size over lr of each held matrix.
        params: Index of the parameter of each held matrix.
        gather_dtype: Dtype of Newton-Schulz inputs on their way to the owners.
        device: Where the tensors are.
        group: The other ranks; None where there are none.
        pairs: Whether exchanges go from rank to rank, by sends and receives.
    """

    program: RankProgram
    settings: Settings
    lr_ratios: tuple[float, ...]
    params: tuple[int, ...]
    gather_dtype: torch.dtype
    device: torch.device
    group: DimGroup | None
    pairs: bool = False


@dataclass(frozen=True)
class Shards:
    """What this rank holds of the matrices of one bucket, in the order of ``held``."""

    params: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]


class Numbers(NamedTuple):
    """Hyperparameters that may change from step to step.

    Args:
        lr: Learning rate, before it is adjusted to a matrix's shape.
        keep: What weight decay leaves of a weight, ``1 - lr * weight_decay``.
        momentum: Weight of the old momentum.
    """

    lr: float
    keep: float
    momentum: float


class Stages(Protocol):
    """The stages of one bucket beside Newton-Schulz; see the functions of these names below."""

    def advance(self) -> Tensor: ...

    def assemble(self, own: Tensor, received: Tensor) -> list[Tensor]: ...

    def give(self, results: list[Tensor]) -> Tensor: ...

    def apply(self, own: Tensor, results: list[Tensor], taken: Tensor) -> Tensor: ...


class EagerStages:
    """The stages as they are, on these shards."""

    def __init__(self, work: BucketWork, shards: Shards, numbers: Numbers) -> None:
        self.work, self.shards, self.numbers = work, shards, numbers

    def advance(self) -> Tensor:
        return advance(self.work, self.shards, self.numbers)

    def assemble(self, own: Tensor, received: Tensor) -> list[Tensor]:
        return assemble(self.work, own, received)

    def give(self, results: list[Tensor]) -> Tensor:
        return give(self.work, results)

    def apply(self, own: Tensor, results: list[Tensor], taken: Tensor) -> Tensor:
        apply(self.work, self.shards, results, taken, self.numbers)
        return own


def run_step(works: Sequence[BucketWork], stages: Sequence[Stages]) -> list[Tensor]:
    """Do the Muon step of all buckets; every rank of their groups calls this.

    The inputs of the next bucket travel while this one is orthogonalized, and its results
    travel while the next one is: at most three buckets take memory at a time.

    Returns:
        Tensors that a compiler has to keep in order that the step is done.
    """
    runs = [_BucketRun(work, its_stages) for work, its_stages in zip(works, stages)]
    done = []
    for position, run in enumerate(runs):
        if position == 0:
            run.launch()
        if position + 1 < len(runs):
            runs[position + 1].launch()
        run.orthogonalize()
        if position > 0:
            done.append(runs[position - 1].finish())
    if runs:
        done.append(runs[-1].finish())
    return done


class _BucketRun:
    """One bucket's step, in three parts between which other buckets do theirs."""

    def __init__(self, work: BucketWork, stages: Stages) -> None:
        self.work, self.stages = work, stages
        self.own = torch.empty(0, dtype=work.gather_dtype, device=work.device)
        self.results: list[Tensor] = []
        self.gathered: Pending | None = None
        self.scattered: Pending | None = None

    def launch(self) -> None:
        """Advance the momentum and send Newton-Schulz inputs to their owners."""
        packed = self.stages.advance() if self.work.program.held else self.own
        leg = self.work.program.gather
        number_sent = sum(leg.send_numels)
        self.own = packed[number_sent:]
        if leg.needed:
            self.gathered = self._exchange(leg, packed[:number_sent])

    def orthogonalize(self) -> None:
        """Wait for the inputs, orthogonalize what this rank owns, send the results back."""
        program, settings = self.work.program, self.work.settings
        received = self._arrived(self.gathered, self.work.gather_dtype)
        sent = self._nothing(settings.dtype)
        if program.owned:
            batches = self.stages.assemble(self.own, received)
            self.results = [_orthogonalized(batch, settings) for batch in batches]
            sent = self.stages.give(self.results)
        self.gathered = None
        if program.scatter.needed:
            self.scattered = self._exchange(program.scatter, sent)

    def finish(self) -> Tensor:
        """Wait for the results and update the weights."""
        done = self._arrived(self.scattered, self.work.settings.dtype)
        if self.work.program.held:
            done = self.stages.apply(self.own, self.results, done)
        self.own = self._nothing(self.work.gather_dtype)
        self.results, self.scattered = [], None
        return done

    def _exchange(self, leg: Leg, send: Tensor) -> Pending:
        assert self.work.group is not None
        numels = leg.send_numels, leg.recv_numels
        if self.work.pairs:
            return exchange_by_pairs(send, *numels, self.work.group)
        return exchange_flat_async(send, *numels, self.work.group)

    def _arrived(self, pending: Pending | None, dtype: torch.dtype) -> Tensor:
        # Waited for even where nothing arrives: a compiler drops a collective that no one waits
        # for, and the other ranks would wait for this one.
        return self._nothing(dtype) if pending is None else pending.wait()

    def _nothing(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype, device=self.work.device)


def _orthogonalized(batch: Tensor, settings: Settings) -> Tensor:
    steps = len(settings.coefficients)
    matrices = batch[0] if batch.shape[0] == 1 else batch
    result = newton_schulz(
        matrices, steps, settings.coefficients, settings.eps, settings.dtype, settings.method
    )
    return result.view(batch.shape)


# ---------------------------------------------------------------------------- the stages


def advance(work: BucketWork, shards: Shards, numbers: Numbers) -> Tensor:
    """Mix the gradients into the momenta and pack the Newton-Schulz inputs.

    A momentum becomes ``momentum`` times itself plus ``1 - momentum`` times the gradient; with
    Nesterov's look ahead, the input is the same mixture of the gradient and the new momentum.

    Returns:
        ``(sum(pack_sizes),)`` in the dtype in which inputs travel.
    """
    program, momenta, momentum = work.program, shards.momenta, numbers.momentum
    grads = [grad.to(buffer.dtype) for grad, buffer in zip(shards.grads, momenta)]
    torch._foreach_lerp_(momenta, grads, 1 - momentum)
    inputs: Sequence[Tensor] = momenta
    if work.settings.nesterov:
        inputs = torch._foreach_lerp(grads, momenta, momentum)
    packed = torch.empty(sum(program.pack_sizes), dtype=work.gather_dtype, device=work.device)
    if program.pack:
        needed = [inputs[position] for position in program.pack]
        places = packed.split(list(program.pack_sizes))
        _copy([place.view(piece.shape) for place, piece in zip(places, needed)], needed)
    return packed


def assemble(work: BucketWork, own: Tensor, received: Tensor) -> list[Tensor]:
    """Put the owned matrices together from what this rank holds and what it received.

    Returns:
        One ``(number, rows, cols)`` per batch, in the dtype in which inputs travel.
    """
    program = work.program
    batches = [
        torch.empty(shape, dtype=work.gather_dtype, device=work.device) for shape in program.batches
    ]
    arrived = received.split(list(program.gather.recv_sizes)) if received.numel() else ()
    number_sent = len(program.pack) - sum(
        part.place < 0 for matrix in program.owned for part in matrix.parts
    )
    own_sizes = program.pack_sizes[number_sent:]
    at_hand = own.split(list(own_sizes)) if own_sizes else ()
    targets, sources = [], []
    for matrix in program.owned:
        whole = _whole(batches, matrix)
        for part in matrix.parts:
            source = arrived[part.place] if part.place >= 0 else at_hand[~part.place]
            targets.append(_cut(whole, part))
            sources.append(source.view(part.shape))
    _copy(targets, sources)
    return batches


def give(work: BucketWork, results: list[Tensor]) -> Tensor:
    """Pack the parts of this rank's results that other ranks hold.

    Returns:
        ``(sum(send_numels),)`` in the dtype of the results.
    """
    program = work.program
    sent = torch.empty(
        sum(program.scatter.send_numels), dtype=work.settings.dtype, device=work.device
    )
    wholes = [_whole(results, matrix) for matrix in program.owned]
    parts = [_cut(wholes[part.place], part) for part in program.give]
    places = sent.split([part.numel() for part in parts]) if parts else ()
    _copy([place.view(part.shape) for place, part in zip(places, parts)], parts)
    return sent


def apply(
    work: BucketWork, shards: Shards, results: list[Tensor], taken: Tensor, numbers: Numbers
) -> None:
    """Decay the weights and add their updates, from own results or from what came back."""
    program = work.program
    arrived = taken.split(list(program.scatter.recv_sizes)) if taken.numel() else ()
    wholes = [_whole(results, matrix) for matrix in program.owned]
    updates = [
        arrived[part.place].view(part.shape) if part.place >= 0 else _cut(wholes[~part.place], part)
        for part in program.updates
    ]
    params = shards.params
    torch._foreach_mul_(params, numbers.keep)
    for ratio in dict.fromkeys(work.lr_ratios):
        chosen = [position for position, other in enumerate(work.lr_ratios) if other == ratio]
        torch._foreach_add_(
            [params[position] for position in chosen],
            [updates[position] for position in chosen],
            alpha=-numbers.lr * ratio,
        )


def _whole(batches: Sequence[Tensor], matrix: Owned) -> Tensor:
    """The place of an owned matrix in its batch, in the dims of its parameter."""
    place = batches[matrix.batch][matrix.slot]
    return (place.mT if matrix.tall else place).view(matrix.shape)


def _cut(whole: Tensor, part: Part) -> Tensor:
    """The part of a matrix; a view."""
    for dim, start, length in part.cuts:
        whole = whole.narrow(dim, start, length)
    return whole


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
