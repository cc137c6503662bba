"""The ring: records that one process writes and another reads, in a file of shared memory.

``RingWriter`` and ``RingReader`` are the two roles; each is held by one process at a time, by a
lock that the kernel drops when the process dies. docs/design.md ("Ring file") is the layout.

A record is a lease on both sides, given back exactly once: the writer's ``Reservation`` by
``commit()`` or ``abandon()``, the reader's ``Record`` by ``release()``. Full and empty are values
(``None``). Payloads are numpy views of the shared memory itself; a view keeps the memory mapped,
so it never crashes, but after its lease is given back its bytes may be another record's.

A forked child holds no role: there every writer and reader is closed.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from . import _core
from ._core import Record, Reservation
from .counters import WORDS, RingCounters
from .errors import RingBusyError

__all__ = [
    "PendingInfo",
    "Record",
    "Reservation",
    "RingCounters",
    "RingInfo",
    "RingReader",
    "RingWriter",
    "inspect_ring",
    "remove_orphan",
]


class PendingInfo(NamedTuple):
    """A record that a dead producer never committed."""

    seq: int
    kind: int
    meta: bytes
    position: int
    record_bytes: int


class RingInfo(NamedTuple):
    """What a ring holds, seen from outside."""

    path: Path
    info: builtins.bytes
    counters: RingCounters
    capacity_bytes: int
    head: int
    tail: int
    committed: int
    """Records that wait for a consumer, payload and all."""
    pending: int
    """Records reserved but not (or, without a producer, never) committed."""
    abandoned: int
    closed: bool
    producer_alive: bool
    consumer_attached: bool
    out: Path | None
    """Where the consumer stores the records, if it has said so."""

    @property
    def bytes(self) -> int:
        """Bytes of the ring that are not freed yet."""
        return self.head - self.tail

    @property
    def records(self) -> int:
        """All records that are not freed yet."""
        return self.committed + self.pending + self.abandoned


class RingWriter:
    """The producer's side. One thread reserves; others may commit, count and close."""

    def __init__(self, core: _core.RingWriter, path: Path, capacity_bytes: int, info: bytes):
        self._core = core
        self.path = path
        self.capacity_bytes = capacity_bytes
        self.info = info

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        info: bytes,
        progress: Callable[[int], None] | None = None,
    ) -> RingWriter:
        """Create the file (mode 0600) and take the producer's role.

        All its memory is taken at once, by up to eight threads that clear about 1.4 GB/s each.
        ``progress`` is called about once a second with the bytes taken so far; what it raises ends
        the creation. The file appears under its name when it is complete.

        Raises ConfigError (capacity not a multiple of 4096 from 64 KiB), FileExistsError,
        FileNotFoundError (no such directory), PermissionError, or OSError with ENOSPC that names
        the bytes wanted and available.
        """
        path = Path(path)
        core = _core.RingWriter.create(str(path), capacity_bytes, info, progress)
        return cls(core, path, capacity_bytes, bytes(info))

    @property
    def core(self) -> _core.RingWriter:
        """The native object, for the copier that pins it."""
        return self._core

    def reserve(
        self,
        kind: int,
        meta: bytes,
        payload_bytes: int,
        *,
        wait_s: float = 0.0,
        leave_bytes: int = 0,
    ) -> Reservation | None:
        """Reserve a record and publish its metadata; None if there is no room.

        Waits for room up to ``wait_s``, with the GIL released; ``ring_stall_ns`` counts that.
        Succeeds only if ``leave_bytes`` stay free afterwards. A None takes no ``seq``.

        Raises ConfigError if the record is larger than the ring can ever hold. A record between
        that and :meth:`max_payload_bytes` may get None from an empty ring, again and again, if it
        would wrap: stay within :meth:`max_payload_bytes`.
        """
        return self._core.reserve(kind, meta, payload_bytes, wait_s, leave_bytes)

    def put(self, kind: int, meta: bytes) -> tuple[int, int, int] | None:
        """A committed record without payload, in one step: its (seq, position, record_bytes).

        None if there is no room at the moment; raises as :meth:`reserve`.
        """
        return self._core.put(kind, meta)

    def max_payload_bytes(self, meta_bytes: int, leave_bytes: int = 0) -> int:
        """Largest payload that an empty ring takes wherever its head stands.

        Records never wrap. At worst the data area ends 64 bytes too early for a record of R bytes,
        and R - 64 bytes are lost to padding; so R <= (capacity - leave + 64) / 2, rounded down to
        64, of which the record's header (64) and metadata, rounded up to 64, are taken off.
        0 if not even the metadata fit.
        """
        return self._core.max_payload_bytes(meta_bytes, leave_bytes)

    def count(self, counter: str, n: int = 1) -> None:
        """Add to one of the :class:`RingCounters`; any thread may. KeyError: there is none."""
        self._core.count(WORDS[counter], n)

    def record_drop(self, reason: str, payload_bytes: int) -> None:
        """Count a piece of a sample that was dropped; ``reason``: one of DROPS."""
        self.count(reason)
        self.count("dropped_bytes", payload_bytes)

    @property
    def head(self) -> int:
        """End of the last reserved record."""
        return self._core.head

    @property
    def tail(self) -> int:
        """Everything before it has been freed by the consumer."""
        return self._core.tail

    @property
    def used_bytes(self) -> int:
        return self.head - self.tail

    @property
    def counters(self) -> RingCounters:
        return RingCounters(*self._core.counters)

    def consumer_attached(self) -> bool:
        return self._core.consumer_attached()

    def close(self) -> bool:
        """End in order: abandon pending records, set ``closed``, give the role back.

        Unlinks the file and returns True if all records are freed; otherwise the file stays for a
        consumer. A copy still in flight into a record must have ended before. Later calls return
        what the first did; ``reserve`` raises RingError and ``commit`` LeaseError from then on.
        """
        return self._core.close()

    def __enter__(self) -> RingWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RingReader:
    """The consumer's side. One thread reads; records may be released from any thread."""

    def __init__(self, core: _core.RingReader, path: Path):
        self._core = core
        self.path = path
        self.info = core.info
        self.capacity_bytes = core.capacity_bytes

    @classmethod
    def attach(cls, path: str | os.PathLike[str]) -> RingReader:
        """Take the consumer's role; reading begins with the oldest record not freed yet.

        Raises FileNotFoundError, PermissionError (another user's), RingLayoutError (no ring, or
        another version or size), RingCorruptError, RingBusyError (another consumer is attached).
        """
        path = Path(path)
        return cls(_core.RingReader.attach(str(path)), path)

    def read(self) -> Record | None:
        """The next record, committed or abandoned; None if it is pending or there is none.

        Every field of a record is checked against the ring's bounds before it is used;
        RingCorruptError names the position, the field, its value and what it must be.
        """
        return self._core.read()

    def pending(self) -> bool:
        """Whether the next record is reserved but neither committed nor abandoned."""
        return self._core.pending()

    def skip_pending(self) -> PendingInfo | None:
        """Step over a record that a dead producer left pending, and free it.

        None if the next record is not pending (it may have been committed at the last moment:
        read it). Raises RingBusyError while the producer is alive.
        """
        skipped = self._core.skip_pending()
        return None if skipped is None else PendingInfo(*skipped)

    def tell_out(self, directory: Path) -> bool:
        """Have :func:`inspect_ring` say where the records go, for as long as this reader lives.

        False when the path is longer than 1024 bytes: nothing is said then.
        """
        return self._core.tell_out(os.fsencode(directory.absolute()))

    def check_whole(self) -> None:
        """RingCorruptError if another process has truncated the file.

        Payloads that were read before this call are what the producer wrote only if it passes:
        where the file is gone, zeros are read.
        """
        self._core.check_whole()

    def producer_alive(self) -> bool:
        """Whether a process holds the producer's role; it cannot come back once it is gone."""
        return self._core.producer_alive()

    @property
    def closed(self) -> bool:
        """Whether the producer ended in order. Then what is in the ring is all there will be."""
        return self._core.closed

    @property
    def head(self) -> int:
        return self._core.head

    @property
    def tail(self) -> int:
        """Everything before it is freed; a new consumer would begin here."""
        return self._core.tail

    @property
    def cursor(self) -> int:
        """Where the next record to read begins."""
        return self._core.cursor

    @property
    def used_bytes(self) -> int:
        return self.head - self.tail

    @property
    def counters(self) -> RingCounters:
        return RingCounters(*self._core.counters)

    def unlink_if_orphaned(self) -> bool:
        """Unlink the file if every record is freed and the producer is gone.

        True if the file has no name any more, whoever removed it.
        """
        return self._core.unlink_if_orphaned()

    def close(self) -> None:
        """Give the role back. Records not released are read again by the next consumer."""
        self._core.close()

    def __enter__(self) -> RingReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def inspect_ring(path: str | os.PathLike[str]) -> RingInfo:
    """Look at a ring without taking a role; nothing in it changes.

    Raises as :meth:`RingReader.attach`, but never RingBusyError. With both sides at work the
    numbers are those of a moment during the call.
    """
    path = Path(path)
    look = _core.inspect_ring(str(path))
    out = Path(os.fsdecode(look[-1])) if look[-1] else None
    return RingInfo(path, look[0], RingCounters(*look[1]), *look[2:-1], out)


def remove_orphan(path: str | os.PathLike[str]) -> bool:
    """Unlink a ring that holds nothing and has neither producer nor consumer.

    True if there is no such file any more. Raises as :meth:`RingReader.attach`.
    """
    try:
        with RingReader.attach(path) as reader:
            return reader.unlink_if_orphaned()
    except FileNotFoundError:
        return True
    except RingBusyError:
        return False
