"""The native decoder beside zstd: what it takes is right, and what it refuses zstd judges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hstransport_consumer import codec
from test_pack import U16, bf16, pack

from hstransport import _core
from hstransport.errors import ConfigError

U8 = npt.NDArray[np.uint8]
HUFFMAN_ONLY = -131072  # a level of libzstd's


def libzstd(data: bytes, level: int = HUFFMAN_ONLY, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=level, **{"write_checksum": True, **options}).compress(
        data
    )


def frames(words: U16, bias: int = 99) -> tuple[U8, list[bytes]]:
    """Of one plane: its table, exponents, sign+mantissa."""
    table = np.full((len(words), words.shape[2]), bias, np.uint8)
    return table, pack([words], table)[::-1]


def halves(words: U16, bias: U8) -> tuple[U8, U8]:
    exponents = ((words >> 7 & 255) - bias).astype(np.uint8)
    return exponents, ((words & 127) | (words >> 8 & 128)).astype(np.uint8)


@pytest.mark.parametrize("rows", [0, 1, 7, 500, 4096])
@pytest.mark.parametrize("hidden", [1, 3, 576, 70_000])
def test_planes_are_unpacked_into_strided_rows(rows: int, hidden: int) -> None:
    rows = min(rows, 2_000_000 // hidden)
    words = bf16(np.random.default_rng(rows).standard_normal((1, rows, hidden)))
    bias, (exponents, mantissas) = frames(words)
    wide = np.full((rows, hidden + 5), 0xABCD, np.uint16)
    place = bias[0], wide.ctypes.data, rows, hidden, wide.strides[0]
    assert _core.unpack_plane(exponents, mantissas, *place)
    np.testing.assert_array_equal(wide[:, :hidden], words[0])
    assert (wide[:, hidden:] == 0xABCD).all()


@pytest.mark.parametrize("hidden", [3, 1000, 70_000])
def test_planes_out_of_frames_that_libzstd_wrote(hidden: int) -> None:
    """Its blocks end within rows, and its codes have other descriptions."""
    words = bf16(np.random.default_rng(hidden).standard_normal((1, 500_000 // hidden, hidden)))
    bias, ours = frames(words)
    theirs = [libzstd(half.tobytes()) for half in halves(words[0], bias[0])]
    for exponents, mantissas in [(ours[0], theirs[1]), (theirs[0], ours[1]), tuple(theirs)]:
        out = np.empty(words.shape[1:], np.uint16)
        codec.unpack_plane(memoryview(exponents), memoryview(mantissas), bias[0], out)
        np.testing.assert_array_equal(out, words[0])
    # Raw blocks are read where they lie, whoever wrote them.
    out = np.empty(words.shape[1:], np.uint16)
    place = bias[0], out.ctypes.data, *out.shape, out.strides[0]
    assert _core.unpack_plane(ours[0], theirs[1], *place)


def test_what_a_shard_never_holds_is_left_to_zstd() -> None:
    data = np.random.default_rng(1).integers(0, 9, 300_000).astype(np.uint8)
    out = np.empty(data.size, np.uint8)
    for frame in (
        libzstd(data.tobytes(), level=3),  # matches
        libzstd(data.tobytes(), write_checksum=False),
        libzstd(data.tobytes(), write_content_size=False),
        libzstd(data.tobytes())[:-1],
        libzstd(data.tobytes()) + b"\0",
        b"",
    ):
        assert not _core.unpack_frame(frame, out)
    codec.decode_frame_into(libzstd(data.tobytes(), level=3), out)
    np.testing.assert_array_equal(out, data)
    for size in (data.size - 1, data.size + 1):
        assert not _core.unpack_frame(libzstd(data.tobytes()), np.empty(size, np.uint8))


@pytest.mark.parametrize("words", ["normal", "few", "any"])
def test_no_bent_frame_is_taken_for_something_else(words: str) -> None:
    """All bits of the heads and of the code's description, and some of the rest."""
    rng = np.random.default_rng(5)
    source = {
        "normal": bf16(rng.standard_normal((1, 300, 500))),
        "few": (rng.integers(98, 101, (1, 300, 500)) << 7).astype(np.uint16),
        "any": rng.integers(0, 1 << 16, (1, 300, 500)).astype(np.uint16),
    }[words]
    bias, whole = frames(source)
    for frame, data in zip(whole, halves(source[0], bias[0]), strict=True):
        out = np.empty(data.size, np.uint8)
        places = [*range(160), *rng.integers(160, len(frame), 200), *range(-8, 0)]
        for at in places:
            for bit in range(8) if at < 160 else [rng.integers(8)]:
                bent = bytearray(frame)
                bent[at] ^= 1 << int(bit)
                if _core.unpack_frame(bytes(bent), out):
                    np.testing.assert_array_equal(out, data.ravel())
                    assert at < 32  # a window's size, or bits that pad the code's description
        for cut in (*range(1, 200, 7), *rng.integers(1, len(frame), 50)):
            assert not _core.unpack_frame(frame[:-cut], out)


def test_a_code_that_zstd_takes_for_broken_is_refused() -> None:
    """A complete code has two bytes of the longest length; this one has none."""
    data = b"\2" * 40
    weights = bytes([127 + 2, 2 << 4 | 2])  # of 0 and 1; 2 has what is left, one bit
    stream = ((1 << 41) - 1).to_bytes(6, "little")
    coded = weights + stream
    literals = (2 | len(data) << 4 | len(coded) << 14).to_bytes(3, "little")
    block = literals + coded + b"\0"
    head = b"\x28\xb5\x2f\xfd\x24" + bytes([len(data)])
    frame = head + (1 | 2 << 1 | len(block) << 3).to_bytes(3, "little") + block
    frame += libzstd(data)[-4:]
    with pytest.raises(zstandard.ZstdError):
        zstandard.ZstdDecompressor().decompress(frame)
    assert not _core.unpack_frame(frame, np.empty(len(data), np.uint8))


def test_one_broken_frame_of_two_is_told_by_its_fault() -> None:
    words = bf16(np.random.default_rng(3).standard_normal((1, 400, 500)))
    bias, whole = frames(words)
    out = np.empty(words.shape[1:], np.uint16)
    for i in range(2):
        bent = [bytearray(f) for f in whole]
        bent[i][-1] ^= 1
        with pytest.raises(ValueError, match="checksum"):
            codec.unpack_plane(*map(memoryview, bent), bias[0], out)
        short = list(map(memoryview, whole))
        short[i] = short[i][:-3]
        with pytest.raises(ValueError):
            codec.unpack_plane(*short, bias[0], out)


def test_what_does_not_fit_is_refused() -> None:
    words = bf16(np.random.default_rng(3).standard_normal((1, 4, 5)))
    bias, whole = frames(words)
    out = np.empty((4, 5), np.uint16)
    with pytest.raises(ConfigError, match="bias has 5 bytes, must have 4"):
        _core.unpack_plane(*whole, bias[0], out.ctypes.data, 5, 4, 8)
    with pytest.raises(ConfigError, match="would overlap"):
        _core.unpack_plane(*whole, bias[0], out.ctypes.data, 4, 5, 8)
    with pytest.raises(ConfigError, match="hidden=0"):
        _core.unpack_plane(*whole, bias[0][:0], out.ctypes.data, 4, 0, 8)
    with pytest.raises(TypeError):
        _core.unpack_frame(whole[0], np.empty(10, np.uint16))
