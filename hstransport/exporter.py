"""The producer as the server's thread sees it: take hold of rows, post, and be gone.

What must happen on the caller's thread happens there: rows are gathered in the order of its
stream. Everything else, from whose rows they are to waiting for room in the ring, is posted to a
thread of the exporter's own, in order, and handed over once for each forward pass: a pass that
costs the server's thread tens of microseconds would cost it hundreds with the rest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from ._core import Planes
from .channel import Publisher
from .copyout import Copier, GatheredRows, GatheredSteps, HostCopier, RowRange
from .errors import CaptureError, ConfigError, HsTransportError
from .protocol import SessionInfo, TokenIds
from .recorder import OpenSample, Recorder, RowSpan
from .ring import RingWriter
from .tags import Label

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

Plan = Callable[[int], Sequence[RowSpan]]
"""``plan(steps)``: whose rows were gathered, in the order of rows; of decode steps the first one's,
of which ``steps`` follow each other, of other passes ``steps`` is 1. Called once, on the exporter's
thread."""


class DecodeRun:
    """Consecutive decode steps of the same requests in the same order, one row each and step."""

    __slots__ = ("_gathered", "_limit", "open", "plan", "rows", "steps", "stream")

    def __init__(self, plan: Plan, rows: int) -> None:
        self.rows = rows
        """Rows of each step, wanted or not."""
        self.steps = 0
        """Steps that were exported."""
        self.open = True
        """Whether one more step may be added."""
        self.stream = 0
        self.plan = plan
        self._limit = 0
        self._gathered: GatheredSteps | None = None

    @classmethod
    def of(cls, spans: Sequence[RowSpan]) -> DecodeRun:
        """A run whose rows are known; ``spans`` are those of its first step."""
        return cls(lambda steps: spans, spans[-1].row + 1)


class Exporter:
    """Single producer over one ring and its PUB socket. One thread calls it; any may close it.

    What :meth:`start`, :meth:`rows`, :meth:`step`, :meth:`end` and :meth:`post` ask for is done
    after the next :meth:`submit`, in that order. An error of the exporter's thread ends the export:
    no more rows are kept, it is given to ``on_failure`` on that thread, after whatever was handed
    over until then and after all that comes later, and every later submit raises it.

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
        self.recorder = Recorder(ring, publisher, info, self._wait_s)
        """For what is posted: it belongs to the exporter's thread."""
        self.on_failure: Callable[[Exception], None] | None = None
        self._rows_per_record = self._fit_rows()
        self._run: DecodeRun | None = None  # whose steps are gathered and not yet posted
        self._posted: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._queue: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hstransport", daemon=True)
        self._thread.start()

    @property
    def ring(self) -> RingWriter:
        return self.recorder.ring

    @property
    def samples_lost(self) -> int:
        """Samples of which not even the name could be kept."""
        return self.recorder.samples_lost

    def start(
        self,
        id: str,
        rid: str,
        prompt: Sequence[int] | TokenIds,
        labels: Mapping[str, Label] | None = None,
        loss_mask: tuple[int, ...] | None = None,
    ) -> OpenSample:
        """Begin a sample. ``prompt``: token ids, which must not be changed from here on."""
        sample = self.recorder.open(id)
        self.post(self.recorder.start, sample, rid, prompt, labels or {}, loss_mask, time.time())
        return sample

    def rows(self, spans: Sequence[RowSpan], planes: Planes) -> None:
        """Export rows of one forward pass whose owners are known; see :meth:`forward`."""
        self.forward(lambda steps: spans, spans[-1].row + spans[-1].rows, planes)

    def forward(self, plan: Plan, rows: int, planes: Planes) -> None:
        """Export what ``plan`` will want of the first ``rows`` rows of a forward pass.

        They go into records of bounded size. The planes must stay as they are until the work that
        their stream has been given so far is done (host memory: until the rows are in the ring);
        they are kept alive for as long.
        """
        self._finish_run()
        most = self._rows_per_record
        spans: list[RowSpan] = []  # of the whole pass: its first part fills it
        for at in range(0, rows, most):
            part = RowRange(at, min(most, rows - at))
            gathered = self._gather(part, planes)
            self._posted.append((self._write_part, (None if at else plan, spans, part, gathered)))

    def step(self, run: DecodeRun, planes: Planes) -> None:
        """Export the rows of one more decode step; of the planes see :meth:`forward`.

        Steps of a GPU are gathered on it, and posted together when there are enough of them, or
        when anything else is exported; the run is not open any more then. Steps of host memory, or
        where the stage has no room, are posted one by one.
        """
        if not run.open:
            raise CaptureError("this run of decode steps has ended: begin another")
        if run is not self._run:
            self._finish_run()
            self._open_run(run, planes)
        elif run.stream != planes.stream:
            raise CaptureError("the server changed the stream of its decode steps in mid-run")
        if run._gathered is None:
            run.steps, run.open, self._run = 1, False, None
            self.forward(run.plan, run.rows, planes)
            return
        run.steps = run._gathered.add(planes)
        if run.steps == run._limit:
            self._finish_run()

    def again(self, run: DecodeRun, stream: int) -> None:
        """The same out of the planes of the step before, and handed over when that is due.

        The usual step of a server, which replays its decode graph: made to cost little.
        """
        if self._failure is not None:
            raise self._failure
        if not run.open or run._gathered is None or stream != run.stream:
            raise CaptureError("this run of decode steps has ended, or changed its stream")
        run.steps = run._gathered.again()
        if run.steps == run._limit:
            self._finish_run()
            self.submit()

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
        self.post(self.recorder.end, sample, reason, tokens, output, cached, detail)

    def post(self, action: Callable[..., None], *args: Any) -> None:
        """Have something done on the exporter's thread, behind all that was asked for before."""
        self._finish_run()
        self._posted.append((action, args))

    def submit(self) -> None:
        """Hand over what was posted, with one wake-up of the exporter's thread."""
        if self._failure is not None:
            raise self._failure
        if self._posted:
            posted, self._posted = self._posted, []
            self._queue.put(posted)

    def flush(self, timeout_s: float = 10.0) -> None:
        """Wait until all that was posted is in the ring, dropped or waiting for room there."""
        done = threading.Event()
        self.post(done.set)
        self.submit()
        if not done.wait(timeout_s):
            raise HsTransportError(f"the exporter's thread was not done after {timeout_s} s")
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """After an error of the caller's: gathered decode steps are given up, and no more come.
        What is posted is still done."""
        run, self._run = self._run, None
        if run is not None:
            run.open = False
            if run._gathered is not None:
                with contextlib.suppress(HsTransportError):  # of a GPU that is lost
                    run._gathered.seal()
                    self._posted.append((run._gathered.drop, ()))

    def close(self) -> None:
        """End the run; the ring stays for a consumer unless all of it is free. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                if self._failure is None:
                    self._finish_run()
                else:
                    self.abandon()
            finally:
                self._queue.put(self._posted)
                self._queue.put(None)
                self._thread.join(self._wait_s + _JOIN_S)
                if self._thread.is_alive():
                    logger.error("hstransport: the exporter's thread hangs; its ring is left as is")
                else:
                    self._copier.close()  # its copies end before the ring gives up what is pending
                    self.recorder.close()

    def _fit_rows(self) -> int:
        # A record must fit whatever the wrap position; a quarter of that lets the consumer free one
        # while others are written.
        ring = self.recorder.ring
        largest = ring.max_payload_bytes(64 << 10, self.recorder.event_reserve)
        size = min(RECORD_PAYLOAD_BYTES, largest // 4, self._copier.max_bytes)
        rows = size // self._info.row_bytes
        if rows < 1:
            raise ConfigError(
                f"HSTRANSPORT_RING_BYTES: one token's states take {self._info.row_bytes} bytes, "
                f"too many for a ring of {ring.capacity_bytes} bytes: choose a larger one"
            )
        return rows

    def _open_run(self, run: DecodeRun, planes: Planes) -> None:
        self._run = run
        run.stream = planes.stream
        # Half of what there is: the next run finds room while this one is on its way.
        run._limit = min(MAX_DECODE_STEPS, self._rows_per_record // 2 // run.rows)
        if run._limit:
            run._gathered = self._copier.gather_steps(run.rows, planes, run._limit)

    def _finish_run(self) -> None:
        """Post the gathered steps of the open run, and let it take no more."""
        run, self._run = self._run, None
        if run is not None:
            run.open = False
            if run._gathered is not None:
                run._gathered.seal()
                self._posted.append((self._write_run, (run,)))

    def _gather(self, rows: RowRange, planes: Planes) -> GatheredRows | None:
        """Gather, and where too much waits already give the exporter's thread time to work."""
        gathered = self._copier.gather(rows, planes)
        if gathered is None:
            self.submit()
            began = time.monotonic_ns()
            deadline = began + int((self._wait_s + _GRACE_S) * 1e9)
            while gathered is None and time.monotonic_ns() < deadline:
                time.sleep(_NAP_S)
                gathered = self._copier.gather(rows, planes)
            self.ring.count("stage_stall_ns", time.monotonic_ns() - began)
        return gathered

    # From here on: the exporter's thread.

    def _work(self) -> None:
        pause: float | None = None
        while True:
            posted: list[Any] | None
            try:
                posted = self._queue.get(timeout=pause)
            except Empty:
                posted = []
            if posted is None:
                return
            pause = self._do(posted)
            del posted  # or the last pass's states would live until the next one

    def _do(self, posted: list[Any]) -> float | None:
        """Do what was posted; how long to wait for more before looking again, None: for ever."""
        for action, args in posted:
            self._guarded(action, *args)
        if self._failure is not None and self.on_failure is not None:
            self.on_failure(self._failure)
        done = self._guarded(self.recorder.flush_pending)
        self._guarded(self.recorder.announce)
        if self._failure is None and self._guarded(self._copier.release):
            return _RELEASE_S
        return _RETRY_PENDING_S if done is False else None

    def _guarded(self, action: Callable[..., Any], *args: Any) -> Any:
        try:
            return action(*args)
        except Exception as e:
            self._failure = self._failure or e
            return None

    def _write_part(
        self, plan: Plan | None, spans: list[RowSpan], rows: RowRange, gathered: GatheredRows | None
    ) -> None:
        if plan is not None:
            spans += plan(1)
        self._record(_cut(spans, rows), 1, gathered)

    def _write_run(self, run: DecodeRun) -> None:
        self._record(run.plan(run.steps), run.steps, run._gathered)

    def _record(self, spans: Sequence[RowSpan], steps: int, gathered: GatheredRows | None) -> None:
        if self._failure is None:
            self.recorder.rows(spans, steps, gathered)
        else:  # the samples have begun, and will end; their rows are not kept
            self.recorder.drop(spans, steps, "stopped")
            if gathered is not None:
                gathered.drop()


def _cut(spans: Sequence[RowSpan], rows: RowRange) -> list[RowSpan]:
    """What of the spans lies in these rows, counted from the first of them."""
    cut = []
    for span in spans:
        start = max(span.row, rows.row)
        stop = min(span.row + span.rows, rows.row + rows.rows)
        if start < stop:
            position = span.position + start - span.row
            cut.append(RowSpan(span.sample, position, start - rows.row, stop - start))
    return cut
