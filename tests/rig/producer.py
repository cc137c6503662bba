"""What the plugin drives, driven by hand: a ring, an exporter and states of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hstransport._core import Planes
from hstransport.capture import planes
from hstransport.channel import Publisher
from hstransport.copyout import Copier, DeviceCopier
from hstransport.exporter import DecodeRun, Exporter
from hstransport.follower import Follower
from hstransport.protocol import (
    FINISHED,
    End,
    Rows,
    SessionInfo,
    Start,
    pack_info,
    unpack_event,
)
from hstransport.recorder import OpenSample, RowSpan
from hstransport.ring import RingReader, RingWriter
from hstransport.session import ring_path
from hstransport.settings import Selection
from hstransport.tap import Tap

HIDDEN = 64
Bits = npt.NDArray[np.uint16]


def tokens(n: int, start: int = 0) -> npt.NDArray[np.int32]:
    return np.arange(start, start + n, dtype=np.int32)


class Producer:
    """The server's side without a server; ``publish`` adds the PUB socket."""

    def __init__(
        self,
        root: Path,
        *,
        session: str = "s",
        run: str = "ab" * 6,
        rank: int = 0,
        ring_bytes: int = 1 << 20,
        policy: str = "drop",
        block_s: float = 1.0,
        publish: bool = False,
        copier: Copier | None = None,
        **info: Any,
    ) -> None:
        info = {"layers": (2, 3), "final": True, "hidden": HIDDEN, "rows": "all", **info}
        self.info = SessionInfo(
            run, session, "model", "0", num_layers=6, rank=rank, producer="test", **info
        )
        self.place = ring_path(root, session, run, rank)
        self.ring = RingWriter.create(self.place.path, ring_bytes, pack_info(self.info))
        publisher = Publisher(self.place.endpoint) if publish else None
        if isinstance(copier, DeviceCopier):
            copier.pin(self.ring)
        self.exporter = Exporter(
            self.ring, publisher, self.info, copier=copier, policy=policy, block_s=block_s
        )
        self._rng = np.random.default_rng(0)

    def tap(self, **options: Any) -> Tap:
        """A tap whose server's request objects are what it follows."""
        options = {"selection": Selection(), **options}
        follower = Follower(self.info, self.exporter.recorder, lambda request: request, **options)
        return Tap(self.info, self.exporter, follower)

    def states(self, count: int) -> Bits:
        """Random finite states ``[planes, count, hidden]``."""
        floats = self._rng.standard_normal((self.info.planes, count, self.info.hidden), np.float32)
        return (floats.view(np.uint32) >> 16).astype(np.uint16)

    def rows(self, *spans: tuple[OpenSample, int, int], states: Bits | None = None) -> Bits:
        """One pass: ``(sample, position, rows)`` each; returns ``[planes, rows, hidden]``."""
        if states is None:
            states = self.states(sum(n for _, _, n in spans))
        placed, row = [], 0
        for sample, position, n in spans:
            placed.append(RowSpan(sample, position, row, n))
            row += n
        self.exporter.rows(placed, planes(states, self.info.hidden))
        self.exporter.flush()
        return states

    def put(self, spans: list[RowSpan], source: Planes) -> None:
        """Rows of planes, handed over and not waited for."""
        self.exporter.rows(spans, source)
        self.exporter.submit()

    def step(self, run: DecodeRun, source: Planes) -> None:
        """The same for a decode step."""
        self.exporter.step(run, source)
        self.exporter.submit()

    def start(self, name: str, n: int) -> OpenSample:
        sample = self.exporter.start(name, f"r-{name}", tokens(n), {"name": name}, (1, n - 1))
        self.exporter.flush()
        return sample

    def end(self, sample: OpenSample, n: int, output: int) -> None:
        self.exporter.end(sample, FINISHED, n, tokens(output, 99))
        self.exporter.flush()

    def sample(self, name: str, n: int) -> Bits:
        """A whole sample of ``n`` prompt tokens in one pass; returns its states."""
        sample = self.start(name, n)
        states = self.rows((sample, 0, n))
        self.end(sample, n, 1)
        return states

    def close(self) -> None:
        self.exporter.close()


Ended = tuple[Start, End, dict[int, Bits]]


def read_samples(reader: RingReader, info: SessionInfo) -> tuple[list[Ended], list[Start]]:
    """All that is in a ring: ended samples in the order of their ends, with the states
    ``[planes, hidden]`` of each position; and those that have begun and not ended."""
    begun: dict[int, tuple[Start, dict[int, Bits]]] = {}
    ended: list[Ended] = []
    while (record := reader.read()) is not None:
        event = unpack_event(record.kind, record.meta)
        if isinstance(event, Start):
            begun[event.sid] = (event, {})
        elif isinstance(event, Rows):
            states = record.payload.view(np.uint16).reshape(info.planes, event.rows, info.hidden)
            row = 0
            for sid, position, n in event.segments:
                rows = begun[sid][1]
                for i in range(n):
                    assert position + i not in rows, f"position {position + i} came twice"
                    rows[position + i] = states[:, row + i].copy()
                row += n
        else:
            start, rows = begun.pop(event.sid)
            ended.append((start, event, rows))
        record.release()
    return ended, [start for start, _ in begun.values()]
