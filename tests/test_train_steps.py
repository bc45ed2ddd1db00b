"""A sharded run equals the whole model in one process with torch's own optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_owner.muon import Muon
from dtensor_owner.train import TrainConfig, data
from dtensor_owner.train.setup import (
    Trainee,
    adamw_options,
    build_reference,
    build_sharded,
    muon_options,
    parameter_groups,
)
from dtensor_owner.train.steps import Ranks, train_steps, validation_loss
from tests.ranks import run_ranks

# Matrices have 5 or 8 rows: with 8 ranks some have fewer rows than there are ranks.
CONFIG = TrainConfig(
    steps=20,
    layers=2,
    dim=8,
    heads=2,
    hidden=5,
    context=12,
    batch=10,
    lr=0.02,
    adamw_lr=0.01,
    weight_decay=0.1,
    eval_sequences=6,
)
TEXT = Path(__file__).read_bytes()

Run = dict[str, Any]


def _run(trainee: Trainee, config: TrainConfig, ranks: Ranks) -> Run:
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    corpus = data.Corpus(*data.split(text, config.context), "this file")
    before = validation_loss(trainee, corpus, config, ranks)
    losses = [record.loss for record in train_steps(trainee, corpus, config, ranks)]
    after = validation_loss(trainee, corpus, config, ranks)
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in trainee.model.named_parameters()
    }
    return {"losses": losses, "validation": [before, after], "weights": weights}


def _config(dtype: torch.dtype, **changes: Any) -> TrainConfig:
    return dataclasses.replace(CONFIG, ns_dtype=str(dtype).removeprefix("torch."), **changes)


def _sharded(config: TrainConfig, backend: str | None = None, local_rows: bool = False) -> Run:
    torch.set_default_dtype(getattr(torch, config.ns_dtype))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    trainee = build_sharded(config, mesh, backend)
    if local_rows:
        matrices, rest = parameter_groups(trainee.model, config)
        adamw = torch.optim.AdamW([p for _, p in rest], **adamw_options(config))
        trainee.optimizers = [adamw, _LocalRows([p for _, p in matrices], config)]
    return _run(trainee, config, Ranks(dist.get_rank(), dist.get_world_size()))


class _LocalRows(Muon):
    """Muon as if each rank's rows were a matrix of their own: what must not come out."""

    def __init__(self, matrices: list[nn.Parameter], config: TrainConfig) -> None:
        self.matrices = [p for p in matrices if p.to_local().shape[0]]
        rows = [nn.Parameter(p.detach().to_local()) for p in self.matrices]  # the same memory
        super().__init__(rows, **muon_options(config), ns_dtype=getattr(torch, config.ns_dtype))

    def step(self, closure: None = None) -> None:
        for matrix, rows in zip(self.matrices, self.param_groups[0]["params"]):
            rows.grad, matrix.grad = matrix.grad.to_local(), None
        super().step()


@contextmanager
def _defaults(dtype: torch.dtype) -> Iterator[None]:
    """Models of this dtype, and torch.optim.Muon's Newton-Schulz in it instead of bfloat16."""
    torch.set_default_dtype(dtype)
    try:
        with mock.patch.object(Tensor, "bfloat16", lambda tensor: tensor.clone()):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def _reference(config: TrainConfig) -> Run:
    with _defaults(getattr(torch, config.ns_dtype)):
        return _run(build_reference(config), config, Ranks())


def _assert_equal(run: Run, reference: Run) -> None:
    """Equal up to rounding, which grows in 20 steps of optimizers that divide by gradients.

    A step moves a weight by up to 0.01, so the float32 bound is 5 % of one step.
    """
    is_double = reference["weights"]["norm.weight"].dtype == torch.float64
    torch.testing.assert_close(run, reference, rtol=0, atol=1e-9 if is_double else 5e-4)


@pytest.mark.parametrize(
    ("world_size", "dtype", "backend"),
    [
        pytest.param(4, torch.float32, None, marks=pytest.mark.slow),
        (4, torch.float32, "aot_eager"),
        pytest.param(4, torch.float32, "inductor", marks=pytest.mark.slow),
        (3, torch.float64, None),
        (8, torch.float64, None),
    ],
)
def test_20_steps_equal_one_process(world_size, dtype, backend):
    config = _config(dtype)
    reference = _reference(config)
    assert reference["validation"][1] < reference["validation"][0] - 0.3
    for run in run_ranks(world_size, _sharded, config, backend, timeout=170):
        _assert_equal(run, reference)


def test_orthogonalizing_local_rows_is_another_run():
    config = _config(torch.float32)
    reference = _reference(config)
    run = run_ranks(4, _sharded, config, local_rows=True)[0]
    with pytest.raises(AssertionError):
        _assert_equal(run, reference)
    apart = max(
        (run["weights"][name] - weight).abs().max() for name, weight in reference["weights"].items()
    )
    assert apart > 0.01  # 20 times what the comparison lets pass


def test_padded_shards_and_adamw_alone():
    for changes in ({"shard_layout": "padded"}, {"optimizer": "adamw"}):
        config = _config(torch.float64, steps=5, **changes)
        for run in run_ranks(3, _sharded, config):
            _assert_equal(run, _reference(config))


def test_one_rank():
    config = _config(torch.float64, steps=5)
    _assert_equal(run_ranks(1, _sharded, config)[0], _reference(config))


def test_another_seed_is_another_run():
    config = _config(torch.float64, steps=2)
    with pytest.raises(AssertionError):
        _assert_equal(_reference(dataclasses.replace(config, seed=1)), _reference(config))


def _plan_and_local_rows() -> tuple[dict[str, Any], dict[str, list[int]]]:
    config = _config(torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    trainee = build_sharded(config, mesh)
    reports = {report.name: report for report in trainee.plan.matrices}
    rows: dict[str, list[int]] = {}
    for name, p in trainee.model.named_parameters():
        here = torch.tensor([p.to_local().shape[0]])
        everywhere = [torch.empty_like(here) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, here)
        rows[name] = torch.cat(everywhere).tolist()
    return reports, rows


def test_the_plan_counts_the_shards_that_are_not_at_their_owner_twice():
    results = run_ranks(4, _plan_and_local_rows)
    reports, rows = results[0]
    assert all(result == results[0] for result in results)
    assert len(reports) == 2 * 7
    for name, report in reports.items():
        assert list(report.rows) == rows[name]
        elsewhere = report.shape[0] - report.rows[report.owner]
        assert report.moved_bytes == 2 * elsewhere * report.shape[1] * 4
    assert any(report.moved_bytes for report in reports.values())
