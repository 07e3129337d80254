"""A progress bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time

from rich import progress
from rich.console import Console

_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Shows step, loss, tokens per second and time left of a training run; a context manager.

    Args:
      steps: of the whole run.
      start: steps done before this process started.
      tokens_per_step: tokens one step trains on.
      quiet: shows nothing.
    """

    def __init__(self, steps: int, start: int, tokens_per_step: int, *, quiet: bool = False):
        self._steps, self._start, self._tokens = steps, start, tokens_per_step
        self._began = self._line = time.monotonic()
        self._bar: progress.Progress | None = None
        self._quiet = quiet
        console = Console()
        if console.is_terminal and not quiet:
            columns = (
                progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[text]}"),
            )
            self._bar = progress.Progress(*columns, console=console, refresh_per_second=4)
            self._task = self._bar.add_task("train", total=steps, completed=start, text="compiling")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()

    def begin(self) -> None:
        """Starts the clock: call it after the first step, which compiles."""
        self._began = self._line = time.monotonic()
        self._start += 1

    def update(self, step: int, bits_per_byte: float) -> None:
        """Shows that step steps are done, the last at this loss."""
        now = time.monotonic()
        rate = (step - self._start) / max(now - self._began, 1e-9)
        text = f"{bits_per_byte:.3f} bits per byte"
        if rate > 0:
            text += f", {rate * self._tokens:,.0f} tokens/s, {_duration((self._steps - step) / rate)} left"
        if self._bar:
            self._bar.update(self._task, completed=step, text=text)
        elif not self._quiet and (now - self._line > _SECONDS_BETWEEN_LINES or step == self._steps):
            self._line = now
            print(f"step {step}/{self._steps}: {text}", flush=True)

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar:
            self._bar.console.print(text, highlight=False)
        elif not self._quiet:
            print(text, flush=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
