"""One ring's records into samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hstransport.protocol import End, Rows, Start

from .live import Fragment, Lease, LiveSample
from .states import Coverage, State, judge
from .stream import Received, RingStream, States


class _Open:
    """A sample whose END has not come."""

    def __init__(self, start: Start, lease: Lease) -> None:
        self.start = start
        # Held too, so that a consumer that comes later finds the sample from its beginning on.
        self.lease: Lease | None = lease
        lease.take()
        self.fragments: list[Fragment] = []
        self.coverage = Coverage()
        self.copied = 0
        self.given_up = False

    def leave_ring(self) -> int:
        """Copy everything out of the ring; returns the bytes now held in memory of our own."""
        if self.lease is not None:
            lease, self.lease = self.lease, None
            lease.drop()
        return sum(fragment.copy_out() for fragment in self.fragments)

    def add(self, position: int, states: States, lease: Lease) -> None:
        """Keep the rows at positions that have none yet; a repetition is surplus."""
        for start, stop in self.coverage.missing(position, position + states.shape[1]):
            part = states[:, start - position : stop - position]
            self.fragments.append(Fragment(start, part, lease))
            self.coverage.add(start, stop)


class Assembler:
    """Turns one ring's records into samples.

    ``memory_bytes`` bounds the rows that it copies out of the ring for samples that are still open;
    beyond it samples are given up, the largest first.
    """

    def __init__(self, stream: RingStream, memory_bytes: int) -> None:
        self.stream = stream
        self._open: dict[int, _Open] = {}
        self._memory_bytes = memory_bytes
        self._copied = 0
        self.lost = 0
        """Samples whose beginning an earlier consumer had taken with it."""

    def feed(self, received: Received) -> LiveSample | None:
        """Take in the ring's next record; the sample that it ends, if it ends one."""
        lease = Lease(received.record)
        lease.take()
        try:
            event = received.event
            if isinstance(event, Start):
                self._open[event.sid] = _Open(event, lease)
            elif isinstance(event, Rows) and received.states is not None:
                self._rows(event, received.states, lease)
            elif isinstance(event, End):
                return self._end(event)
            return None
        finally:
            lease.drop()
            self._relieve()

    def finish(self) -> Iterator[LiveSample]:
        """What is still open when the run is over."""
        for sid in list(self._open):
            yield self._sample(self._open.pop(sid), None)

    def _rows(self, rows: Rows, states: States, lease: Lease) -> None:
        at = 0
        for sid, position, count in rows.segments:
            sample = self._open.get(sid)
            if sample is not None and not sample.given_up:
                sample.add(position, states[:, at : at + count], lease)
            at += count

    def _end(self, end: End) -> LiveSample | None:
        sample = self._open.pop(end.sid, None)
        if sample is None:
            self.lost += 1
            return None
        return self._sample(sample, end)

    def _sample(self, sample: _Open, end: End | None) -> LiveSample:
        self._copied -= sample.copied
        if sample.lease is not None:
            sample.lease.drop()
        coverage = sample.coverage
        if end is None:
            state, limit = State.UNFINISHED, None
        else:
            state = judge(end.reason, end.tokens, end.dropped, end.cached, coverage)
            limit = end.tokens
        if sample.given_up:
            state = State.INCOMPLETE
        # Only rows that begin at position 0 and have no hole can stand beside their token ids.
        reach = coverage.ranges[0][1] if coverage.ranges and not coverage.ranges[0][0] else 0
        tokens = 0 if sample.given_up else reach if limit is None else min(reach, limit)
        states = self._join(sample.fragments, tokens)
        return LiveSample(self.stream.info, sample.start, end, state, states, sample.fragments)

    def _join(self, fragments: list[Fragment], tokens: int) -> States:
        """``[planes, tokens, hidden]``: a view when one fragment has it all, else a copy."""
        whole = [f for f in fragments if f.position == 0 and f.states.shape[1] >= tokens]
        if whole:
            view: States = whole[0].states[:, :tokens]
            for f in fragments:
                if f is not whole[0]:
                    f.free()
            return view
        info = self.stream.info
        joined = np.empty((info.planes, tokens, info.hidden), np.uint16)
        for f in fragments:
            part = f.states[:, : max(tokens - f.position, 0)]
            joined[:, f.position : f.position + part.shape[1]] = part
            f.free()
        return joined

    def _relieve(self) -> None:
        """Copy open samples out of the ring when they would otherwise pin half of it."""
        reader = self.stream.reader
        if reader.cursor - reader.tail <= reader.capacity_bytes // 2:
            return
        for sample in self._open.values():
            copied = sample.leave_ring()
            sample.copied += copied
            self._copied += copied
        while self._copied > self._memory_bytes:
            worst = max(self._open.values(), key=lambda s: s.copied)
            self._copied -= worst.copied
            worst.copied = 0
            worst.fragments = []
            worst.given_up = True
