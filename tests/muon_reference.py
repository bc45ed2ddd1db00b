"""``torch.optim.Muon`` on whole tensors in one process, what sharded steps are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Shape = tuple[int, ...]


def weights_of(shapes: Sequence[Shape], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Deterministic weights, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def grads_of(
    shapes: Sequence[Shape], step: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Deterministic gradients of one step."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def fp32_newton_schulz() -> AbstractContextManager[Any]:
    """Let torch's Muon iterate in the gradients' own dtype instead of bfloat16."""
    return mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())


def reference(
    shapes: Sequence[Shape],
    steps: int,
    *,
    schedule: Callable[[int], float] | None = None,
    dtype: torch.dtype = torch.float32,
    in_fp32: bool = True,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and momenta after ``steps`` steps; parameters of more dims are flattened."""
    params = [torch.nn.Parameter(w.flatten(1)) for w in weights_of(shapes, dtype)]
    optimizer = torch.optim.Muon(params, **options)
    with fp32_newton_schulz() if in_fp32 else nullcontext():
        for step in range(steps):
            for param, grad in zip(params, grads_of(shapes, step, dtype)):
                param.grad = grad.flatten(1)
            if schedule is not None:
                optimizer.param_groups[0]["lr"] = schedule(step)
            optimizer.step()
    momenta = [optimizer.state[param]["momentum_buffer"] for param in params]
    return (
        [param.detach().view(shape) for param, shape in zip(params, shapes)],
        [momentum.view(shape) for momentum, shape in zip(momenta, shapes)],
    )
