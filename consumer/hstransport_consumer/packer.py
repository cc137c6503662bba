"""The consumer that writes shards: rings in, windows of records packed, tails advanced."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from hstransport.errors import RingError

from .stream import Received, RingStream, Streams
from .writer import DatasetWriter

logger = logging.getLogger(__name__)

WINDOW_BYTES = 64 << 20
"""A window is packed when it holds this much, or a quarter of its ring."""
_DISCOVER_EVERY_S = 0.5
_IDLE_WAIT_S = 0.05


@dataclass
class Totals:
    """What one consumer has done since it started."""

    records: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    states: Counter[str] = field(default_factory=Counter)
    """Ended samples by state."""
    dropped: int = 0
    """Drops of rings that have ended; those of the others stand in their headers."""
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


class _Window:
    """Consecutive records of one ring, not yet stored."""

    def __init__(self, stream: RingStream) -> None:
        self.stream = stream
        self.received: list[Received] = []
        self.bytes = 0
        self.opened = 0.0
        self.limit = min(WINDOW_BYTES, stream.reader.capacity_bytes // 4)

    def add(self, received: Received) -> None:
        if not self.received:
            self.opened = time.monotonic()
        self.received.append(received)
        self.bytes += received.record.record_bytes

    def due(self, flush_s: float) -> bool:
        if not self.received:
            return False
        return self.bytes >= self.limit or time.monotonic() - self.opened >= flush_s

    def clear(self) -> None:
        for received in self.received:
            received.record.release()
        self.received = []
        self.bytes = 0


class Packer:
    """Drives any number of rings of one session into one directory of shards.

    ``flush_s``: age at which a window is packed though it is not full. Not thread-safe; call
    :meth:`step` in a loop, then :meth:`close`.
    """

    def __init__(self, streams: Streams, writer: DatasetWriter, *, flush_s: float = 0.5) -> None:
        self._streams = streams
        self._writer = writer
        self._flush_s = flush_s
        self._windows: dict[RingStream, _Window] = {}
        self._next_look = 0.0
        self._lost_runs_closed = False
        self.totals = Totals()
        self.seen = 0
        """Rings attached to so far."""

    def step(self, timeout_s: float = _IDLE_WAIT_S) -> bool:
        """Do what there is to do; when that is nothing, wait at most ``timeout_s``.

        Returns whether something was read or packed. Raises OSError(ENOSPC) when the disk is
        full; nothing is lost then, and the next step tries again.
        """
        self._discover()
        busy = False
        for window in list(self._windows.values()):
            try:
                busy |= self._fill(window)
            except RingError as e:
                self._give_up(window, e)
                continue
            if window.due(self._flush_s):
                self._pack(window)
                busy = True
            elif not window.received and window.stream.ended():
                self._end(window)
        if not busy:
            self._streams.subscriber.wait(timeout_s)
        return busy

    @property
    def idle(self) -> bool:
        """True when every ring seen has ended and is stored."""
        return not self._windows

    def drain(self) -> None:
        """Pack everything that is committed now, whatever the windows' age."""
        for window in list(self._windows.values()):
            goal = window.stream.reader.head
            while window.stream.reader.tail < goal:
                progress = self._fill(window)
                if window.received:
                    self._pack(window)
                elif not progress:
                    break  # what is left is reserved and not committed

    def close(self) -> None:
        """Let go of the rings; those drained and orphaned are removed."""
        for window in list(self._windows.values()):
            if not window.received and window.stream.ended():
                self._end(window)
        # Records read and not stored were never released: the next consumer finds them.
        self._windows.clear()
        self._streams.close()

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
        while window.bytes < window.limit:
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

    def _pack(self, window: _Window) -> None:
        info = window.stream.info
        records = window.received
        events = [(r.event, r.states) for r in records if r.event is not None]
        result = self._writer.write_window(
            info.run, info.rank, records[0].record.seq, records[-1].record.seq, events
        )
        totals = self.totals
        totals.records += len(records)
        totals.raw_bytes += result.raw_bytes
        totals.stored_bytes += result.stored_bytes
        totals.tokens += result.rows
        totals.orphan_rows += result.orphan_rows
        totals.anomalies += result.anomalies
        if result.orphan_rows or result.anomalies:
            logger.warning(
                "run %s: %d rows and %d events belong to samples whose beginning is not here: "
                "another consumer took it, or it was lost",
                info.run,
                result.orphan_rows,
                result.anomalies,
            )
        totals.states.update(ended.state for ended in result.ended)
        window.clear()  # only now may the server reuse the bytes

    def _give_up(self, window: _Window, error: RingError) -> None:
        """The ring is damaged: keep what was read, name the rest, go on with the other rings."""
        logger.error("ring %s is given up: %s", window.stream.place.path, error)
        if window.received:
            self._pack(window)
        self._streams.refuse(window.stream.place.path, str(error))
        self._end(window, f"the ring is damaged: {error}"[:500])

    def _end(self, window: _Window, why: str = "the server ended") -> None:
        """The ring's producer is gone and all it committed is stored."""
        stream = window.stream
        # First: on a full disk this raises, and the next step must find the window here.
        ended = self._writer.close_run(stream.info.run, stream.info.rank, why)
        del self._windows[stream]
        self.totals.states.update(e.state for e in ended)
        self.totals.dropped += stream.reader.counters.dropped_records
        removed = self._streams.drop(stream)
        logger.info(
            "session %s, run %s ended%s%s",
            stream.info.session,
            stream.info.run,
            f", {len(ended)} samples unfinished" if ended else "",
            ", ring removed" if removed else "",
        )
