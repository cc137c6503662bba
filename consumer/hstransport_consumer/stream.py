"""One ring as a stream of decoded records, and the set of rings that a consumer follows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hstransport.channel import Subscriber
from hstransport.errors import ConfigError, ProtocolError, RingBusyError, RingError
from hstransport.protocol import End, Event, Rows, SessionInfo, unpack_event, unpack_info
from hstransport.ring import Record, RingReader
from hstransport.seldom import Seldom
from hstransport.session import RingPath, check_owner, find_rings, find_sessions

logger = logging.getLogger(__name__)

States = npt.NDArray[np.uint16]

SAMPLE_BYTES = 1000
"""What Python takes for what one record tells of one sample, until that is stored."""


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded record; its states are a read-only view of the ring until it is released."""

    record: Record
    event: Event | None
    """None when the metadata broke the protocol: the record was counted and is to be skipped."""
    states: States | None
    """``[planes, rows, hidden]`` bf16 bits of ROWS; None otherwise, or when rows never arrived."""

    @property
    def held_bytes(self) -> int:
        """About what its event takes of our own memory until it is stored: objects for each sample
        that it tells of, its metadata twice, and the token ids of a sample that ends."""
        event = self.event
        samples = len(event.segments) if isinstance(event, Rows) else 1
        states = 0 if self.states is None else self.states.nbytes
        ids = 4 * event.tokens if isinstance(event, End) else 0
        return samples * SAMPLE_BYTES + 2 * (self.record.record_bytes - states) + ids


@dataclass
class StreamCounters:
    """What happened on one ring since this consumer attached."""

    records: int = 0
    bytes: int = 0
    malformed: int = 0
    """Records whose metadata or size broke the protocol; skipped."""
    torn: int = 0
    """Records that the server had begun and never committed when it died."""
    errors: list[str] = field(default_factory=list)


class RingStream:
    """Follows one ring from its tail on. Raises RingBusyError when another consumer holds it.

    ``out``: the directory that its records go to, for those who inspect the ring.
    """

    def __init__(self, place: RingPath, out: Path | None = None) -> None:
        self.place = place
        self._reader = RingReader.attach(place.path)
        try:
            with suppress(FileNotFoundError):  # it is made after the ring
                check_owner(place.socket)
            self.info: SessionInfo = unpack_info(self._reader.info)
            if out is not None:
                self._reader.tell_out(out)
        except (ProtocolError, PermissionError):
            self._reader.close()
            raise
        self.counters = StreamCounters()
        self._seldom = Seldom(logger)

    @property
    def reader(self) -> RingReader:
        return self._reader

    def read(self) -> Received | None:
        """The next committed record, or None when there is none now."""
        record = self._reader.read()
        if record is None and self._reader.pending() and not self._reader.producer_alive():
            self._skip_torn()
            record = self._reader.read()
        if record is None:
            return None
        self.counters.records += 1
        self.counters.bytes += record.record_bytes
        try:
            event = unpack_event(record.kind, record.meta)
            return Received(record, event, self._states(record, event))
        except ProtocolError as e:
            self.counters.malformed += 1
            self._seldom.warning("record %d of ring %s skipped: %s", record.seq, self.place.path, e)
            return Received(record, None, None)

    def ended(self) -> bool:
        """True when the producer is gone and everything it committed has been read."""
        return (
            not self._reader.producer_alive()
            and self._reader.cursor == self._reader.head
            and not self._reader.pending()
        )

    def close(self) -> bool:
        """Let go of the ring; True when it was drained, its producer gone, and it was removed."""
        self._seldom.close()
        try:
            removed = self._reader.unlink_if_orphaned()
        except RingError:  # its header is damaged: left for a person to look at
            removed = False
        if removed:
            self.place.socket.unlink(missing_ok=True)
        self._reader.close()
        return removed

    def _states(self, record: Record, event: Event) -> States | None:
        if not isinstance(event, Rows) or record.abandoned:
            return None
        info = self.info
        expected = event.rows * info.row_bytes
        if len(record.payload) != expected:
            raise ProtocolError(f"payload of {len(record.payload)} bytes, metadata say {expected}")
        states: States = record.payload.view(np.uint16)
        return states.reshape(info.planes, event.rows, info.hidden)

    def _skip_torn(self) -> None:
        while self._reader.pending():
            skipped = self._reader.skip_pending()
            if skipped is None:
                return
            self.counters.torn += 1
            self._seldom.warning(
                "record %d of ring %s was begun and never committed: its server died",
                skipped.seq,
                self.place.path,
            )


class Streams:
    """The rings of a session, found as they appear.

    ``session`` None means: the one session that exists under ``root``; several are an error.
    ``out``: as for :class:`RingStream`.
    """

    def __init__(self, root: Path, session: str | None, out: Path | None = None) -> None:
        self.root = root
        self.session = session
        self._out = out
        self.subscriber = Subscriber()
        self.live: list[RingStream] = []
        self._refused: set[Path] = set()
        self._reasons: dict[Path, str] = {}

    def discover(self, accept: Callable[[SessionInfo], None]) -> list[RingStream]:
        """Attach to rings not seen before. ``accept`` raises for a run that does not fit.

        A ring that cannot be used is reported once and left alone.
        """
        known = {s.place.path for s in self.live}
        found = []
        for place in self._places():
            if place.path in known or place.path in self._refused:
                continue
            try:
                stream = RingStream(place, self._out)
            except FileNotFoundError:
                continue  # its owner unlinked it between the two looks
            except RingBusyError as e:
                self._say_once(place.path, str(e))  # its consumer may end: look again
                continue
            except (RingError, ProtocolError, PermissionError) as e:
                self.refuse(place.path, str(e))
                continue
            try:
                accept(stream.info)
            except BaseException:
                stream.close()
                raise
            self._reasons.pop(place.path, None)
            self.subscriber.connect(place.endpoint)
            self.live.append(stream)
            found.append(stream)
        return found

    def refuse(self, path: Path, why: str) -> None:
        """Leave this ring alone from now on."""
        self._refused.add(path)
        self._say_once(path, why)

    def _say_once(self, path: Path, why: str) -> None:
        if self._reasons.get(path) != why:
            self._reasons[path] = why
            logger.warning("ring %s is left alone: %s", path, why)

    @property
    def refused(self) -> dict[Path, str]:
        """Rings that cannot be used, or could not when last looked at, with the reason."""
        return dict(self._reasons)

    def present(self) -> set[tuple[str, int]]:
        """(run, rank) of every ring of the session, those that cannot be used included."""
        return {(place.run, place.rank) for place in self._places()}

    def drop(self, stream: RingStream) -> bool:
        """Stop following a ring; True when its file was removed."""
        self.live.remove(stream)
        self.subscriber.disconnect(stream.place.endpoint)
        return stream.close()

    def close(self) -> None:
        for stream in list(self.live):
            self.drop(stream)
        self.subscriber.close()

    def _places(self) -> list[RingPath]:
        if self.session is None:
            names = find_sessions(self.root)
            if len(names) > 1:
                raise ConfigError(
                    f"{self.root} holds the sessions {', '.join(names)}: name one with --session"
                )
            if not names:
                return []
            self.session = names[0]
        return find_rings(self.root, self.session)
