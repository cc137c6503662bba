"""Threads that unpack, shared by all that a process reads."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)  # threads do not come along


def default_threads() -> int:
    """The cores there are; 1 in a process that another one started: a loader's workers are the
    parallel ones, and would get in each other's way."""
    if multiprocessing.parent_process() is not None:
        return 1
    return len(os.sched_getaffinity(0))


def for_each(function: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """Call ``function`` for each item, in any order; the first error is raised once all ended."""
    items = list(items)
    if threads < 2 or len(items) < 2:
        for item in items:
            function(item)
        return
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads, "hstransport-unpack"))
    futures = [pool.submit(function, item) for item in items]
    for error in [future.exception() for future in futures]:
        if error is not None:
            raise error
