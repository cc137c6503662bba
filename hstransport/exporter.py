"""The producer: samples and their rows go into the ring in order, and nothing is lost unsaid.

Everything runs on the thread that calls it (SGLang's scheduler), so it does only what it must:
reserve, copy (of a GPU's states: enqueue the copy), send. A full ring is a value: the named policy
decides what it costs. The one exception: START and END records that found no room are put in later
by a helper thread, which lives only while some wait, so that an idle server still names the samples
that it could not keep.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .capture import Planes
from .channel import Publisher
from .copyout import MAX_DECODE_STEPS, Copier, HostCopier, RowRange, Steps
from .errors import CaptureError, ConfigError
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

RECORD_PAYLOAD_BYTES = 256 << 20
"""Rows of one forward pass are split into records of at most this size."""
MAX_PENDING_BYTES = 64 << 20
"""Metadata of START and END records that wait for room; beyond it samples are lost, and counted."""
SMALL_META_BYTES = 64 << 10
"""Metadata of this size fit into every ring: MIN_RING_BYTES of the settings is much more."""
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


class DecodeRun:
    """Consecutive decode steps of the same requests in the same order, one row each and step."""

    __slots__ = ("_gathered", "_limit", "_live", "_ranges", "open", "spans", "steps", "stream")

    def __init__(self, spans: Sequence[RowSpan]) -> None:
        self.spans = spans
        """The rows of the first step."""
        self.steps = 0
        """Steps that were exported."""
        self.open = True
        """Whether one more step may be added."""
        self.stream = 0
        self._live: list[RowSpan] = []
        self._ranges: list[RowRange] = []
        self._limit = 0
        self._gathered: Steps | None = None

    def __bool__(self) -> bool:
        return bool(self.spans)


class Exporter:
    """Single producer over one ring and its PUB socket.

    What :meth:`start`, :meth:`rows`, :meth:`step` and :meth:`end` put into the ring is told to
    listeners by the next :meth:`announce`: one wake-up for a forward pass, not one for each record.

    ``copier`` takes the states out of their memory (default: out of host memory); it is closed
    here. ``policy`` is ``"block"`` (wait for room up to ``block_s``, then drop; after an expired
    wait drop at once until the consumer frees something) or ``"drop"``.
    """

    def __init__(
        self,
        ring: RingWriter,
        publisher: Publisher | None,
        info: SessionInfo,
        *,
        copier: Copier | None = None,
        policy: str = "block",
        block_s: float = 1.0,
    ) -> None:
        self._ring = ring
        self._copier: Copier = copier or HostCopier()
        self._run: DecodeRun | None = None  # whose steps are gathered and not yet in the ring
        self._untold: list[Message] = []
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
                bare = start._replace(prompt=prompt[:0], labels={}, loss_mask=None)
                kind, meta = pack_event(bare)
                self._complain(f"the prompt of sample {id!r} ({len(prompt)} tokens) is too long")
            if not self._emit(kind, meta):
                sample.lost = True
                self.samples_lost += 1
                self._complain(f"no room even for the name of sample {id!r}")
            return sample

    def rows(self, spans: Sequence[RowSpan], planes: Planes) -> None:
        """Copy rows of one forward pass into the ring, in records of bounded size.

        The planes must stay as they are until the work that their stream has been given so far is
        done; they are kept alive for as long as that takes.
        """
        with self._lock:
            self._finish_run()
            self._rows(spans, planes)

    def step(self, run: DecodeRun, planes: Planes) -> None:
        """Copy the rows of one more decode step, as :meth:`rows`.

        Steps of a GPU are gathered on it, and go into the ring together when there are enough of
        them, or when anything else is exported.
        """
        with self._lock:
            if run is not self._run:
                if not run.open:
                    raise CaptureError("this run of decode steps has ended: begin another")
                self._finish_run()
                self._open_run(run, planes)
            elif run.stream != planes.stream:
                raise CaptureError("the server changed the stream of its decode steps in mid-run")
            if run._gathered is None:
                at = run.steps
                self._rows([s._replace(position=s.position + at) for s in run.spans], planes)
                run.steps += 1
                return
            run._gathered.add(run._ranges, planes)
            run.steps += 1
            if run.steps == run._limit:
                self._finish_run()

    def abandon_run(self) -> None:
        """Give up the gathered steps of the open run, after an error: nothing is asked of the GPU.

        Steps cannot be exported any more; events can.
        """
        with self._lock:
            run, self._run = self._run, None
            if run is not None:
                run.open = False
                for span in run.spans:
                    self._drop(span._replace(rows=run.steps))

    def announce(self) -> None:
        """Tell listeners of the records since the last call, and let go of copied sources."""
        with self._lock:
            self._announce()
            self._copier.release()

    def _announce(self) -> None:
        if self._untold:
            untold, self._untold = self._untold, []
            if self._publisher is not None:
                self._publisher.send(untold)

    def _open_run(self, run: DecodeRun, planes: Planes) -> None:
        self._run = run
        run.stream = planes.stream
        run._live = [s for s in run.spans if not (s.sample.lost or s.sample.dropped)]
        run._ranges = row_ranges(run._live)
        rows = len(run._live)
        if rows:
            run._limit = min(MAX_DECODE_STEPS, self._rows_per_record // rows)
            if run._limit:
                run._gathered = self._copier.open_steps(rows, planes, run._limit)

    def _finish_run(self) -> None:
        """Put the gathered steps of the open run into the ring, and let it take no more."""
        run, self._run = self._run, None
        if run is None:
            return
        run.open = False
        if run._gathered is None:
            return
        for span in run.spans:
            if span.sample.dropped and not span.sample.lost:
                self._drop(span._replace(rows=run.steps))
        kind, meta = pack_event(
            Rows(tuple(Segment(s.sample.sid, s.position, run.steps) for s in run._live))
        )
        size = len(run._live) * run.steps * self._info.row_bytes
        slot = None
        if self._flush_pending(self._wait_s):  # a START must come before its rows
            slot = self._reserve(kind, meta, size, self._wait_s)
        if slot is None:
            run._gathered.drop()
            for span in run._live:
                self._drop(span._replace(rows=run.steps))
            return
        run._gathered.send(slot)
        self._tell(kind, _place(slot), meta)

    def _rows(self, spans: Sequence[RowSpan], planes: Planes) -> None:
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
            self._finish_run()  # its rows come before its end
            self._end(
                sample, End(sample.sid, reason, tokens, output, sample.dropped, cached, detail)
            )

    def _end(self, sample: OpenSample, end: End) -> None:
        kind, meta = pack_event(end)
        if not self._can_fit(meta):
            bare = end._replace(output=end.output[:0], dropped=max(end.dropped, 1))
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
                self._finish_run()
                self._flush_pending()
                self._announce()
            finally:
                self._close_all()

    def _close_all(self) -> None:
        if self._pending:
            logger.warning(
                "hstransport: %d START/END records found no room in the ring; the consumer will "
                "report their samples as unfinished or not at all",
                len(self._pending),
            )
        try:
            self._copier.close()  # its copies end before the ring gives up what is pending
        finally:
            try:
                self._ring.close()
            finally:
                if self._publisher is not None:
                    self._publisher.close()

    def _fit_rows(self) -> int:
        # A record must fit whatever the wrap position; a quarter of that lets the consumer free one
        # while others are written.
        largest = self._ring.max_payload_bytes(64 << 10, self._event_reserve)
        sizes = [RECORD_PAYLOAD_BYTES, largest // 4]
        if self._copier.max_bytes is not None:
            sizes.append(self._copier.max_bytes)
        rows = min(sizes) // self._info.row_bytes
        if rows < 1:
            raise ConfigError(
                f"HSTRANSPORT_RING_BYTES: one token's states take {self._info.row_bytes} bytes, "
                f"too many for a ring of {self._ring.capacity_bytes} bytes: choose a larger one"
            )
        return rows

    def _write_rows(self, spans: Sequence[RowSpan], count: int, planes: Planes) -> None:
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
        self._copier.copy(slot, row_ranges(live), planes)
        self._tell(kind, _place(slot), meta)

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
        if size <= SMALL_META_BYTES:
            return True
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
                    self._announce()
                except Exception:
                    logger.exception("hstransport: START and END records that wait are stuck")
                    done = True  # the next one that has to wait starts another helper
                if done:
                    self._helper = None
                    return

    def _write_event(self, kind: int, meta: bytes, wait_s: float = 0.0) -> bool:
        place = self._ring.put(kind, meta) if not wait_s else None
        if place is None and wait_s:
            slot = self._reserve(kind, meta, 0, wait_s)
            if slot is not None:
                slot.commit()
                place = _place(slot)
        if place is None:
            return False
        self._tell(kind, place, meta)
        return True

    def _flush_pending(self, wait_s: float = 0.0) -> bool:
        while self._pending:
            kind, meta = self._pending[0]
            if not self._write_event(kind, meta, wait_s):
                return False
            self._pending.popleft()
            self._pending_bytes -= len(meta)
        return True

    def _tell(self, kind: int, place: tuple[int, int, int], meta: bytes) -> None:
        if self._publisher is not None:
            self._untold.append(Message(self._info.run, self._info.rank, kind, *place, meta))

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


def _place(slot: Reservation) -> tuple[int, int, int]:
    return slot.seq, slot.position, slot.record_bytes
