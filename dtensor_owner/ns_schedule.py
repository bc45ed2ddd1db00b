"""Newton-Schulz by numbers: coefficients of each step, the two forms, and what they cost.

Numbers only, so that plans can count with it. The iteration multiplies a matrix ``X`` (``r x c``,
``r <= c``) by a polynomial of its Gram matrix ``A = X X^T`` in every step. The plain form does just
that. All those polynomials are polynomials of the first ``A``, so the Gram form works on ``r x r``
matrices alone and touches ``X`` twice: to form ``A`` and to apply the product of all polynomials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

Coefficients = tuple[float, float, float]
Method = Literal["auto", "plain", "gram"]

METHODS = ("auto", "plain", "gram")

QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)
"""Coefficients of Keller Jordan's Muon: steepest slope at zero; singular values end in about
0.7 to 1.2 rather than at exactly 1 (https://kellerjordan.github.io/posts/muon/)."""

# How much a rounding error of fp32 (6e-8) may grow before X is formed anew.
_GROWTH_LIMIT = 2.0**16


def as_schedule(
    coefficients: Coefficients | Sequence[Coefficients], steps: int
) -> tuple[Coefficients, ...]:
    """Coefficients of each step, checked."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"Newton-Schulz steps must be an int from 0 to 99, got {steps!r}.")
    if not isinstance(coefficients, (tuple, list)):
        raise ValueError(f"Newton-Schulz coefficients must be a tuple, got {coefficients!r}.")
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
    if not all(math.isfinite(number) for triple in triples for number in triple):
        raise ValueError(f"Newton-Schulz coefficients must be finite, got {coefficients!r}.")
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)


def check_method(method: str) -> Method:
    """The method, if it is one."""
    if method not in METHODS:
        raise ValueError(f'Newton-Schulz method must be "auto", "plain" or "gram", got {method!r}.')
    return cast("Method", method)


def uses_gram(
    method: Method, shape: Sequence[int], *, itemsize: int, device_type: str = "cpu"
) -> bool:
    """Whether matrices of this shape are iterated in the Gram form.

    ``"auto"`` takes it where the long side is more than 1.5 times the short one: there it has
    fewer multiply-adds, whatever the number of steps, and ``benchmarks/newton_schulz.py`` finds it
    faster. Its small products are in fp32 at least; an accelerator multiplies half precision many
    times faster than that, so for half precision ``"auto"`` takes the plain form there. A single
    row is iterated in the plain form whatever the method: nothing is saved on a matrix of one
    element, and inductor, which writes such products out inside each other, takes minutes over it.

    Args:
        method: The method asked for.
        shape: Ends with rows and columns.
        itemsize: Bytes per element of the iteration's dtype.
        device_type: Where it runs.
    """
    short, long = sorted(shape[-2:])
    if short == 1:
        return False
    if method == "auto":
        return 2 * long > 3 * short and (itemsize >= 4 or device_type == "cpu")
    return method == "gram"


def gram_runs(schedule: Sequence[Coefficients]) -> list[tuple[Coefficients, ...]]:
    """Cut the steps into runs, between which the Gram form returns to ``X``.

    A computed Gram matrix has eigenvalues that are wrong by the rounding error; what should be zero
    may be negative. A step multiplies eigenvalues near zero by ``a^2``, also the negative ones,
    for which there is no fixed point, so their growth within a run is bounded.
    """
    runs: list[list[Coefficients]] = []
    growth = 1.0
    for triple in schedule:
        if not runs or growth > _GROWTH_LIMIT:
            runs.append([])
            growth = 1.0
        runs[-1].append(triple)
        growth *= max(1.0, triple[0] ** 2)
    return [tuple(run) for run in runs]


def multiply_adds(shape: Sequence[int], schedule: Sequence[Coefficients], *, gram: bool) -> int:
    """Multiply-adds of all products for one matrix.

    Plain: ``2 r^2 c + r^3`` per step (form ``A``, square it, apply). Gram: ``2 r^2 c + (4 k - 3)
    r^3`` per run of ``k`` steps: each squares ``A``, all but the last advance it by two products,
    all but the first multiply their polynomial to the others.
    """
    short, long = sorted(shape[-2:])
    touch, small = short * short * long, short**3
    if not gram:
        return len(schedule) * (2 * touch + small)
    return sum(2 * touch + (4 * len(run) - 3) * small for run in gram_runs(schedule))
