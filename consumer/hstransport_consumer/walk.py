"""Reading a shard frame by frame, without its footer: for recovery, verification and files that
are still being written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hstransport.errors import ProtocolError
from hstransport.protocol import END as END_EVENT
from hstransport.protocol import START as START_EVENT
from hstransport.protocol import (
    End,
    Segment,
    SessionInfo,
    Start,
    unpack_event,
    unpack_info,
)

from . import codec
from . import format as fmt
from .carry import check_uids, unpack_carry, unpack_parts
from .format import DatasetMeta, Frame, Header, corrupt, pread_into, read_frame, read_header, torn
from .index import (
    BiasRecord,
    Carry,
    ChunkRecord,
    EndRecord,
    Item,
    Part,
    RecordError,
    RunRecord,
    ShardIndex,
    StartRecord,
    WindowRecord,
)
from .states import STATES

Record = RunRecord | WindowRecord


@dataclass
class Head:
    """What precedes a shard's windows."""

    header: Header
    carry: Carry
    end: int


def read_head(fd: int, size: int, path: Path) -> Head:
    """The header and the carry frame."""
    header, at = read_header(fd, size, path)
    frame = read_frame(fd, at, size, path)
    if frame.kind != fmt.CARRY:
        raise frame.corrupt("a carry frame is due")
    return Head(header, unpack_carry(frame, frame.body), frame.end)


def walk(fd: int, start: int, size: int, path: Path, meta: DatasetMeta) -> Iterator[Record]:
    """Runs and complete windows from ``start`` up to the footer or to ``size``.

    Raises TornShardError or CorruptShardError at the first frame that is not whole.
    """
    at = start
    while at < size:
        frame = read_frame(fd, at, size, path)
        if frame.kind == fmt.FOOTER:
            return
        if frame.kind == fmt.RUN:
            yield RunRecord(at, frame.end, _info(frame, meta))
            at = frame.end
        elif frame.kind == fmt.WINDOW:
            window = _window(fd, frame, size, meta)
            yield window
            at = window.end
        else:
            raise frame.corrupt("a run or a window is due")


def apply(index: ShardIndex, record: Record, path: Path) -> None:
    """``index.apply`` whose errors name the place."""
    try:
        index.apply(record)
    except RecordError as e:
        raise corrupt(path, record.offset, str(e)) from None


def chunk_planes(fd: int, chunk: ChunkRecord, bias: codec.U8, path: Path) -> Iterator[codec.U16]:
    """Each plane of a chunk, uint16 ``[rows, hidden]``, checksums verified; all in one memory."""
    words = np.empty((chunk.rows, bias.shape[1]), np.uint16)
    at = chunk.offset
    for plane, table in enumerate(bias):
        first, second = chunk.sizes[2 * plane : 2 * plane + 2]
        data = codec.room_for_frames(first + second)
        pread_into(fd, data, at, path)
        try:
            codec.unpack_plane(data[first:], data[:first], table, words)
        except ValueError as e:
            raise corrupt(path, at, f"data frame: {e}") from None
        yield words
        at += first + second


def read_bias(fd: int, offset: int, end: int, path: Path, meta: DatasetMeta) -> codec.U8:
    """The bias table at ``offset``: uint8 ``[planes, hidden]``."""
    frame = read_frame(fd, offset, end, path)
    return bias_table(frame, meta)


def bias_table(frame: Frame, meta: DatasetMeta) -> codec.U8:
    table = frame.binary(frame.map(), "table") if frame.kind == fmt.BIAS else b""
    if len(table) != meta.planes * meta.hidden:
        raise frame.corrupt(f"no bias table of {meta.planes} * {meta.hidden} bytes")
    return np.frombuffer(table, np.uint8).reshape(meta.planes, meta.hidden)


def start_event(frame: Frame) -> Start:
    """The START in a frame."""
    event = _event(frame, START_EVENT, frame.body) if frame.kind == fmt.START else None
    if not isinstance(event, Start):
        raise frame.corrupt("a START is due")
    return event


def end_event(frame: Frame) -> tuple[End, str]:
    """The END in a frame, and the state that the writer gave the sample."""
    if frame.kind != fmt.END:
        raise frame.corrupt("an END is due")
    raw = frame.map()
    state = raw.get("state")
    event = _event(frame, END_EVENT, frame.binary(raw, "end"))
    if state not in STATES or not isinstance(event, End) or event.tokens > fmt.MAX_TOKENS:
        raise frame.corrupt(f"state {state!r:.40} is unknown, or an absurd number of tokens")
    return event, str(state)


def end_refs(frame: Frame) -> tuple[Part, ...]:
    """The rows of other samples that complete the one whose END is in a frame."""
    raw = frame.map()
    if "refs" not in raw:
        return ()
    return tuple(unpack_parts(frame, raw["refs"], check_uids(frame, raw.get("shards"))))


def _event(frame: Frame, kind: int, meta: bytes) -> object:
    try:
        return unpack_event(kind, meta)
    except ProtocolError as e:
        raise frame.corrupt(str(e)) from None


def _info(frame: Frame, meta: DatasetMeta) -> SessionInfo:
    try:
        info = unpack_info(frame.binary(frame.map(), "info"))
    except ProtocolError as e:
        raise frame.corrupt(str(e)) from None
    if DatasetMeta.of(info) != meta:
        raise frame.corrupt("a run of another dataset than the header's")
    return info


def _window(fd: int, frame: Frame, size: int, meta: DatasetMeta) -> WindowRecord:
    raw = frame.map()
    length = frame.nat(raw, "bytes")
    end = frame.end + length
    if end > size:
        raise torn(frame.path, frame.offset, f"a window of {length} bytes reaches past {size}")
    items: list[Item] = []
    at = frame.end
    while at < end:
        inner = read_frame(fd, at, end, frame.path)
        item, at = _item(inner, end, meta)
        items.append(item)
    return WindowRecord(
        frame.offset,
        end,
        frame.nat(raw, "run"),
        frame.nat(raw, "first"),
        frame.nat(raw, "next"),
        tuple(items),
    )


def _item(frame: Frame, window_end: int, meta: DatasetMeta) -> tuple[Item, int]:
    """A frame of a window, and where the next one begins."""
    at = frame.offset
    if frame.kind == fmt.START:
        start = start_event(frame)
        return StartRecord(at, start.sid, start.id), frame.end
    if frame.kind == fmt.END:
        end, state = end_event(frame)
        return EndRecord(at, end.sid, end.tokens, state, end_refs(frame)), frame.end
    if frame.kind == fmt.BIAS:
        bias_table(frame, meta)
        return BiasRecord(at, frame.nat(frame.map(), "rows")), frame.end
    if frame.kind != fmt.CHUNK:
        raise frame.corrupt("this frame does not belong into a window")
    chunk = _chunk(frame, meta)
    data_end = frame.end + sum(chunk.sizes)
    if data_end > window_end:
        raise frame.corrupt("the chunk's data reach past its window")
    return chunk, data_end


def _chunk(frame: Frame, meta: DatasetMeta) -> ChunkRecord:
    raw = frame.map()
    rows = frame.nat(raw, "rows", fmt.MAX_CHUNK_BYTES // meta.hidden + 1)
    limit = codec.max_frame_bytes(rows * meta.hidden) + 1
    flat, sizes = raw.get("seg"), raw.get("sizes")
    if not isinstance(flat, list) or not isinstance(sizes, list) or len(flat) % 3 or not rows:
        raise frame.corrupt("segments or sizes are malformed")
    if len(sizes) != 2 * meta.planes:
        raise frame.corrupt(f"{len(sizes)} frames of data, {2 * meta.planes} are due")
    numbers = [
        frame.number(x, "segment", fmt.MAX_TOKENS + 1 if i % 3 else 1 << 63)
        for i, x in enumerate(flat)
    ]
    segments = tuple(Segment(*numbers[i : i + 3]) for i in range(0, len(numbers), 3))
    if sum(s.rows for s in segments) != rows or not all(s.rows for s in segments):
        raise frame.corrupt(f"segments of {sum(s.rows for s in segments)} rows, chunk of {rows}")
    if any(s.position + s.rows > fmt.MAX_TOKENS for s in segments):
        raise frame.corrupt("a segment at an absurd position")
    return ChunkRecord(
        frame.end,
        rows,
        frame.nat(raw, "bias", 1 << 16),
        tuple(frame.number(x, "frame size", limit) for x in sizes),
        segments,
    )
