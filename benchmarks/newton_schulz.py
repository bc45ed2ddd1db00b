"""The two forms of Newton-Schulz: multiply-adds, time and error.

    python benchmarks/newton_schulz.py [--short 512] [--rounds 7]

Times are medians on one thread, forms interleaved. Errors are relative Frobenius norms against the
same polynomials applied to the singular values in fp64; the matrices' singular values fall evenly
in logarithms from 1 to 1 / condition.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
from torch import Tensor

from dtensor_owner import newton_schulz
from dtensor_owner.ns_schedule import QUINTIC, Method, multiply_adds, uses_gram

FORMS: tuple[Method, Method] = ("plain", "gram")
STEPS = 5


def times(shape: tuple[int, int], dtype: torch.dtype, rounds: int) -> dict[Method, float]:
    """Median milliseconds of both forms."""
    G = torch.randn(shape)
    taken: dict[Method, list[float]] = {form: [] for form in FORMS}
    for number in range(rounds + 1):
        for form in FORMS:
            start = time.perf_counter()
            newton_schulz(G, STEPS, dtype=dtype, method=form)
            if number:
                taken[form].append(1e3 * (time.perf_counter() - start))
    return {form: statistics.median(values) for form, values in taken.items()}


def conditioned(rows: int, cols: int, condition: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    U, V = (
        torch.linalg.qr(torch.randn(n, rows, generator=generator, dtype=torch.float64)).Q
        for n in (rows, cols)
    )
    falling = torch.logspace(0, -math.log10(condition), rows, dtype=torch.float64)
    return (U * falling) @ V.mT


def error(G: Tensor, dtype: torch.dtype, form: Method) -> float:
    U, S, V = torch.linalg.svd(G, full_matrices=False)
    S = S / S.norm()
    a, b, c = QUINTIC
    for _ in range(STEPS):
        S = a * S + b * S**3 + c * S**5
    exact = (U * S) @ V
    result = newton_schulz(G.float(), STEPS, dtype=dtype, method=form).double()
    return ((result - exact).norm() / exact.norm()).item()


def print_times(short: int, dtypes: list[torch.dtype], rounds: int) -> None:
    print("| shape | multiply-adds, Gram / plain | auto |", end="")
    print("".join(f" {name(d)} plain, ms | Gram, ms | ratio |" for d in dtypes))
    print("|---|---:|---|" + "---:|---:|---:|" * len(dtypes))
    for ratio in (1, 1.25, 1.5, 2, 2.6875, 4):
        shape = (short, int(short * ratio))
        counts = [multiply_adds(shape, [QUINTIC] * STEPS, gram=gram) for gram in (True, False)]
        auto = "Gram" if uses_gram("auto", shape, itemsize=4) else "plain"
        cells = [f"{shape[0]} x {shape[1]}", f"{counts[0] / counts[1]:.2f}", auto]
        for dtype in dtypes:
            taken = times(shape, dtype, rounds)
            cells += [f"{taken['plain']:.1f}", f"{taken['gram']:.1f}"]
            cells += [f"{taken['gram'] / taken['plain']:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def print_errors(rows: int, cols: int, dtypes: list[torch.dtype]) -> None:
    print(f"\nRelative error, {rows} x {cols}, {STEPS} steps:\n")
    print("| condition |" + "".join(f" {name(d)} plain | Gram |" for d in dtypes))
    print("|---:|" + "---:|---:|" * len(dtypes))
    for power in range(7):
        G = conditioned(rows, cols, 10.0**power)
        cells = [f"{error(G, dtype, form):.1e}" for dtype in dtypes for form in FORMS]
        print(f"| 1e{power} | {' | '.join(cells)} |", flush=True)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", type=int, default=512, help="rows of the timed matrices")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_times(arguments.short, [torch.float32, torch.bfloat16], arguments.rounds)
    print_errors(256, 688, [torch.float32, torch.bfloat16, torch.float16])


if __name__ == "__main__":
    main()
