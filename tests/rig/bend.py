"""Bending what is well-formed: bytes, msgpack values, and shards whose checksums stay right.

All decisions come out of a :class:`Choices`, so that a fuzzer that follows coverage can make them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgpack
from hstransport_consumer.format import pack_frame, pack_trailer
from hstransport_consumer.tables import COLUMNS
from shard_kit import split_frames

NUMBERS = [0, 1, 2, 127, 255, 65535, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32]
NUMBERS += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -(1 << 31), -(1 << 63)]
STRANGE: list[Any] = [None, True, False, 0.5, float("nan"), float("inf"), 24.0, "", "x", "é" * 300]
STRANGE += [
    "../../x",
    "x\0y",
    b"",
    b"x" * 16,
    b"\x80",
    b"\xff" * 5,
    [],
    [0],
    {},
    {"a": 1},
    [[]] * 3,
]


class Choices:
    """Bytes as decisions; after the last one every choice is the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def more(self) -> bool:
        return self._at < len(self._data)

    def below(self, n: int) -> int:
        """A number in ``[0, n)``."""
        size = (max(n - 1, 1).bit_length() + 7) // 8
        return int.from_bytes(self.bytes(size), "little") % n if n > 1 else 0

    def bytes(self, n: int) -> bytes:
        part = self._data[self._at : self._at + n]
        self._at += n
        return part.ljust(n, b"\0")

    def one_of(self, values: Any) -> Any:
        return values[self.below(len(values))]


def bend_bytes(c: Choices, data: bytes) -> bytes:
    """Flip, cut, repeat or put in; a few bytes."""
    at = c.below(len(data) + 1)
    n = c.below(9)
    how = c.below(6)
    if how < 2 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << c.below(8)]) + data[at + 1 :]
    if how == 2:
        return data[:at]
    if how == 3:
        return data[:at] + data[at + n :]
    if how == 4:
        return data[:at] + data[max(at - n, 0) :]
    return data[:at] + c.bytes(n) + data[at + (n if c.below(2) else 0) :]


def bend_value(c: Choices, value: Any) -> Any:
    """Another value in the place of one, somewhere in a tree of maps, lists and leaves."""
    if isinstance(value, dict) and value and c.below(8):
        key = c.one_of(sorted(value))
        how = c.below(16)
        if how == 0:
            return {k: v for k, v in value.items() if k != key}
        if how == 1:
            return {**value, c.one_of(["x", "later", key * 2]): c.one_of(STRANGE)}
        return {**value, key: bend_value(c, value[key])}
    if isinstance(value, list) and value and c.below(8):
        i = c.below(len(value))
        how = c.below(12)
        if how == 0:
            return value[:i] + value[i + 1 :]
        if how == 1:
            return [*value[:i], value[i], *value[i:]]
        if how == 2:
            return [*value, c.one_of(NUMBERS + STRANGE)]
        return [*value[:i], bend_value(c, value[i]), *value[i + 1 :]]
    if isinstance(value, bytes) and c.below(4):
        packed = _packed_map(value)
        if packed is not None and c.below(4):  # a msgpack map in another one
            return msgpack.packb(bend_value(c, packed))
        return bend_bytes(c, value)
    if type(value) is int and c.below(4):
        return max(min(value + c.one_of([1, -1, 2, 64, value, -value]), (1 << 64) - 1), -(1 << 63))
    return c.one_of(NUMBERS if c.below(2) else STRANGE)


def bend_packed(c: Choices, data: bytes) -> bytes:
    """A msgpack value, bent as a value or as bytes."""
    if c.below(4) == 0:
        return bend_bytes(c, data)
    return bytes(msgpack.packb(bend_value(c, msgpack.unpackb(data))))


def _packed_map(data: bytes) -> dict[str, Any] | None:
    try:
        value = msgpack.unpackb(data)
    except Exception:
        return None
    return value if isinstance(value, dict) else None


def bend_shard(c: Choices, data: bytes) -> bytes:
    """A shard of which one thing or another is not so; most of the time its checksums are right."""
    if c.below(8) == 0:
        return bend_bytes(c, data)
    frames = [[k, data[a:b]] for k, a, b in split_frames(data)]
    kind = c.one_of(sorted({k for k, _ in frames}))  # most frames are data
    i = c.one_of([i for i, (k, _) in enumerate(frames) if k == kind])
    how = c.below(12)
    if how == 0:
        del frames[i]
    elif how == 1:
        frames.insert(c.below(len(frames)), frames[i])
    else:
        part = frames[i][1]
        bend = {b"data": bend_bytes, b"HSft": _bend_footer, b"HStr": _bend_trailer}
        if kind in bend:
            frames[i][1] = bend[kind](c, part)
        else:
            frames[i][1] = pack_frame(kind, bend_packed(c, part[16:]))
    return join_frames(frames) if c.below(6) else b"".join(p for _, p in frames)


def _bend_trailer(c: Choices, part: bytes) -> bytes:
    fields = list(struct.unpack_from("<QQ16s", part, 16))
    i = c.below(2)
    fields[i] = (fields[i] + c.one_of([1, -1, 16, 1 << 32, 1 << 63])) % (1 << 64)
    return pack_trailer(*fields)


def _bend_footer(c: Choices, part: bytes) -> bytes:
    """An item of a column, or the head."""
    length = struct.unpack_from("<I", part, 16)[0]
    head, blob = part[20 : 20 + length], bytearray(part[20 + length :])
    if c.below(4):
        name = c.one_of(sorted(COLUMNS))
        at, count = msgpack.unpackb(head)["columns"][name]
        size = struct.calcsize("<" + COLUMNS[name])
        if count:
            at += c.below(count) * size
            before = int.from_bytes(blob[at : at + size], "little")
            bend: Callable[[], int] = c.one_of([lambda: c.one_of(NUMBERS), lambda: before + 1])
            blob[at : at + size] = (bend() % (1 << 8 * size)).to_bytes(size, "little")
    else:
        head = bend_packed(c, head)
    return pack_frame(b"HSft", struct.pack("<I", len(head)) + head + bytes(blob))


def join_frames(frames: list[Any]) -> bytes:
    """Frames in a row, the length of each window and the place of the footer put right."""
    out: list[bytes] = []
    window: tuple[int, int] | None = None  # which frame, where it ends
    at = footer = 0
    for kind, part in frames:
        if kind in (b"HSwn", b"HSrn", b"HSft", b"HSca") and window:
            out[window[0]] = _set_bytes(out[window[0]], at - window[1])
            window = None
        if kind == b"HSwn":
            window = len(out), at + len(part)
        if kind == b"HSft":
            footer = at
        if kind == b"HStr" and footer and len(part) == 48:
            said, length, uid = struct.unpack_from("<QQ16s", part, 16)
            if abs(said - footer) < 4096 and length < 1 << 30:
                part = pack_trailer(footer, at - footer, uid)
        out.append(part)
        at += len(part)
    return b"".join(out)


def _set_bytes(part: bytes, size: int) -> bytes:
    fields = _packed_map(part[16:])
    if fields is None or type(fields.get("bytes")) is not int or fields["bytes"] > 1 << 30:
        return part  # bent itself
    body = msgpack.packb({**fields, "bytes": size})
    # As long as it was: a number is packed in as few bytes as it needs, the writer's in nine.
    packed = b"".join(msgpack.packb(k) + _nine(v) for k, v in {**fields, "bytes": size}.items())
    body = bytes([0x80 | len(fields)]) + packed if len(fields) < 16 else body
    return pack_frame(b"HSwn", body)


def _nine(value: Any) -> bytes:
    if type(value) is int and 0 <= value < 1 << 64:
        return b"\xcf" + value.to_bytes(8, "big")
    return bytes(msgpack.packb(value))
