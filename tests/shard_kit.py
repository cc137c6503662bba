"""What the tests of shards share: a made-up server, and a model of what must be stored of it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hstransport_consumer.results import Ended, WindowResult
from hstransport_consumer.writer import DatasetWriter

from hstransport.protocol import End, Event, Rows, Segment, SessionInfo, Start

Entry = tuple[Event | None, Any]

SPECIAL = np.array(
    [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x807F, 0x0080, 0x7F7F],
    np.uint16,
)
"""Zeros, infinities, NaNs with payloads, denormals, the smallest and the largest number."""


def make_info(run: str = "c0ffee00", **changes: Any) -> SessionInfo:
    fields: dict[str, Any] = {
        "run": run,
        "session": "test",
        "model": "model/a",
        "sglang": "0.5.11",
        "layers": (1, 3),
        "final": True,
        "hidden": 24,
        "num_layers": 4,
        "created": 1.5,
    }
    return SessionInfo(**{**fields, **changes})


def bf16(rng: np.random.Generator, *shape: int, special: float = 0.0) -> np.ndarray:
    """Bits of normally distributed bf16, a share of them special."""
    bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16
    states = bits.astype(np.uint16)
    if special:
        where = rng.random(shape) < special
        states[where] = rng.choice(SPECIAL, int(where.sum()))
    return states


@dataclass
class Expected:
    """A sample as it must be read back: rows by position, and the state."""

    id: str
    prompt: np.ndarray
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    """Position -> ``[planes, hidden]``."""
    tokens: int = 0
    state: str = ""
    output: Sequence[int] = ()

    def states(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        stop = self.tokens if stop is None else stop
        return np.stack([self.rows[p] for p in range(start, stop)])


class Script:
    """Records of one run in ring order, and what must come of them."""

    def __init__(self, info: SessionInfo, seed: int = 0, special: float = 0.0) -> None:
        self.info = info
        self.rng = np.random.default_rng(seed)
        self.special = special
        self.records: list[Entry] = []
        self.samples: dict[int, Expected] = {}

    def start(self, sid: int, tokens: int, id: str | None = None, **fields: Any) -> None:
        prompt = self.rng.integers(0, 1000, tokens).astype(np.int32)
        name = id or f"sample-{sid}"
        self.samples[sid] = Expected(name, prompt)
        self.records.append((Start(sid, name, f"rid-{sid}", prompt, **fields), None))

    def rows(self, *segments: tuple[int, int, int], lost: bool = False) -> None:
        """A forward pass: ``(sid, position, rows)`` each; ``lost``: the payload never came."""
        total = sum(n for _, _, n in segments)
        states = bf16(self.rng, self.info.planes, total, self.info.hidden, special=self.special)
        row = 0
        for sid, position, n in segments:
            for i in range(n):
                if not lost:
                    self.samples[sid].rows.setdefault(position + i, states[:, row + i])
            row += n
        event = Rows(tuple(Segment(*s) for s in segments))
        self.records.append((event, None if lost else states))

    def end(
        self, sid: int, tokens: int | None = None, reason: str = "finished", **fields: Any
    ) -> None:
        sample = self.samples[sid]
        n = len(sample.prompt) if tokens is None else tokens
        output = fields.pop("output", [7])
        end = End(sid, reason, n, np.array(output, np.int32), **fields)
        self.records.append((end, None))
        sample.tokens, sample.output = n, output
        sample.rows = {p: r for p, r in sample.rows.items() if p < n}
        holes = [p for p in range(n) if p not in sample.rows]
        if reason == "aborted":
            sample.state = "aborted"
        elif n and not holes:
            sample.state = "whole"
        elif end.dropped:
            sample.state = "dropped"
        elif holes and holes[-1] < end.cached:
            sample.state = "prefix_missing"
        else:
            sample.state = "incomplete"

    def whole(self, sid: int, tokens: int, **fields: Any) -> None:
        """A sample from start to end in three records."""
        self.start(sid, tokens, **fields)
        self.rows((sid, 0, tokens))
        self.end(sid)

    def write(
        self, writer: DatasetWriter, windows: Iterable[int], first: int = 0
    ) -> list[WindowResult]:
        """Write all records from ``first`` on, in windows of so many records."""
        results = []
        writer.begin_run(self.info)
        for n in windows:
            last = min(first + n, len(self.records)) - 1
            results.append(self.write_window(writer, first, last))
            first = last + 1
        if first < len(self.records):
            results.append(self.write_window(writer, first, len(self.records) - 1))
        return results

    def begin_window(self, writer: DatasetWriter, first: int, last: int) -> None:
        events = self.records[first : last + 1]
        writer.begin_window(self.info.run, self.info.rank, first, last, events)

    def write_window(self, writer: DatasetWriter, first: int, last: int) -> WindowResult:
        events = self.records[first : last + 1]
        return writer.write_window(self.info.run, self.info.rank, first, last, events)


def ended(results: Iterable[WindowResult]) -> list[Ended]:
    return [e for r in results for e in r.ended]


def check(dataset: Any, samples: Iterable[Expected]) -> None:
    """Every sample is there once, with its state and its bits."""
    expected = {s.id: s for s in samples}
    assert sorted(dataset.ids) == sorted(expected)
    for sample in dataset:
        check_sample(sample, expected[sample.id])


def check_sample(sample: Any, expected: Expected) -> None:
    assert (sample.state, sample.tokens) == (expected.state, expected.tokens)
    have = [p for a, b in sample.ranges for p in range(a, b)]
    assert have == sorted(expected.rows)
    ids = [*expected.prompt.tolist(), *expected.output]
    assert sample.token_ids.tolist() == ids[: sample.tokens]
    for a, b in sample.ranges:
        np.testing.assert_array_equal(sample.read(a, b), expected.states(a, b))


# Frames of a file, to be bent.

HEAD = struct.Struct("<II4sI")


def split_frames(data: bytes) -> list[tuple[bytes, int, int]]:
    """``(kind, offset, end)`` of every frame; the kind of data frames is ``b"data"``."""
    import msgpack

    frames, at, sizes = [], 0, []
    while at < len(data):
        if sizes:
            n, kind = sizes.pop(0), b"data"
        else:
            _, size, kind, _ = HEAD.unpack_from(data, at)
            n = size + 8
            if kind == b"HSck":
                sizes = msgpack.unpackb(data[at + 16 : at + n])["sizes"]
        frames.append((kind, at, at + n))
        at += n
    return frames


def only_shard(directory: Path) -> Path:
    (path,) = sorted(directory.glob("shard-*"))
    return path
