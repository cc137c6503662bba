"""The file of the shard being written: whole appends or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hstransport.errors import ShardError

from . import directory
from .direct import Buffer, DirectFile, Piece, write_all
from .workers import wait_all

SYNC_BYTES = 256 << 20
"""So much is written between two syncs that run beside the writing."""


class Appender:
    """An open ``.partial`` file, whose descriptor it takes.

    ``size`` is its end; what lies past it is never left there.
    """

    def __init__(self, path: Path, fd: int, size: int, *, durable: bool) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        try:
            self._direct = DirectFile(path, fd)
        except OSError:
            os.close(fd)
            raise
        self._durable = durable
        self._syncs = ThreadPoolExecutor(1, "hstransport-sync")
        self._syncing: Future[None] | None = None
        self._synced = size

    @staticmethod
    def create(path: Path, head: Sequence[Buffer], *, durable: bool) -> Appender:
        """A new file that begins with ``head``; no file remains if that cannot be written."""
        with ExitStack() as undo:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            undo.callback(path.unlink)
            file = Appender(path, fd, 0, durable=durable)
            undo.callback(file.close)
            file.append(head)
            if durable:
                directory.sync(path.parent)
            undo.pop_all()
        return file

    @staticmethod
    def resume(path: Path, size: int, *, durable: bool) -> Appender:
        """An existing file, cut back to ``size``."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(fd, size)
        return Appender(path, fd, size, durable=durable)

    def append(self, buffers: Sequence[Buffer]) -> None:
        """Hand all buffers to the kernel, and to the disk if durable; see :meth:`transaction`."""
        with self.transaction() as transaction:
            transaction.put(buffers)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Several writes that count together, once the block ends.

        On OSError (a full disk), or any other error, the file is as it was before. ShardError:
        what was written earlier did not reach the disk.
        """
        self._check_synced()
        transaction = Transaction(self._fd, self._direct, self.size)
        try:
            try:
                yield transaction
            finally:
                transaction.wait()  # whatever happened: nobody writes behind the cut
            if self._durable:
                os.fdatasync(self._fd)
        except OSError as e:
            os.ftruncate(self._fd, self.size)
            raise OSError(
                e.errno,
                f"{e.strerror}; nothing of this write was kept, it may be repeated when there "
                "is room",
                str(self.path),
            ) from e
        except BaseException:
            os.ftruncate(self._fd, self.size)
            raise
        self.size = transaction.end
        if not self._durable:
            self._sync_behind()

    def _sync_behind(self) -> None:
        """Let the disk work all the time: else it idles, and then everyone waits for the last sync.

        What went wrong here the next write says, because the kernel tells of an error only once.
        """
        idle = self._syncing is None or (self._syncing.done() and not self.sync_error)
        if idle and self.size - self._synced >= SYNC_BYTES:
            self._synced = self.size
            self._syncing = self._syncs.submit(os.fdatasync, self._fd)

    @property
    def sync_error(self) -> BaseException | None:
        """Why what was appended earlier is perhaps not on the disk; stays so for ever."""
        return self._syncing.exception() if self._syncing and self._syncing.done() else None

    def _check_synced(self) -> None:
        error = self.sync_error
        if error is not None:
            # The kernel takes the pages for written from now on: to try again would not help.
            raise ShardError(
                f"{self.path}: what was written did not reach the disk ({error}). It is in the "
                "page cache at best: copy the file to another disk, see to this one, and run "
                "hstransport verify before you trust the shard"
            )

    def sync(self) -> None:
        """Make all that was appended outlive the machine. ShardError as :meth:`transaction`."""
        if self._syncing:
            wait([self._syncing])
        self._check_synced()
        self._syncing = self._syncs.submit(os.fsync, self._fd)  # remembers how it ended
        wait([self._syncing])
        self._check_synced()

    def cut(self, size: int) -> None:
        """Take back appends."""
        os.ftruncate(self._fd, size)
        self.size = size

    def finish(self, tail: Sequence[Buffer], path: Path, ready: Callable[[], None]) -> None:
        """Append the footer, make the file last, and only then give it its name, which lasts once
        the caller has synced the directory.

        ``ready`` is called between: when all is on the disk.
        """
        before = self.size
        self.append(tail)
        try:
            self.sync()
            ready()
            self.path.rename(path)
        except (OSError, ShardError):
            self.cut(before)
            raise
        self.close()

    def discard(self) -> None:
        self.close()
        self.path.unlink()

    def close(self) -> None:
        if self._fd >= 0:
            self._syncs.shutdown()
            self._direct.close()
            os.close(self._fd)
            self._fd = -1


class Transaction:
    """Writes past the end of the file; ``end`` is where the next one goes."""

    def __init__(self, fd: int, direct: DirectFile, end: int) -> None:
        self._fd = fd
        self._direct = direct
        self._writing: list[Future[None]] = []
        self.end = end

    def leave(self, size: int) -> int:
        """Leave room, to be filled by :meth:`fill`; returns where it is."""
        at = self.end
        self.end += size
        return at

    def put(self, buffers: Sequence[Buffer]) -> None:
        self.end = write_all(self._fd, buffers, self.end)

    def put_by(self, pool: Executor, head: bytes, data: memoryview) -> Future[None]:
        """As :meth:`put`, by the one thread of ``pool`` and past the page cache where that can be;
        ``data`` is read until it is done."""
        at = self.leave(len(head) + len(data))
        future = self._direct.write_by(pool, Piece(at, head, data))
        self._writing.append(future)
        return future

    def wait(self) -> None:
        """Until all that was put is written. Raises the first OSError once none is under way."""
        wait_all(self._writing)
        writing, self._writing = self._writing, []
        for future in writing:
            future.result()

    def fill(self, at: int, data: bytes) -> None:
        """Write into room that was left."""
        write_all(self._fd, [data], at)
