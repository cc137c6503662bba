"""The producer as the server's thread sees it: take hold of rows, post, and be gone.

What must happen on the caller's thread happens there: rows are gathered in the order of its
stream. Everything else, from packing metadata to waiting for room in the ring, is posted to a
thread of the exporter's own, in order, and handed over once for each forward pass: a pass that
costs the server's thread tens of microseconds would cost it hundreds with the rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from .capture import Planes
from .channel import Publisher
from .copyout import Copier, HostCopier, RowRange, Steps
from .copyout import Rows as GatheredRows
from .errors import CaptureError, ConfigError, HsTransportError
from .protocol import Label, SessionInfo, TokenIds
from .recorder import OpenSample, Recorder, RowSpan
from .ring import RingWriter

logger = logging.getLogger(__name__)

RECORD_PAYLOAD_BYTES = 256 << 20
"""Rows of one forward pass are split into records of at most this size."""
MAX_DECODE_STEPS = 32
"""Decode steps that a GPU gathers into one record."""
_GRACE_S = 1.0  # beyond the policy's wait, for the exporter's thread to do what it has
_NAP_S = 0.0005
_RETRY_PENDING_S = 0.05
_RELEASE_S = 0.01
_JOIN_S = 10.0

_Post = tuple[Callable[..., None], tuple[Any, ...]]


class DecodeRun:
    """Consecutive decode steps of the same requests in the same order, one row each and step."""

    __slots__ = (
        "_gathered",
        "_limit",
        "_ranges",
        "_spoilt",
        "_worth",
        "open",
        "spans",
        "steps",
        "stream",
    )

    def __init__(self, spans: Sequence[RowSpan]) -> None:
        self.spans = spans
        """The rows of the first step."""
        self.steps = 0
        """Steps that were exported."""
        self.open = True
        """Whether one more step may be added."""
        self.stream = 0
        self._worth: Sequence[RowSpan] = ()
        self._spoilt: Sequence[RowSpan] = ()
        self._ranges: list[RowRange] = []
        self._limit = 0
        self._gathered: Steps | None = None

    def __bool__(self) -> bool:
        return bool(self.spans)


class Exporter:
    """Single producer over one ring and its PUB socket. One thread calls it; any may close it.

    What :meth:`start`, :meth:`rows`, :meth:`step` and :meth:`end` post is done after the next
    :meth:`submit`, in that order. An error of the exporter's thread is raised by the next call.

    ``copier`` takes the states out of their memory (default: out of host memory); it is closed
    here. ``policy`` is ``"block"`` (wait for room in the ring up to ``block_s``, then drop; after
    an expired wait drop at once until the consumer frees something) or ``"drop"``. While the
    exporter's thread waits, the caller goes on until the copier has no room either; then it waits
    too, as long.
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
        self._info = info
        self._copier: Copier = copier or HostCopier()
        self._wait_s = block_s if policy == "block" else 0.0
        self._recorder = Recorder(ring, publisher, info, self._wait_s)
        self._rows_per_record = self._fit_rows()
        self._next_sid = 0
        self._run: DecodeRun | None = None  # whose steps are gathered and not yet posted
        self._posted: list[_Post] = []
        self._queue: SimpleQueue[list[_Post] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hstransport", daemon=True)
        self._thread.start()

    @property
    def ring(self) -> RingWriter:
        return self._recorder.ring

    @property
    def samples_lost(self) -> int:
        """Samples of which not even the name could be kept."""
        return self._recorder.samples_lost

    def start(
        self,
        id: str,
        rid: str,
        prompt: Sequence[int] | TokenIds,
        labels: Mapping[str, Label] | None = None,
        loss_mask: tuple[int, ...] | None = None,
    ) -> OpenSample:
        """Begin a sample. ``prompt``: token ids, which must not be changed from here on."""
        sample = OpenSample(self._next_sid, id)
        self._next_sid += 1
        now = time.time()
        self._post(self._recorder.start, sample, rid, prompt, labels or {}, loss_mask, now)
        return sample

    def rows(self, spans: Sequence[RowSpan], planes: Planes) -> None:
        """Export rows of one forward pass, in records of bounded size.

        The planes must stay as they are until the work that their stream has been given so far is
        done (host memory: until the rows are in the ring); they are kept alive for as long.
        """
        self._finish_run()
        worth, spoilt = _sort_out(spans)
        if spoilt:
            self._post(self._recorder.drop, spoilt)
        for part in self._parts(worth):
            self._post(self._recorder.rows, part, 1, self._gather(row_ranges(part), planes))

    def step(self, run: DecodeRun, planes: Planes) -> None:
        """Export the rows of one more decode step; of the planes see :meth:`rows`.

        Steps of a GPU are gathered on it, and posted together when there are enough of them, or
        when anything else is exported.
        """
        if not run.open:
            raise CaptureError("this run of decode steps has ended: begin another")
        if run is not self._run:
            self._finish_run()
            self._open_run(run, planes)
        elif run.stream != planes.stream:
            raise CaptureError("the server changed the stream of its decode steps in mid-run")
        if run._gathered is None:
            at = run.steps
            run.steps += 1
            self._run = None
            self.rows([s._replace(position=s.position + at) for s in run.spans], planes)
            return
        run._gathered.add(run._ranges, planes)
        run.steps += 1
        if run.steps == run._limit:
            self._finish_run()

    def end(
        self,
        sample: OpenSample,
        reason: str,
        tokens: int,
        output: Sequence[int] | TokenIds,
        *,
        cached: int = 0,
        detail: str = "",
    ) -> None:
        """End a sample: positions 0 .. tokens-1 make it whole."""
        self._finish_run()  # its rows come before its end
        self._post(self._recorder.end, sample, reason, tokens, output, cached, detail)

    def submit(self) -> None:
        """Hand over what was posted, with one wake-up of the exporter's thread."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._posted:
            posted, self._posted = self._posted, []
            self._queue.put(posted)

    def flush(self, timeout_s: float = 10.0) -> None:
        """Wait until all that was posted is in the ring, dropped or waiting for room there."""
        done = threading.Event()
        self._post(done.set)
        self.submit()
        if not done.wait(timeout_s):
            raise HsTransportError(f"the exporter's thread was not done after {timeout_s} s")
        self.submit()  # raises what it met

    def abandon(self) -> None:
        """After an error: no more rows. What is gathered is given up, and nothing is asked of the
        GPU; events can still be posted."""
        run, self._run = self._run, None
        if run is not None:
            run.open = False
            self._post(self._recorder.drop, run.spans, run.steps)

    def close(self) -> None:
        """End the run; the ring stays for a consumer unless all of it is free. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                self._finish_run()
            finally:
                self._queue.put(self._posted)
                self._queue.put(None)
                self._thread.join(self._wait_s + _JOIN_S)
                if self._thread.is_alive():
                    logger.error("hstransport: the exporter's thread hangs; its ring is left as is")
                else:
                    self._copier.close()  # its copies end before the ring gives up what is pending
                    self._recorder.close()

    def _fit_rows(self) -> int:
        # A record must fit whatever the wrap position; a quarter of that lets the consumer free one
        # while others are written.
        ring = self._recorder.ring
        largest = ring.max_payload_bytes(64 << 10, self._recorder.event_reserve)
        size = min(RECORD_PAYLOAD_BYTES, largest // 4, self._copier.max_bytes)
        rows = size // self._info.row_bytes
        if rows < 1:
            raise ConfigError(
                f"HSTRANSPORT_RING_BYTES: one token's states take {self._info.row_bytes} bytes, "
                f"too many for a ring of {ring.capacity_bytes} bytes: choose a larger one"
            )
        return rows

    def _parts(self, spans: Sequence[RowSpan]) -> Iterator[list[RowSpan]]:
        """The spans cut into what one record takes."""
        part: list[RowSpan] = []
        room = self._rows_per_record
        for span in spans:
            at = 0
            while at < span.rows:
                n = min(span.rows - at, room)
                part.append(RowSpan(span.sample, span.position + at, span.row + at, n))
                at, room = at + n, room - n
                if not room:
                    yield part
                    part, room = [], self._rows_per_record
        if part:
            yield part

    def _open_run(self, run: DecodeRun, planes: Planes) -> None:
        self._run = run
        run.stream = planes.stream
        run._worth, run._spoilt = _sort_out(run.spans)
        run._ranges = row_ranges(run._worth)
        rows = len(run._worth)
        run._limit = min(MAX_DECODE_STEPS, self._rows_per_record // rows) if rows else 0
        if run._limit:
            run._gathered = self._copier.gather_steps(rows, planes, run._limit)

    def _finish_run(self) -> None:
        """Post the gathered steps of the open run, and let it take no more."""
        run, self._run = self._run, None
        if run is not None:
            run.open = False
            if run._gathered is not None:
                run._gathered.seal()
                if run._spoilt:
                    self._post(self._recorder.drop, run._spoilt, run.steps)
                self._post(self._recorder.rows, run._worth, run.steps, run._gathered)

    def _gather(self, ranges: Sequence[RowRange], planes: Planes) -> GatheredRows | None:
        """Gather, and where too much waits already give the exporter's thread time to work."""
        gathered = self._copier.gather(ranges, planes)
        if gathered is None:
            self.submit()
            deadline = time.monotonic() + self._wait_s + _GRACE_S
            while gathered is None and time.monotonic() < deadline:
                time.sleep(_NAP_S)
                gathered = self._copier.gather(ranges, planes)
        return gathered

    def _post(self, action: Callable[..., None], *args: Any) -> None:
        self._posted.append((action, args))

    def _work(self) -> None:
        """The exporter's thread."""
        pause: float | None = None
        while True:
            posted: list[_Post] | None
            try:
                posted = self._queue.get(timeout=pause)
            except Empty:
                posted = []
            if posted is None:
                return
            pause = self._do(posted)
            del posted  # or the last pass's states would live until the next one

    def _do(self, posted: list[_Post]) -> float | None:
        """Do what was posted; how long to wait for more before looking again, None: for ever."""
        for action, args in posted:
            self._guarded(action, *args)
        done = self._guarded(self._recorder.flush_pending)
        self._guarded(self._recorder.announce)
        if self._guarded(self._copier.release):
            return _RELEASE_S
        return _RETRY_PENDING_S if done is False else None

    def _guarded(self, action: Callable[..., Any], *args: Any) -> Any:
        try:
            return action(*args)
        except Exception as e:
            self._failure = self._failure or e
            return None


def _sort_out(spans: Sequence[RowSpan]) -> tuple[Sequence[RowSpan], Sequence[RowSpan]]:
    """(Rows of samples that can still be whole, the others)."""
    spoilt = [s for s in spans if s.sample.dropped or s.sample.lost]
    if not spoilt:
        return spans, spoilt
    return [s for s in spans if not (s.sample.dropped or s.sample.lost)], spoilt


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
