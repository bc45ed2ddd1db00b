"""What a run shows: the plan, a progress bar and the results, on rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtensor_owner.usage import UsageError

Show = Callable[[float, float], None]  # (loss in nats per byte, tokens a second) of a finished step


class Silent:
    """The display of every rank but the first: nothing at all."""

    def line(self, text: str = "") -> None:
        """Show nothing."""

    @contextmanager
    def progress(self, steps: int, done: int = 0) -> Iterator[Show]:
        """A bar nobody sees."""
        yield lambda loss, tokens_per_second: None


class Terminal(Silent):
    """Lines and a bar on standard output; without a terminal, a line every tenth of the run.

    Raises:
        UsageError: rich is not installed.
    """

    def __init__(self) -> None:
        try:
            from rich.console import Console
        except ImportError:
            raise UsageError(
                "the progress bar and the plot need rich and matplotlib: "
                "pip install 'dtensor-owner[train]'"
            ) from None
        self._console = Console(highlight=False, soft_wrap=True)

    def line(self, text: str = "") -> None:
        """Show a line (or several) as it is."""
        self._console.print(text, markup=False)

    @contextmanager
    def progress(self, steps: int, done: int = 0) -> Iterator[Show]:
        """Yield a function to call after each step with its loss and speed."""
        if not self._console.is_terminal:
            yield self._plain_progress(steps, done)
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            Remaining(),
        )
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task("", total=steps, completed=done, status="first step")

            def show(loss: float, tokens_per_second: float) -> None:
                bar.update(task, advance=1, status=_status(loss, tokens_per_second))

            yield show

    def _plain_progress(self, steps: int, done: int) -> Show:

        def show(loss: float, tokens_per_second: float) -> None:
            nonlocal done
            done += 1
            if done == 1 or done == steps or done * 10 // steps != (done - 1) * 10 // steps:
                self.line(f"step {done:>5} of {steps}  {_status(loss, tokens_per_second)}")

        return show


def _status(loss: float, tokens_per_second: float) -> str:
    return f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
