"""Samples straight out of the ring, for embedding in other pipelines.

    with Consumer.attach("default") as samples:
        for sample in samples:
            train(sample.token_ids, sample["final"])

A sample whose rows lie in one record is a view of the ring, without a copy; its lease ends with the
loop turn. Keep one longer with :meth:`LiveSample.copy`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from hstransport.errors import DatasetMismatchError
from hstransport.protocol import SessionInfo
from hstransport.session import check_session_name, default_root, find_sessions

from .assembler import Assembler
from .live import LiveSample
from .states import State
from .stream import RingStream, Streams

MEMORY_BYTES = 4 << 30
"""Default bound on rows copied out of the ring for samples that are still open."""


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
        self._assemblers: dict[RingStream, Assembler] = {}
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
            self._assemblers[stream] = Assembler(stream, self._memory_bytes)
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
