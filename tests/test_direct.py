"""Writes past the page cache: the same file, whatever the pieces, and on any file system."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, direct, open_shards
from hstransport_consumer.direct import PAGE, DirectFile
from shard_kit import Script, check, make_info, only_shard

MIB = 1 << 20


class Noted:
    """What went past the page cache: ``(offset, bytes)``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fail: OSError | None = None) -> None:
        self.writes: list[tuple[int, int]] = []
        real = os.pwrite

        def pwrite(fd: int, data: memoryview, at: int) -> int:
            if fail is not None:
                raise fail
            n = real(fd, data, at)
            self.writes.append((at, n))
            return n

        monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.fixture
def file(tmp_path: Path) -> DirectFile:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    return DirectFile(path, fd)


def pieces(rng: np.random.Generator) -> list[memoryview]:
    sizes = [int(rng.integers(1, 3000)), *rng.integers(1, 2 * MIB, rng.integers(1, 6)).tolist()]
    return [memoryview(rng.integers(0, 256, n, np.uint8).tobytes()) for n in sizes]


def test_any_pieces_at_any_offset_give_the_same_file(
    file: DirectFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    rng = np.random.default_rng(0)
    expected, at = bytearray(), 0
    for _ in range(30):
        gap = int(rng.integers(0, 200))  # room that is left for a head
        parts = pieces(rng)
        expected += bytes(gap) + b"".join(parts)
        at = file.write(parts, at + gap)
        assert at == len(expected)
    assert (tmp_path / "file").read_bytes() == expected
    if file._fd < 0:
        pytest.skip("this file system has no direct writes")
    assert sum(n for _, n in noted.writes) > 0.9 * len(expected)
    assert all(at % PAGE == n % PAGE == 0 for at, n in noted.writes)


def test_little_goes_through_the_page_cache(
    file: DirectFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    assert file.write([bytes(direct.LEAST_BYTES - 1)], 0) == direct.LEAST_BYTES - 1
    assert not noted.writes


@pytest.mark.parametrize("when", ["opened", "written"])
def test_where_the_file_system_has_none_the_page_cache_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    if when == "opened":
        monkeypatch.setattr(os, "open", refuse)
    else:
        Noted(monkeypatch, fail=OSError(errno.EINVAL, "Invalid argument"))
    path = tmp_path / "file"
    fd = real(path, os.O_RDWR | os.O_CREAT, 0o600)
    file = DirectFile(path, fd)
    data = np.random.default_rng(1).bytes(5 * MIB)
    assert file.write([data[:70], data[70:]], 0) == len(data)
    assert path.read_bytes() == data


def test_a_disk_takes_less_than_it_was_given(
    file: DirectFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: 3 * PAGE], at))
    data = np.random.default_rng(2).bytes(2 * MIB + 100)
    file.write([data], 50)
    assert (tmp_path / "file").read_bytes() == bytes(50) + data


def test_a_full_disk_is_told_and_the_window_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(make_info(hidden=2048))
    for sid in range(3):
        script.whole(sid, 400)
    with DatasetWriter(tmp_path) as writer:
        writer.begin_run(script.info)
        script.write_window(writer, 0, 2)
        size = only_shard(tmp_path).stat().st_size
        with monkeypatch.context() as broken:
            Noted(broken, fail=OSError(errno.ENOSPC, "No space left on device"))
            with pytest.raises(OSError, match="may be repeated"):
                script.write_window(writer, 3, 8)
            assert only_shard(tmp_path).stat().st_size == size
        noted = Noted(monkeypatch)
        script.write_window(writer, 3, 8)
        assert noted.writes
    check(open_shards(tmp_path), script.samples.values())


def test_memory_is_aligned(file: DirectFile) -> None:
    file.write([bytes(3 * MIB)], 1)
    address = np.frombuffer(file._memory, np.uint8).ctypes.data
    assert isinstance(file._memory, mmap.mmap) and address % PAGE == 0
