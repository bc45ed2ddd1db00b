"""The files a run leaves behind: metrics.jsonl, summary.json and loss.png."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dtensor_owner.usage import UsageError

FILES = METRICS, SUMMARY, PLOT = "metrics.jsonl", "summary.json", "loss.png"

Point = tuple[int, float]  # (steps done, loss in nats per byte)


class NoMetrics(AbstractContextManager[None]):
    """The metrics of every rank but the first: not written."""

    history: tuple[Mapping[str, Any], ...] = ()  # of the steps before a resume

    def sync(self) -> None:
        """Nothing to bring to the disk."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write nothing."""

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""


class Metrics(NoMetrics):
    """One JSON object a line, written as the run goes, so that a broken run keeps its part.

    Args:
        folder: Where ``metrics.jsonl`` goes.
        done: Steps done before a resume: their lines, where the folder has them, stay, and later
            ones go, since those steps are done again.

    Raises:
        UsageError: The folder cannot be written to.
    """

    def __init__(self, folder: Path, done: int | None = None) -> None:
        path = folder / METRICS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (SUMMARY, PLOT):  # of an older run; they would seem to belong to this one
                (folder / name).unlink(missing_ok=True)
            self.history = tuple(_lines(path, done)) if done is not None else ()
            part = path.with_suffix(".part")  # a kill here leaves the old file as it was
            part.write_text("".join(map(_line, self.history)), encoding="utf-8")
            part.replace(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out {folder}: cannot be written to: {error}") from None

    def sync(self) -> None:
        """Bring all lines to the disk, so that a checkpoint is never ahead of them."""
        os.fsync(self._file.fileno())

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _lines(path: Path, done: int) -> Iterator[dict[str, Any]]:
    """Records up to a step; the last line may have been cut off by a kill."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] <= done:
            yield record


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
