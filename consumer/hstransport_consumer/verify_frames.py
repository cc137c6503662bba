"""Verifying one file: every frame, and that the footer says the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hstransport.errors import (
    CorruptShardError,
    HsTransportError,
    NotAShardError,
    TornShardError,
)
from hstransport.protocol import Segment

from . import codec
from .carry import pack_carry, unpack_carry
from .findings import Flags, Run, VerifyReport, Walked
from .format import read_footer
from .index import Carry, ChunkRecord, EndRecord, ShardIndex, StartRecord, WindowRecord
from .shard import Shard, open_file
from .tables import Tables, parse_tables
from .walk import apply, chunk_planes, read_bias, read_head, walk


def verify_file(path: Path, number: int, partial: bool, report: VerifyReport) -> Walked | None:
    """Walk and decode a file; None if it cannot even be begun, or was taken away meanwhile.

    ``number`` is what the file's name says, -1 if that says none.
    """
    try:
        fd = open_file(path)
    except FileNotFoundError:
        return None
    except OSError as e:
        report.note(path, f"cannot be opened: {e.strerror}")
        return None
    except NotAShardError as e:
        report.note(path, str(e))
        return None
    try:
        size = os.fstat(fd).st_size
        report.bytes += size
        if partial:
            report.unfinished.append(path.name)
        else:
            report.shards += 1
        return _verify_frames(fd, size, path, number, partial, report)
    except HsTransportError as e:
        if not (partial and isinstance(e, TornShardError)):
            report.note(path, str(e))
        return None
    except OSError as e:
        report.note(path, f"cannot be read: {e.strerror}")
        return None
    finally:
        os.close(fd)


def _verify_frames(
    fd: int, size: int, path: Path, number: int, partial: bool, report: VerifyReport
) -> Walked:
    head = read_head(fd, size, path)
    if number >= 0 and head.header.number != number:
        report.note(path, f"is shard number {head.header.number} under another name")
    carry_in = _comparable(head.carry)
    index = ShardIndex(head.header, head.carry)
    flags: list[Flags | None] = []
    owners: list[tuple[Run, tuple[Segment, ...]]] = []
    starts: dict[tuple[Run, int], int] = {}
    ends: dict[tuple[Run, int], int] = {}
    end = head.end
    try:
        for record in walk(fd, head.end, size, path, head.header.meta):
            apply(index, record, path)
            end = record.end
            if isinstance(record, WindowRecord):
                info = index.runs[record.run].info
                run = info.run, info.rank
                for item in record.items:
                    if isinstance(item, ChunkRecord):
                        flags.append(_verify_chunk(fd, item, index, path, report))
                        owners.append((run, item.segments))
                        report.tokens += item.rows
                    elif isinstance(item, StartRecord):
                        starts[run, item.sid] = item.offset
                    elif isinstance(item, EndRecord):
                        ends[run, item.sid] = item.offset
    except (TornShardError, CorruptShardError) as e:
        if not (partial and isinstance(e, TornShardError)):
            report.note(path, str(e))
    carry_out = _comparable(index.carry)
    tables = index.tables()
    if not partial:
        try:
            tables, end = _verify_footer(fd, size, path, index, end, carry_out, report)
        except HsTransportError as e:
            report.note(path, str(e))
    shard = Shard(path, head.header, tables, end)
    return Walked(shard, flags, carry_in, carry_out, owners, starts, ends)


def _verify_footer(
    fd: int,
    size: int,
    path: Path,
    index: ShardIndex,
    frames_end: int,
    carry: bytes,
    report: VerifyReport,
) -> tuple[Tables, int]:
    header = index.header
    footer = read_footer(fd, size, path, header.uid)
    said = parse_tables(footer, header.meta, header.uid)
    if footer.offset != frames_end:
        report.note(path, f"footer at byte {footer.offset}, but frames end at {frames_end}")
    for what in _differences(said, index.tables()):
        report.note(path, f"footer: {what} differs from what the frames say")
    if _comparable(unpack_carry(footer, said.carry)) != carry:
        report.note(path, "footer: carry differs from what the frames say")
    return said, footer.offset


def _comparable(carry: Carry) -> bytes:
    """What a carry says, to be compared with another: runs that a consumer has only announced are
    in there or not, and in any order."""
    stored = [key for key, run in carry.items() if run.next_seq or run.open]
    return pack_carry({key: carry[key] for key in sorted(stored)})


def _differences(said: Tables, walked: Tables) -> Iterator[str]:
    for name, column in walked.c.items():
        if not np.array_equal(said.c[name], column):
            yield name
    if not np.array_equal(said.ids, walked.ids):
        yield "ids"
    for name in ("shards", "runs", "bias", "states", "windows"):
        if getattr(said, name) != getattr(walked, name):
            yield name


def _verify_chunk(
    fd: int, chunk: ChunkRecord, index: ShardIndex, path: Path, report: VerifyReport
) -> Flags | None:
    """Decode a chunk; one byte of flags for each row."""
    meta = index.header.meta
    offset = index.bias[chunk.bias].offset
    bias = read_bias(fd, offset, os.fstat(fd).st_size, path, meta)
    flags = np.zeros(chunk.rows, np.uint8)
    try:
        for words in chunk_planes(fd, chunk, bias, path):
            codec.odd_rows(words, flags)
    except HsTransportError as e:
        report.note(path, str(e))
        return None
    return flags
