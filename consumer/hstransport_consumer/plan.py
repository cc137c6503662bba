"""From a window's events to what is to be written: pure, and nothing is changed by it.

Rows are gathered by sample, in the order of their positions, and cut into chunks. A position that
the sample already has is skipped: a request that was retracted is computed again, and the first
rows are as right as the later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from hstransport.protocol import End, Event, Rows, Segment, Start

from .codec import Piece, Source, source
from .format import CHUNK_BYTES, MAX_TOKENS, SMALL_BYTES
from .index import Part
from .states import Coverage, State, judge

Entry = tuple[Event | None, npt.NDArray[Any] | None]
"""A record: its event (None if it could not be read) and, of Rows, the states (None if lost)."""


Known = Callable[[int], Coverage | None]
"""What a sample that is open before a window covers, by its sid; None if there is none."""


@dataclass(slots=True)
class Touched:
    """What a window does to one sample."""

    sid: int
    coverage: Coverage
    start: Start | None = None
    pieces: list[Piece] = field(default_factory=list)
    end: End | None = None
    state: State | None = None
    refs: list[Part] = field(default_factory=list)
    """Rows of other samples that complete it."""


@dataclass
class ChunkPlan:
    """Rows that are packed together: ``(sid, piece)`` in the order they take in the chunk."""

    pieces: list[tuple[int, Piece]] = field(default_factory=list)
    rows: int = 0

    def add(self, sid: int, piece: Piece) -> None:
        self.pieces.append((sid, piece))
        self.rows += piece.rows

    @property
    def segments(self) -> list[Segment]:
        """The chunk's rows as the format tells them: neighbours of one sample merged."""
        merged: list[Segment] = []
        for sid, p in self.pieces:
            last = merged[-1] if merged else None
            if last and last.sid == sid and last.position + last.rows == p.position:
                merged[-1] = Segment(sid, last.position, last.rows + p.rows)
            else:
                merged.append(Segment(sid, p.position, p.rows))
        return merged


@dataclass
class WindowPlan:
    """What a window holds, and what of it is not kept."""

    touched: dict[int, Touched] = field(default_factory=dict)
    chunks: list[ChunkPlan] = field(default_factory=list)
    rows: int = 0
    duplicate_rows: int = 0
    """Rows at positions that the sample already has."""
    orphan_rows: int = 0
    """Rows of samples that never started or have ended."""
    anomalies: int = 0
    """STARTs of known samples, ENDs of unknown ones, records that could not be read."""


def plan_window(known: Known, entries: Sequence[Entry], planes: int, hidden: int) -> WindowPlan:
    """Plan a window; ``known``: the samples open before it."""
    plan = WindowPlan()
    for event, array in entries:
        if isinstance(event, Rows):
            if array is not None:
                states = source(array, planes, hidden)
                _take_rows(plan, known, event, states)
        elif isinstance(event, Start):
            if event.sid in plan.touched or known(event.sid) is not None:
                plan.anomalies += 1
            else:
                plan.touched[event.sid] = Touched(event.sid, Coverage(), start=event)
        elif isinstance(event, End):
            _take_end(plan, known, event)
        else:
            plan.anomalies += 1
    plan.chunks = _cut(plan.touched.values(), hidden)
    return plan


def _touch(plan: WindowPlan, known: Known, sid: int) -> Touched | None:
    """The sample, if it is open at this point of the window."""
    touched = plan.touched.get(sid)
    if touched is None:
        before = known(sid)
        if before is not None:
            touched = plan.touched[sid] = Touched(sid, Coverage(before.ranges))
    return touched if touched and touched.end is None else None


def _take_rows(plan: WindowPlan, known: Known, event: Rows, states: Source) -> None:
    if event.rows != states.rows:
        raise ValueError(f"record of {states.rows} rows whose segments have {event.rows}")
    row = 0
    for sid, position, rows in event.segments:
        touched = _touch(plan, known, sid)
        if touched is None or position + rows > MAX_TOKENS:
            plan.orphan_rows += rows
        else:
            kept = 0
            for a, b in touched.coverage.missing(position, position + rows):
                touched.pieces.append(Piece(states, row + a - position, a, b - a))
                touched.coverage.add(a, b)
                kept += b - a
            plan.rows += kept
            plan.duplicate_rows += rows - kept
        row += rows


def _take_end(plan: WindowPlan, known: Known, event: End) -> None:
    touched = _touch(plan, known, event.sid)
    if touched is None or event.tokens > MAX_TOKENS:
        plan.anomalies += 1
        return
    touched.end = event
    touched.state = judge(event.reason, event.tokens, event.dropped, event.cached, touched.coverage)


def _cut(samples: Iterator[Touched] | Any, hidden: int) -> list[ChunkPlan]:
    """Chunks of whole rows: large samples alone in about equal parts, small ones together."""
    full = max(CHUNK_BYTES // hidden, 1)
    chunks: list[ChunkPlan] = []
    shared = ChunkPlan()
    for t in samples:
        pieces = sorted(t.pieces, key=lambda p: p.position)
        rows = sum(p.rows for p in pieces)
        if rows * hidden < SMALL_BYTES:
            if shared.rows + rows > full:
                chunks.append(shared)
                shared = ChunkPlan()
            for p in pieces:
                shared.add(t.sid, p)
        else:
            chunks.extend(_cut_sample(t.sid, pieces, rows, full))
    return [*chunks, shared] if shared.rows else chunks


def _cut_sample(sid: int, pieces: list[Piece], rows: int, full: int) -> list[ChunkPlan]:
    parts = -(-rows // full)
    bounds = [rows * (i + 1) // parts for i in range(parts)]
    chunks = [ChunkPlan()]
    done = 0
    for p in pieces:
        at = 0
        while at < p.rows:
            if done == bounds[len(chunks) - 1]:
                chunks.append(ChunkPlan())
            n = min(p.rows - at, bounds[len(chunks) - 1] - done)
            chunks[-1].add(sid, Piece(p.source, p.row + at, p.position + at, n))
            at += n
            done += n
    return chunks
