"""Large pieces of a file written past the page cache.

The kernel copies what is written into pages that it must find first, and writes them later: that
takes several times the processor time, and twice as long, as letting the disk take it from here
(benchmarks/writes.py). Only pages that lie wholly in one piece go this way; what the edges of
pieces share goes through the page cache, so no page is ever written both ways, and nothing else
about the file changes.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

Buffer = bytes | memoryview

PAGE = 4096
"""What file offsets and memory are aligned to; no usual disk wants more."""
LEAST_BYTES = 1 << 20
"""Less is for the page cache: the disk would be waited for too often."""
_IOV_MAX = 1024


def write_all(fd: int, buffers: Sequence[Buffer], at: int) -> int:
    """Write all buffers at offset ``at``; returns the end. The kernel may take fewer at a time."""
    left = [memoryview(b) for b in buffers if len(b)]
    left.reverse()
    while left:
        n = os.pwritev(fd, left[: -_IOV_MAX - 1 : -1], at)
        at += n
        while left and n >= len(left[-1]):
            n -= len(left.pop())
        if n:
            left[-1] = left[-1][n:]
    return at


class DirectFile:
    """A second descriptor of a file that ``fd`` writes. For one thread at a time."""

    def __init__(self, path: Path, fd: int) -> None:
        self._cached = fd
        self._memory = mmap.mmap(-1, PAGE)
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._fd = -1  # the file system has no such thing

    def write(self, buffers: Sequence[Buffer], at: int) -> int:
        """As :func:`write_all`."""
        size = sum(map(len, buffers))
        lead = at % PAGE
        first, last = -(-lead // PAGE) * PAGE, (lead + size) // PAGE * PAGE
        if self._fd < 0 or last - first < LEAST_BYTES:
            return write_all(self._cached, buffers, at)
        # Together, and as far from a page's beginning as in the file.
        if len(self._memory) < lead + size:
            self._memory = mmap.mmap(-1, lead + size)
        view = memoryview(self._memory)
        end = lead
        for b in buffers:
            np.copyto(np.frombuffer(view[end : end + len(b)], np.uint8), np.frombuffer(b, np.uint8))
            end += len(b)
        base = at - lead
        write_all(self._cached, [view[lead:first]], at)
        done = self._write_pages(view[first:last], base + first)
        return write_all(self._cached, [view[first + done : end]], base + first + done)

    def _write_pages(self, pages: memoryview, at: int) -> int:
        """How many bytes the disk took: whole pages, and all unless it cannot take them so."""
        done = 0
        while done < len(pages):
            try:
                n = os.pwrite(self._fd, pages[done:], at + done)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                logger.info("this disk wants to be written through the page cache")
                self.close()
                break
            done += n // PAGE * PAGE
            if n % PAGE:
                break
        return done

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
