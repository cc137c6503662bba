"""The tap: what capture does on the server's thread, in its own words.

Forward passes come in as a :class:`Pass` with the server's own request objects; whose rows they
are, the :class:`Follower` works out later, on the exporter's thread. Here rows are only gathered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ._core import Planes
from .capture import planes, split_packed
from .errors import CaptureError
from .exporter import DecodeRun, Exporter, Plan
from .follower import Follower, Noted, Pass
from .protocol import SessionInfo

logger = logging.getLogger(__name__)


class Forward(NamedTuple):
    """A forward pass whose rows are wanted."""

    plan: Plan
    rows: int


class _Decode(NamedTuple):
    """The batch of the open run of decode steps."""

    requests: list[Any]
    run: DecodeRun
    tokens: int | None
    """Sum of its sequences' lengths at the first step."""


class Tap:
    """One rank's capture. Whatever goes wrong in it ends capture, never serving."""

    def __init__(self, info: SessionInfo, exporter: Exporter, follower: Follower) -> None:
        self.all_rows = info.rows == "all"
        self.follower = follower
        self._info = info
        self._exporter = exporter
        self._decode: _Decode | None = None
        self._stopped = False
        self._closing: threading.Thread | None = None
        self._lock = threading.Lock()  # one thread at a time calls the exporter
        self._reporting = threading.Lock()
        exporter.on_failure = self._failed

    def guarded(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run a step of capture; an error ends capture, never serving."""
        if self._stopped:
            return None
        try:
            return step(*args)
        except Exception as e:
            self.stop(str(e), e)
            return None

    def stop(self, why: str, error: Exception | None = None, wait_s: float = 0.0) -> None:
        """End capture for good; all open samples end as aborted, and serving goes on.

        The ring is closed beside serving; ``wait_s``: how long to wait for that.
        """
        with self._lock:
            if self._report(why, error):
                try:
                    self._exporter.post(self.follower.end_all, f"capture stopped: {why}")
                    self._exporter.submit()
                except Exception:  # whatever is broken must not reach the server's thread
                    logger.debug("hstransport: while stopping", exc_info=True)
        if self._closing is not None:
            self._closing.join(wait_s)

    def _failed(self, error: Exception) -> None:
        """The exporter's thread met an error; it says so itself, on that thread."""
        self._report(str(error), error)
        self.follower.end_all(f"capture stopped: {error}")

    def _report(self, why: str, error: Exception | None) -> bool:
        """Whether this is the first that is heard of an end."""
        with self._reporting:
            if self._stopped:
                return False
            self._stopped = True
            logger.error("hstransport: capture stopped, serving goes on: %s", why, exc_info=error)
            # Beside serving: it waits for copies, and perhaps for room in the ring.
            self._closing = threading.Thread(target=self._close, name="hstransport-close")
            self._closing.start()
            return True

    def _close(self) -> None:
        with self._lock:  # the server's thread is not in the middle of anything
            try:
                self._exporter.close()
            except Exception:
                logger.exception("hstransport: the ring cannot be closed in order")

    def plan(self, batch: Sequence[Any], step: Pass, noted: Noted) -> Forward:
        """A coming pass over ``batch``, the server's requests in the order of their rows."""
        self._decode = None
        return Forward(partial(self.follower.plan, list(batch), step, noted), sum(step.counts))

    def going_on(self, batch: list[Any], tokens: int | None) -> DecodeRun | None:
        """The open run of decode steps, if the coming step is one more of it.

        ``batch``: one row for each of these requests, in their order. ``tokens``: sum of their
        sequences' lengths, None when the server does not say.
        """
        last = self._decode
        if last is None or not last.run.open or batch != last.requests:
            return None
        run = last.run
        goes_on = tokens is None or tokens == (last.tokens or 0) + run.steps * run.rows
        return run if goes_on else None

    def plan_decode(
        self, batch: Sequence[Any], step: Pass, noted: Noted, tokens: int | None
    ) -> DecodeRun:
        """A coming decode step that begins a run; see :meth:`plan` and :meth:`going_on`."""
        requests = list(batch)
        run = DecodeRun(partial(self.follower.plan, requests, step, noted), len(requests))
        self._decode = _Decode(requests, run, tokens)
        return run

    def planes(self, states: tuple[Any, Any], stream: int | None = None) -> Planes:
        """Take the states of a pass: (final, captured layers).

        final: ``[tokens, hidden]``. Captured layers: a list of such arrays, or one packed
        ``[tokens, layers * hidden]``. All may be padded at their end. ``stream``: the CUDA stream
        on which they are computed.
        """
        final, captured = states
        hidden, layers = self._info.hidden, self._info.layers
        arrays: list[Any] = []
        if layers:
            if captured is None:
                raise CaptureError("the model handed no captured layers to LogitsProcessor.forward")
            packed = hasattr(captured, "ndim")
            arrays = split_packed(captured, len(layers), hidden) if packed else list(captured)
        if len(arrays) != len(layers):
            raise CaptureError(f"the model captured {len(arrays)} layers, {len(layers)} were asked")
        if self._info.final:
            arrays.append(final)
        return planes(arrays, hidden, stream)

    def again(self, run: DecodeRun, stream: int) -> None:
        """Gather one more step of an open run, whose states lie where its last step's lay."""
        with self._lock:
            if self._stopped:
                return
            try:
                self._exporter.again(run, stream)
            except Exception:
                self._abandon(run)
                raise

    def take(self, work: Forward | DecodeRun, states: Callable[[], Planes]) -> None:
        """Gather the rows of the pass that :meth:`plan` or :meth:`plan_decode` was told of."""
        exporter = self._exporter
        with self._lock:
            if self._stopped:
                return
            try:
                planes = states()
                if planes.rows < work.rows:
                    raise CaptureError(f"a plane has {planes.rows} rows, the batch has {work.rows}")
                if isinstance(work, DecodeRun):
                    exporter.step(work, planes)
                else:
                    exporter.forward(work.plan, work.rows, planes)
            except Exception:
                self._abandon(work)
                raise
            exporter.submit()

    def _abandon(self, work: Forward | DecodeRun) -> None:
        self._exporter.abandon()
        self._exporter.post(self._name, work)  # so that the samples that end here have begun

    @staticmethod
    def _name(work: Forward | DecodeRun) -> None:
        work.plan(1)

    def post(self, action: Callable[..., None], *args: Any) -> None:
        """Have the follower do something, behind all that came before."""
        with self._lock:
            if not self._stopped:
                self._exporter.post(action, *args)
                self._exporter.submit()
