"""Newton-Schulz orthogonalization: the nearest (semi-)orthogonal matrix by products alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from placements.owner import Owner

Coefficients = tuple[float, float, float]

QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)
"""Coefficients of Keller Jordan's Muon: steepest slope at zero; singular values end in about
0.7 to 1.2 rather than at exactly 1 (https://kellerjordan.github.io/posts/muon/)."""


def newton_schulz(
    G: Tensor,
    steps: int = 5,
    coefficients: Coefficients | Sequence[Coefficients] = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Orthogonalize a matrix, or each matrix of a batch.

    With ``G = U S V^T`` the result approximates ``U V^T``. Each step maps the singular values
    ``s`` to ``a s + b s^3 + c s^5``, after all of them were brought into [0, 1] by the
    Frobenius norm. Matrices with more rows than columns are iterated transposed.

    The scale of ``G`` does not matter, from 1e-30 to 1e30: a matrix is divided by its largest
    magnitude before its norm is taken (squares of 1e-30 underflow), the norm is accumulated in
    at least fp32, and a dtype with a smaller exponent range than ``G`` has (fp16) is entered
    only after that. A matrix of zeros gives zeros. inf or nan anywhere in a matrix gives nan
    everywhere in that matrix, and in no other of the batch.

    Args:
        G: ``(..., rows, cols)``, floating point; unchanged. A DTensor must be whole on the
            ranks that hold it: ``Owner`` or ``Replicate`` on every mesh dim.
        steps: Number of iterations, below 100.
        coefficients: ``(a, b, c)``, or one such triple per step.
        eps: Lower bound of the norm, after the largest magnitude was made 1; as that norm is
            at least 1, it matters for zeros only.
        dtype: Floating dtype of the iteration and of the result.

    Returns:
        ``(..., rows, cols)`` in ``dtype``; for a DTensor, with the placements of ``G``.

    Raises:
        ValueError: Fewer than two dims, no floating dtype, or bad steps or coefficients.
        NotImplementedError: A DTensor whose matrices are cut.
    """
    schedule = as_schedule(coefficients, steps)
    if G.ndim < 2:
        raise ValueError(
            f"Newton-Schulz needs matrices, got shape {tuple(G.shape)}: view a weight as "
            "(shape[0], rest) first."
        )
    if not (G.dtype.is_floating_point and dtype.is_floating_point):
        raise ValueError(
            f"Newton-Schulz needs real floating dtypes, got G of {G.dtype} and dtype={dtype}."
        )
    if isinstance(G, DTensor):
        return _on_holders(G, schedule, eps, dtype)
    if G.numel() == 0:
        return torch.zeros_like(G, dtype=dtype)
    tall = G.shape[-2] > G.shape[-1]
    X = _normalized(G.mT if tall else G, eps, dtype)
    if G.device.type == "cpu" and dtype in _SLOW_ON_THIS_CPU:
        X = X.to(torch.float32)
        for a, b, c in schedule:
            X = _rounded_step(X, a, b, c, dtype)
        X = X.to(dtype)
    else:
        for a, b, c in schedule:
            X = _quintic_step(X, a, b, c)
    return X.mT if tall else X


def as_schedule(
    coefficients: Coefficients | Sequence[Coefficients], steps: int
) -> tuple[Coefficients, ...]:
    """Coefficients of each step, checked."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"Newton-Schulz steps must be an int from 0 to 99, got {steps!r}.")
    triples: Sequence[Sequence[float]]
    if len(coefficients) == 3 and all(isinstance(x, (int, float)) for x in coefficients):
        triples = [cast("Coefficients", coefficients)] * steps
    else:
        triples = cast("Sequence[Coefficients]", coefficients)
    if any(not isinstance(t, (tuple, list)) or len(t) != 3 for t in triples):
        raise ValueError(
            "Newton-Schulz coefficients must be three numbers (a, b, c), or one such triple per "
            f"step, got {coefficients!r}."
        )
    if len(triples) != steps:
        raise ValueError(f"Got {len(triples)} coefficient triples for {steps} steps.")
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)


def keeps_range(dtype: torch.dtype, of: torch.dtype) -> bool:
    """Whether every finite exponent of dtype ``of`` is one of ``dtype`` (bf16 keeps fp32's)."""
    return torch.finfo(dtype).tiny <= torch.finfo(of).tiny


def _normalized(G: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``G`` in ``dtype`` with Frobenius norm 1 (0 for zeros), per matrix."""
    if keeps_range(dtype, of=G.dtype):
        # Cast first: the result is then the same whether or not G travelled in ``dtype``.
        G = G.to(dtype)
    wide = torch.promote_types(G.dtype, torch.float32)
    largest = G.abs().amax(dim=(-2, -1), keepdim=True).to(wide)
    scaled = G.to(wide) / torch.where(largest > 0, largest, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
    return (scaled / norm.clamp(min=eps)).to(dtype)


def _quintic_step(X: Tensor, a: float, b: float, c: float) -> Tensor:
    """``a X + (b A + c A A) X`` with ``A = X X^T``."""
    A = X @ X.mT
    if X.ndim == 2:
        return torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    if X.ndim == 3:
        return torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return a * X + (b * A + c * (A @ A)) @ X


def _rounded_step(X: Tensor, a: float, b: float, c: float, dtype: torch.dtype) -> Tensor:
    """The step as hardware for ``dtype`` does it: products summed in fp32, rounded once each.

    ``X`` is fp32 and holds values of ``dtype``.
    """

    def rounded(Y: Tensor) -> Tensor:
        return Y.to(dtype).to(torch.float32)

    A = rounded(X @ X.mT)
    P = rounded(b * A + c * (A @ A))
    return rounded(a * X + P @ X)


def _slow_on_this_cpu() -> frozenset[torch.dtype]:
    """Half-precision dtypes whose products this CPU only emulates, some 30 times slower."""
    capabilities = torch.cpu.get_capabilities()
    names = {torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"), torch.float16: ("amx_fp16",)}
    return frozenset(
        dtype for dtype, fast in names.items() if not any(capabilities.get(name) for name in fast)
    )


_SLOW_ON_THIS_CPU = _slow_on_this_cpu()


def _on_holders(
    G: DTensor, schedule: tuple[Coefficients, ...], eps: float, dtype: torch.dtype
) -> DTensor:
    cut = [
        (mesh_dim, placement)
        for mesh_dim, placement in enumerate(G.placements)
        if not isinstance(placement, (Owner, Replicate))
    ]
    if cut:
        raise NotImplementedError(
            f"Newton-Schulz needs whole matrices, but {cut[0][1]} on mesh dim {cut[0][0]} cuts "
            f"them: redistribute to Owner(rank) (one rank works) or Replicate() (all do) first."
        )
    result = newton_schulz(G.to_local(), len(schedule), schedule, eps, dtype)
    return DTensor.from_local(
        result.contiguous(),
        G.device_mesh,
        G.placements,
        run_check=False,
        shape=G.shape,
        stride=torch.empty(G.shape, device="meta").stride(),
    )
