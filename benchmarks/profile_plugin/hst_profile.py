"""Timers around what hstransport does on the scheduler's thread, as an SGLang plugin.

Found through an entry point that benchmarks/ways.py writes. Totals go into the file named by
HST_PROFILE after each batch: ``{step: [calls, wall seconds, processor seconds]}``. A timer costs
about a microsecond a call; ``rows`` contains ``reserve`` and ``send``, ``take`` contains ``rows``.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

_totals: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hstransport.channel import Publisher
    from hstransport.exporter import Exporter
    from hstransport.ring import RingWriter
    from hstransport.sglang_plugin import Tap

    for owner, names in (
        (Tap, ("plan", "take", "sweep")),
        (Exporter, ("start", "rows", "end")),
        (RingWriter, ("reserve",)),
        (Publisher, ("send",)),
    ):
        for name in names:
            setattr(owner, name, _timed(name, getattr(owner, name)))
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.run_batch", _batch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.process_batch_result", _batch_over, HookType.AROUND)


def _timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    total = _totals[name]

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            total[0] += 1
            total[1] += time.perf_counter() - wall
            total[2] += time.thread_time() - cpu

    return timed


def _batch(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _timed("batch", original)(*args, **kwargs)


def _batch_over(original: Any, *args: Any, **kwargs: Any) -> Any:
    result = _timed("result", original)(*args, **kwargs)
    path = Path(os.environ["HST_PROFILE"])
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(_totals))
    scratch.rename(path)
    return result
