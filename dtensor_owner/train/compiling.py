"""The optimizer step as one compiled graph, by a backend that works on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor_owner.train.steps import Ranks

INDUCTOR, WITHOUT_COMPILER = "inductor", "aot_eager"


class CompiledStep:
    """Steps all optimizers in one graph, compiled at the first call with ``fullgraph=True``.

    Args:
        optimizers: Stepped one after the other.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.backend = INDUCTOR
        self._compiled = self._step

    def choose_backend(self, ranks: Ranks) -> str:
        """Choose the backend, the same on all ranks, and say in one line which and why."""
        problem = _inductor_problem(ranks.device)
        failures = ranks.total(torch.tensor(float(problem is not None), device=ranks.device))
        if failures.item():
            self.backend = WITHOUT_COMPILER
        self._compiled = torch.compile(self._step, fullgraph=True, backend=self.backend)
        if self.backend == INDUCTOR:
            return "The optimizer step is compiled by inductor at the first step."
        return (
            f"The optimizer step falls back to {WITHOUT_COMPILER}, as inductor does not work here: "
            f"{problem or 'another rank reports so'}"
        )

    def __call__(self) -> None:
        self._compiled()

    @torch.no_grad()
    def _step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def _inductor_problem(device: torch.device) -> str | None:
    """Compile a trifle; the first line of the error where that fails, for want of a compiler."""

    def trifle(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    try:
        torch.compile(trifle, backend=INDUCTOR)(torch.ones(8, device=device))
    except Exception as error:  # whatever is missing: compiler, headers, a place to write to
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    return None
