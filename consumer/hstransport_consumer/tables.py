"""The footer's columns: little-endian arrays that are read where they lie.

Body of the footer frame: u32 length of the head, the head (msgpack), then the columns one after
another. The head names each column's place; its type is fixed by the format.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from .format import MAX_CHUNK_BYTES, MAX_TOKENS, DatasetMeta, Frame
from .states import STATES

assert sys.byteorder == "little", "shards are little-endian, and read without conversion"

COLUMNS = {
    "chunk.offset": "Q",
    "chunk.rows": "I",
    "chunk.bias": "H",
    "chunk.sizes": "I",
    "segment.position": "I",
    "segment.rows": "I",
    "segment.shard": "H",
    "segment.chunk": "I",
    "segment.row": "I",
    "sample.hash": "Q",
    "sample.id_end": "I",
    "sample.tokens": "I",
    "sample.state": "B",
    "sample.start_shard": "H",
    "sample.start": "Q",
    "sample.end": "Q",
    "sample.segment_end": "I",
    "sample.run": "H",
}
"""Name of each column and its type: B, H, I, Q are unsigned of 1, 2, 4, 8 bytes."""

Column = npt.NDArray[Any]


@dataclass(frozen=True)
class Tables:
    """The index of one shard. ``c["sample.tokens"]`` is a column; all lengths are checked."""

    c: Mapping[str, Column]
    ids: Column
    """UTF-8 of all ids, one after another."""
    shards: Sequence[bytes]
    """uids; 0 is the shard itself, the others hold the beginnings of its samples."""
    runs: Sequence[bytes]
    """Packed SessionInfo of each."""
    bias: Sequence[tuple[int, int]]
    """Offset of each bias frame, and the rows it was estimated from."""
    states: Sequence[str]
    windows: int
    carry: bytes = b""

    @staticmethod
    def build(
        columns: Mapping[str, bytes],
        ids: bytes,
        shards: Sequence[bytes],
        runs: Sequence[bytes],
        bias: Sequence[tuple[int, int]],
        windows: int,
    ) -> Tables:
        c = {n: np.frombuffer(columns[n], np.dtype(code)) for n, code in COLUMNS.items()}
        text = np.frombuffer(ids, np.uint8)
        return Tables(c, text, list(shards), list(runs), list(bias), list(STATES), windows)

    @property
    def samples(self) -> int:
        return len(self.c["sample.tokens"])

    @property
    def chunks(self) -> int:
        return len(self.c["chunk.rows"])

    def sizes(self, planes: int) -> Column:
        """Frame sizes as ``[chunks, planes, 2]``."""
        return self.c["chunk.sizes"].reshape(-1, planes, 2)

    def id(self, sample: int) -> str:
        ends = self.c["sample.id_end"]
        start = int(ends[sample - 1]) if sample else 0
        return str(self.ids[start : int(ends[sample])].tobytes(), "utf-8")

    def segments(self, sample: int) -> range:
        """Which rows of the segment columns are the sample's, in order of position."""
        ends = self.c["sample.segment_end"]
        return range(int(ends[sample - 1]) if sample else 0, int(ends[sample]))

    def pack(self, carry: bytes) -> list[bytes | memoryview]:
        """The footer's body, in parts of bytes: the columns are not copied."""
        places, parts, at = {}, [], 0
        for name, column in [*self.c.items(), ("ids", self.ids)]:
            places[name] = [at, len(column)]
            parts.append(column.view(np.uint8).data)
            at += column.nbytes
        head = {
            "columns": places,
            "shards": list(self.shards),
            "runs": list(self.runs),
            "bias": [list(b) for b in self.bias],
            "states": list(self.states),
            "windows": self.windows,
            "carry": carry,
        }
        packed = msgpack.packb(head)
        return [struct.pack("<I", len(packed)), packed, *parts]


def parse_tables(frame: Frame, meta: DatasetMeta, uid: bytes) -> Tables:
    """Read and check a footer; CorruptShardError says what is wrong with it."""
    body = memoryview(frame.body)
    length = int.from_bytes(body[:4], "little")
    if len(body) < 4 or length > len(body) - 4:
        raise frame.corrupt(f"a head of {length} bytes")
    head = frame.unpack_map(bytes(body[4 : 4 + length]))
    blob = body[4 + length :]
    places = head.get("columns")
    columns = {n: _column(frame, blob, places, n, np.dtype(t)) for n, t in COLUMNS.items()}
    ids = _column(frame, blob, places, "ids", np.dtype("B"))
    tables = Tables(
        c=columns,
        ids=ids,
        shards=_list(frame, head, "shards", bytes),
        runs=_list(frame, head, "runs", bytes),
        bias=[
            (frame.number(b[0], "bias offset", frame.offset), frame.number(b[1], "bias rows"))
            for b in _list(frame, head, "bias", list)
            if len(b) == 2
        ],
        states=_list(frame, head, "states", str),
        windows=frame.nat(head, "windows"),
        carry=frame.binary(head, "carry"),
    )
    if not tables.shards or tables.shards[0] != uid or any(len(u) != 16 for u in tables.shards):
        raise frame.corrupt("the table of shards does not begin with this shard")
    for what in _contradictions(tables, meta, frame.offset):
        raise frame.corrupt(what)
    return tables


def _column(frame: Frame, blob: memoryview, places: Any, name: str, kind: np.dtype[Any]) -> Column:
    place = places.get(name) if isinstance(places, dict) else None
    if not isinstance(place, list) or len(place) != 2:
        raise frame.corrupt(f"column {name} is missing")
    at = frame.number(place[0], name, len(blob) + 1)
    count = frame.number(place[1], name, len(blob) + 1)
    if at + count * kind.itemsize > len(blob):
        raise frame.corrupt(f"column {name} reaches past the footer")
    return np.frombuffer(blob, kind, count, at)


def _list(frame: Frame, head: dict[str, Any], key: str, kind: type) -> list[Any]:
    value = head.get(key)
    if not isinstance(value, list) or not all(type(v) is kind for v in value):
        raise frame.corrupt(f"{key} is malformed")
    return value


def _contradictions(t: Tables, meta: DatasetMeta, footer_offset: int) -> list[str]:
    """What in the columns would lead a reader outside of the file or of a table."""
    for table in ("chunk", "segment", "sample"):
        lengths = {len(v) for n, v in t.c.items() if n.startswith(table) and n != "chunk.sizes"}
        if len(lengths) != 1:
            return [f"columns of the {table} table have different lengths: {sorted(lengths)}"]
    if len(t.c["chunk.sizes"]) != t.chunks * meta.planes * 2:
        return [f"{len(t.c['chunk.sizes'])} frame sizes for {t.chunks} chunks"]
    return [what for what, bad in _checks(t, meta, footer_offset) if bad]


def _checks(t: Tables, meta: DatasetMeta, footer_offset: int) -> list[tuple[str, bool]]:
    c = t.c
    stored = t.sizes(meta.planes).sum(axis=(1, 2), dtype=np.uint64)
    rows = c["chunk.rows"]
    own = c["segment.shard"] == 0
    own_chunk = c["segment.chunk"][own]
    lost = bool(_any_ge(own_chunk, t.chunks))
    beyond = False
    if not lost and len(own_chunk):
        stop = c["segment.row"][own].astype(np.uint64) + c["segment.rows"][own]
        beyond = bool((stop > rows[own_chunk]).any())
    last_chunk = c["chunk.offset"] > footer_offset
    return [
        ("a chunk lies outside of the file", bool(last_chunk.any())),
        (
            "a chunk reaches outside of the file",
            bool((stored > footer_offset - np.minimum(c["chunk.offset"], footer_offset)).any()),
        ),
        ("a chunk is too large", _any_ge(rows, MAX_CHUNK_BYTES // meta.hidden + 1)),
        ("a chunk has no rows", bool((rows == 0).any())),
        ("a chunk names an unknown bias table", _any_ge(c["chunk.bias"], len(t.bias))),
        ("a segment names an unknown shard", _any_ge(c["segment.shard"], len(t.shards))),
        ("a segment names an unknown chunk", lost),
        ("a segment reaches outside of its chunk", beyond),
        ("a sample has an absurd number of tokens", _any_ge(c["sample.tokens"], MAX_TOKENS + 1)),
        ("a sample names an unknown run", _any_ge(c["sample.run"], len(t.runs))),
        ("a sample names an unknown shard", _any_ge(c["sample.start_shard"], len(t.shards))),
        ("a sample names an unknown state", _any_ge(c["sample.state"], len(t.states))),
        ("sample ids are out of order", _bad_ends(c["sample.id_end"], len(t.ids))),
        ("sample ids are not UTF-8", _not_utf8(t.ids, c["sample.id_end"])),
        (
            "segment ranges are out of order",
            _bad_ends(c["sample.segment_end"], len(c["segment.rows"])),
        ),
    ]


def _any_ge(column: Column, limit: int) -> bool:
    return bool(len(column)) and int(column.max()) >= limit


def _bad_ends(ends: Column, limit: int) -> bool:
    """Whether ends of consecutive ranges fall, or do not use up exactly ``limit``."""
    if not len(ends):
        return limit != 0
    return bool((ends[1:] < ends[:-1]).any()) or int(ends[-1]) != limit


def _not_utf8(text: Column, ends: Column) -> bool:
    """Whether some part of ``text`` that ends at one of ``ends`` is not UTF-8."""
    try:
        text.tobytes().decode()
    except UnicodeDecodeError:
        return True
    # All of it is: then a part is, unless it begins in the midst of a character.
    starts = ends[ends < len(text)]
    return bool((text[starts] & 0xC0 == 0x80).any())
