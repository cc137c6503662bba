"""Chunks into zstd frames: what the native coder writes, zstd and the native decoder read, and no
byte is another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from hstransport import _core
from hstransport.errors import ConfigError

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
BLOCK = 128 << 10  # zstd's largest


def pack(parts: list[U16], bias: U8) -> list[bytes]:
    """Frames of ``[planes, rows, hidden]`` arrays that follow one another: sign+mantissa and
    exponents of each plane."""
    room = _core.packed_bound(len(bias), sum(p.shape[1] for p in parts) * bias.shape[1])
    out = np.empty(room, np.uint8)
    places = [(p.ctypes.data, *p.strides[:2], p.shape[1]) for p in parts]
    sizes = _core.pack_chunk(np.array(places, np.uint64), bias, out)
    ends = np.cumsum(sizes)
    return [out[end - n : end].tobytes() for n, end in zip(sizes, ends, strict=True)]


def check(parts: list[U16], bias: U8) -> float:
    """Every frame holds the bytes that FORMAT.md says; returns what is left of the exponents."""
    words = np.concatenate(parts, axis=1)
    frames = pack(parts, bias)
    unpack = zstandard.ZstdDecompressor().decompress  # it verifies the checksum
    for plane, table, mantissas, exponents in zip(
        words, bias, frames[::2], frames[1::2], strict=True
    ):
        want = ((plane >> 7 & 255) - table).astype(np.uint8), (plane & 127) | (plane >> 8 & 128)
        for frame, data in zip((exponents, mantissas), want, strict=True):
            assert unpack(frame, allow_extra_data=False) == data.astype(np.uint8).tobytes()
            out = np.empty(data.size, np.uint8)
            assert _core.unpack_frame(frame, out) and np.array_equal(out, data.ravel())
            said = zstandard.get_frame_parameters(frame)
            assert (said.content_size, said.has_checksum) == (data.size, True)
            # A decoder that streams needs no more memory than for one block.
            assert said.window_size <= BLOCK
    return sum(map(len, frames[1::2])) / words.size


def bf16(values: npt.NDArray[np.float64]) -> U16:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def with_exponents(exponents: npt.NDArray[np.int64]) -> U16:
    return (exponents.astype(np.uint16) & 255) << 7


KINDS = {
    "any bits": lambda rng, n: rng.integers(0, 1 << 16, n).astype(np.uint16),
    "normal": lambda rng, n: bf16(rng.standard_normal(n)),
    "all alike": lambda rng, n: np.full(n, 0x3F80, np.uint16),
    "a few": lambda rng, n: with_exponents(
        rng.choice(rng.permutation(256)[: rng.integers(2, 40)], n)
    ),
    # Codes longer than zstd allows, which have to give way to one another.
    "very uneven": lambda rng, n: with_exponents(
        np.minimum(rng.geometric(0.5 ** rng.integers(1, 9), n), 255)
    ),
    "all 256, unevenly": lambda rng, n: with_exponents(
        rng.choice(256, n, p=rng.dirichlet(np.full(256, 10.0 ** rng.uniform(-2, 1))))
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [20, 3000, 400_000], ids="up to {} words".format)
def test_what_was_packed_is_read(kind: str, most: int) -> None:
    rng = np.random.default_rng(most)
    for _ in range(30 if most > 3000 else 150):
        hidden = int(rng.integers(1, min(most, 3000)))
        rows = int(rng.integers(1, max(2, most // hidden)))
        words = KINDS[kind](rng, rows * hidden).reshape(1, rows, hidden)
        check([words], rng.integers(0, 256, (1, hidden)).astype(np.uint8))


@pytest.mark.parametrize("hidden", [32 << 10, (32 << 10) + 1, 2 * BLOCK + 5])
def test_rows_longer_than_a_tile(hidden: int) -> None:
    rng = np.random.default_rng(hidden)
    words = bf16(rng.standard_normal((2, 3, hidden)))
    assert check([words], np.full((2, hidden), 127, np.uint8)) < 0.36


def test_pieces_with_gaps_between_rows_and_planes() -> None:
    rng = np.random.default_rng(1)
    wide = bf16(rng.standard_normal((4, 300, 500)))
    parts = [wide[:3, 10:11, :96], wide[1:, :200, 100:196], wide[:3, 250:, 404:]]
    check(parts, rng.integers(100, 130, (3, 96)).astype(np.uint8))
    ones = [wide[:3, i : i + 1, :96] for i in range(300)]  # as decode leaves them
    check(ones, rng.integers(100, 130, (3, 96)).astype(np.uint8))


def test_exponents_that_the_sample_has_not_seen() -> None:
    """Only a part of a large plane is counted; what is rare, and zeros, must have codes as well.

    A zero's byte is what the channel's bias makes of it: channels have ten of them here."""
    rng = np.random.default_rng(2)
    rows, hidden = 1024, 1024
    scale = rng.integers(-5, 5, hidden)
    words = bf16(rng.standard_normal((1, rows, hidden)) * 2.0**scale)
    bias = (126 + scale).astype(np.uint8)[None]
    usual = check([words], bias)
    for count in (1, 3, 50):
        bent = words.copy()
        at = rng.integers(0, rows, count), rng.integers(0, hidden, count)
        bent[0][at] = 0x8000  # -0.0
        assert check([bent], bias) < usual + 0.003
        bent[0][at] = with_exponents(np.arange(count) + 130)
        assert check([bent], bias) < usual + 0.005
        bent[0][at] = with_exponents(rng.integers(0, 256, count))
        assert check([bent], bias) < usual + 0.005


def test_exponents_end_near_their_entropy() -> None:
    rng = np.random.default_rng(3)
    words = bf16(rng.standard_normal((1, 1000, 2000)))
    share = np.bincount((words >> 7 & 255).ravel()) / words.size
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum() / 8
    assert check([words], np.full((1, 2000), 127, np.uint8)) < 1.02 * entropy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": 1}, "even addresses"),
        ({"address": 0}, "the address is null"),
        ({"plane": 3}, "plane_bytes=3"),
        ({"row": 3}, "even addresses"),
        ({"row": 2}, "would overlap"),
        ({"rows": 1 << 32}, "less than 2\\*\\*32"),
        ({"out": 7}, "out has 7 bytes, must have"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, int], words: str) -> None:
    array = np.zeros((2, 3, 8), np.uint16)
    a = {"address": array.ctypes.data, "plane": 48, "row": 16, "rows": 3}
    a["out"] = _core.packed_bound(2, 24)
    a |= {"address": array.ctypes.data + 1} if change == {"address": 1} else change
    place = np.array([[a["address"], a["plane"], a["row"], a["rows"]]], np.uint64)
    with pytest.raises(ConfigError, match=words):
        _core.pack_chunk(place, np.zeros((2, 8), np.uint8), np.empty(a["out"], np.uint8))


def test_arrays_of_another_kind_are_refused() -> None:
    out, bias = np.empty(_core.packed_bound(2, 0), np.uint8), np.zeros((2, 8), np.uint8)
    none = np.empty((0, 4), np.uint64)
    assert len(_core.pack_chunk(none, bias, out)) == 4  # no rows: four empty frames
    for bad in ((none.astype(np.int64), bias, out), (none[:, :3], bias, out), (none, bias[0], out)):
        with pytest.raises(TypeError):
            _core.pack_chunk(*bad)
    frozen = out.copy()
    frozen.setflags(write=False)
    with pytest.raises(TypeError):
        _core.pack_chunk(none, bias, frozen)
    with pytest.raises(ConfigError, match="hidden=0"):
        _core.pack_chunk(none, np.zeros((2, 0), np.uint8), out)
