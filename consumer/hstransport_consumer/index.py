"""The index of one shard as it grows, and the carry, which outlives it.

The writer and the readers of unfinished files feed the same records to :meth:`ShardIndex.apply`:
the one right after a window is on disk, the others out of the file. So a finished shard's footer
is, by construction, what a walk of its frames says.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hstransport.protocol import Segment, SessionInfo, pack_info

from .format import MAX_SHARDS, Header
from .states import STATES, Coverage
from .tables import COLUMNS, Tables


class Part(NamedTuple):
    """Rows of a sample and where they are stored."""

    position: int
    rows: int
    shard: bytes
    """uid"""
    chunk: int
    row: int


class Parts:
    """Parts of one sample, in 20 bytes each: a long decode has one in every window."""

    __slots__ = ("_numbers", "_shards")

    def __init__(self) -> None:
        self._numbers = array("I")
        self._shards: list[bytes] = []

    def append(self, p: Part) -> None:
        if not self._shards or self._shards[-1] != p.shard:
            self._shards.append(p.shard)
        shard = len(self._shards) - 1
        self._numbers.extend((p.position, p.rows, shard, p.chunk, p.row))

    def __iter__(self) -> Iterator[Part]:
        numbers = iter(self._numbers)
        for position, rows, shard, chunk, row in zip(*[numbers] * 5, strict=True):
            yield Part(position, rows, self._shards[shard], chunk, row)


@dataclass(slots=True)
class OpenSample:
    """A sample whose END has not come."""

    sid: int
    id: str
    shard: bytes
    """uid of the shard that has its START frame."""
    start_offset: int
    parts: Parts = field(default_factory=Parts)
    coverage: Coverage = field(default_factory=Coverage)


@dataclass
class RunState:
    """How far a run has been written."""

    info: SessionInfo
    next_seq: int = 0
    open: dict[int, OpenSample] = field(default_factory=dict)


Carry = dict[tuple[str, int], RunState]
"""All runs of a directory by (run, rank); carry.py packs it for a shard's head and foot."""


class RunRecord(NamedTuple):
    offset: int
    end: int
    info: SessionInfo


class BiasRecord(NamedTuple):
    offset: int
    rows: int


class StartRecord(NamedTuple):
    offset: int
    sid: int
    id: str


class ChunkRecord(NamedTuple):
    offset: int
    """Of the first data frame."""
    rows: int
    bias: int
    sizes: tuple[int, ...]
    """Bytes of the data frames in order: sign+mantissa and exponents of each plane."""
    segments: tuple[Segment, ...]


class EndRecord(NamedTuple):
    offset: int
    sid: int
    tokens: int
    state: str
    refs: tuple[Part, ...] = ()
    """Rows of other samples that complete it."""


Item = BiasRecord | StartRecord | ChunkRecord | EndRecord


class WindowRecord(NamedTuple):
    offset: int
    end: int
    run: int
    first_seq: int
    next_seq: int
    """One past the last record of the window."""
    items: tuple[Item, ...]


class RecordError(ValueError):
    """A record contradicts those before it; the walker adds file and offset."""


def id_hash(sample_id: str) -> int:
    """What ids are looked up by: BLAKE2b of the UTF-8 bytes, 8 bytes, little-endian."""
    return int.from_bytes(hashlib.blake2b(sample_id.encode(), digest_size=8).digest(), "little")


class ShardIndex:
    """Columns of the footer, growing window by window."""

    def __init__(self, header: Header, carry: Carry) -> None:
        self.header = header
        self.carry = carry
        self.shards = [header.uid]
        self.runs: list[RunState] = []
        self.bias: list[BiasRecord] = []
        self.windows = 0
        self.raw_rows = 0
        self._ids = bytearray()
        self._columns = {name: array(code) for name, code in COLUMNS.items()}
        self._shard_refs = {header.uid: 0}

    def apply(self, record: RunRecord | WindowRecord) -> None:
        """Take in what is now part of the file; RecordError if it contradicts what came before."""
        if isinstance(record, RunRecord):
            self._add_run(record.info)
            return
        if record.run >= len(self.runs):
            raise RecordError(f"run {record.run} has no frame")
        run = self.runs[record.run]
        if not run.next_seq <= record.first_seq <= record.next_seq:
            raise RecordError(
                f"records from {record.first_seq} before {record.next_seq}; {run.next_seq} is due"
            )
        for item in record.items:
            if isinstance(item, ChunkRecord):
                self._add_chunk(run, item)
            elif isinstance(item, StartRecord):
                if item.sid in run.open:
                    raise RecordError(f"sample {item.sid} starts twice")
                opened = OpenSample(item.sid, item.id, self.header.uid, item.offset)
                run.open[item.sid] = opened
            elif isinstance(item, EndRecord):
                self._add_end(record.run, run, item)
            else:
                self.bias.append(item)
        run.next_seq = record.next_seq
        self.windows += 1

    def run_index(self, key: tuple[str, int]) -> int | None:
        """The number of a run's frame in this shard."""
        wanted = self.carry[key]
        return next((i for i, run in enumerate(self.runs) if run is wanted), None)

    def _add_run(self, info: SessionInfo) -> None:
        run = self.carry.setdefault((info.run, info.rank), RunState(info))
        if any(r is run for r in self.runs):
            raise RecordError(f"run {info.run} rank {info.rank} has two frames")
        if pack_info(run.info) != pack_info(info):
            raise RecordError(f"run {info.run} rank {info.rank} has two descriptions")
        self.runs.append(run)

    def _add_chunk(self, run: RunState, c: ChunkRecord) -> None:
        if c.bias >= len(self.bias):
            raise RecordError(f"bias table {c.bias} has no frame")
        number = self.chunks
        row = 0
        for sid, position, rows in c.segments:
            sample = run.open.get(sid)
            if sample is None:
                raise RecordError(f"rows of sample {sid}, which is not open")
            if sample.coverage.missing(position, position + rows) != [(position, position + rows)]:
                raise RecordError(f"sample {sid} has rows {position}+{rows} twice")
            sample.coverage.add(position, position + rows)
            sample.parts.append(Part(position, rows, self.header.uid, number, row))
            row += rows
        self._append("chunk", offset=c.offset, rows=c.rows, bias=c.bias)
        self._columns["chunk.sizes"].extend(c.sizes)
        self.raw_rows += c.rows

    def _add_end(self, run_index: int, run: RunState, e: EndRecord) -> None:
        sample = run.open.pop(e.sid, None)
        if sample is None:
            raise RecordError(f"sample {e.sid} ends, which is not open")
        for p in e.refs:
            self._check_place(e.sid, p)
            if sample.coverage.missing(p.position, p.position + p.rows) != [
                (p.position, p.position + p.rows)
            ]:
                raise RecordError(f"sample {e.sid} has rows {p.position}+{p.rows} twice")
            sample.coverage.add(p.position, p.position + p.rows)
        for p in sorted([*sample.parts, *e.refs]):
            if p.position < e.tokens:
                self._append(
                    "segment",
                    position=p.position,
                    rows=min(p.rows, e.tokens - p.position),
                    shard=self._shard_ref(p.shard),
                    chunk=p.chunk,
                    row=p.row,
                )
        self._ids += sample.id.encode()
        self._append(
            "sample",
            hash=id_hash(sample.id),
            id_end=len(self._ids),
            tokens=e.tokens,
            state=STATES.index(e.state),
            start_shard=self._shard_ref(sample.shard),
            start=sample.start_offset,
            end=e.offset,
            segment_end=len(self._columns["segment.rows"]),
            run=run_index,
        )

    def _check_place(self, sid: int, p: Part) -> None:
        """Other shards are not here to look into; of this one it is known what it has."""
        if p.shard != self.header.uid:
            return
        rows = self._columns["chunk.rows"]
        if p.chunk >= len(rows) or p.row + p.rows > rows[p.chunk]:
            raise RecordError(f"sample {sid} shares rows {p.row}+{p.rows} of chunk {p.chunk}")

    def _append(self, table: str, **values: int) -> None:
        for name, value in values.items():
            self._columns[f"{table}.{name}"].append(value)

    def _shard_ref(self, uid: bytes) -> int:
        ref = self._shard_refs.setdefault(uid, len(self.shards))
        if ref == len(self.shards):
            if ref >= MAX_SHARDS:
                raise RecordError(f"samples have parts in more than {MAX_SHARDS} shards")
            self.shards.append(uid)
        return ref

    @property
    def chunks(self) -> int:
        return len(self._columns["chunk.rows"])

    @property
    def bytes(self) -> int:
        """Size of the columns."""
        return len(self._ids) + sum(len(c) * c.itemsize for c in self._columns.values())

    def tables(self) -> Tables:
        """A copy of the columns as they are now."""
        return Tables.build(
            columns={name: column.tobytes() for name, column in self._columns.items()},
            ids=bytes(self._ids),
            shards=self.shards,
            runs=[pack_info(r.info) for r in self.runs],
            bias=[(b.offset, b.rows) for b in self.bias],
            windows=self.windows,
        )


def open_samples(carry: Carry) -> Iterable[tuple[RunState, OpenSample]]:
    """All samples that have started and not ended."""
    for run in carry.values():
        for sample in run.open.values():
            yield run, sample
