"""Where doctor gets its samples: out of a directory of shards, its own if need be.

A ring has one consumer, and what it frees is gone. So where a consumer is attached its directory
is read; where none is, doctor takes the role for as long as it asks, and frees nothing of others.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..client.stored import Stored
from ..protocol import Event, Rows, Start
from ..ring import Record
from .place import Place

if TYPE_CHECKING:
    from hstransport_consumer.sample import Sample
    from hstransport_consumer.stream import Received, RingStream
    from hstransport_consumer.writer import DatasetWriter

_LOOK_EVERY_S = 0.05


def wait_for(directory: Path, ids: Iterable[str], settle_timeout_s: float) -> dict[str, Sample]:
    """The samples of ``ids``, by id, whole or not.

    Waits until all are there, or none of them has come for ``settle_timeout_s``. Raises what
    open_shards raises.
    """
    stored = Stored(directory)
    left = set(ids)
    found: dict[str, Sample] = {}
    moved = time.monotonic()
    while left and time.monotonic() - moved < settle_timeout_s:
        if stored.look():
            come = {i: sample for i in left if (sample := stored.sample(i)) is not None}
            if come:
                moved = time.monotonic()
            found |= come
            left -= come.keys()
        time.sleep(0.05)
    return found


class OwnConsumer:
    """Stores doctor's own samples, for as long as it asks, in a temporary directory.

    It holds the consumer's role on a session's rings, on a thread of its own, and passes over
    what others asked for: that stays in the ring. What it stored itself is freed at the end if
    nothing else came, and is else left, with the rest, to the next consumer.
    """

    def __init__(self, place: Place, prefix: str) -> None:
        self._place = place
        self._prefix = prefix
        self.directory = Path(tempfile.mkdtemp(prefix="hstransport-doctor-"))
        self._followed: list[_Followed] = []
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="hstransport-doctor", daemon=True)

    def __enter__(self) -> OwnConsumer:
        """Raises RingBusyError when another consumer was quicker."""
        from hstransport_consumer.stream import RingStream

        try:
            for ring in self._place.live:
                self._followed.append(_Followed(RingStream(ring.place), self._prefix))
        except BaseException:
            self._close()
            raise
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._close()
        if error is None:
            self.raise_error()

    @property
    def foreign(self) -> int:
        """Records of others, which stay in the ring."""
        return sum(ring.foreign for ring in self._followed)

    def raise_error(self) -> None:
        """Raise what went wrong on the thread, if anything did."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _close(self) -> None:
        for ring in self._followed:
            ring.stream.close()
        shutil.rmtree(self.directory)

    def _work(self) -> None:
        from hstransport_consumer.writer import DatasetWriter

        try:
            with DatasetWriter(self.directory) as writer:
                for ring in self._followed:
                    writer.begin_run(ring.stream.info)
                while not self._stop.wait(_LOOK_EVERY_S):
                    for ring in self._followed:
                        ring.store(writer)
                for ring in self._followed:
                    ring.free_own()
        except BaseException as e:
            self._error = e


class _Followed:
    """One ring, and whose records are in it."""

    def __init__(self, stream: RingStream, prefix: str) -> None:
        self.stream = stream
        self.foreign = 0
        self._prefix = prefix
        self._own: set[int] = set()  # sids
        self._read: list[Record] = []

    def store(self, writer: DatasetWriter) -> None:
        """Store what has come of doctor's own samples."""
        own: list[Received] = []
        while (received := self.stream.read()) is not None:
            self._read.append(received.record)
            if self._is_own(received.event):
                own.append(received)
            else:
                self.foreign += 1
        if own:
            info = self.stream.info
            first, last = own[0].record.seq, own[-1].record.seq
            events = [(r.event, r.states) for r in own if r.event is not None]
            writer.write_window(info.run, info.rank, first, last, events)

    def free_own(self) -> None:
        """Free what was read, unless there are others' records among it."""
        if not self.foreign:
            for record in self._read:
                record.release()

    def _is_own(self, event: Event | None) -> bool:
        if isinstance(event, Start):
            if event.id.startswith(self._prefix):
                self._own.add(event.sid)
            return event.sid in self._own
        if isinstance(event, Rows):
            return any(segment.sid in self._own for segment in event.segments)
        return event is not None and event.sid in self._own
