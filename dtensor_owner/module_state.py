"""What happens around the forward and the backward of a sharded module."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtensor_owner.nested import map_tensors, tensors_in
from dtensor_owner.parameter_group import ParameterGroup, start_epoch
from dtensor_owner.unsharded import GroupUse, forget_reductions, weights_not_saved


class ForwardRecord:
    """In which order sharded modules ran in one forward of a root.

    Modules are expected to run in the order of the root's previous forward; as long as they do,
    their weights are gathered ahead. All ranks run the same modules, so all ranks gather the
    same ones ahead.

    Args:
        expected: The order of the previous forward.
    """

    def __init__(self, expected: Sequence[ModuleState]) -> None:
        self.entered: list[ModuleState] = []
        #: Modules whose backward is to come, in the order in which their forwards ended.
        self.left: list[ModuleState] = []
        self._expected = expected

    def enter(self, state: ModuleState) -> Sequence[ModuleState]:
        """Note that a module starts; returns those expected to start next."""
        position = len(self.entered)
        self.entered.append(state)
        if self._expected[position : position + 1] != [state]:
            self._expected = []
        return self._expected[position + 1 : position + 1 + state.prefetch]

    def leave(self, state: ModuleState) -> int:
        """Note that a module whose backward is to come has ended; returns its place."""
        self.left.append(state)
        return len(self.left) - 1

    def before(self, place: int) -> Sequence[ModuleState]:
        """Modules whose backward comes after that of the module in this place."""
        first = max(0, place - self.left[place].prefetch)
        return self.left[first:place][::-1]


class _Progress:
    """Forwards of sharded modules in this process."""

    depth = 0  # how many are running, one inside the other
    epoch = 0  # how many of a root module were started
    record: ForwardRecord | None = None  # of the root that is running


class ModuleCall:
    """One forward of a sharded module, and its backward."""

    def __init__(self, uses: Sequence[GroupUse]) -> None:
        self.uses = uses
        self._epoch = -1
        self._context = ExitStack()

    def enter(self, state: ModuleState, *, is_root: bool) -> None:
        running = state.running_backward()
        if running is None:
            if _Progress.depth == 1 and not is_root:  # called directly, not by its root
                state.forget_prepared()
            # The gathers of later modules are issued before this one's is waited for.
            for use in self.uses:
                use.prepare()
            if _Progress.record is not None and self.uses:
                for later in _Progress.record.enter(state):
                    later.prepare()
        for i, use in enumerate(self.uses):
            use.start_forward(running.uses[i].flat if running else None)
        if is_root and torch.is_grad_enabled():
            self._context.enter_context(weights_not_saved())

    def leave(self) -> None:
        self._context.close()
        for use in self.uses:
            use.end_forward()

    def watch_backward(self, state: ModuleState, inputs: Any, output: Any) -> None:
        """Gather when the output's first gradient arrives, free when an input's does.

        Trainable weights free themselves when their own gradients are there; this is for
        frozen ones, and for forwards that ran under reentrant activation checkpointing.
        """
        watched = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not watched:
            return
        record = _Progress.record if self.uses else None
        place = record.leave(state) if record is not None else 0
        for tensor in watched:
            tensor.register_hook(partial(self._start_backward, state, record, place))
        handles: list[Any] = []
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                handles.append(tensor.register_hook(partial(_end_backward, self.uses, handles)))
        trainable = [use for use in self.uses if use.group.requires_grad]
        if not handles and trainable:
            trainable[-1].followers = [use for use in self.uses if not use.group.requires_grad]

    def _start_backward(
        self, state: ModuleState, record: ForwardRecord | None, place: int, gradient: Tensor
    ) -> None:
        if not self.in_backward:
            # As in forward: what comes next is issued before this module's is waited for.
            for use in self.uses:
                use.prepare_backward()
            for later in record.before(place) if record is not None else ():
                later.prepare_backward()
        self._epoch = _Progress.epoch
        state.backward_call = weakref.ref(self)
        for use in self.uses:
            use.start_backward()

    @property
    def in_backward(self) -> bool:
        return self._epoch == _Progress.epoch and all(use.in_backward for use in self.uses)


def _end_backward(uses: Sequence[GroupUse], handles: list[Any], gradient: Tensor) -> None:
    for use in uses:
        use.end_backward()
    for handle in handles:
        handle.remove()


class ModuleState:
    """The groups of one sharded module, and what its hooks do.

    Args:
        groups: Its parameters.
        keep: Keep gathered weights from forward to backward; None does so in a root alone.
        prefetch: How many modules' weights are gathered ahead.
        mp_policy: Dtypes of inputs and outputs.
        not_quantized: Parameters that MXFP8 was asked for and not done, and why.
    """

    def __init__(
        self,
        groups: list[ParameterGroup],
        *,
        keep: bool | None,
        prefetch: int,
        mp_policy: MixedPrecisionPolicy,
        not_quantized: Mapping[str, str],
    ) -> None:
        self.groups = groups
        self.not_quantized = not_quantized
        self.prefetch = prefetch
        self._keep = keep
        self._policy = mp_policy
        self.is_root = True  # until it runs inside another sharded module
        self._start()

    def _start(self) -> None:
        self.backward_call: weakref.ref[ModuleCall] | None = None
        self._calls: list[ModuleCall | None] = []  # running forwards of this module
        self._prepared: list[GroupUse] | None = None  # for the next forward
        self.order: Sequence[ModuleState] = []  # of the last forward, where this is a root
        self._unsharded: list[GroupUse] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        copied = memo[id(self)] = object.__new__(ModuleState)
        vars(copied).update(vars(self))
        copied._start()
        copied.groups = copy.deepcopy(self.groups, memo)
        return copied

    @property
    def keep(self) -> bool:
        return self.is_root if self._keep is None else self._keep

    def running_backward(self) -> ModuleCall | None:
        """The call whose backward runs this forward again, for activation checkpointing.

        A root's forward is never part of a backward: it ends what an abandoned one has left.
        """
        call = self.backward_call() if self.backward_call is not None else None
        return call if call is not None and call.in_backward else None

    # ---------------------------------------------------------------- gathers ahead

    def prepare(self) -> None:
        """Issue the gathers of this module's next forward."""
        if self._prepared is None:
            self._prepared = self._new_uses()
        for use in self._prepared:
            use.prepare()

    def prepare_backward(self) -> None:
        """Issue the gathers of this module's next backward, unless the weights were kept."""
        if not self.keep:
            for group in self.groups:
                group.prefetch()

    def forget_prepared(self) -> None:
        self._prepared = None
        for group in self.groups:
            group.forget_gathered()

    def _new_uses(self) -> list[GroupUse]:
        return [GroupUse(group, keep=self.keep, ahead=self.prefetch) for group in self.groups]

    def _start_root(self) -> None:
        """Whatever was gathered ahead and not used, by a forward or backward that failed or took
        another way, is dropped; on all ranks alike, as nothing is sent."""
        _Progress.epoch += 1
        start_epoch()
        for state in self.order:
            state.forget_prepared()
        forget_reductions()
        _Progress.record = ForwardRecord(self.order)

    def _end_root(self) -> None:
        if _Progress.record is not None:
            self.order = _Progress.record.entered
        _Progress.record = None

    # ------------------------------------------------------------------------- hooks

    def before_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if _Progress.depth:
            self.is_root = False
        # Only the root replaces saved weights, for all modules below it: hooks of a block
        # would shadow those by which activation checkpointing around it saves nothing.
        is_root = self.is_root
        if is_root:
            self._start_root()
        _Progress.depth += 1
        self._calls.append(None)  # after_forward is called also where the rest of this fails
        uses, self._prepared = self._prepared or self._new_uses(), None
        call = ModuleCall(uses)
        try:
            call.enter(self, is_root=is_root)
        except BaseException:
            call.leave()
            raise
        self._calls[-1] = call
        if self._policy.cast_forward_inputs and self._policy.param_dtype is not None:
            to_dtype = partial(_cast, self._policy.param_dtype)
            args, kwargs = map_tensors(to_dtype, args), map_tensors(to_dtype, kwargs)
        return args, kwargs

    def after_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Undo what ``before_forward`` did; ``output`` is None where forward has failed."""
        if not self._calls:  # a hook that ran first has failed, and ``before_forward`` never ran
            return output
        _Progress.depth -= 1
        call = self._calls.pop()
        if call is not None:
            call.leave()
            if torch.is_grad_enabled():
                call.watch_backward(self, (args, kwargs), output)
        if self.is_root:
            self._end_root()
        if call is not None and self._policy.output_dtype is not None:
            return map_tensors(partial(_cast, self._policy.output_dtype), output)
        return output

    # ------------------------------------------------------------- unsharded by the user

    def unshard(self) -> None:
        """Gather and show the weights until ``reshard`` or the end of the next backward."""
        self.reshard()
        self._unsharded = [GroupUse(group, keep=True) for group in self.groups]
        for use in self._unsharded:
            use.start_unsharded()

    def reshard(self) -> None:
        """Take the weights away again."""
        for group in self.groups:
            group.release()
        self._unsharded = []


def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook; it finds the state by the module, so that a copied module has its own."""
    state: ModuleState = module._fully_shard_state  # type: ignore[assignment]
    return state.before_forward(args, kwargs)


def after_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Forward hook."""
    state: ModuleState = module._fully_shard_state  # type: ignore[assignment]
    output = state.after_forward(args, kwargs, output)
    if state.is_root and torch.is_grad_enabled():
        _watch_unused(module, output, used={id(later) for later in state.order})
    return output


def _watch_unused(root: nn.Module, output: Any, used: set[int]) -> None:
    """Let the backward of a root reduce also what ``no_sync`` has left in modules it does not use.

    Whether anything was left is known only when that backward runs.
    """
    states = [getattr(module, "_fully_shard_state", None) for module in root.modules()]
    groups = [
        group for state in states if state and id(state) not in used for group in state.groups
    ]
    if not groups:
        return

    def reduce_accumulated(gradient: Tensor) -> None:
        for group in groups:
            group.reduce_accumulated()

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(reduce_accumulated)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
