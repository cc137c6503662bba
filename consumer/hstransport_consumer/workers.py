"""Threads that unpack, shared by all that a process reads."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
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
    """Call ``function`` for each item, in any order; the first error is raised once all ended.

    The caller's thread is one of the ``threads``.
    """
    items = list(items)
    threads = min(threads, len(items))
    left = iter(items)  # shared: a step of a list's iterator is whole under the GIL

    def work() -> None:
        for item in left:
            function(item)

    if threads < 2:
        return work()
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads - 1, "hstransport-unpack"))
    others = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        wait(others)
    for other in others:
        other.result()
