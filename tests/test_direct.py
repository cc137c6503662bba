"""Writes past the page cache: the same file, whatever the pieces, and on any file system."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer.appender import Appender
from hstransport_consumer.direct import PAGE, DirectFile, Piece
from shard_kit import Script, check, make_info, only_shard

MIB = 1 << 20


class Noted:
    """What went past the page cache: ``(offset, bytes)``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fail: OSError | None = None) -> None:
        self.writes: list[tuple[int, int]] = []
        real = os.pwritev

        def pwritev(fd: int, buffers: Sequence[memoryview], at: int) -> int:
            if not is_direct(fd):
                return real(fd, buffers, at)
            if fail is not None:
                raise fail
            n = real(fd, buffers, at)
            self.writes.append((at, n))
            return n

        monkeypatch.setattr(os, "pwritev", pwritev)
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwritev(fd, [data], at))


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


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


@pytest.mark.parametrize("together", [1, 4])
def test_any_pieces_at_any_offset_give_the_same_file(
    file: DirectFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    noted = Noted(monkeypatch)
    rng = np.random.default_rng(0)
    expected, due = bytearray(), 0
    for _ in range(60 // together):
        expected += bytes(int(rng.integers(0, 200)))  # room that is left for a head
        batch = []
        for _ in range(together):
            data = rng.bytes(int(rng.integers(1, 5 * MIB)))
            head = rng.bytes(int(rng.integers(1, 300)))
            how = int(rng.integers(4))
            if how:  # as the writer does it
                head += bytes(-(len(expected) + len(head)) % PAGE)
            memory = aligned(data, lead=8 if how == 1 else 0)
            if how > 1 and len(data) >= MIB:
                due += len(data) - len(data) % PAGE
            batch.append(Piece(len(expected), head, memory))
            expected += head + data
        file.write(batch)
    assert (tmp_path / "file").read_bytes() == expected
    if file._fd < 0:
        pytest.skip("this file system has no direct writes")
    written = sum(n for _, n in noted.writes)
    assert written == due if together == 1 else due < written < due + 60 * PAGE
    assert due > 30 * MIB and all(at % PAGE == n % PAGE == 0 for at, n in noted.writes)
    if together > 1:
        assert len(noted.writes) < 30, "neighbours went together"


def test_pieces_that_wait_go_together(
    file: DirectFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    rng = np.random.default_rng(1)
    expected, begun = bytearray(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(begun.wait)
        written = []
        for _ in range(3):
            data = rng.bytes(MIB + int(rng.integers(5000)))
            head = bytes(-(len(expected)) % PAGE) + rng.bytes(PAGE)
            written.append(file.write_by(pool, Piece(len(expected), head, aligned(data))))
            expected += head + data
        assert not any(w.done() for w in written)
        begun.set()
    assert [w.result() for w in written] == [None] * 3
    assert (tmp_path / "file").read_bytes() == expected
    if file._fd < 0:
        pytest.skip("this file system has no direct writes")
    assert len(noted.writes) == 1


def test_what_waits_for_a_broken_disk_is_told_of_it(
    file: DirectFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", broken)
    monkeypatch.setattr(os, "pwritev", broken)
    with ThreadPoolExecutor(1) as pool:
        written = [
            file.write_by(pool, Piece(2 * i * MIB, b"", aligned(bytes(2 * MIB)))) for i in range(3)
        ]
    assert [w.exception() is not None for w in written] == [True] * 3


def broken(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_little_goes_through_the_page_cache(
    file: DirectFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    file.write([Piece(0, b"", aligned(bytes(MIB - 1)))])
    assert not noted.writes and (tmp_path / "file").stat().st_size == MIB - 1


def test_a_file_that_cannot_be_opened_twice_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one descriptor below the limit: it may be tried again."""
    real, path = os.open, tmp_path / "shard"

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, *mode)

    with monkeypatch.context() as limited:
        limited.setattr(os, "open", refuse)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(2):
            with pytest.raises(OSError, match="Too many"):
                Appender.create(path, [b"head"], durable=False)
        assert len(list(Path("/proc/self/fd").iterdir())) == before and not path.exists()
    Appender.create(path, [b"head"], durable=False).close()


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
    file.write([Piece(0, bytes(PAGE), aligned(data))])
    assert path.read_bytes() == bytes(PAGE) + data


def test_a_disk_takes_less_than_it_was_given(
    file: DirectFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, buffers, at: real(fd, [buffers[0][: 3 * PAGE]], at)
    )
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, [data[: 3 * PAGE]], at))
    data = np.random.default_rng(2).bytes(2 * MIB + 100)
    file.write([Piece(0, bytes(PAGE), aligned(data))])
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
