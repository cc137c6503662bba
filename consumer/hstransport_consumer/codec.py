"""The one gate to the native codec and to zstd: checks arrays, passes addresses.

A bf16 word x becomes an exponent byte ``(x >> 7 & 255) - bias[plane, channel]`` (mod 256), which
is Huffman-coded, and a sign+mantissa byte ``x & 127 | x >> 8 & 128``, which no coder can shrink
and which is stored in raw blocks. Native code writes frames and reads them; zstd reads those that
others have written, and says what is wrong with a broken one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from hstransport import _core

from .direct import page_aligned

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


class Source(NamedTuple):
    """States of one record, ``[planes, rows, hidden]`` bf16, where they lie."""

    owner: Any
    """Keeps the memory alive."""
    address: int
    plane_bytes: int
    row_bytes: int
    rows: int


class Piece(NamedTuple):
    """``rows`` rows of a source from ``row`` on; the first is at token ``position``."""

    source: Source
    row: int
    position: int
    rows: int


class Packed(NamedTuple):
    """Data frames of a chunk."""

    sizes: tuple[int, ...]
    """Bytes of each: sign+mantissa and exponents of each plane in order."""
    data: memoryview
    """All of them, one behind another, in the memory of a :class:`FrameBuffer`."""


class PlanePlace(NamedTuple):
    """Where in a shard the two frames of a plane are."""

    at: int
    mantissas: int
    """Bytes of the first one."""
    exponents: int
    """Bytes of the one behind it."""


class PlaneRead(NamedTuple):
    """A plane of a whole chunk to be read."""

    fd: int
    place: PlanePlace
    bias: U8
    """uint8 ``[hidden]``, contiguous."""
    out: U16
    """uint16 ``[rows, hidden]``; rows may be strided."""


class FrameBuffer:
    """Memory for the frames of one chunk at a time.

    It is used again and again: to touch fresh memory costs as much as the packing itself.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def reserve(self, size: int) -> U8:
        """``size`` bytes that begin with a page; what was in them before is void."""
        if len(self._memory) < size:
            self._memory = page_aligned(size)
        return self._memory[:size]


class _Local(threading.local):
    """What a thread keeps: zstd contexts are not for sharing, memory is not for allocating."""

    def __init__(self) -> None:
        self.unpack = zstandard.ZstdDecompressor()
        self.packed, self.exponents = FrameBuffer(), FrameBuffer()


_local = _Local()


def source(array: npt.NDArray[Any], planes: int, hidden: int) -> Source:
    """Check that ``array`` is uint16 ``[planes, rows, hidden]`` with contiguous rows."""
    if array.dtype != np.dtype("<u2"):
        raise ValueError(f"states must be uint16 (bf16 bits), not {array.dtype}")
    if array.ndim != 3 or array.shape[0] != planes or array.shape[2] != hidden:
        raise ValueError(f"states must be [{planes}, rows, {hidden}], not {list(array.shape)}")
    plane_bytes, row_bytes, item = array.strides
    if array.size and ((hidden > 1 and item != 2) or row_bytes < 0 or plane_bytes < 0):
        raise ValueError(f"states have strides {array.strides}: a row must be contiguous")
    return Source(array, array.ctypes.data, plane_bytes, row_bytes, array.shape[1])


def encode_chunk(pieces: Sequence[Piece], bias: U8, buffer: FrameBuffer) -> Packed:
    """Pack a chunk into ``buffer``. ``bias`` is uint8 ``[planes, hidden]``.

    Releases the GIL in all that takes time.
    """
    planes, hidden = bias.shape
    memory = buffer.reserve(_core.packed_bound(planes, sum(p.rows for p in pieces) * hidden))
    places = [
        (s.address + first * s.row_bytes, s.plane_bytes, s.row_bytes, rows)
        for s, first, _, rows in pieces
    ]
    sizes = _core.pack_chunk(np.array(places, np.uint64), bias, memory)
    return Packed(tuple(sizes), memory.data[: sum(sizes)])


def median_exponents(pieces: Sequence[Piece], planes: int, hidden: int) -> U8:
    """Median exponent of each plane and channel over the rows of ``pieces``: ``[planes, hidden]``.

    The rows are copied together plane by plane, because a decode's records have one row each.
    """
    rows = sum(p.rows for p in pieces)
    room = _local.exponents.reserve(2 * rows * hidden)
    gathered = room.view(np.uint16).reshape(rows, hidden)
    table = np.empty((planes, hidden), np.uint8)
    for plane in range(planes):
        at = 0
        for p in pieces:
            gathered[at : at + p.rows] = p.source.owner[plane, p.row : p.row + p.rows]
            at += p.rows
        table[plane] = _core.median_exponents(gathered.ctypes.data, rows, hidden, hidden * 2)
    return table


def max_frame_bytes(size: int) -> int:
    """Upper bound of a frame of ``size`` decoded bytes."""
    return size + (size >> 8) + 64


def decode_frame(frame: bytes | memoryview, size: int) -> U8:
    """Unpack one frame, its checksum verified; ValueError unless it holds ``size`` bytes.

    The size in the frame is checked before anything is allocated by it.
    """
    _check_head(frame, size)
    out = np.empty(size, np.uint8)
    decode_frame_into(frame, out)
    return out


def decode_frame_into(frame: bytes | memoryview, out: U8) -> None:
    """As :func:`decode_frame`, into ``out``, which holds anything after an error."""
    if _core.unpack_frame(frame, out):
        return
    # No frame of ours, or a broken one: zstd unpacks it, or says what is wrong.
    _check_head(frame, out.size)
    try:
        data = _local.unpack.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise ValueError(str(e)) from None
    if len(data) != out.size:
        raise ValueError(f"{len(data)} bytes, {out.size} are due")
    out[:] = np.frombuffer(data, np.uint8)


def _check_head(frame: bytes | memoryview, size: int) -> None:
    try:
        said = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as e:
        raise ValueError(str(e)) from None
    if said.content_size != size or not said.has_checksum or said.dict_id:
        raise ValueError(
            f"the frame says {said.content_size} bytes, checksum {said.has_checksum}; "
            f"{size} bytes with checksum are due"
        )


def room_for_frames(size: int) -> memoryview:
    """Memory of this thread's, to read frames into that are unpacked before the next are read."""
    return _local.packed.reserve(size).data


def unpack_plane(exponents: memoryview, mantissas: memoryview, bias: U8, out: U16) -> None:
    """Unpack the two frames of a plane into ``out``, as :func:`join` does with what they hold.

    ValueError as of :func:`decode_frame`; ``out`` holds anything then.
    """
    _check_words(out)
    rows, hidden = out.shape
    place = bias, out.ctypes.data, rows, hidden, out.strides[0]
    if not _core.unpack_plane(exponents, mantissas, *place):
        size = rows * hidden
        join(decode_frame(exponents, size), decode_frame(mantissas, size), bias, out)


def plane_reads(reads: Sequence[PlaneRead], *, stream: bool) -> _core.PlaneReads:
    """What does all ``reads``, as :func:`unpack_plane` would, in as many threads as call its
    ``work``; those whose frames are not as :func:`encode_chunk` packs them are ``left``. Uses the
    arrays and descriptors until its ``with`` block ends. ``stream``: writes past the processor's
    caches, for one who reads more than they hold."""
    rows = []
    for fd, place, bias, out in reads:
        _check_words(out)
        if bias.shape != (out.shape[1],):
            raise ValueError(f"bias is {list(bias.shape)} for rows of {out.shape[1]}")
        rows.append((fd, *place, bias.ctypes.data, out.ctypes.data, len(out), out.strides[0]))
    return _core.PlaneReads(np.array(rows, np.uint64), reads[0].out.shape[1], stream, reads)


def odd_rows(words: U16, odd: U8) -> None:
    """Add to ``odd``, uint8 ``[rows]``, what is odd about each row of ``[rows, hidden]``:
    1 zeros (of either sign), 2 one value only, 4 Inf or NaN."""
    if words.size:
        rows, hidden = words.shape
        _core.odd_rows(words.ctypes.data, rows, hidden, words.strides[0], odd)


def join(exponents: U8, mantissas: U8, bias: U8, out: U16) -> None:
    """Put the words of ``[rows, hidden]`` together in ``out``, whose rows may be strided."""
    rows, hidden = out.shape
    if not exponents.size == mantissas.size == rows * hidden or bias.shape != (hidden,):
        raise ValueError(f"{exponents.size}, {mantissas.size} bytes for {rows} rows of {hidden}")
    _check_words(out)
    if rows:
        _core.join_planes(exponents, mantissas, bias, out.ctypes.data, rows, hidden, out.strides[0])


def _check_words(out: U16) -> None:
    contiguous = out.shape[1] <= 1 or out.strides[1] == 2
    if out.dtype != np.uint16 or not out.flags.writeable or not contiguous or out.strides[0] < 0:
        raise ValueError("out must be writable uint16 with contiguous rows, one behind another")
