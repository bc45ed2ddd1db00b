"""The weights a forward sees: gathered before it, gathered again for its backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dtensor_owner.parameter_group import ParameterGroup, PendingGradients

_keys = count()


class GroupUse:
    """One use of a parameter group: by one forward, and by the backward that follows.

    Args:
        group: The group.
        keep: Keep the gathered weights until backward is done, instead of gathering twice.
        ahead: How many groups earlier than its first use ``prepare`` is called; so many
            reductions may be under way when this one is issued.
    """

    def __init__(self, group: ParameterGroup, *, keep: bool, ahead: int = 0) -> None:
        self.group = group
        self.keep = keep
        self.flat: Tensor | None = None
        self.in_backward = False
        #: Uses without a backward of their own (frozen weights), over when this one's is.
        self.followers: list[GroupUse] = []
        self._ahead = ahead
        self._anchor: tuple[_Reduction, Tensor] | None = None
        self._key = next(_keys)
        self._version = 0
        self._backward_over = False
        # A graph may be dropped without a backward; then nothing else takes the weights away.
        weakref.finalize(self, group.hide, self._key).atexit = False

    def prepare(self) -> None:
        """Issue the gather, before other modules run that come first."""
        self.group.adopt_changes()
        self.group.prefetch()
        if self._anchor is None and torch.is_grad_enabled() and self.group.requires_grad:
            self._anchor = _anchor(self.group, self._ahead)

    def start_forward(self, flat: Tensor | None = None) -> None:
        """Wait for the weights (or take ``flat``) and show them to the modules."""
        self._version = self.group.version()
        self.flat = self.group.weights() if flat is None else flat
        self.group.show(self._key, self._tensors(ends_backward=True))
        if torch.is_grad_enabled() and not self.keep:
            _gathered[self.flat.untyped_storage().data_ptr()] = self

    def end_forward(self) -> None:
        """Take the weights away from the modules, and free them unless they are kept."""
        self.group.hide(self._key)
        if self.flat is None:
            return
        _gathered.pop(self.flat.untyped_storage().data_ptr(), None)
        if not self.keep or not torch.is_grad_enabled():
            if torch.is_grad_enabled():
                self.group.keep_part(self.flat)
            self.flat = None

    def start_unsharded(self) -> None:
        """Gather and show the weights, outside of any forward."""
        self.group.adopt_changes()
        self.group.forget_gathered()
        self._version = self.group.version()
        self.flat = self.group.weights()
        self.group.hold(self._key, self.flat)
        self.group.show(self._key, self._tensors(ends_backward=False))
        self.flat = None  # the group has it

    def prepare_backward(self) -> None:
        """Issue the gather for backward, where the weights were freed."""
        if self.flat is None:
            self.group.prefetch()

    def start_backward(self) -> None:
        """Show the weights again: activation checkpointing runs parts of forward in backward.

        Reentrant checkpointing also runs a backward of its own for them, so that they need
        a way to the parameters.
        """
        self._check_version()
        if self.in_backward:
            return
        self.in_backward, self._backward_over = True, False
        self.flat = self.backward_weights()
        with torch.enable_grad():
            self.group.show(self._key, self._tensors(ends_backward=False))

    def _tensors(self, *, ends_backward: bool) -> tuple[Tensor, ...]:
        assert self.flat is not None
        if not (self.group.requires_grad and torch.is_grad_enabled()):
            return self.group.full_tensors(self.flat)
        (reduction, token), self._anchor = self._anchor or _anchor(self.group, ahead=0), None
        return _Unshard.apply(reduction, token, self.flat, self if ends_backward else None)

    def end_backward(self) -> None:
        """Take the weights away and free them; without effect the second time."""
        self.group.hide(self._key)
        self.group.release()  # an optimizer may change the parameters now
        self.group.keep_part(None)
        self.flat = None
        self.in_backward, self._backward_over = False, True
        for follower in self.followers:
            follower.end_backward()

    def backward_weights(self) -> Tensor:
        """The flat weights of the forward, gathered again where they were freed."""
        if self.flat is not None:
            return self.flat
        self._check_version()
        flat = self.group.weights()
        if not self._backward_over:
            self.flat = flat
        return flat

    def _check_version(self) -> None:
        if self._version != self.group.version():
            raise RuntimeError(
                f"One of the parameters {self.group.names} was changed in place between forward "
                "and backward, which needs the weights that forward used: call optimizer.step() "
                "and load_state_dict() before forward or after backward."
            )


# ------------------------------------------------------------------------ into the graph


class _Reduction:
    """Carries gradients of one use from the node that issues the reduction to the one that waits.

    Two nodes of the graph lead from the parameters to the full weights. In backward the later
    one issues the reduction of the gradients, the earlier one waits for it. Autograd runs what
    was made last first: where the earlier node was made before the weights of other modules, it
    waits only when those modules have issued theirs, so that reductions overlap their backward.

    Args:
        group: The group.
        ahead: How many reductions may be under way while a module computes.
    """

    def __init__(self, group: ParameterGroup, ahead: int) -> None:
        self.group = group
        self._ahead = ahead
        self._pending: PendingGradients | None = None

    def start(self, gradients: Sequence[Tensor | None]) -> None:
        while len(_under_way) >= max(1, self._ahead):
            _under_way.popleft().arrive()
        self._pending = self.group.start_reduce(gradients)
        if self._pending is not None:
            _under_way.append(self._pending)

    def finish(self) -> Sequence[Tensor | None]:
        pending, self._pending = self._pending, None
        if pending is None:
            return [None] * len(self.group.parameters)
        if pending in _under_way:
            _under_way.remove(pending)
        return pending.wait()


#: Reductions that were issued and not waited for, oldest first. Each keeps full gradients.
_under_way: deque[PendingGradients] = deque()


def _anchor(group: ParameterGroup, ahead: int) -> tuple[_Reduction, Tensor]:
    """The earlier of the two nodes, as the token that it returns."""
    reduction = _Reduction(group, ahead)
    return reduction, _Parameters.apply(reduction, *group.parameters)


class _Parameters(torch.autograd.Function):
    """From sharded parameters to a token that stands for them; backward waits for gradients."""

    @staticmethod
    def forward(ctx: Any, reduction: _Reduction, *parameters: nn.Parameter) -> Tensor:
        ctx.reduction = reduction
        return torch.empty(0, device=reduction.group.buffer.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.reduction.finish()


class _Unshard(torch.autograd.Function):
    """From the token to full weights; backward issues the reduction of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, reduction: _Reduction, token: Tensor, flat: Tensor, ending: GroupUse | None
    ) -> tuple[Tensor, ...]:
        ctx.reduction, ctx.ending = reduction, ending
        ctx.set_materialize_grads(False)  # unused weights then come as None
        return reduction.group.full_tensors(flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.ending is not None:
            ctx.ending.end_backward()
        ctx.reduction.start(gradients)
        return None, torch.empty(0, device=ctx.reduction.group.buffer.device), None, None


# ------------------------------------------------------------- weights saved for backward

#: Uses whose forward is running, by the address of their gathered weights.
_gathered: dict[int, GroupUse] = {}


class _SavedWeight(NamedTuple):
    """Stands in the graph for a view of gathered weights, ``offset`` elements into them."""

    use: GroupUse
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


def _pack(tensor: Tensor) -> Tensor | _SavedWeight:
    if type(tensor) not in (Tensor, nn.Parameter):
        return tensor
    use = _gathered.get(tensor.untyped_storage().data_ptr())
    if use is None or use.flat is None or tensor.dtype != use.flat.dtype:
        return tensor
    offset = tensor.storage_offset() - use.flat.storage_offset()
    return _SavedWeight(use, tensor.size(), tensor.stride(), offset)


def _unpack(saved: Tensor | _SavedWeight) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    flat = saved.use.backward_weights()
    return flat.as_strided(saved.size, saved.stride, flat.storage_offset() + saved.offset)


@contextmanager
def weights_not_saved() -> Iterator[None]:
    """Autograd keeps no gathered weight alive: it stores which one it was."""
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def forget_reductions() -> None:
    """Drop what a backward that failed midway has left under way."""
    _under_way.clear()
