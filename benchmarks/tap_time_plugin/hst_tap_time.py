"""How long hstransport's hooks hold the scheduler's thread, forward pass by forward pass.

Found through an entry point that benchmarks/ways.py writes. HST_TAP_TIME names a file that exists
when the server starts: while its first byte is 1, passes are timed, and each adds a line ("prefill"
or "decode", microseconds) to the file of that name with ".log" behind it. Of each hook counts what
it takes without SGLang's own function inside it. Switched off this costs a microsecond a pass.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

_passes: deque[tuple[str, float]] = deque()
"""Passes that were run and whose results are not processed yet: (kind, seconds so far)."""
_spent = 0.0  # in the hooks since the pass, or the processing of its result, began


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    path = Path(os.environ["HST_TAP_TIME"])
    with path.open("rb") as file:
        switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    log = path.with_suffix(".log").open("a", buffering=1)
    apply = HookRegistry.apply_hooks

    def apply_timed() -> None:
        """Called when all plugins have registered, in whatever order."""
        for target, hooks in HookRegistry._hooks.items():
            for i, (kind, hook, *rest) in enumerate(hooks):
                if hook.__module__ == "hstransport.sglang.plugin":
                    timed = _timed(hook, switch)
                    if target.endswith(".run_batch"):
                        timed = _pass(timed, switch)
                    elif target.endswith(".process_batch_result"):
                        timed = _result(timed, switch, log)
                    hooks[i] = (kind, timed, *rest)
        apply()

    HookRegistry.apply_hooks = apply_timed


def _timed(hook: Callable[..., Any], switch: mmap.mmap) -> Callable[..., Any]:
    @functools.wraps(hook)
    def timed(original: Any, *args: Any, **kwargs: Any) -> Any:
        global _spent
        if not switch[0]:
            return hook(original, *args, **kwargs)
        outside = 0.0

        def inner(*a: Any, **kw: Any) -> Any:
            nonlocal outside
            begun = time.perf_counter()
            try:
                return original(*a, **kw)
            finally:
                outside += time.perf_counter() - begun

        begun = time.perf_counter()
        try:
            return hook(inner, *args, **kwargs)
        finally:
            _spent += time.perf_counter() - begun - outside

    return timed


def _pass(run_batch: Callable[..., Any], switch: mmap.mmap) -> Callable[..., Any]:
    @functools.wraps(run_batch)
    def run(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        global _spent
        kind = "decode" if batch.forward_mode.is_decode() else "prefill"
        _spent = 0.0
        result = run_batch(original, scheduler, batch, *args, **kwargs)
        if switch[0]:
            _passes.append((kind, _spent))
        return result

    return run


def _result(process: Callable[..., Any], switch: mmap.mmap, log: Any) -> Callable[..., Any]:
    @functools.wraps(process)
    def processed(original: Any, *args: Any, **kwargs: Any) -> Any:
        global _spent
        _spent = 0.0
        result = process(original, *args, **kwargs)
        if not switch[0]:
            _passes.clear()
        elif _passes:  # results come in the order of the passes
            kind, seconds = _passes.popleft()
            log.write(f"{kind} {(seconds + _spent) * 1e6:.2f}\n")
        return result

    return processed
