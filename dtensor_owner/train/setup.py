"""Model and optimizers of a run: on shards, or whole in one process as the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_owner.fully_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from dtensor_owner.layout import ShardLayout
from dtensor_owner.muon import Muon
from dtensor_owner.muon_groups import muon_param_groups
from dtensor_owner.mxfp8_report import MXFP8GroupReport
from dtensor_owner.mxfp8_weights import MXFP8Policy
from dtensor_owner.report import GroupReport, PlanReport, matrix_reports
from dtensor_owner.train.config import TrainConfig
from dtensor_owner.train.model import GPT

ADAMW_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95
# Muon's update then has AdamW's usual size, so that both may have a similar learning rate.
ADJUST_LR = "match_rms_adamw"

Named = tuple[str, nn.Parameter]


@dataclass
class Trainee:
    """A model with the optimizers that step it, and the plan both follow."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    plan: PlanReport


def build_model(config: TrainConfig) -> GPT:
    """The whole model, the same on every rank: weights come from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return GPT(
            layers=config.layers,
            dim=config.dim,
            heads=config.heads,
            hidden=config.hidden,
            context=config.context,
        )


def parameter_groups(model: nn.Module, config: TrainConfig) -> tuple[list[Named], list[Named]]:
    """Split the parameters into (name, parameter) lists: Muon's matrices, and AdamW's rest.

    Muon takes weights of two dimensions that map vectors to vectors; embeddings, among them the
    output layer that is tied to one, and 1-D parameters are AdamW's. With ``--optimizer adamw``
    everything is AdamW's.
    """
    if config.optimizer != "muon":
        return [], list(model.named_parameters())
    matrices: list[Named] = []
    rest: list[Named] = []
    for group in muon_param_groups(model):
        (matrices if group["algorithm"] == "muon" else rest).extend(group["params"])
    return matrices, rest


def build_reference(config: TrainConfig) -> Trainee:
    """The whole model in one process with torch's own optimizers: what a sharded run must equal."""
    model = build_model(config)
    matrices, rest = parameter_groups(model, config)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([parameter for _, parameter in rest], **adamw_options(config))
    ]
    if matrices:
        options = muon_options(config)
        optimizers.append(torch.optim.Muon([parameter for _, parameter in matrices], **options))
    return Trainee(model, optimizers, PlanReport(1, [], []))


def build_sharded(config: TrainConfig, mesh: DeviceMesh, backend: str | None = None) -> Trainee:
    """The model on shards, one parameter group for each block and one for the rest.

    Args:
        backend: What compiles Muon's step; None to run it eagerly.
    """
    model = build_model(config).to(mesh.device_type)
    layout = ShardLayout[config.shard_layout.upper()]
    options: dict[str, Any] = {"mesh": mesh, "shard_layout": layout}
    quantized: dict[str, Any] = {"block_size": 32, "mxfp8": MXFP8Policy()} if config.mxfp8 else {}
    for block in model.blocks:
        fully_shard(block, mp_policy=mp_policy(config), **options, **quantized)
    fully_shard(model, mp_policy=mp_policy(config, output_dtype=torch.float32), **options)
    matrices, rest = parameter_groups(model, config)
    adamw = adamw_options(config)
    groups, mxfp8 = _group_reports(model), _mxfp8_reports(model)
    if not matrices:
        adamw_alone = torch.optim.AdamW([parameter for _, parameter in rest], **adamw)
        return Trainee(model, [adamw_alone], PlanReport(mesh.size(), groups, [], mxfp8))
    muon = Muon(
        [{"params": matrices}, {"params": rest, "algorithm": "adamw", **adamw}],
        **muon_options(config),
        ns_dtype=ns_dtype(config),
        compile=backend is not None,
        backend=backend or "eager",
    )
    matrix_plans = [report for plan in muon.plans for report in matrix_reports(plan)]
    return Trainee(model, [muon], PlanReport(mesh.size(), groups, matrix_plans, mxfp8))


def mp_policy(config: TrainConfig, output_dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """Weights and activations in ``--param-dtype``, gradients reduced in fp32."""
    if config.param_dtype == "float32":
        return MixedPrecisionPolicy()
    dtype = getattr(torch, config.param_dtype)
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=output_dtype
    )


def ns_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of Newton-Schulz; CPUs without bfloat16 units are many times faster in float32."""
    if config.ns_dtype == "auto":
        return torch.bfloat16 if config.device == "cuda" else torch.float32
    return getattr(torch, config.ns_dtype)


def _group_reports(model: nn.Module) -> list[GroupReport]:
    return [
        GroupReport(name or "the rest", group.layout, group.buffer.dtype.itemsize)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
        for group in module.parameter_groups
    ]


def _mxfp8_reports(model: nn.Module) -> list[MXFP8GroupReport]:
    return [
        MXFP8GroupReport(
            name or "the rest",
            group.mxfp8.layouts,
            group.layout.dp_size,
            ordinary=module.not_quantized,
        )
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
        for group in module.parameter_groups
        if group.mxfp8 is not None
    ]


def adamw_options(config: TrainConfig) -> dict[str, Any]:
    alone = config.optimizer == "adamw"
    return {
        "lr": config.adamw_lr,
        "weight_decay": config.weight_decay if alone else 0.0,
        "betas": ADAMW_BETAS,
    }


def muon_options(config: TrainConfig) -> dict[str, Any]:
    return {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "momentum": MUON_MOMENTUM,
        "adjust_lr_fn": ADJUST_LR,
    }
