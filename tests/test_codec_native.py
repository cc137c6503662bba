"""bf16 words apart into planes and together again, against numpy."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hstransport import _core
from hstransport.errors import ConfigError

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


def words(rows: int, hidden: int, stride: int, seed: int) -> U16:
    """``[rows, hidden]`` of a wider array: any bits at all."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 16, (rows, stride), np.uint16)[:, :hidden]


def split(x: U16, bias: U8) -> tuple[U8, U8]:
    rows, hidden = x.shape
    exponents, mantissas = np.empty((2, rows, hidden), np.uint8)
    _core.split_planes(x.ctypes.data, rows, hidden, x.strides[0], bias, exponents, mantissas)
    return exponents, mantissas


def join(exponents: U8, mantissas: U8, bias: U8, out: U16) -> None:
    rows, hidden = out.shape
    _core.join_planes(exponents, mantissas, bias, out.ctypes.data, rows, hidden, out.strides[0])


shapes = st.tuples(
    st.integers(1, 9), st.integers(1, 300), st.integers(0, 40), st.integers(0, 1 << 30)
)


@settings(deadline=None)
@given(shapes)
def test_split_is_as_written_down_and_join_is_its_inverse(shape: tuple[int, int, int, int]) -> None:
    rows, hidden, gap, seed = shape
    x = words(rows, hidden, hidden + gap, seed)
    bias = np.random.default_rng(seed).integers(0, 256, hidden, np.uint8)
    exponents, mantissas = split(x, bias)
    assert (exponents == (((x >> 7) & 255) - bias).astype(np.uint8)).all()
    assert (mantissas == ((x & 127) | (x >> 8 & 128))).all()

    wide = np.full((rows, hidden + gap), 0xABCD, np.uint16)
    join(exponents, mantissas, bias, wide[:, :hidden])
    assert (wide[:, :hidden] == x).all()
    assert (wide[:, hidden:] == 0xABCD).all()  # what lies between the rows is not touched


def test_every_word_comes_back_under_every_bias() -> None:
    x = np.arange(1 << 16, dtype=np.uint16).reshape(1, -1)
    back = np.empty_like(x)
    for value in range(256):
        bias = np.full(x.size, value, np.uint8)
        join(*split(x, bias), bias, back)
        assert (back == x).all()


@settings(deadline=None)
@given(shapes, st.sampled_from([[0], [0, 0x8000], [0x3F80], [0x7F80, 1], [0xFFC1, 0x7F7F], [1]]))
def test_odd_rows_are_named(shape: tuple[int, int, int, int], values: list[int]) -> None:
    rows, hidden, gap, seed = shape
    x = words(rows, hidden, hidden + gap, seed)
    rng = np.random.default_rng(seed)
    x[::2] = rng.choice(np.array(values, np.uint16), x[::2].shape)
    x[:, 0] = rng.choice(np.array([*values, 5], np.uint16), rows)
    odd = np.full(rows, 8, np.uint8)
    _core.odd_rows(x.ctypes.data, rows, hidden, x.strides[0], odd)
    zero = (x & 0x7FFF == 0).all(axis=1)
    constant = (x == x[:, :1]).all(axis=1) & ~zero & (hidden > 1)
    endless = ((x & 0x7F80) == 0x7F80).any(axis=1)
    assert (odd == 8 + zero * 1 + constant * 2 + endless * 4).all()


@settings(deadline=None)
@given(shapes)
def test_median_is_the_lower_one_of_each_column(shape: tuple[int, int, int, int]) -> None:
    rows, hidden, gap, seed = shape
    x = words(rows, hidden, hidden + gap, seed)
    medians = _core.median_exponents(x.ctypes.data, rows, hidden, x.strides[0])
    assert medians.dtype == np.uint8 and medians.shape == (hidden,)
    assert (medians == np.sort((x >> 7) & 255, axis=0)[(rows - 1) // 2]).all()


def test_no_rows_split_to_nothing_and_have_no_median() -> None:
    none = np.empty(0, np.uint8)
    _core.split_planes(0, 0, 4, 8, np.zeros(4, np.uint8), none, none)
    with pytest.raises(ConfigError, match="rows=0"):
        _core.median_exponents(0, 0, 4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": np.zeros(7, np.uint8)}, "bias has 7 bytes, must have 8"),
        ({"exponents": np.zeros(31, np.uint8)}, "exponents has 31 bytes, must have 32"),
        ({"mantissas": np.zeros(33, np.uint8)}, "mantissas has 33 bytes, must have 32"),
        ({"stride": 14}, "stride_bytes=14: rows of 16"),
        ({"stride": 17}, "stride_bytes=17.*even"),
        ({"address": 0}, "null"),
        ({"address": 4097}, "address=4097.*even"),
        ({"rows": 1 << 40}, f"rows={1 << 40}"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    x = words(4, 8, 8, 0)
    a = {
        "address": x.ctypes.data,
        "rows": 4,
        "stride": 16,
        "bias": np.zeros(8, np.uint8),
        "exponents": np.zeros(32, np.uint8),
        "mantissas": np.zeros(32, np.uint8),
    } | change
    planes = (a["bias"], a["exponents"], a["mantissas"])
    with pytest.raises(ConfigError, match=message):
        _core.split_planes(a["address"], a["rows"], 8, a["stride"], *planes)
    with pytest.raises(ConfigError, match=message):
        _core.join_planes(planes[1], planes[2], planes[0], a["address"], a["rows"], 8, a["stride"])


def test_planes_to_write_must_be_writable_bytes() -> None:
    x = words(1, 4, 4, 0)
    good = np.zeros(4, np.uint8)
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    for bad in (frozen, b"1234", np.zeros(4, np.int8), np.zeros(8, np.uint8)[::2]):
        with pytest.raises(TypeError):
            _core.split_planes(x.ctypes.data, 1, 4, 8, good, bad, good)
    _core.split_planes(x.ctypes.data, 1, 4, 8, frozen, bytearray(4), memoryview(bytearray(4)))
    _core.join_planes(b"1234", frozen, frozen, x.ctypes.data, 1, 4, 8)


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """Other threads run only while the GIL is let go of one's own accord."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("what", ["split", "join", "median"])
def test_other_threads_run_meanwhile(what: str) -> None:
    x = words(1000, 8000, 8000, 0)
    bias = np.zeros(8000, np.uint8)
    exponents, mantissas = split(x, bias)
    run = {
        "split": lambda: _core.split_planes(
            x.ctypes.data, 1000, 8000, 16000, bias, exponents, mantissas
        ),
        "join": lambda: join(exponents, mantissas, bias, x),
        "median": lambda: _core.median_exponents(x.ctypes.data, 1000, 8000, 16000),
    }[what]
    turns = 0
    stop = False

    def count() -> None:
        nonlocal turns
        while not stop:
            turns += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    advanced = False
    for _ in range(50):
        before = turns
        run()
        advanced = turns > before
        if advanced:
            break
    stop = True
    thread.join()
    assert advanced
