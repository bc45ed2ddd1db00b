"""Newton-Schulz orthogonalization: the nearest (semi-)orthogonal matrix by products alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dtensor_owner.ns_schedule import (
    QUINTIC,
    Coefficients,
    Method,
    as_schedule,
    check_method,
    gram_runs,
    uses_gram,
)
from placements.owner import Owner


def newton_schulz(
    G: Tensor,
    steps: int = 5,
    coefficients: Coefficients | Sequence[Coefficients] = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    method: Method = "auto",
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
        method: ``"plain"``: every step multiplies the matrix itself. ``"gram"``: all steps work on
            its small Gram matrix, in fp32 at least, and the matrix is multiplied once at the end;
            fewer products where it is far from square; a single row takes the plain form all the
            same. ``"auto"``: the one with fewer products (see ``uses_gram``).

    Returns:
        ``(..., rows, cols)`` in ``dtype``; for a DTensor, with the placements of ``G``.

    Raises:
        ValueError: Fewer than two dims, no floating dtype, or bad steps, coefficients, eps or
            method.
        NotImplementedError: A DTensor whose matrices are cut.
    """
    schedule = as_schedule(coefficients, steps)
    check_method(method)
    if G.ndim < 2:
        raise ValueError(
            f"Newton-Schulz needs matrices, got shape {tuple(G.shape)}: view a weight as "
            "(shape[0], rest) first."
        )
    if not (G.dtype.is_floating_point and dtype.is_floating_point):
        raise ValueError(
            f"Newton-Schulz needs real floating dtypes, got G of {G.dtype} and dtype={dtype}."
        )
    if not eps >= 0.0:
        raise ValueError(f"Newton-Schulz eps must be >= 0, got {eps}.")
    if isinstance(G, DTensor):
        return _on_holders(G, schedule, eps, dtype, method)
    if G.numel() == 0:
        return torch.zeros_like(G, dtype=dtype)
    tall = G.shape[-2] > G.shape[-1]
    X = _normalized(G.mT if tall else G, eps, dtype)
    device = G.device.type
    if G.shape[-2:] == (1, 1) and eps <= 1.0:
        # It is 1, -1 or 0 now. Inductor would write the products of all steps out inside each
        # other, which takes it minutes.
        X = X * _of_one(schedule)
    elif uses_gram(method, G.shape, itemsize=dtype.itemsize, device_type=device):
        wide = torch.promote_types(dtype, torch.float32)
        X = _gram_form(X.to(wide), schedule).to(dtype)
    elif device == "cpu" and dtype in _SLOW_ON_THIS_CPU:
        X = X.to(torch.float32)
        for a, b, c in schedule:
            X = _rounded_step(X, a, b, c, dtype)
        X = X.to(dtype)
    else:
        for a, b, c in schedule:
            X = _quintic_step(X, a, b, c)
    return X.mT if tall else X


def _of_one(schedule: Sequence[Coefficients]) -> float:
    """What the steps make of a singular value of 1."""
    value = 1.0
    for a, b, c in schedule:
        value = a * value + b * value**3 + c * value**5
    return value


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
    return _add_product(a, X, 1.0, _add_product(b, A, c, A, A), X)


def _add_product(beta: float, S: Tensor, alpha: float, Y: Tensor, Z: Tensor) -> Tensor:
    """``beta S + alpha Y Z``, in one call where there is one."""
    if S.ndim == 2:
        return torch.addmm(S, Y, Z, beta=beta, alpha=alpha)
    if S.ndim == 3:
        return torch.baddbmm(S, Y, Z, beta=beta, alpha=alpha)
    return beta * S + alpha * (Y @ Z)


def _gram_form(X: Tensor, schedule: Sequence[Coefficients]) -> Tensor:
    """All steps on the Gram matrix ``A = X X^T``.

    A step multiplies ``X`` by ``a + P`` with ``P = b A + c A A``, so ``A`` by ``(a + P)`` from both
    sides. ``Q`` is the product of all factors so far; it commutes with ``A``.
    """
    for run in gram_runs(schedule):
        A = X @ X.mT
        Q: Tensor | None = None
        for number, (a, b, c) in enumerate(run):
            P = _add_product(b, A, c, A, A)
            Q = _plus_identity(a, P) if Q is None else _add_product(a, Q, 1.0, P, Q)
            if number + 1 < len(run):
                half = _add_product(a, A, 1.0, P, A)
                A = _add_product(a, half, 1.0, half, P)
        assert Q is not None
        X = Q @ X
    return X


def _plus_identity(a: float, P: Tensor) -> Tensor:
    identity = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    return torch.add(P, identity, alpha=a)


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
    G: DTensor,
    schedule: tuple[Coefficients, ...],
    eps: float,
    dtype: torch.dtype,
    method: Method,
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
    result = newton_schulz(G.to_local(), len(schedule), schedule, eps, dtype, method)
    return DTensor.from_local(
        result.contiguous(),
        G.device_mesh,
        G.placements,
        run_check=False,
        shape=G.shape,
        stride=torch.empty(G.shape, device="meta").stride(),
    )
