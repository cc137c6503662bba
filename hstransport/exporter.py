"""The producer: samples and their rows go into the ring in order, and nothing is lost unsaid.

Everything runs on the thread that calls it (SGLang's scheduler), so it does only what it must:
reserve, copy, commit, send. A full ring is a value: the named policy decides what it costs. The one
exception: START and END records that found no room are put in later by a helper thread, which lives
only while some wait, so that an idle server still names the samples that it could not keep.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .capture import Plane
from .channel import Publisher
from .errors import ConfigError
from .protocol import (
    MAX_META_BYTES,
    ROWS,
    End,
    Label,
    Message,
    Rows,
    Segment,
    SessionInfo,
    Start,
    TokenIds,
    pack_event,
)
from .ring import Reservation, RingWriter

logger = logging.getLogger(__name__)

RECORD_PAYLOAD_BYTES = 64 << 20
"""Rows of one forward pass are split into records of about this size."""
MAX_PENDING_BYTES = 64 << 20
"""Metadata of START and END records that wait for room; beyond it samples are lost, and counted."""
_LOG_EVERY_S = 10.0
_RETRY_PENDING_S = 0.05


@dataclass
class OpenSample:
    """A request whose rows are being captured."""

    sid: int
    id: str
    dropped: int = 0
    """Rows that the ring had no room for; the sample cannot be whole any more."""
    lost: bool = False
    """Its START never found room, not even in the queue: the consumer will not hear of it."""


class RowSpan(NamedTuple):
    """Rows of one sample inside the planes of a forward pass."""

    sample: OpenSample
    position: int
    """Token position of the first row."""
    row: int
    """Its row in the planes."""
    rows: int


class Exporter:
    """Single producer over one ring and its PUB socket.

    ``policy`` is ``"block"`` (wait for room up to ``block_s``, then drop; after an expired wait
    drop at once until the consumer frees something) or ``"drop"``.
    """

    def __init__(
        self,
        ring: RingWriter,
        publisher: Publisher | None,
        info: SessionInfo,
        *,
        policy: str = "block",
        block_s: float = 1.0,
    ) -> None:
        self._ring = ring
        self._publisher = publisher
        self._info = info
        self._wait_s = block_s if policy == "block" else 0.0
        self._event_reserve = min(ring.capacity_bytes // 16, 4 << 20)
        self._stalled_at: int | None = None  # the ring's tail when a wait last expired
        self._next_sid = 0
        self._pending: deque[tuple[int, bytes]] = deque()
        self._pending_bytes = 0
        self.samples_lost = 0
        """Samples of which not even the name could be kept; their number is all that is left."""
        self._logged_at = float("-inf")
        self._rows_dropped = 0
        self._rows_per_record = self._fit_rows()
        self._lock = threading.Lock()  # the scheduler's thread against the helper
        self._helper: threading.Thread | None = None
        self._closed = False

    @property
    def ring(self) -> RingWriter:
        return self._ring

    def start(
        self,
        id: str,
        rid: str,
        prompt: TokenIds,
        labels: Mapping[str, Label] | None = None,
        loss_mask: tuple[int, ...] | None = None,
    ) -> OpenSample:
        """Begin a sample. ``prompt``: int32 token ids."""
        with self._lock:
            sample = OpenSample(self._next_sid, id)
            self._next_sid += 1
            start = Start(sample.sid, id, rid, prompt, labels or {}, loss_mask, time.time())
            kind, meta = pack_event(start)
            if not self._can_fit(meta):
                # Its name and its end are told; its rows could not be told apart without tokens.
                sample.dropped = len(prompt)
                bare = replace(start, prompt=prompt[:0], labels={}, loss_mask=None)
                kind, meta = pack_event(bare)
                self._complain(f"the prompt of sample {id!r} ({len(prompt)} tokens) is too long")
            if not self._emit(kind, meta):
                sample.lost = True
                self.samples_lost += 1
                self._complain(f"no room even for the name of sample {id!r}")
            return sample

    def rows(self, spans: Sequence[RowSpan], planes: Sequence[Plane]) -> None:
        """Copy rows of one forward pass into the ring, in records of bounded size."""
        with self._lock:
            self._rows(spans, planes)

    def _rows(self, spans: Sequence[RowSpan], planes: Sequence[Plane]) -> None:
        room = self._flush_pending(self._wait_s)  # a START must come before its rows
        batch: list[RowSpan] = []
        count = 0
        for span in spans:
            if span.sample.lost:
                continue
            if span.sample.dropped or not room:
                self._drop(span)
                continue
            at = 0
            while at < span.rows:
                n = min(span.rows - at, self._rows_per_record - count)
                batch.append(RowSpan(span.sample, span.position + at, span.row + at, n))
                at, count = at + n, count + n
                if count == self._rows_per_record:
                    self._write_rows(batch, count, planes)
                    batch, count = [], 0
        if batch:
            self._write_rows(batch, count, planes)

    def end(
        self,
        sample: OpenSample,
        reason: str,
        tokens: int,
        output: TokenIds,
        *,
        cached: int = 0,
        detail: str = "",
    ) -> None:
        """End a sample: positions 0 .. tokens-1 make it whole."""
        if sample.lost:
            return
        with self._lock:
            self._end(
                sample, End(sample.sid, reason, tokens, output, sample.dropped, cached, detail)
            )

    def _end(self, sample: OpenSample, end: End) -> None:
        kind, meta = pack_event(end)
        if not self._can_fit(meta):
            bare = replace(end, output=end.output[:0], dropped=max(end.dropped, 1))
            kind, meta = pack_event(bare)
        if not self._emit(kind, meta):
            self.samples_lost += 1
            self._complain(f"no room even for the end of sample {sample.id!r}")

    def close(self) -> None:
        """End the run; the ring stays for a consumer unless all of it is free. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._flush_pending()
            finally:
                self._close_both()

    def _close_both(self) -> None:
        if self._pending:
            logger.warning(
                "hstransport: %d START/END records found no room in the ring; the consumer will "
                "report their samples as unfinished or not at all",
                len(self._pending),
            )
        try:
            self._ring.close()
        finally:
            if self._publisher is not None:
                self._publisher.close()

    def _fit_rows(self) -> int:
        # A record must fit whatever the wrap position; half of that leaves room for a second one.
        largest = self._ring.max_payload_bytes(64 << 10, self._event_reserve)
        rows = min(RECORD_PAYLOAD_BYTES, largest // 2) // self._info.row_bytes
        if rows < 1:
            raise ConfigError(
                f"HSTRANSPORT_RING_BYTES: one token's states take {self._info.row_bytes} bytes, "
                f"too many for a ring of {self._ring.capacity_bytes} bytes: choose a larger one"
            )
        return rows

    def _write_rows(self, spans: Sequence[RowSpan], count: int, planes: Sequence[Plane]) -> None:
        live = [s for s in spans if not s.sample.dropped]
        if len(live) < len(spans):  # an earlier record of this very pass was dropped
            for span in spans:
                if span.sample.dropped:
                    self._drop(span)
            count = sum(s.rows for s in live)
            if not live:
                return
        kind, meta = pack_event(
            Rows(tuple(Segment(s.sample.sid, s.position, s.rows) for s in live))
        )
        payload_bytes = count * self._info.row_bytes
        slot = self._reserve(kind, meta, payload_bytes, self._wait_s)
        if slot is None:
            for span in live:
                self._drop(span)
            return
        offset = 0
        for p in planes:
            for span in live:
                address = p.address + span.row * p.stride_bytes
                slot.copy_rows(offset, address, span.rows, p.row_bytes, p.stride_bytes)
                offset += span.rows * p.row_bytes
        slot.commit()
        self._tell(kind, slot, meta)

    def _reserve(
        self, kind: int, meta: bytes, payload_bytes: int, wait_s: float
    ) -> Reservation | None:
        leave = self._event_reserve if kind == ROWS else 0
        if self._stalled_at is not None:
            if self._ring.tail == self._stalled_at:
                wait_s = 0.0  # nobody has freed a byte since the last wait expired
            else:
                self._stalled_at = None
        slot = self._ring.reserve(kind, meta, payload_bytes, wait_s=wait_s, leave_bytes=leave)
        if slot is None and wait_s:
            self._stalled_at = self._ring.tail
        return slot

    def _can_fit(self, meta: bytes) -> bool:
        """Whether an empty ring has room for the metadata wherever its head stands."""
        size = len(meta)
        return size <= MAX_META_BYTES and self._ring.max_payload_bytes(size, 0) > 0

    def _emit(self, kind: int, meta: bytes) -> bool:
        """Write a START or END, or queue it behind those already waiting."""
        if self._flush_pending() and self._write_event(kind, meta):
            return True
        if self._pending_bytes + len(meta) > MAX_PENDING_BYTES:
            return False
        self._pending.append((kind, meta))
        self._pending_bytes += len(meta)
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="hstransport", daemon=True)
            self._helper.start()
        return True

    def _help(self) -> None:
        while True:
            time.sleep(_RETRY_PENDING_S)
            with self._lock:
                try:
                    done = self._closed or self._flush_pending()
                except Exception:
                    logger.exception("hstransport: START and END records that wait are stuck")
                    done = True  # the next one that has to wait starts another helper
                if done:
                    self._helper = None
                    return

    def _write_event(self, kind: int, meta: bytes, wait_s: float = 0.0) -> bool:
        slot = self._reserve(kind, meta, 0, wait_s)
        if slot is None:
            return False
        slot.commit()
        self._tell(kind, slot, meta)
        return True

    def _flush_pending(self, wait_s: float = 0.0) -> bool:
        while self._pending:
            kind, meta = self._pending[0]
            if not self._write_event(kind, meta, wait_s):
                return False
            self._pending.popleft()
            self._pending_bytes -= len(meta)
        return True

    def _tell(self, kind: int, slot: Reservation, meta: bytes) -> None:
        if self._publisher is not None:
            self._publisher.send(
                Message(
                    self._info.run,
                    self._info.rank,
                    kind,
                    slot.seq,
                    slot.position,
                    slot.record_bytes,
                    meta,
                )
            )

    def _drop(self, span: RowSpan) -> None:
        self._ring.record_drop(span.rows * self._info.row_bytes)
        span.sample.dropped += span.rows
        self._rows_dropped += span.rows
        self._complain("the ring is full")

    def _complain(self, why: str) -> None:
        now = time.monotonic()
        if now - self._logged_at < _LOG_EVERY_S:
            return
        self._logged_at = now
        logger.warning(
            "hstransport: %s: %d rows dropped and %d samples lost so far; ring %d of %d bytes "
            "used, consumer %s",
            why,
            self._rows_dropped,
            self.samples_lost,
            self._ring.used_bytes,
            self._ring.capacity_bytes,
            "attached" if self._ring.consumer_attached() else "absent",
        )
