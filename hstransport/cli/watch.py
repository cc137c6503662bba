"""What the rings' headers and the disk say of every session, look by look."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ProtocolError, RingError
from ..protocol import unpack_info
from ..ring import RingInfo, inspect_ring
from ..session import RingPath, find_rings, find_sessions

_DISK_WINDOW_S = 60.0
"""Shards are written in bursts: the disk's rate is that of the last minute."""


@dataclass(frozen=True)
class Row:
    """A ring. ``None`` is what cannot be known: a rate at the first look, a ring not readable."""

    session: str
    run: str
    rank: int
    remarks: list[str]
    """What is not as it should be."""
    model: str | None = None
    in_gbs: float | None = None
    """10⁹ bytes of records a second that the server put in; metadata and padding count."""
    out_gbs: float | None = None
    """That the consumer stored and freed."""
    size_bytes: int | None = None
    used_bytes: int | None = None
    lag_records: int | None = None
    """Records not stored yet."""
    lag_s: float | None = None
    """How long the consumer takes for them at its present rate."""
    counters: dict[str, int] = field(default_factory=dict)
    """As in the ring's header."""
    out: str | None = None
    """Where its consumer stores it."""


@dataclass(frozen=True)
class Disk:
    """Where shards are written; ``None``: it does not become fuller."""

    path: str
    free_bytes: int
    size_bytes: int
    gbs: float | None
    full_in_s: float | None


@dataclass(frozen=True)
class View:
    time: float
    rings: list[Row]
    disks: list[Disk]


class Watch:
    """Looks again and again, and makes rates of the differences.

    ``out``: the directory whose disk is looked at, instead of those that consumers tell of.
    """

    def __init__(self, root: Path, session: str | None, out: Path | None) -> None:
        self._root = root
        self._session = session
        self._out = out
        self._before: dict[Path, tuple[float, RingInfo]] = {}
        self._free: dict[str, deque[tuple[float, int]]] = {}

    def look(self) -> View:
        """Raises PermissionError, and FileNotFoundError when there is no such ``out``."""
        names = find_sessions(self._root) if self._session is None else [self._session]
        places = [place for name in names for place in find_rings(self._root, name)]
        rows = [row for place in places if (row := self._row(place)) is not None]
        return View(time.time(), rows, list(self._disks(rows)))

    def _disks(self, rows: list[Row]) -> Iterator[Disk]:
        if self._out is not None:
            yield self._disk(str(self._out))
            return
        for out in sorted({row.out for row in rows if row.out}):
            # In a container they may be others, and a broken ring may say anything.
            with suppress(OSError, ValueError):
                yield self._disk(out)

    def _row(self, place: RingPath) -> Row | None:
        name = place.session, place.run, place.rank
        try:
            ring = inspect_ring(place.path)
            model = unpack_info(ring.info).model
        except FileNotFoundError:
            return None  # its owner unlinked it between the two looks
        except (RingError, ProtocolError, PermissionError) as e:
            return Row(*name, [f"unreadable: {e}"])
        now = time.monotonic()
        then, before = self._before.get(place.path, (now, ring))
        self._before[place.path] = now, ring
        spent = now - then
        in_gbs = (ring.head - before.head) / spent / 1e9 if spent else None
        out_gbs = (ring.tail - before.tail) / spent / 1e9 if spent else None
        return Row(
            *name,
            _remarks(ring),
            model,
            in_gbs,
            out_gbs,
            ring.capacity_bytes,
            ring.bytes,
            ring.records,
            (ring.bytes / out_gbs / 1e9 if out_gbs else None) if ring.bytes else 0.0,
            ring.counters._asdict(),
            None if ring.out is None else str(ring.out),
        )

    def _disk(self, out: str) -> Disk:
        usage = shutil.disk_usage(out)
        now = time.monotonic()
        seen = self._free.setdefault(out, deque())
        seen.append((now, usage.free))
        while now - seen[0][0] > _DISK_WINDOW_S:
            seen.popleft()
        then, before = seen[0]
        rate = (before - usage.free) / (now - then) if now > then else 0.0
        fills = rate > 0
        return Disk(
            out,
            usage.free,
            usage.total,
            rate / 1e9 if fills else None,
            usage.free / rate if fills else None,
        )


def _remarks(ring: RingInfo) -> list[str]:
    remarks = []
    if not ring.producer_alive:
        remarks.append("server ended" if ring.closed else "server died")
    if not ring.consumer_attached:
        remarks.append("no consumer")
    if ring.counters.budget_spent:
        remarks.append("budget spent")
    if ring.counters.samples_lost:
        remarks.append(f"{ring.counters.samples_lost:,} samples lost")
    return remarks
