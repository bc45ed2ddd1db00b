"""fully_shard: train a module on unpadded shards, gathered where forward and backward run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from dtensor_owner.layout import ShardLayout
from dtensor_owner.mxfp8 import BLOCK
from dtensor_owner.mxfp8_weights import MXFP8Policy
from dtensor_owner.nested import map_tensors, tensors_in
from dtensor_owner.parameter_group import ManagedParameter, ParameterGroup
from dtensor_owner.unsharded import GroupUse, weights_not_saved

_SHARDED_AS = "_dtensor_owner_sharded_as"  # mark on a full parameter that a group has replaced


class FSDPModule:
    """What ``fully_shard`` adds to a module's class."""

    _fully_shard_state: ModuleState

    @property
    def parameter_groups(self) -> list[ParameterGroup]:
        """The groups that one call of ``fully_shard`` made, by dtype and ``requires_grad``."""
        return self._fully_shard_state.groups

    @property
    def not_quantized(self) -> Mapping[str, str]:
        """Parameters that ``mxfp8`` was asked for and left in an ordinary group, and why."""
        return self._fully_shard_state.not_quantized


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    shard_layout: ShardLayout = ShardLayout.UNPADDED,
    block_size: int = 1,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  a frozen value
    ignored_params: Iterable[nn.Parameter] | None = None,
    mxfp8: MXFP8Policy | None = None,
) -> nn.Module:
    """Shard a module's parameters over a mesh; gather them around its forward and backward.

    Apply it bottom-up, to each block and then to the whole model: a call takes the parameters
    below ``module`` that no earlier call took. They become DTensors placed ``RowAtomic`` (or
    ``BlockAtomic``); optimizers, ``state_dict`` and ``clip_grad_norm_`` see those. All ranks
    must hold the same full values, call this in the same order, and run the same modules.
    Gradients are averaged over the ranks.

    Args:
        module: Changed in place; its class becomes a subclass that is also an ``FSDPModule``.
        mesh: A 1-D mesh.
        shard_layout: ``UNPADDED``, or ``PADDED`` for equal shards.
        block_size: Rows of a parameter that stay on one rank.
        reshard_after_forward: Free the gathered weights after forward and gather them again for
            backward; otherwise they are kept in between.
        mp_policy: Dtypes of compute and reduction (``torch.distributed.fsdp``'s own class).
        ignored_params: Parameters left as they are.
        mxfp8: Gather weights in MXFP8; needs ``block_size=32``. Parameters that cannot be
            quantized (norms, biases, dims that are not multiples of 32) get a group of their
            own, with ``block_size`` 1, and ``not_quantized`` tells why.

    Returns:
        ``module``.

    Raises:
        ValueError: It is sharded already, has no forward, or has parameters of no rows, on a device
            other than the mesh's, or shared with a module that was sharded before. ``mxfp8`` with
            a ``block_size`` that is not a multiple of 32.
        NotImplementedError: The mesh has several dims, or a parameter cannot be sharded.
    """
    _check_module(module, mesh)
    managed = _managed_parameters(module, ignored_params or ())
    _check_parameters(managed, mesh)
    not_quantized = _not_quantized(managed, mxfp8, block_size)
    groups: dict[Any, list[ManagedParameter]] = {}
    for m in managed:
        quantize = mxfp8 is not None and m.name not in not_quantized
        groups.setdefault((m.parameter.dtype, m.parameter.requires_grad, quantize), []).append(m)
    state = ModuleState(
        [
            ParameterGroup(
                members,
                mesh,
                shard_layout=shard_layout,
                block_size=block_size if quantize or mxfp8 is None else 1,
                mp_policy=mp_policy,
                mxfp8=quantize,
            )
            for (_, _, quantize), members in groups.items()
        ],
        keep=not reshard_after_forward,
        mp_policy=mp_policy,
        not_quantized=not_quantized,
    )
    for m in managed:
        setattr(m.parameter, _SHARDED_AS, f"{m.name} of {type(module).__name__}")
    cls = type(module)
    module.__class__ = type(
        f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__}
    )
    cast(FSDPModule, module)._fully_shard_state = state
    # A compiled module compiles its forward; gathers stay outside of its graphs.
    before, after = map(torch.compiler.disable, (state.before_forward, state.after_forward))
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True, always_call=True)
    return module


# ---------------------------------------------------------------------- around a forward


class _Progress:
    """Forwards of sharded modules in this process."""

    depth = 0  # how many are running, one inside the other
    epoch = 0  # how many of a root module were started


class ModuleCall:
    """One forward of a sharded module, and its backward."""

    def __init__(self, groups: Sequence[ParameterGroup], *, keep: bool) -> None:
        self.uses = [GroupUse(group, keep=keep) for group in groups]
        self._epoch = -1
        self._context = ExitStack()

    def enter(self, state: ModuleState, *, is_root: bool) -> None:
        running = state.running_backward()
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
        for tensor in watched:
            tensor.register_hook(partial(self._start_backward, state))
        if not watched:
            return
        handles: list[Any] = []
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                handles.append(tensor.register_hook(partial(_end_backward, self.uses, handles)))
        trainable = [use for use in self.uses if use.group.requires_grad]
        if not handles and trainable:
            trainable[-1].followers = [use for use in self.uses if not use.group.requires_grad]

    def _start_backward(self, state: ModuleState, gradient: Tensor) -> None:
        self._epoch = _Progress.epoch
        state.backward_call = weakref.ref(self)
        for use in self.uses:
            use.start_backward()

    @property
    def in_backward(self) -> bool:
        return self._epoch == _Progress.epoch and all(use.in_backward for use in self.uses)


def _end_backward(uses: list[GroupUse], handles: list[Any], gradient: Tensor) -> None:
    for use in uses:
        use.end_backward()
    for handle in handles:
        handle.remove()


class ModuleState:
    """The groups of one sharded module, and what its hooks do."""

    def __init__(
        self,
        groups: list[ParameterGroup],
        *,
        keep: bool,
        mp_policy: MixedPrecisionPolicy,
        not_quantized: Mapping[str, str],
    ) -> None:
        self.groups = groups
        self.not_quantized = not_quantized
        self.keep = keep
        self.backward_call: weakref.ref[ModuleCall] | None = None
        self._policy = mp_policy
        self._calls: list[ModuleCall | None] = []  # running forwards of this module
        self._is_root = True  # until it runs inside another sharded module

    def running_backward(self) -> ModuleCall | None:
        """The call whose backward runs this forward again, for activation checkpointing.

        A root's forward is never part of a backward: it ends what an abandoned one has left.
        """
        call = self.backward_call() if self.backward_call is not None else None
        return call if call is not None and call.in_backward else None

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if _Progress.depth:
            self._is_root = False
        # Only the root replaces saved weights, for all modules below it: hooks of a block
        # would shadow those by which activation checkpointing around it saves nothing.
        is_root = self._is_root
        if is_root:
            _Progress.epoch += 1
        _Progress.depth += 1
        self._calls.append(None)  # after_forward is called also where the rest of this fails
        call = ModuleCall(self.groups, keep=self.keep)
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

    def after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Undo what ``before_forward`` did; ``output`` is None where forward has failed."""
        _Progress.depth -= 1
        call = self._calls.pop()
        if call is None:
            return output
        call.leave()
        if torch.is_grad_enabled():
            call.watch_backward(self, (args, kwargs), output)
        if self._policy.output_dtype is not None:
            return map_tensors(partial(_cast, self._policy.output_dtype), output)
        return output


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# --------------------------------------------------------------------- which parameters


def _check_module(module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"fully_shard was already applied to this {type(module).__name__}: apply it once to "
            "each module, inner ones first."
        )
    if type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward, so nothing would gather its parameters: "
            "apply fully_shard to its children and to the module that calls them."
        )
    if mesh.ndim != 1:
        raise NotImplementedError(
            f"fully_shard shards over a 1-D mesh, got mesh dims {mesh.mesh_dim_names} of sizes "
            f"{tuple(mesh.shape)}: pass a 1-D sub-mesh, such as mesh['shard']."
        )


def _managed_parameters(
    module: nn.Module, ignored: Iterable[nn.Parameter]
) -> list[ManagedParameter]:
    """Parameters of the module that neither an inner ``fully_shard`` nor the caller has taken."""
    skipped = {id(parameter) for parameter in ignored}
    managed: dict[int, ManagedParameter] = {}
    for prefix, owner in _own_modules(module, ""):
        if isinstance(owner, nn.RNNBase):
            raise NotImplementedError(
                f"{prefix or 'The module'} is a {type(owner).__name__}, which keeps its weights in "
                "a private list that gathered ones cannot be put into: pass its parameters as "
                "ignored_params."
            )
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in skipped:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            entry = managed.setdefault(
                id(parameter), ManagedParameter(full_name, parameter, owners=[])
            )
            entry.owners.append((owner, name))
    return list(managed.values())


def _not_quantized(
    managed: Sequence[ManagedParameter], policy: MXFP8Policy | None, block_size: int
) -> dict[str, str]:
    """Names of the parameters that MXFP8 is not for, with the reasons."""
    if policy is None:
        return {}
    if block_size % BLOCK:
        raise ValueError(
            f"mxfp8 needs blocks of {BLOCK} rows to stay on one rank, got block_size={block_size}: "
            f"pass block_size={BLOCK}."
        )
    reasons = {m.name: policy.reason_against(m.name, m.parameter) for m in managed}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _own_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The module and those below it, up to the ones that are sharded on their own."""
    seen: set[int] = set()
    pending = [(prefix, module)]
    while pending:
        path, current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield path, current
        children = [
            (f"{path}.{name}" if path else name, child)
            for name, child in current.named_children()
            if not isinstance(child, FSDPModule)
        ]
        pending += reversed(children)


def _check_parameters(managed: Sequence[ManagedParameter], mesh: DeviceMesh) -> None:
    for m in managed:
        if m.parameter.ndim == 0:
            raise ValueError(
                f"{m.name} has the 0-D shape () and so no rows to shard: give it shape (1,) or "
                "pass it in ignored_params."
            )
        taken = getattr(m.parameter, _SHARDED_AS, None)
        if taken is not None:
            raise ValueError(
                f"{m.name} is the same parameter as {taken}, which was sharded before: a tied "
                "parameter is gathered in one place, so apply fully_shard only to a module that "
                "contains all its uses."
            )
        if isinstance(m.parameter, DTensor):
            raise NotImplementedError(
                f"{m.name} is already a DTensor placed {m.parameter.placements}: pass it in "
                "ignored_params, or shard the plain parameter."
            )
        device = m.parameter.device.type
        if device not in (mesh.device_type, "meta"):
            raise ValueError(
                f"{m.name} is on {device}, but the mesh is of {mesh.device_type} devices: move the "
                f"module there first, module.to({mesh.device_type!r})."
            )
