"""What a person sees meanwhile, on stderr: a bar with an ETA, or a line every few seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

_LINE_EVERY_S = 5.0


class Progress:
    """Shows one phase after the other. ``quiet`` shows nothing but notes."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._quiet = quiet
        self._bar: RichProgress | None = None
        if self._console.is_terminal and not quiet:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
        self._task: TaskID | None = None
        self._what, self._total, self._done, self._tokens = "", 0, 0, 0
        self._started = self._said = time.monotonic()

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def phase(self, what: str, total: int) -> None:
        """Begin to count something else, from nothing."""
        self._what, self._total, self._done, self._tokens = what, total, 0, 0
        self._started = self._said = time.monotonic()
        if self._bar:
            self._task = self._bar.add_task(what, total=total, rate="")

    def advance(self, tokens: int, count: int = 1) -> None:
        """``count`` more are done, with that many prompt tokens."""
        self._done += count
        self._tokens += tokens
        now = time.monotonic()
        if self._bar and self._task is not None:
            self._bar.update(self._task, advance=count, rate=self._rate(now))
        elif now - self._said >= _LINE_EVERY_S or (count and self._done == self._total):
            self._said = now
            self._line(now)

    def say(self, words: str) -> None:
        """Something that a person may like to know."""
        if not self._quiet:
            self.note(words)

    def note(self, words: str) -> None:
        """Something that a person should know at once."""
        if self._bar:
            self._bar.console.print(f"hstransport: {words}", markup=False, highlight=False)
        else:
            self._console.print(
                f"hstransport: {words}", markup=False, highlight=False, soft_wrap=True
            )

    def _line(self, now: float) -> None:
        words = f"{self._what}: {self._done} of {self._total}"
        if rate := self._rate(now):
            words += f", {rate}"
        if 0 < self._done < self._total:
            left = (now - self._started) / self._done * (self._total - self._done)
            words += f", about {duration(left)} left"
        self.say(words)

    def _rate(self, now: float) -> str:
        seconds = now - self._started
        return f"{self._tokens / seconds:,.0f} tokens/s" if self._tokens and seconds > 0 else ""


def duration(seconds: float) -> str:
    """``90`` -> ``"2 min"``: to one unit, for people."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}" if unit != "min" else f"{seconds / size:.0f} min"
    return f"{seconds:.0f} s"
