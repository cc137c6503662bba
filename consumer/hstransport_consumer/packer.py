"""The consumer that writes shards: rings in, windows of records packed, tails advanced."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from hstransport.counters import RingCounters
from hstransport.errors import RingError
from hstransport.seldom import Seldom

from .stream import Received, RingStream, Streams
from .writer import DatasetWriter

logger = logging.getLogger(__name__)

WINDOW_BYTES = 64 << 20
"""A window is packed when it holds this much, or a quarter of its ring."""
HELD_BYTES = 8 << 20
"""And when its events take this much of our own memory, as those of tiny samples do long before.
Once all windows that are begun behind the oldest take as much, that one is written first."""
_DISCOVER_EVERY_S = 0.5
_IDLE_WAIT_S = 0.05
_PENDING_WAIT_S = 0.001
"""The message of a record may come before its bytes do: there will not be another one."""


@dataclass
class Totals:
    """What one consumer has done since it started."""

    records: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    states: Counter[str] = field(default_factory=Counter)
    """Ended samples by state."""
    ended: dict[Path, RingCounters] = field(default_factory=dict)
    """What servers counted whose rings have ended; those of the others stand in their headers."""
    waited_s: dict[str, float] = field(default_factory=lambda: {"disk_full": 0, "on_shard": 0})
    """For how long packing waited, by what it waited for."""
    malformed: int = 0
    torn: int = 0
    orphan_rows: int = 0
    """Rows of samples whose beginning another consumer took."""
    anomalies: int = 0
    """Beginnings and ends of samples that do not fit what came before."""
    repeated: int = 0
    """Records that an earlier consumer had already stored when it died."""

    @property
    def samples(self) -> int:
        return sum(self.states.values())

    def servers(self, live: Iterable[RingStream]) -> RingCounters:
        """What all servers have counted; ``live``: the rings that are followed.

        Another thread may ask with a list that it took before: a ring that ends is in
        :attr:`ended` first and then out of the list, and one that is in both counts once.
        """
        now = {stream.place.path: stream.reader.counters for stream in live}
        return reduce(RingCounters.plus, {**now, **self.ended}.values(), RingCounters())

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the time that is spent inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s[what] += time.monotonic() - began


class _Window:
    """Consecutive records of one ring, not yet stored."""

    def __init__(self, stream: RingStream) -> None:
        self.stream = stream
        self.received: list[Received] = []
        self.bytes = self.held_bytes = 0
        self.opened = 0.0
        self.limit = min(WINDOW_BYTES, stream.reader.capacity_bytes // 4)

    def add(self, received: Received) -> None:
        if not self.received:
            self.opened = time.monotonic()
        self.received.append(received)
        self.bytes += received.record.record_bytes
        self.held_bytes += received.held_bytes

    @property
    def full(self) -> bool:
        return self.bytes >= self.limit or self.held_bytes >= HELD_BYTES

    def due(self, flush_s: float) -> bool:
        if not self.received:
            return False
        return self.full or time.monotonic() - self.opened >= flush_s

    def release(self) -> None:
        for received in self.received:
            received.record.release()


class RingPacker:
    """Drives any number of rings of one session into one directory of shards.

    ``flush_s``: age at which a window is packed though it is not full. Not thread-safe; call
    :meth:`step` in a loop, then :meth:`close`.

    Each ring has a window that is being filled. Windows that are due are packed side by side, as
    many as keep the writer's threads busy, and written one after another by the thread that calls
    :meth:`step`; a window's part of the ring is freed when it is written.
    """

    def __init__(self, streams: Streams, writer: DatasetWriter, *, flush_s: float = 0.5) -> None:
        self._streams = streams
        self._writer = writer
        self._flush_s = flush_s
        self._windows: dict[RingStream, _Window] = {}
        self._due: deque[_Window] = deque()
        """Windows to be written; the writer has begun with the first ``self._writer.begun``."""
        self._next_look = 0.0
        self._lost_runs_closed = False
        self._seldom = Seldom(logger)
        self.totals = Totals()
        self.seen = 0
        """Rings attached to so far."""

    def step(self, timeout_s: float = _IDLE_WAIT_S) -> bool:
        """Do what there is to do; when that is nothing, wait at most ``timeout_s``.

        Returns whether something was read or packed. Raises OSError(ENOSPC) when the disk is
        full; nothing is lost then, and the next step tries again.
        """
        self._discover()
        busy = pending = False
        for window in list(self._windows.values()):
            try:
                busy |= self._fill(window)
                pending |= window.stream.reader.pending()
            except RingError as e:
                self._give_up(window, e)
                continue
            if window.due(self._flush_s):
                if self._hungry:
                    self._queue(window)
                    busy = True
            elif not window.received and not self._under_way(window) and window.stream.ended():
                self._end(window)
        if self._due and not (busy and self._hungry):
            self._finish()
            busy = True
        if not busy:
            self._streams.subscriber.wait(min(timeout_s, _PENDING_WAIT_S) if pending else timeout_s)
        return busy

    @property
    def idle(self) -> bool:
        """True when every ring seen has ended and is stored."""
        return not self._windows

    def drain(self) -> None:
        """Pack everything that is committed now, whatever the windows' age."""
        for stream in list(self._windows):
            try:
                self._drain(stream)
            except RingError as e:
                self._give_up(self._windows[stream], e)
        self._finish_all()

    def _drain(self, stream: RingStream) -> None:
        goal = stream.reader.head
        while stream.reader.cursor < goal:
            window = self._windows[stream]
            if not self._fill(window) and not window.received:
                break  # what is left is reserved and not committed
            self._queue(window)
            while not self._hungry:
                self._finish()
        self._queue(self._windows[stream])

    def close(self) -> None:
        """Let go of the rings; those drained and orphaned are removed."""
        for window in list(self._windows.values()):
            if not window.received and not self._under_way(window) and window.stream.ended():
                self._end(window)
        # Records read and not stored were never released: the next consumer finds them.
        self._windows.clear()
        self._streams.close()
        self._seldom.close()

    def _discover(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _DISCOVER_EVERY_S
        for stream in self._streams.discover(self._writer.begin_run):
            self._windows[stream] = _Window(stream)
            self.seen += 1
            info = stream.info
            logger.info(
                "attached to session %s: %s, layers %s, rows=%s, ring %d MiB",
                info.session,
                info.model,
                ",".join(map(str, info.layer_names)),
                info.rows,
                stream.reader.capacity_bytes >> 20,
            )

        if self.seen and not self._lost_runs_closed:
            self._close_lost_runs()
            self._lost_runs_closed = True

    def _close_lost_runs(self) -> None:
        """Samples left open by an earlier consumer whose ring is gone will never have an end."""
        self._finish_all()
        present = self._streams.present()
        for info in self._writer.open_runs():
            # Rings of other sessions may lie anywhere.
            if info.session == self._streams.session and (info.run, info.rank) not in present:
                ended = self._writer.close_run(info.run, info.rank, "the ring of its run is gone")
                self.totals.states.update(e.state for e in ended)
                logger.warning(
                    "run %s is gone with its ring, %d samples unfinished", info.run, len(ended)
                )

    def _fill(self, window: _Window) -> bool:
        """Read records into the window until it is full or none is left."""
        stream = window.stream
        stored = self._writer.next_seq(stream.info.run, stream.info.rank)
        malformed, torn = stream.counters.malformed, stream.counters.torn
        read = False
        while not window.full:
            received = stream.read()
            if received is None:
                break
            read = True
            if received.record.seq < stored:
                self.totals.repeated += 1
                received.record.release()
                continue
            window.add(received)
        self.totals.malformed += stream.counters.malformed - malformed
        self.totals.torn += stream.counters.torn - torn
        return read

    def _queue(self, window: _Window) -> None:
        """What the window holds is due: from now on another one is filled."""
        if window.received:
            # At the end of the others: a busy ring must not keep them from their turn.
            del self._windows[window.stream]
            self._windows[window.stream] = _Window(window.stream)
            self._due.append(window)
            self._begin()

    @property
    def _hungry(self) -> bool:
        """Whether another window should be begun before the oldest is written."""
        later = itertools.islice(self._due, 1, self._writer.begun)
        return self._writer.hungry and sum(w.held_bytes for w in later) < HELD_BYTES

    def _under_way(self, window: _Window) -> bool:
        """Whether earlier windows of its ring are not written yet."""
        return any(due.stream is window.stream for due in self._due)

    def _begin(self) -> None:
        """Let the writer begin with as many windows as it wants; after an error it has none."""
        while self._writer.begun < len(self._due) and self._hungry:
            window = self._due[self._writer.begun]
            info, records = window.stream.info, window.received
            events = [(r.event, r.states) for r in records if r.event is not None]
            self._writer.begin_window(
                info.run,
                info.rank,
                records[0].record.seq,
                records[-1].record.seq,
                events,
                window.stream.reader.check_whole,
            )

    def _finish(self) -> None:
        """Write the oldest window that is due."""
        self._begin()
        window = self._due[0]
        try:
            result = self._writer.finish_window()
        except RingError:  # nothing that was read of this ring counts; the next look gives it up
            self._due = deque(due for due in self._due if due.stream is not window.stream)
            return
        self._due.popleft()
        info, records = window.stream.info, window.received
        totals = self.totals
        totals.records += len(records)
        totals.raw_bytes += result.raw_bytes
        totals.stored_bytes += result.stored_bytes
        totals.tokens += result.rows
        totals.orphan_rows += result.orphan_rows
        totals.anomalies += result.anomalies
        if result.orphan_rows or result.anomalies:
            self._seldom.warning(
                "run %s: %d rows and %d events belong to samples whose beginning is not here: "
                "another consumer took it, or it was lost",
                info.run,
                result.orphan_rows,
                result.anomalies,
            )
        totals.states.update(ended.state for ended in result.ended)
        window.release()  # only now may the server reuse the bytes

    def _finish_all(self) -> None:
        while self._due:
            self._finish()

    def _give_up(self, window: _Window, error: RingError) -> None:
        """The ring is damaged: keep what was read, name the rest, go on with the other rings."""
        logger.error("ring %s is given up: %s", window.stream.place.path, error)
        self._queue(window)
        self._streams.refuse(window.stream.place.path, str(error))
        self._end(window, f"the ring is damaged: {error}"[:500])

    def _end(self, window: _Window, why: str = "the server ended") -> None:
        """The ring's producer is gone and all it committed is stored."""
        stream = window.stream
        self._finish_all()
        # First: on a full disk this raises, and the next step must find the window here.
        ended = self._writer.close_run(stream.info.run, stream.info.rank, why)
        del self._windows[stream]
        self.totals.states.update(e.state for e in ended)
        self.totals.ended[stream.place.path] = stream.reader.counters
        removed = self._streams.drop(stream)
        logger.info(
            "session %s, run %s ended%s%s",
            stream.info.session,
            stream.info.run,
            f", {len(ended)} samples unfinished" if ended else "",
            ", ring removed" if removed else "",
        )
