"""Threads that unpack, shared by all that a process reads."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)  # threads do not come along


def default_threads() -> int:
    """The cores there are; 1 in a process that another one started: a loader's workers are the
    parallel ones, and would get in each other's way."""
    if multiprocessing.parent_process() is not None:
        return 1
    return len(os.sched_getaffinity(0))


def wait_all(futures: Sequence[Future[Any]]) -> None:
    """Until all are done, however often the caller is interrupted meanwhile: what they work on is
    somebody else's afterwards. Python's own end would wait for their threads just as long."""
    try:
        wait(futures)
    except BaseException:
        wait_all(futures)
        raise


def together(work: Callable[[], None], threads: int, shares: int) -> None:
    """Call ``work``, which takes its share of what there is to do until nothing is left, in so many
    threads, or in fewer when there are fewer shares; the caller's is one of them."""
    others_due = min(threads, shares) - 1
    if others_due < 1:
        work()
        return
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads - 1, "hstransport-unpack"))
    others: list[Future[None]] = []
    try:
        for _ in range(others_due):
            try:
                others.append(pool.submit(work))
            except RuntimeError:
                break  # no more threads can be had: there are fewer
        work()
    finally:
        # What has not begun has nothing left to do: threads are at work for another reader.
        others = [other for other in others if not other.cancel()]
        wait_all(others)
    for other in others:
        other.result()
