"""Frames, limits and the header of a shard. FORMAT.md is normative; this file only follows it.

A frame of metadata is a zstd skippable frame, so every zstd tool steps over it::

    0  4  0x184D2A58
    4  4  bytes that follow
    8  4  kind
   12  4  crc32 of kind and body
   16  …  body: msgpack, except the trailer's and the columns of the footer
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgpack

from hstransport.errors import (
    CorruptShardError,
    DatasetMismatchError,
    NotAShardError,
    ProtocolError,
    ShardVersionError,
    TornShardError,
)
from hstransport.protocol import SessionInfo, check_types
from hstransport.wire import unpack_whole

VERSION = 2
FORMAT = "hstransport shard"

HEADER, RUN, CARRY, WINDOW = b"HShd", b"HSrn", b"HSca", b"HSwn"
BIAS, START, CHUNK, END = b"HSbi", b"HSst", b"HSck", b"HSen"
FOOTER, TRAILER = b"HSft", b"HStr"

MAX_FRAME_BYTES = 64 << 20
"""Largest body of a metadata frame; carry and footer may take MAX_INDEX_BYTES."""
MAX_INDEX_BYTES = 2 << 30
MAX_PLANES = 1024
MAX_HIDDEN = 1 << 20
MAX_BIAS_BYTES = 32 << 20
"""Largest planes * hidden, which is a bias table's size."""
MAX_CHUNK_BYTES = 16 << 20
"""Largest rows * hidden of a chunk, which is a decoded frame's size."""
MAX_TOKENS = (1 << 31) - 1
MAX_SHARDS = 1 << 16
"""Shards, itself included, in which a shard's samples may have parts."""

CHUNK_BYTES = 1 << 20
"""Exponents of one plane that a writer aims to put into a chunk."""
SMALL_BYTES = 64 << 10
"""Samples with fewer exponents than this in a window share chunks."""

_MAGIC = 0x184D2A58
_HEAD = struct.Struct("<II4sI")
_TRAILER = struct.Struct("<QQ16s")
HEAD_BYTES = _HEAD.size
TRAILER_BYTES = HEAD_BYTES + _TRAILER.size

_REMEDY = "restore the file from a copy, or move it out of the directory"


@dataclass(frozen=True)
class Frame:
    """One metadata frame and where it was read."""

    path: Path
    offset: int
    kind: bytes
    body: bytes

    @property
    def end(self) -> int:
        return self.offset + HEAD_BYTES + len(self.body)

    def corrupt(self, what: str) -> CorruptShardError:
        kind = self.kind.decode("ascii", "replace")
        return corrupt(self.path, self.offset, f"{kind} frame: {what}")

    def map(self) -> dict[str, Any]:
        """The body as a msgpack map."""
        return self.unpack_map(self.body)

    def unpack_map(self, data: bytes) -> dict[str, Any]:
        try:
            raw = unpack_whole(data)
        except Exception as e:  # msgpack raises many types for malformed input
            raise self.corrupt(f"not msgpack: {type(e).__name__}: {e}") from None
        if not isinstance(raw, dict):
            raise self.corrupt(f"a {type(raw).__name__}, not a map")
        return raw

    def nat(self, raw: Any, key: str, limit: int = 1 << 63) -> int:
        """``raw[key]`` as a number in ``[0, limit)``."""
        value = raw.get(key) if isinstance(raw, dict) else None
        return self.number(value, key, limit)

    def number(self, value: Any, name: str, limit: int = 1 << 63) -> int:
        if type(value) is not int or not 0 <= value < limit:
            raise self.corrupt(f"{name} is {value!r:.40}, not a number below {limit}")
        return value

    def binary(self, raw: dict[str, Any], key: str) -> bytes:
        value = raw.get(key)
        if not isinstance(value, bytes):
            raise self.corrupt(f"{key} is {value!r:.40}, not bytes")
        return value


def corrupt(path: Path, offset: int, what: str) -> CorruptShardError:
    return CorruptShardError(f"{path} at byte {offset}: {what}; {_REMEDY}")


def torn(path: Path, offset: int, what: str) -> TornShardError:
    return TornShardError(f"{path} at byte {offset}: {what}; {_REMEDY}")


def pack_frame(kind: bytes, body: bytes) -> bytes:
    return b"".join(frame_of(kind, [body]))


def frame_of(kind: bytes, parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """A frame whose body is ``parts`` of bytes, which are not copied."""
    crc = zlib.crc32(kind)
    for part in parts:
        crc = zlib.crc32(part, crc)
    return [_HEAD.pack(_MAGIC, 8 + sum(map(len, parts)), kind, crc), *parts]


def pack_map(kind: bytes, body: dict[str, Any]) -> bytes:
    return pack_frame(kind, bytes(msgpack.packb(body)))


def pack_chunk_head(body: dict[str, Any], at: int, align: int) -> bytes:
    """The head of a chunk that goes to the offset ``at``, padded so that the data behind it begin
    at a multiple of ``align``, 1 or 4096: whole pages need not go through the page cache."""
    head = pack_map(CHUNK, body)
    if (at + len(head)) % align == 0:
        return head
    # The key takes 4 bytes, and the length of its value 1 or 2 more than its type.
    n = -(at + len(head) + 6) % align
    if n > 255:
        n = -(at + len(head) + 7) % align
        n += align if n <= 255 else 0
    return pack_map(CHUNK, body | {"pad": bytes(n)})


def pack_window(run: int, first_seq: int, next_seq: int, size: int) -> bytes:
    """The head of a window of ``size`` bytes: WINDOW_HEAD_BYTES whatever the numbers are.

    So room can be left for it: it is written last, and makes the window count.
    """
    fields = {"run": run, "first": first_seq, "next": next_seq, "bytes": size}
    body = bytearray([0x80 | len(fields)])
    for key, value in fields.items():
        body += msgpack.packb(key) + b"\xcf" + value.to_bytes(8, "big")
    return pack_frame(WINDOW, bytes(body))


WINDOW_HEAD_BYTES = len(pack_window(0, 0, 0, 0))


def pread(fd: int, size: int, offset: int, path: Path) -> bytes:
    """Exactly ``size`` bytes at ``offset``; the caller has checked both against the file's size."""
    data = os.pread(fd, size, offset)
    if len(data) < size:
        rest = bytearray(size - len(data))
        pread_into(fd, memoryview(rest), offset + len(data), path)
        data += rest
    return data


def pread_into(fd: int, out: memoryview, offset: int, path: Path) -> None:
    """As :func:`pread`, all of ``out``."""
    done = 0
    while done < len(out):
        n = os.preadv(fd, [out[done:]], offset + done)
        if not n:
            raise torn(path, offset + done, f"the file ends, {len(out) - done} more were due")
        done += n


def read_frame(fd: int, offset: int, end: int, path: Path) -> Frame:
    """The metadata frame at ``offset``, which must not reach past ``end``.

    TornShardError if it does, CorruptShardError if it is no such frame or its checksum is wrong.
    """
    if end - offset < HEAD_BYTES:
        raise torn(path, offset, f"{end - offset} bytes, too few for a frame")
    head = pread(fd, HEAD_BYTES, offset, path)
    if not any(head):
        raise torn(path, offset, "room was left for a window that was never completed")
    magic, size, kind, crc = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise corrupt(path, offset, f"{magic:#010x} is not the start of a metadata frame")
    limit = MAX_INDEX_BYTES if kind in (CARRY, FOOTER) else MAX_FRAME_BYTES
    if not 8 <= size <= limit:
        raise corrupt(path, offset, f"a frame of {size} bytes, at most {limit} are allowed")
    if size - 8 > end - offset - HEAD_BYTES:
        raise torn(path, offset, f"a frame of {size} bytes reaches past byte {end}")
    body = pread(fd, size - 8, offset + HEAD_BYTES, path)
    if zlib.crc32(body, zlib.crc32(kind)) != crc:
        raise corrupt(path, offset, f"wrong checksum of a {kind!r} frame")
    return Frame(path, offset, kind, body)


@dataclass(frozen=True)
class DatasetMeta:
    """What all samples of a directory have in common; written into each shard's header."""

    model: str
    layers: tuple[int, ...]
    final: bool
    final_norm: str
    hidden: int
    num_layers: int
    dtype: str
    rows: str

    @staticmethod
    def of(info: SessionInfo) -> DatasetMeta:
        return DatasetMeta(**{f.name: getattr(info, f.name) for f in fields(DatasetMeta)})

    @property
    def planes(self) -> int:
        return len(self.layers) + self.final

    @property
    def names(self) -> tuple[int | str, ...]:
        """The planes' names in order: canonical layer ids, then ``"final"``."""
        return (*self.layers, "final") if self.final else self.layers

    def check_same(self, other: DatasetMeta, where: str) -> None:
        """DatasetMismatchError naming each field that differs, with both values."""
        mine, theirs = asdict(self), asdict(other)
        bad = [
            f"{k} is {mine[k]!r} there, {theirs[k]!r} here" for k in mine if mine[k] != theirs[k]
        ]
        if bad:
            raise DatasetMismatchError(
                f"{where} holds other hidden states: {'; '.join(bad)}; use another directory"
            )

    def check_limits(self) -> None:
        """ValueError if the format cannot hold states of this shape."""
        if not (0 < self.planes <= MAX_PLANES and 0 < self.hidden <= MAX_HIDDEN):
            raise ValueError(f"planes={self.planes}, hidden={self.hidden} are out of bounds")
        if self.planes * self.hidden > MAX_BIAS_BYTES:
            raise ValueError(
                f"planes * hidden = {self.planes * self.hidden} exceeds {MAX_BIAS_BYTES}"
            )
        if self.dtype != "bfloat16" or self.final_norm != "post":
            raise ValueError(f"dtype {self.dtype!r}, final_norm {self.final_norm!r} are unknown")


@dataclass(frozen=True)
class Header:
    """A shard's first frame."""

    uid: bytes
    number: int
    meta: DatasetMeta


def pack_header(header: Header) -> bytes:
    meta = {**asdict(header.meta), "layers": list(header.meta.layers)}
    body = {"format": FORMAT, "version": VERSION, "uid": header.uid, "number": header.number}
    return pack_map(HEADER, {**body, "dataset": meta})


def read_header(fd: int, size: int, path: Path) -> tuple[Header, int]:
    """The header and where it ends.

    NotAShardError, ShardVersionError, or TornShardError and CorruptShardError of the frame.
    """
    start = pread(fd, min(size, HEAD_BYTES), 0, path)
    known = struct.pack("<I", _MAGIC) + HEADER
    seen = start[:4] + start[8:12]
    if (len(seen) == 8 and seen != known) or not known.startswith(seen[:4]):
        raise NotAShardError(
            f"{path} begins with {start[:12]!r}: it is not an "
            "hstransport shard, move it out of the directory"
        )
    frame = read_frame(fd, 0, size, path)
    raw = frame.map()
    version = raw.get("version")
    if version != VERSION:
        raise ShardVersionError(
            f"{path} has format version {version!r}, this release reads {VERSION}: "
            "install the hstransport release that wrote it"
        )
    return _parse_header(frame, raw), frame.end


def _parse_header(frame: Frame, raw: dict[str, Any]) -> Header:
    uid = frame.binary(raw, "uid")
    data = raw.get("dataset")
    try:
        meta = DatasetMeta(**{f.name: data[f.name] for f in fields(DatasetMeta)})  # type: ignore[index]
        layers = tuple(frame.number(k, "layer", 1 << 31) for k in meta.layers)
        meta = DatasetMeta(**{**asdict(meta), "layers": layers})
        check_types(meta)
        meta.check_limits()
    except (KeyError, TypeError, ValueError, ProtocolError) as e:
        raise frame.corrupt(f"dataset: {type(e).__name__}: {e}") from None
    if len(uid) != 16:
        raise frame.corrupt(f"uid of {len(uid)} bytes")
    return Header(uid, frame.nat(raw, "number"), meta)


def pack_trailer(footer_offset: int, footer_bytes: int, uid: bytes) -> bytes:
    return pack_frame(TRAILER, _TRAILER.pack(footer_offset, footer_bytes, uid))


def kind_at(fd: int, offset: int, size: int, path: Path) -> bytes:
    """What a metadata frame at ``offset`` says that it is; b"" if none begins there. No more of it
    is checked."""
    head = pread(fd, min(HEAD_BYTES, size - offset), offset, path)
    return head[8:12] if head[:4] == struct.pack("<I", _MAGIC) else b""


def read_trailer(fd: int, size: int, path: Path) -> tuple[int, int, bytes]:
    """Where the footer is, its length, and the shard's uid; errors as :func:`read_footer`."""
    at = size - TRAILER_BYTES
    try:
        if at < 0:
            raise torn(path, 0, "too short")
        trailer = read_frame(fd, at, size, path)
    except (TornShardError, CorruptShardError):
        raise torn(path, max(at, 0), "the file does not end with a trailer: it was cut") from None
    if trailer.kind != TRAILER or len(trailer.body) != _TRAILER.size:
        raise trailer.corrupt("not a trailer")
    offset, length, uid = _TRAILER.unpack(trailer.body)
    if offset + length != at:
        raise trailer.corrupt(f"footer at {offset} of {length} bytes does not end at {at}")
    return offset, length, uid


def read_footer(fd: int, size: int, path: Path, uid: bytes) -> Frame:
    """The footer, found through the trailer at the file's end.

    TornShardError when there is no trailer, CorruptShardError when it lies.
    """
    offset, length, trailer_uid = read_trailer(fd, size, path)
    if trailer_uid != uid:
        raise corrupt(path, size - TRAILER_BYTES, "the trailer is another shard's")
    footer = read_frame(fd, offset, offset + length, path)
    if footer.kind != FOOTER or footer.end != offset + length:
        raise footer.corrupt("not the footer")
    return footer
