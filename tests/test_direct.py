"""Writes past the page cache: the same file, whatever the pieces, and on any file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, open_shards
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


def aligned(data: bytes, lead: int = 0) -> memoryview:
    """The bytes in memory that begins ``lead`` bytes behind a page's beginning."""
    memory = np.empty(len(data) + 2 * PAGE, np.uint8)
    at = -memory.ctypes.data % PAGE + lead
    memory[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return memory[at : at + len(data)].data


def test_any_pieces_at_any_offset_give_the_same_file(
    file: DirectFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    rng = np.random.default_rng(0)
    expected, at, due = bytearray(), 0, 0
    for i in range(60):
        gap = int(rng.integers(0, 200))  # room that is left for a head
        data = rng.bytes(int(rng.integers(1, 5 * MIB)))
        head = rng.bytes(int(rng.integers(1, 300)))
        if i % 2:  # as the writer does it
            head += bytes(-(at + gap + len(head)) % PAGE)
            if i % 4 == 1 and len(data) >= MIB:
                due += len(data) - len(data) % PAGE
        expected += bytes(gap) + head + data
        at = file.write(head, aligned(data, lead=8 if i % 4 == 3 else 0), at + gap)
        assert at == len(expected)
    assert (tmp_path / "file").read_bytes() == expected
    if file._fd < 0:
        pytest.skip("this file system has no direct writes")
    assert sum(n for _, n in noted.writes) == due > 30 * MIB
    assert all(at % PAGE == n % PAGE == 0 for at, n in noted.writes)


def test_little_goes_through_the_page_cache(
    file: DirectFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    assert file.write(b"", aligned(bytes(MIB - 1)), 0) == MIB - 1
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
    assert file.write(bytes(PAGE), aligned(data), 0) == PAGE + len(data)
    assert path.read_bytes() == bytes(PAGE) + data


def test_a_disk_takes_less_than_it_was_given(
    file: DirectFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: 3 * PAGE], at))
    data = np.random.default_rng(2).bytes(2 * MIB + 100)
    file.write(bytes(PAGE), aligned(data), 0)
    assert (tmp_path / "file").read_bytes() == bytes(PAGE) + data


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


def test_the_writers_chunks_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    script = Script(make_info(hidden=2048))
    for sid in range(20):
        script.whole(sid, int(np.random.default_rng(sid).integers(300, 700)))
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [])
    size = only_shard(tmp_path).stat().st_size
    if not noted.writes:
        pytest.skip("this file system has no direct writes")
    assert sum(n for _, n in noted.writes) > 0.95 * size
    check(open_shards(tmp_path), script.samples.values())
