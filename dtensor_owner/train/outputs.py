"""The files a run leaves behind: metrics.jsonl, summary.json and loss.png."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dtensor_owner.usage import UsageError

FILES = METRICS, SUMMARY, PLOT = "metrics.jsonl", "summary.json", "loss.png"

Point = tuple[int, float]  # (steps done, loss in nats per byte)


class NoMetrics(AbstractContextManager[None]):
    """The metrics of every rank but the first: not written."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write nothing."""

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""


class Metrics(NoMetrics):
    """One JSON object a line, written as the run goes, so that a broken run keeps its part.

    Raises:
        UsageError: The folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (SUMMARY, PLOT):  # of an older run; they would seem to belong to this one
                (folder / name).unlink(missing_ok=True)
            self._file = (folder / METRICS).open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out {folder}: cannot be written to: {error}") from None

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    text = json.dumps(summary, indent=2) + "\n"
    (folder / SUMMARY).write_text(text, encoding="utf-8")


def plot_losses(
    folder: Path, training: Iterable[Point], validation: Iterable[Point], title: str
) -> None:
    """Draw both losses over the steps; needs matplotlib, but no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*training), label="training", linewidth=1)
    axes.plot(*zip(*validation), "o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / PLOT, dpi=120)
