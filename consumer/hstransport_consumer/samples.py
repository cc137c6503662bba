"""Samples straight out of the ring, for embedding in other pipelines.

    with Consumer.attach("default") as samples:
        for sample in samples:
            train(sample.token_ids, sample["final"])

A sample whose rows lie in one record is a view of the ring, without a copy; its lease ends with the
loop turn. Keep one longer with :meth:`LiveSample.copy`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hstransport.errors import DatasetMismatchError, LeaseError
from hstransport.protocol import (
    End,
    Label,
    Rows,
    SessionInfo,
    Start,
    TokenIds,
    decode_loss_mask,
)
from hstransport.ring import Record
from hstransport.session import check_session_name, default_root, find_sessions

from .states import Coverage, State, judge
from .stream import Received, RingStream, States, Streams
from .tensors import to_torch

MEMORY_BYTES = 4 << 30
"""Default bound on rows copied out of the ring for samples that are still open."""


class _Lease:
    """A record that several samples may share; released when the last lets go."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.users = 0

    def take(self) -> None:
        self.users += 1

    def drop(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.record.release()


class _Fragment:
    """Consecutive rows of one sample: ``[planes, rows, hidden]``, in the ring or copied out."""

    def __init__(self, position: int, states: States, lease: _Lease) -> None:
        self.position = position
        self.states = states
        self.lease: _Lease | None = lease
        lease.take()

    def copy_out(self) -> int:
        """Leave the ring; returns the bytes now held in memory of our own."""
        if self.lease is None:
            return 0
        self.states = self.states.copy()
        self.free()
        return self.states.nbytes

    def free(self) -> None:
        if self.lease is not None:
            lease, self.lease = self.lease, None
            lease.drop()


class LiveSample:
    """One sample as it came off the ring. Its arrays are valid until the loop turns."""

    def __init__(
        self,
        info: SessionInfo,
        start: Start,
        end: End | None,
        state: State,
        states: States,
        fragments: list[_Fragment],
    ) -> None:
        self.info = info
        self.id = start.id
        self.request_id = start.rid
        self.labels: Mapping[str, Label] = start.labels
        self.state = state.value
        """``whole`` or why not, as in the shards."""
        self.reason = end.reason if end else State.UNFINISHED.value
        self.layers = info.layer_names
        """Canonical layer ids in the order of the planes, then ``"final"``."""
        output = end.output if end else np.empty(0, np.int32)
        self.tokens = states.shape[1]
        self.token_ids: TokenIds = np.concatenate([start.prompt, output])[: self.tokens]
        self.output_ids: TokenIds = output
        self.prompt_tokens = len(start.prompt)
        mask = start.loss_mask
        self.loss_mask = None if mask is None else decode_loss_mask(mask, self.tokens)
        self._states: States | None = states
        self._fragments = fragments

    @property
    def hidden_states(self) -> npt.NDArray[np.uint16]:
        """bf16 bits, ``[tokens, layers, hidden]``; a view without a copy (rows are strided)."""
        return self._valid().transpose(1, 0, 2)

    def __getitem__(self, layer: int | str) -> npt.NDArray[np.uint16]:
        """bf16 bits of one layer, ``[tokens, hidden]``, contiguous. KeyError names the layers."""
        if layer not in self.layers:
            raise KeyError(f"layer {layer!r} was not captured; there are {list(self.layers)}")
        plane: npt.NDArray[np.uint16] = self._valid()[self.layers.index(layer)]
        return plane

    def torch(self) -> Any:
        """``[tokens, layers, hidden]`` torch.bfloat16 on the same memory. Needs torch."""
        return to_torch(self.hidden_states)

    @property
    def zero_copy(self) -> bool:
        """Whether the arrays are views of the ring."""
        self._valid()
        return any(f.lease is not None for f in self._fragments)

    def copy(self) -> LiveSample:
        """The same sample in memory of its own, valid for ever."""
        twin = object.__new__(LiveSample)
        twin.__dict__.update(self.__dict__)
        twin._states = self._valid().copy()
        twin._fragments = []
        return twin

    def release(self) -> None:
        """End the lease; called when the loop turns. Arrays taken from it must not be read."""
        self._states = None
        for fragment in self._fragments:
            fragment.free()
        self._fragments = []

    def _valid(self) -> States:
        if self._states is None:
            raise LeaseError(
                f"sample {self.id!r} was given back when the loop turned: take sample.copy() of "
                "what is to be kept"
            )
        return self._states


class _Open:
    """A sample whose END has not come."""

    def __init__(self, start: Start, lease: _Lease) -> None:
        self.start = start
        # Held too, so that a consumer that comes later finds the sample from its beginning on.
        self.lease: _Lease | None = lease
        lease.take()
        self.fragments: list[_Fragment] = []
        self.coverage = Coverage()
        self.copied = 0
        self.given_up = False

    def leave_ring(self) -> int:
        """Copy everything out of the ring; returns the bytes now held in memory of our own."""
        if self.lease is not None:
            lease, self.lease = self.lease, None
            lease.drop()
        return sum(fragment.copy_out() for fragment in self.fragments)

    def add(self, position: int, states: States, lease: _Lease) -> None:
        """Keep the rows at positions that have none yet; a repetition is surplus."""
        for start, stop in self.coverage.missing(position, position + states.shape[1]):
            part = states[:, start - position : stop - position]
            self.fragments.append(_Fragment(start, part, lease))
            self.coverage.add(start, stop)


class _Assembler:
    """Turns one ring's records into samples, with bounded memory."""

    def __init__(self, stream: RingStream, memory_bytes: int) -> None:
        self.stream = stream
        self._open: dict[int, _Open] = {}
        self._memory_bytes = memory_bytes
        self._copied = 0
        self.lost = 0
        """Samples whose beginning an earlier consumer had taken with it."""

    def feed(self, received: Received) -> LiveSample | None:
        lease = _Lease(received.record)
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

    def _rows(self, rows: Rows, states: States, lease: _Lease) -> None:
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

    def _join(self, fragments: list[_Fragment], tokens: int) -> States:
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


class Consumer:
    """Iterates over the samples of a running server; ends when the server has ended.

    ``states``: which samples to yield; the default is whole ones only. The others are counted in
    :attr:`skipped`.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        states: tuple[str, ...] | None = (State.WHOLE.value,),
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._streams = streams
        self._states = states
        self._memory_bytes = memory_bytes
        self._assemblers: dict[RingStream, _Assembler] = {}
        self._ready: deque[LiveSample] = deque()
        self._info: SessionInfo | None = None
        self._current: LiveSample | None = None
        self.skipped: dict[str, int] = {}
        """Samples not yielded, by state; ``lost``: an earlier consumer took their beginning."""

    @classmethod
    def attach(
        cls,
        session: str | None = None,
        *,
        root: Path | str | None = None,
        wait_s: float = 60.0,
        states: tuple[str, ...] | None = (State.WHOLE.value,),
        memory_bytes: int = MEMORY_BYTES,
    ) -> Consumer:
        """Attach to ``session`` (or the only one there is), waiting ``wait_s`` for it to appear.

        ``states`` None yields every sample, whole or not. Raises TimeoutError when no ring of the
        session can be attached to in time; the message says why, such as that another consumer
        holds it (a ring has one).
        """
        name = None if session is None else check_session_name(session)
        streams = Streams(Path(root) if root else default_root(), name)
        consumer = cls(streams, states=states, memory_bytes=memory_bytes)
        deadline = time.monotonic() + wait_s
        while not consumer._discover():
            refused = streams.refused
            if time.monotonic() >= deadline:
                consumer.close()
                raise TimeoutError(_why_not(streams, name, wait_s, refused))
            time.sleep(0.05)
        return consumer

    @property
    def info(self) -> SessionInfo:
        """Model, layers and sizes of the session."""
        assert self._info is not None
        return self._info

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[LiveSample]:
        for sample in self._all():
            self._current = sample
            try:
                if self._states is None or sample.state in self._states:
                    yield sample
                else:
                    self.skipped[sample.state] = self.skipped.get(sample.state, 0) + 1
            finally:
                sample.release()

    def close(self) -> None:
        """Let go of the rings. Samples not yet yielded stay for the next consumer."""
        if self._current is not None:
            self._current.release()  # a loop that was left with its last sample in hand
        self._assemblers.clear()
        self._streams.close()

    def _all(self) -> Iterator[LiveSample]:
        next_look = 0.0
        while self._assemblers:
            if time.monotonic() >= next_look:
                self._discover()
                next_look = time.monotonic() + 0.5
            busy = False
            for stream, assembler in list(self._assemblers.items()):
                received = stream.read()
                if received is not None:
                    busy = True
                    lost = assembler.lost
                    sample = assembler.feed(received)
                    if assembler.lost > lost:
                        self.skipped["lost"] = self.skipped.get("lost", 0) + 1
                    if sample is not None:
                        stream.reader.check_whole()  # what was copied out of the ring counts
                        yield sample
                elif stream.ended():
                    yield from assembler.finish()
                    del self._assemblers[stream]
                    self._streams.drop(stream)
            if not busy and self._assemblers:
                # A record that the GPU is about to commit was told of before it is ready.
                pending = any(stream.reader.pending() for stream in self._assemblers)
                self._streams.subscriber.wait(0.001 if pending else 0.05)

    def _discover(self) -> bool:
        for stream in self._streams.discover(self._accept):
            self._assemblers[stream] = _Assembler(stream, self._memory_bytes)
        return bool(self._assemblers)

    def _accept(self, info: SessionInfo) -> None:
        if self._info is None:
            self._info = info
        mine, theirs = self._info, info
        if (mine.layer_names, mine.hidden) != (theirs.layer_names, theirs.hidden):
            raise DatasetMismatchError(
                f"session {info.session!r} has a run with layers {theirs.layer_names}, hidden "
                f"{theirs.hidden} beside one with {mine.layer_names}, hidden {mine.hidden}"
            )


def _why_not(streams: Streams, name: str | None, wait_s: float, refused: dict[Path, str]) -> str:
    if refused:
        why = "; ".join(f"{path}: {reason}" for path, reason in refused.items())
        return f"no ring under {streams.root} could be attached to in {wait_s:g} s: {why}"
    here = ", ".join(find_sessions(streams.root)) or "none"
    return (
        f"no session{f' {name!r}' if name else ''} under {streams.root} after {wait_s:g} s (there: "
        f"{here}): start the server with HSTRANSPORT=1, or name its HSTRANSPORT_DIR with root="
    )
