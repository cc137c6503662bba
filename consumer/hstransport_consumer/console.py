"""What a person sees while the consumer runs: one live line, or plain log lines."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from .handover import Handover
from .packer import Totals
from .stream import RingStream

_REFRESH_S = 0.25
_LOG_EVERY_S = 10.0


class Status:
    """Shows totals and the rings' fill: live on a terminal, else a log line every 10 s."""

    def __init__(
        self, console: Console, handover: Handover | None = None, *, log_json: bool = False
    ) -> None:
        self._handover = handover
        live = console.is_terminal and not log_json
        self._live = Live(console=console, auto_refresh=False) if live else None
        self._started = self._shown = time.monotonic()
        self._last: tuple[float, int] = (self._started, 0)
        self._rate = 0.0
        self._said: tuple[int, ...] = ()

    def __enter__(self) -> Status:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, totals: Totals, streams: Sequence[RingStream], *, final: bool = False) -> None:
        """Refresh when it is time to; ``final`` says it in any case."""
        now = time.monotonic()
        every = _REFRESH_S if self._live else _LOG_EVERY_S
        if not final and now - self._shown < every:
            return
        self._shown = now
        self._measure(now, totals.raw_bytes)
        line = describe(totals, streams, self._rate)
        if self._handover:
            line += f" · {self._handover}"
        if self._live:
            self._live.update(Text(line), refresh=True)
            return
        done = self._handover.done if self._handover else 0
        key = (totals.records, totals.samples, len(streams), done)
        if final or key != self._said:
            self._said = key
            logging.getLogger("hstransport_consumer").info(line)

    def _measure(self, now: float, raw_bytes: int) -> None:
        then, before = self._last
        if now - then >= 1.0 or raw_bytes < before:
            self._rate = (raw_bytes - before) / max(now - then, 1e-9) / 1e9
            self._last = (now, raw_bytes)


def describe(totals: Totals, streams: Sequence[RingStream], gbs: float) -> str:
    """``12 samples (11 whole, 1 dropped) · 3,456 tokens · 0.12 GB/s · ratio 1.49 · ring 3 % …``"""
    states = ", ".join(f"{n} {state}" for state, n in sorted(totals.states.items()))
    ratio = f"{totals.raw_bytes / totals.stored_bytes:.3f}" if totals.stored_bytes else "-"
    used = sum(s.reader.used_bytes for s in streams)
    size = sum(s.reader.capacity_bytes for s in streams)
    ring = f"ring {100 * used / size:.0f} %" if size else "no server"
    parts = [
        f"{totals.samples:,} samples" + (f" ({states})" if states else ""),
        f"{totals.tokens:,} tokens",
        f"{gbs:.2f} GB/s",
        f"ratio {ratio}",
        ring,
        f"drops {totals.servers(streams).drop_words}",
    ]
    for count, what in (
        (totals.repeated, "repeated records"),
        (totals.malformed, "malformed records"),
        (totals.torn, "torn records"),
        (totals.orphan_rows, "orphan rows"),
        (totals.anomalies, "orphan events"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    return " · ".join(parts)


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, and on an error
    perhaps its ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        said = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said)


def set_up_logging(console: Console, *, verbose: bool, log_json: bool = False) -> None:
    """Log through rich on a terminal (the live line stays below), plainly or as JSON elsewhere."""
    handler: logging.Handler
    formatter: logging.Formatter | None = None
    if log_json:
        handler, formatter = logging.StreamHandler(), JsonLines()
    elif console.is_terminal:
        handler = RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S")
        formatter = logging.Formatter("%(message)s")
    else:
        handler = logging.StreamHandler()
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
