"""The tensor work of a Muon step, on plain local tensors: what a plan says, carried out.

Everything here is traceable: under ``torch.compile`` a whole step is one graph, in which the
plan's integers are constants. Weights and momenta are updated in place, gradients only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_owner.muon_plan import Settings
from dtensor_owner.muon_program import Leg, Part, RankProgram
from dtensor_owner.newton_schulz import newton_schulz
from placements.boxes import Box, box_shape, full_box
from placements.collectives import DimGroup, Pending, exchange_flat_async

Number = float | Tensor


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
    """

    program: RankProgram
    settings: Settings
    lr_ratios: tuple[float, ...]
    params: tuple[int, ...]
    gather_dtype: torch.dtype
    device: torch.device
    group: DimGroup | None


@dataclass(frozen=True)
class Shards:
    """What this rank holds of the matrices of one bucket, in the order of ``held``."""

    params: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]


@dataclass(frozen=True)
class Numbers:
    """Hyperparameters that may change from step to step.

    Floats in eager mode; 0-dim float64 CPU tensors under compile, where a change of value must not
    compile anew.

    Args:
        lr: Learning rate, before it is adjusted to a matrix's shape.
        keep: What weight decay leaves of a weight, ``1 - lr * weight_decay``.
        momentum: Weight of the old momentum.
    """

    lr: Number
    keep: Number
    momentum: Number


def run_step(
    works: Sequence[BucketWork], shards: Sequence[Shards], numbers: Sequence[Numbers]
) -> None:
    """Do the Muon step of all buckets; every rank of their groups calls this.

    The inputs of the next bucket travel while this one is orthogonalized, and its results
    travel while the next one is: at most three buckets take memory at a time.
    """
    runs = [_BucketRun(*fields) for fields in zip(works, shards, numbers)]
    for position, run in enumerate(runs):
        if position == 0:
            run.launch()
        if position + 1 < len(runs):
            runs[position + 1].launch()
        run.orthogonalize()
        if position > 0:
            runs[position - 1].apply()
    if runs:
        runs[-1].apply()


class _BucketRun:
    """One bucket's step in three stages."""

    def __init__(self, work: BucketWork, shards: Shards, numbers: Numbers) -> None:
        self.work, self.shards, self.numbers = work, shards, numbers
        self.inputs: list[Tensor] = []
        self.results: list[Tensor] = []
        self.gathered: Pending | None = None
        self.scattered: Pending | None = None

    def launch(self) -> None:
        """Advance the momentum and send Newton-Schulz inputs to their owners."""
        settings, program = self.work.settings, self.work.program
        updates = _advance_momenta(self.shards, self.numbers.momentum, settings.nesterov)
        self.inputs = [update.to(self.work.gather_dtype) for update in updates]
        send = [self.inputs[position] for position in program.send]
        self.gathered = self._exchange(program.gather, send, self.work.gather_dtype)

    def orthogonalize(self) -> None:
        """Wait for the inputs, orthogonalize what this rank owns, send the results back."""
        program, settings = self.work.program, self.work.settings
        received = _received(self.gathered, program.gather)
        wholes = [_assembled(parts, received, self.inputs) for parts in program.assembly]
        self.inputs = []
        matrices = [whole.reshape(shape) for whole, shape in zip(wholes, program.shapes)]
        self.results = list(wholes)
        for positions in program.batches:
            batch = _orthogonalized([matrices[position] for position in positions], settings)
            for position, result in zip(positions, batch):
                self.results[position] = result.reshape(wholes[position].shape)
        give = [_cut(self.results[part.place], part.box) for part in program.give]
        self.scattered = self._exchange(program.scatter, give, settings.dtype)

    def apply(self) -> None:
        """Wait for the results and update the weights."""
        program, params = self.work.program, self.shards.params
        taken = _received(self.scattered, program.scatter)
        updates = []
        for part, param in zip(program.updates, params):
            here = part.place < 0
            update = _cut(self.results[~part.place], part.box) if here else taken[part.place]
            updates.append(update.reshape(param.shape))
        _update(params, updates, self.work.lr_ratios, self.numbers)
        self.results = []

    def _exchange(self, leg: Leg, parts: Sequence[Tensor], dtype: torch.dtype) -> Pending | None:
        if not leg.needed:
            return None
        assert self.work.group is not None
        if parts:
            send = torch.cat([part.reshape(-1) for part in parts])
        else:
            send = torch.empty(0, dtype=dtype, device=self.work.device)
        return exchange_flat_async(send, leg.send_numels, leg.recv_numels, self.work.group)


def _received(pending: Pending | None, leg: Leg) -> Sequence[Tensor]:
    if pending is None:
        return ()
    # Waited for even where nothing arrives: a compiler drops a collective that no one waits for,
    # and the other ranks would wait for this one.
    received = pending.wait()
    return received.split(list(leg.recv_sizes)) if leg.recv_sizes else ()


def _assembled(
    parts: Sequence[Part], received: Sequence[Tensor], at_hand: Sequence[Tensor]
) -> Tensor:
    """A whole matrix from its pieces, in the dims of its parameter."""
    boxes = [part.box for part in parts]
    pieces = [
        at_hand[~part.place] if part.place < 0 else received[part.place].view(box_shape(part.box))
        for part in parts
    ]
    if len(pieces) == 1:
        return pieces[0]
    cut_dims = [dim for dim in range(len(boxes[0])) if len({box[dim] for box in boxes}) > 1]
    if len(cut_dims) == 1:
        return torch.cat(pieces, dim=cut_dims[0])
    whole = pieces[0].new_empty([max(box[dim][1] for box in boxes) for dim in range(len(boxes[0]))])
    for box, piece in zip(boxes, pieces):
        _cut(whole, box).copy_(piece)
    return whole


def _cut(tensor: Tensor, box: Box) -> Tensor:
    """The part of a tensor that a box names; a view."""
    for dim, (start, stop) in enumerate(box):
        if (start, stop) != full_box(tensor.shape)[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _orthogonalized(matrices: Sequence[Tensor], settings: Settings) -> Sequence[Tensor]:
    """Orthogonalize matrices of one shape, some of them transposed, in one batch."""
    wide = [matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices]
    batch = torch.stack(wide) if len(wide) > 1 else wide[0]
    steps = len(settings.coefficients)
    result = newton_schulz(batch, steps, settings.coefficients, settings.eps, settings.dtype)
    results = result.unbind() if len(wide) > 1 else [result]
    return [
        result.mT if matrix.shape[0] > matrix.shape[1] else result
        for matrix, result in zip(matrices, results)
    ]


def _advance_momenta(shards: Shards, momentum: Number, nesterov: bool) -> Sequence[Tensor]:
    """Mix the gradients into the momenta; return the Newton-Schulz inputs.

    ``momentum`` times the old plus ``1 - momentum`` times the gradient; with Nesterov's look
    ahead, the same mixture of the gradient and the new momentum.
    """
    momenta = shards.momenta
    grads = [grad.to(buffer.dtype) for grad, buffer in zip(shards.grads, momenta)]
    if not momenta:
        return []
    if isinstance(momentum, Tensor):
        for buffer, grad in zip(momenta, grads):
            buffer.copy_(_mixed(buffer, grad, momentum))
        if not nesterov:
            return momenta
        return [_mixed(buffer, grad, momentum) for buffer, grad in zip(momenta, grads)]
    torch._foreach_lerp_(momenta, grads, 1 - momentum)
    return torch._foreach_lerp(grads, momenta, momentum) if nesterov else momenta


def _mixed(old: Tensor, new: Tensor, weight: Tensor) -> Tensor:
    """``weight * old + (1 - weight) * new``; in fp32 at least, so that it rounds as lerp does."""
    wide = torch.promote_types(old.dtype, torch.float32)
    return (old.to(wide) + (new.to(wide) - old.to(wide)) * (1 - weight)).to(old.dtype)


def _update(
    params: list[Tensor], updates: Sequence[Tensor], ratios: Sequence[float], numbers: Numbers
) -> None:
    if not params:
        return
    if isinstance(numbers.lr, Tensor):
        for param, update, ratio in zip(params, updates, ratios):
            wide = torch.promote_types(param.dtype, torch.float32)
            param.mul_(numbers.keep)
            param.sub_(update.to(wide) * (numbers.lr * ratio))
        return
    torch._foreach_mul_(params, numbers.keep)
    for ratio in dict.fromkeys(ratios):
        chosen = [position for position, other in enumerate(ratios) if other == ratio]
        torch._foreach_add_(
            [params[position] for position in chosen],
            [updates[position] for position in chosen],
            alpha=-numbers.lr * ratio,
        )
