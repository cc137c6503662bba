"""What the exporter's thread does: records into the ring in order, and nothing lost unsaid.

A full ring is a value: the named policy decides what it costs. START and END records that find no
room wait and are tried again, so that an idle server still names the samples that it could not
keep.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .channel import Publisher
from .copyout import GatheredRows, RowRange
from .counters import DROPS
from .protocol import (
    END,
    MAX_META_BYTES,
    ROWS,
    End,
    Message,
    Rows,
    Segment,
    SessionInfo,
    Start,
    TokenIds,
    pack_event,
)
from .ring import Reservation, RingWriter
from .seldom import Seldom
from .tags import Label

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 64 << 20
"""Metadata of START and END records that wait for room; beyond it samples are lost, and counted."""
SMALL_META_BYTES = 64 << 10
"""Metadata of this size fit into every ring: MIN_RING_BYTES of the settings is much more."""


@dataclass(slots=True)
class OpenSample:
    """A request whose rows are being captured. Only the recorder writes into it."""

    sid: int
    id: str
    dropped: int = 0
    """Rows that the ring had no room for; the sample cannot be whole any more."""
    lost: bool = False
    """Its START never found room, not even in the queue: the consumer will not hear of it."""
    why: str = ""
    """The reason, of DROPS, for which it lost rows first; what it loses later is counted there."""

    @property
    def spoilt(self) -> bool:
        """Whether it cannot be whole any more."""
        return bool(self.dropped or self.lost)


class RowSpan(NamedTuple):
    """Rows of one sample inside the planes of a forward pass."""

    sample: OpenSample
    position: int
    """Token position of the first row."""
    row: int
    """Its row in the planes."""
    rows: int


class Recorder:
    """Single producer over one ring and its PUB socket. Not thread-safe.

    ``wait_s``: how long to wait for room before rows are dropped; after an expired wait they are
    dropped at once until the consumer frees something.
    """

    def __init__(
        self, ring: RingWriter, publisher: Publisher | None, info: SessionInfo, wait_s: float
    ) -> None:
        self.ring = ring
        self._publisher = publisher
        self._info = info
        self._wait_s = wait_s
        self.event_reserve = min(ring.capacity_bytes // 16, 4 << 20)
        """Bytes of the ring that rows leave to START and END."""
        self._stalled_at: int | None = None  # the ring's tail when a wait last expired
        self._pending: deque[tuple[int, bytes]] = deque()
        self._pending_bytes = 0
        self._untold: list[Message] = []
        self.samples_lost = 0
        """Samples of which not even the name could be kept; their number is all that is left."""
        self._seldom = Seldom(logger)
        self._rows_dropped = 0
        self._sids = itertools.count()

    def start(
        self,
        sample: OpenSample,
        rid: str,
        prompt: Sequence[int] | TokenIds,
        labels: Mapping[str, Label],
        loss_mask: tuple[int, ...] | None,
        at: float,
    ) -> None:
        ids = np.asarray(prompt, np.int32)
        start = Start(sample.sid, sample.id, rid, ids, labels, loss_mask, at)
        kind, meta = pack_event(start)
        if not self._can_fit(meta):
            # Its name and its end are told; its rows could not be told apart without tokens.
            sample.dropped, sample.why = len(ids), "too_long"
            kind, meta = pack_event(start._replace(prompt=ids[:0], labels={}, loss_mask=None))
            why = f"the prompt of sample {sample.id!r} ({len(ids)} tokens) is too long"
            self._complain("too_long", why)
        if not self._emit(kind, meta):
            sample.lost, sample.why = True, "queue_full"
            self._lose(f"no room even for the name of sample {sample.id!r}")

    def open(self, id: str) -> OpenSample:
        """A new sample of this run; :meth:`start` tells of it. May be called from any thread."""
        return OpenSample(next(self._sids), id)

    def rows(self, spans: Sequence[RowSpan], steps: int, gathered: GatheredRows | None) -> None:
        """One record: ``steps`` times the rows of each span. None: the stage had no room for them.

        Rows of samples that cannot be whole any more are left out, and counted as dropped.
        """
        worth = [s for s in spans if not s.sample.spoilt]
        why = "stage_full" if gathered is None else "ring_full"
        self.drop([s for s in spans if s.sample.spoilt], steps, why)
        slot = meta = None
        # A START must come before its rows.
        if gathered is not None and worth and self.flush_pending(self._wait_s):
            segments = [Segment(s.sample.sid, s.position, s.rows * steps) for s in worth]
            kind, meta = pack_event(Rows(tuple(segments)))
            size = sum(s.rows for s in worth) * steps * self._info.row_bytes
            slot = self._reserve(kind, meta, size, self._wait_s)
        if slot is None or gathered is None or meta is None:
            if gathered is not None:
                gathered.drop()
            self.drop(worth, steps, why)
            return
        gathered.fill(slot, row_ranges(worth))
        self._tell(ROWS, _place(slot), meta)

    def drop(self, spans: Sequence[RowSpan], steps: int, why: str) -> None:
        """Count rows that will not be kept, for the reason ``why`` (see DROPS)."""
        for span in spans:
            sample = span.sample
            rows = span.rows * steps
            sample.why = sample.why or why
            sample.dropped += rows
            self._rows_dropped += rows
            self.ring.record_drop(sample.why, rows * self._info.row_bytes)
            self._complain(sample.why, DROPS[sample.why])

    def end(
        self,
        sample: OpenSample,
        reason: str,
        tokens: int,
        output: Sequence[int] | TokenIds,
        cached: int,
        detail: str,
    ) -> None:
        if sample.lost:
            return
        ids = np.asarray(output, np.int32)
        if sample.why and DROPS[sample.why] not in detail:
            detail = "; ".join(filter(None, (detail, f"rows dropped: {DROPS[sample.why]}")))
        end = End(sample.sid, reason, tokens, ids, sample.dropped, cached, detail)
        kind, meta = pack_event(end)
        if not self._can_fit(meta):
            bare = end._replace(output=ids[:0], dropped=max(end.dropped, 1))
            kind, meta = pack_event(bare)
        if not self._emit(kind, meta):
            self._lose(f"no room even for the end of sample {sample.id!r}")

    def flush_pending(self, wait_s: float = 0.0) -> bool:
        """Write START and END records that wait for room; True when none is left."""
        while self._pending:
            kind, meta = self._pending[0]
            if not self._write_event(kind, meta, wait_s):
                return False
            self._pending.popleft()
            self._pending_bytes -= len(meta)
        return True

    def announce(self) -> None:
        """Tell listeners of the records since the last call: one wake-up for all of them."""
        if self._untold:
            untold, self._untold = self._untold, []
            if self._publisher is not None:
                self._publisher.send(untold)

    def close(self) -> None:
        """End the run; the ring stays for a consumer unless all of it is free."""
        try:
            self.flush_pending()
            self.announce()
        finally:
            if self._pending:
                lost = sum(kind == END for kind, _ in self._pending)
                self.samples_lost += lost
                self.ring.count("samples_lost", lost)
                logger.warning(
                    "hstransport: %d START/END records found no room in the ring; the consumer "
                    "will report their samples as unfinished or not at all",
                    len(self._pending),
                )
            self._seldom.close()
            try:
                self.ring.close()
            finally:
                if self._publisher is not None:
                    self._publisher.close()

    def _reserve(
        self, kind: int, meta: bytes, payload_bytes: int, wait_s: float
    ) -> Reservation | None:
        leave = self.event_reserve if kind == ROWS else 0
        if self._stalled_at is not None:
            if self.ring.tail == self._stalled_at:
                wait_s = 0.0  # nobody has freed a byte since the last wait expired
            else:
                self._stalled_at = None
        slot = self.ring.reserve(kind, meta, payload_bytes, wait_s=wait_s, leave_bytes=leave)
        if slot is None and wait_s:
            self._stalled_at = self.ring.tail
        return slot

    def _can_fit(self, meta: bytes) -> bool:
        """Whether an empty ring has room for the metadata wherever its head stands."""
        size = len(meta)
        if size <= SMALL_META_BYTES:
            return True
        return size <= MAX_META_BYTES and self.ring.max_payload_bytes(size, 0) > 0

    def _emit(self, kind: int, meta: bytes) -> bool:
        """Write a START or END, or queue it behind those already waiting."""
        if self.flush_pending() and self._write_event(kind, meta, 0.0):
            return True
        if self._pending_bytes + len(meta) > MAX_PENDING_BYTES:
            return False
        self._pending.append((kind, meta))
        self._pending_bytes += len(meta)
        return True

    def _write_event(self, kind: int, meta: bytes, wait_s: float) -> bool:
        if wait_s:
            slot = self._reserve(kind, meta, 0, wait_s)
            if slot is None:
                return False
            slot.commit()
            place = _place(slot)
        else:
            written = self.ring.put(kind, meta)
            if written is None:
                return False
            place = written
        self._tell(kind, place, meta)
        return True

    def _tell(self, kind: int, place: tuple[int, int, int], meta: bytes) -> None:
        if self._publisher is not None:
            self._untold.append(Message(self._info.run, self._info.rank, kind, *place, meta))

    def _lose(self, words: str) -> None:
        self.samples_lost += 1
        self.ring.count("samples_lost")
        self._complain("queue_full", words)

    def _complain(self, why: str, words: str) -> None:
        self._seldom.warning(
            "hstransport: %s: %d rows dropped and %d samples lost so far; ring %d of %d bytes "
            "used, consumer %s",
            words,
            self._rows_dropped,
            self.samples_lost,
            self.ring.used_bytes,
            self.ring.capacity_bytes,
            "attached" if self.ring.consumer_attached() else "absent",
            key=f"hstransport: {DROPS[why]}",
        )


def _place(slot: Reservation) -> tuple[int, int, int]:
    return slot.seq, slot.position, slot.record_bytes


def row_ranges(spans: Sequence[RowSpan]) -> list[RowRange]:
    """The rows of the spans in their order, neighbours put together."""
    ranges: list[RowRange] = []
    start = stop = -1
    for span in spans:
        if span.row != stop:
            if stop > start:
                ranges.append(RowRange(start, stop - start))
            start = span.row
        stop = span.row + span.rows
    if stop > start:
        ranges.append(RowRange(start, stop - start))
    return ranges
