"""Which backend compiles the optimizer step on this machine."""

from __future__ import annotations

import torch

from dtensor_owner.train.steps import Ranks

INDUCTOR, WITHOUT_COMPILER = "inductor", "aot_eager"


def choose_backend(ranks: Ranks) -> tuple[str, str]:
    """Inductor, or where that does not work a backend that needs no C++ compiler.

    Every rank calls this and gets the same backend: one rank that lacks a compiler decides.

    Returns:
        The backend and one line that says which it is and why.
    """
    problem = inductor_problem(ranks.device)
    failures = ranks.total(torch.tensor(float(problem is not None), device=ranks.device))
    if not failures.item():
        return INDUCTOR, "Muon's step is compiled by inductor, in the first step."
    return (
        WITHOUT_COMPILER,
        f"Muon's step falls back to {WITHOUT_COMPILER}, which needs no C++ compiler: "
        f"{problem or 'inductor does not work on another rank'}",
    )


def inductor_problem(device: torch.device) -> str | None:
    """Compile a trifle; where that fails, for want of a compiler, the error's first line."""

    def trifle(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    try:
        torch.compile(trifle, backend=INDUCTOR)(torch.ones(8, device=device))
    except Exception as error:  # whatever is missing: compiler, headers, a place to write to
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    return None
