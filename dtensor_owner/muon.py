"""Muon on sharded parameters: every matrix is orthogonalized once, whole, by one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from dtensor_owner.muon_adamw import ADAMW_DEFAULTS, adamw_step
from dtensor_owner.muon_agree import agree_on_parameters, options_code, tell_others
from dtensor_owner.muon_compile import compile_step
from dtensor_owner.muon_gradients import agree_on_gradients
from dtensor_owner.muon_options import check_group, check_options
from dtensor_owner.muon_plan import Settings, StepPlan
from dtensor_owner.muon_prepare import (
    ADAMW,
    MUON,
    Prepared,
    fault_of_parameters,
    local_grad,
    local_of,
    prepare,
    settings_of,
)
from dtensor_owner.muon_state import fault_of_state, init_state, misplaced, place_state
from dtensor_owner.muon_step import BucketWork, EagerStages, Numbers, Shards, run_step
from dtensor_owner.ns_schedule import QUINTIC, Coefficients, Method

_WHOLE = ("owners", "ranks_per_node", "bucket_numel", "nonfinite", "transport")
_MAX_COMPILED_KINDS = 4


class Muon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, in one optimizer.

    Parameters may be plain tensors or DTensors placed by ``RowAtomic``, ``BlockAtomic``,
    ``Owner``, ``Shard`` or ``Replicate``, in any mix. Momentum stays sharded where the parameter
    is. A step advances the momentum on the shards, gathers each matrix to its owner, a rank
    chosen once by ``plan_owners``'s rules, orthogonalizes there, and scatters the result back.
    Names, defaults and results of the first nine arguments are those of ``torch.optim.Muon`` on
    full matrices; beyond them Newton-Schulz is scale-free (see ``newton_schulz``).

    A group is a Muon group unless it says ``algorithm="adamw"``; then it takes the options of
    ``torch.optim.AdamW``, and torch's own AdamW updates its shards.

    ``step()`` never changes ``.grad``. A parameter without a gradient on any rank is left alone,
    without decay. ``docs/muon.md`` tells more.

    Args:
        params: Parameters, named parameters or groups of them, the same on every rank.
        lr: Learning rate; a float or a 1-element tensor.
        weight_decay: A weight loses ``lr * weight_decay`` of itself per step.
        momentum: Weight of the old momentum; the gradient gets the rest.
        nesterov: Look ahead along the new momentum.
        ns_coefficients: ``(a, b, c)``, or one such triple per step.
        eps: Lower bound of the norm in Newton-Schulz.
        ns_steps: Newton-Schulz steps.
        adjust_lr_fn: ``"original"`` (None): lr times ``sqrt(max(1, rows / cols))``;
            ``"match_rms_adamw"``: lr times ``0.2 sqrt(max(rows, cols))``.
        ns_dtype: Dtype of Newton-Schulz. With bfloat16 its inputs and results travel in
            bfloat16, half the bytes for the same bits.
        ns_method: Form of Newton-Schulz: ``"plain"``, ``"gram"``, or ``"auto"`` by shape; see
            ``newton_schulz``.
        matrices: What a parameter of more than two dims is. ``"flatten"``: one matrix
            ``(shape[0], rest)``; ``"stack"``: a 3-D one is a stack of ``shape[0]`` matrices.
        split_rows: Rows of each of several matrices stacked along dim 0 of every parameter of
            the group, e.g. ``(q, k, v)`` of a fused QKV weight; each is orthogonalized alone.
        adamw: Defaults of AdamW groups.
        owners: ``"holders"``: an owner holds some of its matrix, so that a matrix with one
            holder does not move; ``"any"``: every rank may own, which balances loads to 5 %
            where holders cannot, and moves what that takes.
        ranks_per_node: Consecutive ranks of a mesh that share a node; among owners that balance
            alike, those on the node that holds most of a matrix are preferred.
        transport: How an exchange is done: ``"all_to_all"`` with splits, or one batch of
            ``"point_to_point"`` sends and receives (not with ``compile``).
        bucket_numel: Elements that one owner collects per exchange. Smaller buckets take less
            memory and overlap better, larger ones batch more.
        nonfinite: What to do when a gradient is inf or nan on any rank: ``"raise"``, ``"skip"``
            the step (nothing changes on any rank), or ``"propagate"`` without looking.
        compile: Compile the Muon part of the step into one graph (``fullgraph=True``). Changed
            values of lr, weight decay and momentum do not compile anew.
        backend: Backend for that graph. ``torch.compile(optimizer.step)`` makes the same graph,
            by this backend, too; with point-to-point transport it runs eagerly.

    Raises:
        ValueError: At construction, on all ranks: a 0-D or 1-D parameter in a Muon group, a
            parameter given twice, options that do not fit, or ranks that do not agree.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients | tuple[Coefficients, ...] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        ns_method: Method = "auto",
        matrices: Literal["flatten", "stack"] = "flatten",
        split_rows: tuple[int, ...] | None = None,
        adamw: Mapping[str, Any] | None = None,
        owners: Literal["holders", "any"] = "holders",
        ranks_per_node: int = 1,
        transport: Literal["all_to_all", "point_to_point"] = "all_to_all",
        bucket_numel: int = 1 << 26,
        nonfinite: Literal["raise", "skip", "propagate"] = "raise",
        compile: bool = False,
        backend: str = "inductor",
    ) -> None:
        defaults = {
            "algorithm": MUON,
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "ns_method": ns_method,
            "matrices": matrices,
            "split_rows": split_rows,
        }
        self._adamw_defaults = {"algorithm": ADAMW, **ADAMW_DEFAULTS, **(adamw or {})}
        self._owners: Literal["holders", "any"] = owners
        self._ranks_per_node, self._bucket_numel = ranks_per_node, bucket_numel
        self._nonfinite, self._transport = nonfinite, transport
        self._backend, self._compile = backend, compile
        self._prepared: Prepared | None = None
        self._agreed = False  # whether all ranks have planned that, and nothing was added since
        # Compiled steps, with what they were compiled for, by its identity.
        self._compiled: dict[int, tuple[list[BucketWork], Callable[..., None]]] = {}
        params = params if isinstance(params, (Tensor, set, frozenset)) else _listed(params)
        try:
            check_options(params, self._options(), self._adamw_defaults)
            super().__init__(params, defaults)
        except Exception as fault:
            tell_others(fault, params)
            raise
        self._prepare()

    # ------------------------------------------------------------------ groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; every rank adds the same one. See the class for what groups may say.

        Ranks compare their groups in the next step.
        """
        algorithm = param_group.get("algorithm", MUON)
        if algorithm not in (MUON, ADAMW):
            raise ValueError(f'algorithm must be "muon" or "adamw", got {algorithm!r}.')
        muon_defaults = self.defaults
        if algorithm == ADAMW:
            self.defaults = self._adamw_defaults
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults = muon_defaults
        group = self.param_groups[-1]
        try:
            check_group(group, len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise
        for param in group["params"]:
            init_state(self.state[param], param, group)
        self._agreed = False

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_adamw_defaults", "_backend", "_compile", *(f"_{option}" for option in _WHOLE))
        own = {key: value for key, value in vars(self).items() if key in kept}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepared, self._compiled, self._agreed = None, {}, False

    def state_dict(self) -> dict[str, Any]:
        """State and groups, as of every optimizer; a group tells the name of its ``ns_dtype``,
        because ``torch.distributed.checkpoint.state_dict`` gathers no dtypes."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if "ns_dtype" in group:
                group["ns_dtype"] = str(group["ns_dtype"]).removeprefix("torch.")
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state; a parameter that the state knows nothing of starts from zeros."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for key in group.keys() - {"params", "param_names"}:
                group[key] = _tuples(group[key])  # a gathered state dict has lists instead
            if isinstance(group.get("ns_dtype"), str):
                group["ns_dtype"] = getattr(torch, group["ns_dtype"])
            defaults = self._adamw_defaults if group.get("algorithm") == ADAMW else self.defaults
            for key, value in defaults.items():
                group.setdefault(key, value)
            for param in group["params"]:
                init_state(self.state[param], param, group)
        self._agreed = False

    # ----------------------------------------------------------------------------- plans

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """The step's plan for each mesh, and for plain tensors if there are any.

        ``print(*optimizer.plans)`` shows owners, bytes and loads.
        """
        prepared = self._prepared if self._prepared and self._agreed else self._plan()
        return tuple(prepared.plans.values())

    @property
    def bytes_per_step(self) -> int:
        """Bytes that all ranks together send in a step, both ways of the exchange."""
        return sum(plan.num_bytes for plan in self.plans)

    def _settings(self) -> list[Settings | None]:
        return [settings_of(g) if g["algorithm"] == MUON else None for g in self.param_groups]

    def _options(self) -> dict[str, Any]:
        whole = {option: getattr(self, f"_{option}") for option in _WHOLE}
        return {**whole, "compile": self._compile, "backend": self._backend}

    def _plan(self) -> Prepared:
        return prepare(
            self.param_groups,
            eligible=self._owners,
            bucket_numel=self._bucket_numel,
            ranks_per_node=self._ranks_per_node,
            transport=self._transport,
        )

    def _prepare(self) -> Prepared:
        """Compare what there is and plan; every rank does this together."""
        groups = self.param_groups
        fault = fault_of_parameters(groups) or fault_of_state(groups, self.state)
        agree_on_parameters(groups, self._options(), misplaced(groups, self.state), fault)
        for group in groups:
            for param in group["params"]:
                init_state(self.state[param], param, group)
        place_state(groups, self.state)
        self._prepared, self._compiled, self._agreed = self._plan(), {}, True
        return self._prepared

    # ------------------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; every rank of the parameters' meshes calls this.

        Raises:
            RuntimeError: On every rank, before anything has changed: a parameter has a gradient
                on some ranks only, or a gradient is not finite and ``nonfinite="raise"``.
            ValueError: On every rank, before anything has changed: ranks, parameters, options or
                state, changed since the last step, do not fit each other.
        """
        # Where a compiler meets this, it does not look into what ranks compare and plan; the graph
        # is the one that compile=True makes.
        traced = torch.compiler.is_dynamo_compiling()
        return self._step(closure, compiled=self._compile or traced)

    @torch.compiler.disable(reason="ranks compare and plan; the step's graph is compiled by itself")
    def _step(self, closure: Callable[[], Any] | None, *, compiled: bool) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_finite = self._nonfinite != "propagate"
        prepared = self._prepared = self._prepared or self._plan()
        gradients = agree_on_gradients(
            prepared.members,
            check_finite=check_finite,
            stale=self._is_stale(prepared),
            options=options_code(self.param_groups, self._options()),
        )
        if gradients.stale:
            prepared = self._prepare()
            gradients = agree_on_gradients(prepared.members, check_finite=check_finite)
        if not gradients.finite:
            if self._nonfinite == "skip":
                return loss
            raise RuntimeError(
                "A gradient is inf or nan on at least one rank; nothing has been updated. Clip or "
                'scale gradients, or build Muon with nonfinite="skip" to skip such steps.'
            )
        if prepared.members and not any(gradients.present):
            warnings.warn(
                "No parameter of this optimizer has a gradient. If the model was sharded or "
                "replaced after the optimizer was built, build the optimizer anew.",
                stacklevel=2,
            )
        # Gradients placed otherwise are moved before anything changes: that may be refused.
        grads = {
            index: local_grad(member)
            for index, member in enumerate(prepared.members)
            if gradients.present[index]
        }
        self._muon_step(prepared, gradients.present, grads, compiled)
        self._adamw_step(prepared, gradients.present, grads)
        return loss

    def _is_stale(self, prepared: Prepared) -> bool:
        if not all(self.state.get(member.param) for member in prepared.members):
            return True  # state that was taken away is made anew where all ranks prepare
        try:
            return not (self._agreed and prepared.is_current(self._settings()))
        except Exception:  # an option that cannot be used: said to all ranks when they compare
            return True

    def _muon_step(
        self,
        prepared: Prepared,
        present: tuple[bool, ...],
        grads: Mapping[int, Tensor],
        compiled: bool,
    ) -> None:
        works = prepared.works(present)
        locals_of: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for index, member in enumerate(prepared.members):
            if member.algorithm == MUON and present[index]:
                buffer = self.state[member.param]["momentum_buffer"]
                locals_of[index] = (local_of(member.param), grads[index], local_of(buffer))
        shards = [_shards(work, locals_of) for work in works]
        numbers = [self._numbers(work) for work in works]
        graph = self._compiled_step(works) if compiled else None
        if graph is not None:
            graph(shards, numbers)
        else:
            run_step(works, [EagerStages(*each) for each in zip(works, shards, numbers)])

    def _compiled_step(self, works: list[BucketWork]) -> Callable[..., None] | None:
        """The compiled step; None where the step is to run eagerly.

        Which gradients there are decides what is compiled. Where that keeps changing, as with
        experts that no token chose, steps beyond the first few kinds run eagerly.
        """
        if not works or self._transport == "point_to_point":
            return None
        if id(works) not in self._compiled:
            if len(self._compiled) >= _MAX_COMPILED_KINDS:
                return None
            self._compiled[id(works)] = (works, compile_step(works, self._backend))
        return self._compiled[id(works)][1]

    def _numbers(self, work: BucketWork) -> Numbers:
        group = self.param_groups[work.program.group]
        lr = float(group["lr"])
        return Numbers(lr, 1 - lr * group["weight_decay"], float(group["momentum"]))

    def _adamw_step(
        self, prepared: Prepared, present: tuple[bool, ...], grads: Mapping[int, Tensor]
    ) -> None:
        for number, group in enumerate(self.param_groups):
            chosen = [
                index
                for index, member in enumerate(prepared.members)
                if present[index] and member.group == number
            ]
            if group["algorithm"] == ADAMW and chosen:
                params = [prepared.members[index].param for index in chosen]
                states = [self.state[param] for param in params]
                adamw_step(group, params, [grads[index] for index in chosen], states)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _listed(params: Iterable[Any]) -> list[Any]:
    """Parameters or groups as given, in lists that can be read twice."""
    return [
        {**item, "params": list(item["params"])}
        if isinstance(item, dict) and not isinstance(item.get("params"), (Tensor, set, type(None)))
        else item
        for item in params
    ]


def _shards(work: BucketWork, locals_of: Mapping[int, tuple[Tensor, Tensor, Tensor]]) -> Shards:
    params, grads, momenta = [], [], []
    for index, (start, stop) in zip(work.params, work.program.local_rows):
        param, grad, momentum = (
            tensor if stop - start == tensor.shape[0] else tensor[start:stop]
            for tensor in locals_of[index]
        )
        params.append(param)
        grads.append(grad)
        momenta.append(momentum)
    return Shards(params, grads, momenta)
