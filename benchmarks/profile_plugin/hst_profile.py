"""Timers around what hstransport does in the scheduler's process, as an SGLang plugin.

Found through an entry point that benchmarks/ways.py writes. Totals go into the file named by
HST_PROFILE after each batch: ``{step: [calls, wall seconds, processor seconds]}``. A timer costs
about a microsecond a call. ``plan``, ``take`` and ``post`` run on the scheduler's thread, the
others on the exporter's, where ``follow`` contains ``start`` and ``rows`` contains ``reserve``.
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
    from hstransport.follower import Follower
    from hstransport.recorder import Recorder
    from hstransport.ring import RingWriter
    from hstransport.tap import Tap

    for owner, names in (
        (Tap, ("plan", "take", "post")),
        (Recorder, ("start", "rows", "end")),
        (RingWriter, ("reserve",)),
        (Publisher, ("send",)),
    ):
        for name in names:
            setattr(owner, name, _timed(name, getattr(owner, name)))
    Follower.plan = _timed("follow", Follower.plan)
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
