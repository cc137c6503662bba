"""Large pieces of a file written past the page cache.

The kernel copies what is written into pages that it must find first, and writes them later: that
takes several times the processor time, and twice as long, as letting the disk take it from here
(benchmarks/writes.py). Only pages that lie wholly in one piece go this way, and only where the
piece begins with a page in memory and in the file; what others share goes through the page cache.
So no page is ever written both ways, and nothing else about the file changes.
"""

from __future__ import annotations

import errno
import logging
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
    """A second descriptor of a file that ``fd`` writes."""

    def __init__(self, path: Path, fd: int) -> None:
        self._cached = fd
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._fd = -1  # the file system has no such thing

    def write(self, head: bytes, data: memoryview, at: int) -> int:
        """As :func:`write_all`; ``data`` are bytes. Past the page cache goes what of them can."""
        begin = at + len(head)
        pages = len(data) // PAGE * PAGE
        aligned = begin % PAGE == 0 and np.frombuffer(data, np.uint8).ctypes.data % PAGE == 0
        if self._fd < 0 or not aligned or pages < LEAST_BYTES:
            return write_all(self._cached, [head, data], at)
        write_all(self._cached, [head], at)
        done = self._write_pages(data[:pages], begin)
        return write_all(self._cached, [data[done:]], begin + done)

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
