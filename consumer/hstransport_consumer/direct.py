"""Large pieces of a file written past the page cache.

The kernel copies what is written into pages that it must find first, and writes them later: that
takes several times the processor time, and twice as long, as letting the disk take it from here
(benchmarks/writes.py). Only pages that lie wholly in one piece go this way, and only where the
piece begins with a page in memory and in the file; what others share goes through the page cache.
So no page is written both ways (but for one that the disk took in part), and nothing else about the
file changes.

Pieces that wait while others are written go to the disk in one call, with the page between two of
them put together: the disk idles whenever a call has returned and the next one has not come.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Buffer = bytes | memoryview

PAGE = 4096
"""What file offsets and memory are aligned to; no usual disk wants more."""
LEAST_BYTES = 1 << 20
"""Less is for the page cache: the disk would be waited for too often."""
_MOST_BYTES = 6 << 20
"""Of one call, about: two chunks of four planes. Their memory is in use until all is written."""
_IOV_MAX = 1024


def page_aligned(size: int) -> npt.NDArray[np.uint8]:
    """Fresh memory of at least ``size`` bytes that begins with a page."""
    memory = np.empty(size + PAGE, np.uint8)
    return memory[-memory.ctypes.data % PAGE :]


def write_all(fd: int, buffers: Sequence[Buffer], at: int) -> int:
    """Write all buffers at offset ``at``; returns the end. The kernel may take fewer at a time."""
    left = [memoryview(b) for b in buffers if len(b)]
    left.reverse()
    while left:
        n = os.pwritev(fd, left[: -_IOV_MAX - 1 : -1], at)
        at += n
        _drop(left, n)
    return at


def _drop(left: list[memoryview], n: int) -> None:
    """Take ``n`` bytes off buffers that are in reverse order."""
    while left and n >= len(left[-1]):
        n -= len(left.pop())
    if n:
        left[-1] = left[-1][n:]


class Piece(NamedTuple):
    """Bytes that go to the offset ``at``: a head, and data that may go past the page cache."""

    at: int
    head: bytes
    data: memoryview

    @property
    def end(self) -> int:
        return self.at + len(self.head) + len(self.data)


class DirectFile:
    """A second descriptor of a file that ``fd`` writes. Written by one thread at a time."""

    def __init__(self, path: Path, fd: int) -> None:
        self._cached = fd
        self._waiting: deque[tuple[Piece, Future[None]]] = deque()
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._fd = -1  # the file system has no such thing

    def write_by(self, pool: Executor, piece: Piece) -> Future[None]:
        """Have the one thread of ``pool`` call :meth:`write`, with the pieces that wait by then."""
        done: Future[None] = Future()
        self._waiting.append((piece, done))
        pool.submit(self._write_waiting)
        return done

    def _write_waiting(self) -> None:
        batch: list[tuple[Piece, Future[None]]] = []
        size = 0
        while self._waiting and size < _MOST_BYTES:
            if batch and self._waiting[0][0].at != batch[-1][0].end:
                break
            batch.append(self._waiting.popleft())
            size += len(batch[-1][0].data)
        try:
            self.write([piece for piece, _ in batch])
        except BaseException as e:
            for _, done in batch:
                done.set_exception(e)
        else:
            for _, done in batch:
                done.set_result(None)

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write pieces that follow one another."""
        pages: list[memoryview] = []  # whole ones, to go past the page cache together
        loose: list[Buffer] = []  # what follows them, or what there is before the first
        begin = at = pieces[0].at if pieces else 0  # where each of the two begins
        for piece in pieces:
            loose.append(piece.head)
            start = piece.end - len(piece.data)
            whole = self._whole_pages(piece.data, start)
            if not whole:
                loose.append(piece.data)
                continue
            if pages and start - at <= LEAST_BYTES:
                # Both ends are those of pages, and only these pieces are between.
                between = page_aligned(start - at)[: start - at]
                between[:] = np.frombuffer(b"".join(loose), np.uint8)
                pages.append(between.data)
            else:
                self._write_pages(pages, begin)
                write_all(self._cached, loose, at)
                pages, begin = [], start
            pages.append(piece.data[:whole])
            loose, at = [piece.data[whole:]], start + whole
        self._write_pages(pages, begin)
        write_all(self._cached, loose, at)

    def _whole_pages(self, data: memoryview, at: int) -> int:
        """How many bytes of a piece's data may go past the page cache."""
        size = len(data) // PAGE * PAGE
        if self._fd < 0 or size < LEAST_BYTES or at % PAGE:
            return 0
        return 0 if np.frombuffer(data, np.uint8).ctypes.data % PAGE else size

    def _write_pages(self, pages: Sequence[memoryview], at: int) -> None:
        left = list(reversed(pages))
        while left and self._fd >= 0:
            try:
                if len(left) == 1:
                    n = os.pwrite(self._fd, left[0], at)
                else:
                    n = os.pwritev(self._fd, left[: -_IOV_MAX - 1 : -1], at)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                logger.info("this disk wants to be written through the page cache")
                self.close()
                break
            at += n // PAGE * PAGE
            _drop(left, n // PAGE * PAGE)
            if n % PAGE or not n:
                break
        write_all(self._cached, left[::-1], at)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
