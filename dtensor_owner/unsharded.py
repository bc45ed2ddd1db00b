"""The weights a forward sees: gathered before it, gathered again for its backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dtensor_owner.parameter_group import ParameterGroup

_keys = count()


class GroupUse:
    """One use of a parameter group: by one forward, and by the backward that follows.

    Args:
        group: The group.
        keep: Keep the gathered weights until backward is done, instead of gathering twice.
    """

    def __init__(self, group: ParameterGroup, *, keep: bool) -> None:
        self.group = group
        self.keep = keep
        self.flat: Tensor | None = None
        self.in_backward = False
        #: Uses without a backward of their own (frozen weights), over when this one's is.
        self.followers: list[GroupUse] = []
        self._key = next(_keys)
        self._version = 0
        self._backward_over = False
        # A graph may be dropped without a backward; then nothing else takes the weights away.
        weakref.finalize(self, group.hide, self._key).atexit = False  # type: ignore[misc]

    def start_forward(self, flat: Tensor | None = None) -> None:
        """Gather the weights (or take ``flat``) and show them to the modules."""
        self.group.adopt_changes()
        self._version = self.group.version()
        self.flat = self.group.gather() if flat is None else flat
        self.group.show(self._key, self._tensors(ends_backward=True))
        if torch.is_grad_enabled() and not self.keep:
            _gathered[self.flat.untyped_storage().data_ptr()] = self

    def end_forward(self) -> None:
        """Take the weights away from the modules, and free them unless they are kept."""
        self.group.hide(self._key)
        if self.flat is not None:
            _gathered.pop(self.flat.untyped_storage().data_ptr(), None)
        if not self.keep or not torch.is_grad_enabled():
            self.flat = None

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
        if self.group.requires_grad and torch.is_grad_enabled():
            return _Unshard.apply(self, self.flat, ends_backward, *self.group.parameters)
        return self.group.full_tensors(self.flat)

    def end_backward(self) -> None:
        """Take the weights away and free them; without effect the second time."""
        self.group.hide(self._key)
        self.flat = None
        self.in_backward, self._backward_over = False, True
        for follower in self.followers:
            follower.end_backward()

    def backward_weights(self) -> Tensor:
        """The flat weights of the forward, gathered again where they were freed."""
        if self.flat is not None:
            return self.flat
        self._check_version()
        flat = self.group.gather()
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


class _Unshard(torch.autograd.Function):
    """From sharded parameters to full weights; backward reduces the gradients of the weights."""

    @staticmethod
    def forward(
        ctx: Any, use: GroupUse, flat: Tensor, ends_backward: bool, *parameters: nn.Parameter
    ) -> tuple[Tensor, ...]:
        ctx.use, ctx.ends_backward = use, ends_backward
        ctx.set_materialize_grads(False)  # unused weights then come as None
        return use.group.full_tensors(flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        use: GroupUse = ctx.use
        if ctx.ends_backward:
            use.end_backward()
        return None, None, None, *use.group.reduce(gradients)


# ------------------------------------------------------------- weights saved for backward

#: Uses whose forward is running, by the address of their gathered weights.
_gathered: dict[int, GroupUse] = {}


class _SavedWeight(NamedTuple):
    """Stands in the graph for a view of gathered weights."""

    use: GroupUse
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _pack(tensor: Tensor) -> Tensor | _SavedWeight:
    if type(tensor) not in (Tensor, nn.Parameter):
        return tensor
    use = _gathered.get(tensor.untyped_storage().data_ptr())
    if use is None or use.flat is None or tensor.dtype != use.flat.dtype:
        return tensor
    return _SavedWeight(use, tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(saved: Tensor | _SavedWeight) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    flat = saved.use.backward_weights()
    return flat.as_strided(saved.size, saved.stride, saved.offset)


@contextmanager
def weights_not_saved() -> Iterator[None]:
    """Autograd keeps no gathered weight alive: it stores which one it was."""
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield
