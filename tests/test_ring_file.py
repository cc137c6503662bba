"""Ring files: who may have them, who holds a role, and what a reader refuses to believe."""

from __future__ import annotations

import errno
import os
import resource
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hstransport.errors import (
    ConfigError,
    LeaseError,
    RingBusyError,
    RingCorruptError,
    RingError,
    RingLayoutError,
)
from hstransport.ring import RingReader, RingWriter, inspect_ring, remove_orphan

CAPACITY = 64 << 10
HEADER = 4096
BYTES = HEADER + CAPACITY
ROWS = 1


@pytest.fixture
def path(ring_dir: Path) -> Path:
    return ring_dir / "r-0.ring"


@pytest.fixture
def writer(path: Path) -> Iterator[RingWriter]:
    with RingWriter.create(path, CAPACITY, b"the info") as w:
        yield w


def put(writer: RingWriter, payload: bytes, meta: bytes = b"") -> None:
    slot = writer.reserve(ROWS, meta, len(payload))
    assert slot is not None
    slot.payload[:] = np.frombuffer(payload, np.uint8)
    slot.commit()


def test_the_file_is_private_whatever_the_umask(path: Path) -> None:
    for umask in (0, 0o777):
        before = os.umask(umask)
        try:
            with RingWriter.create(path, CAPACITY, b""):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
        finally:
            os.umask(before)


def test_a_ring_never_replaces_a_file(path: Path, ring_dir: Path) -> None:
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"r-0\.ring"):
        RingWriter.create(path, CAPACITY, b"")
    assert path.read_bytes() == b"mine" and list(ring_dir.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        RingWriter.create(ring_dir / "no" / "r", CAPACITY, b"")


def test_a_ring_larger_than_its_file_system_is_refused(path: Path, ring_dir: Path) -> None:
    fs = os.statvfs(ring_dir)
    check_no_room_for(path, fs.f_bavail * fs.f_frsize + (1 << 30))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs")
def test_a_ring_larger_than_the_memory_left_is_refused(path: Path) -> None:
    meminfo = Path("/proc/meminfo").read_text()
    kib = next(int(x.split()[1]) for x in meminfo.splitlines() if x.startswith("MemAvailable"))
    check_no_room_for(path, (kib << 10) + (1 << 30))


def check_no_room_for(path: Path, capacity: int) -> None:
    capacity = capacity // 4096 * 4096
    # Should the check be missing, this keeps the test from taking all the memory of the machine.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, before[1]))
    try:
        with pytest.raises(OSError, match=rf"{capacity + HEADER} bytes .* \d+ bytes are av") as e:
            RingWriter.create(path, capacity, b"")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert e.value.errno == errno.ENOSPC and not list(path.parent.iterdir())


def test_of_two_creators_one_wins(path: Path, ring_dir: Path) -> None:
    won: list[RingWriter] = []
    lost: list[FileExistsError] = []
    start = threading.Barrier(2)

    def create() -> None:
        start.wait()
        try:
            won.append(RingWriter.create(path, CAPACITY, b""))
        except FileExistsError as e:
            lost.append(e)

    for turn in range(100):
        threads = [threading.Thread(target=create) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert (len(won), len(lost)) == (1, turn + 1)
        assert list(ring_dir.iterdir()) == [path] and won.pop().close()


@pytest.mark.parametrize("capacity", [0, 4096, CAPACITY - 4096, CAPACITY + 64, (1 << 64) - 4096])
def test_a_bad_capacity_is_refused(path: Path, capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"capacity_bytes={capacity}"):
        RingWriter.create(path, capacity, b"")


def test_a_ring_is_only_seen_complete(path: Path) -> None:
    stop = threading.Event()
    seen: list[object] = []

    def look() -> None:
        while not stop.is_set():
            try:
                seen.append(inspect_ring(path).producer_alive)
            except FileNotFoundError:
                pass
            except Exception as e:
                seen.append(e)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(300):
        RingWriter.create(path, CAPACITY, bytes(300)).close()
    deadline = time.monotonic() + 20
    with RingWriter.create(path, CAPACITY, b""):
        while not seen and time.monotonic() < deadline:
            time.sleep(0.001)
    stop.set()
    thread.join()
    assert seen and not [s for s in seen if isinstance(s, Exception)]


def test_close_abandons_what_is_pending_and_keeps_the_file_for_a_consumer(path: Path) -> None:
    writer = RingWriter.create(path, CAPACITY, b"")
    committed, pending = writer.reserve(ROWS, b"1", 8), writer.reserve(ROWS, b"2", 8)
    committed.commit()
    assert [writer.close(), writer.close()] == [False, False]
    with pytest.raises(RingError, match="closed"):
        writer.reserve(ROWS, b"", 8)
    with pytest.raises(LeaseError, match="writer is closed"):
        pending.commit()
    with RingReader.attach(path) as reader:
        assert reader.closed and not reader.producer_alive()
        first, second = reader.read(), reader.read()
        assert not first.abandoned and second.abandoned
        assert not reader.unlink_if_orphaned()
        second.release()
        assert not reader.unlink_if_orphaned()
        first.release()
        assert reader.unlink_if_orphaned() and not path.exists()


def test_close_unlinks_a_drained_ring_and_only_its_own(path: Path) -> None:
    with RingWriter.create(path, CAPACITY, b"") as writer:
        assert writer.close() and writer.close() and not path.exists()
    writer = RingWriter.create(path, CAPACITY, b"")
    path.rename(path.with_suffix(".moved"))
    path.write_bytes(b"another file")
    writer.close()
    assert path.read_bytes() == b"another file"


def test_roles_are_held_once_and_seen_by_the_other_side(path: Path, writer: RingWriter) -> None:
    assert not writer.consumer_attached()
    with RingReader.attach(path) as reader:
        assert writer.consumer_attached() and reader.producer_alive()
        assert not reader.unlink_if_orphaned() and not reader.closed
        with pytest.raises(RingBusyError, match="another consumer"):
            RingReader.attach(path)
        assert not remove_orphan(path)
    assert not writer.consumer_attached()
    assert not remove_orphan(path) and path.exists()


def test_inspecting_a_ring_takes_and_changes_nothing(path: Path, writer: RingWriter) -> None:
    put(writer, b"x" * 100)
    writer.reserve(ROWS, b"", 10).abandon()
    writer.reserve(ROWS, b"", 10)
    before = path.read_bytes()
    look = inspect_ring(path)
    assert (look.committed, look.abandoned, look.pending, look.records) == (1, 1, 1, 3)
    assert (look.head, look.tail, look.bytes) == (448, 0, 448)
    assert look.info == b"the info" and look.counters == writer.counters
    assert look.capacity_bytes == CAPACITY and look.path == path
    assert look.producer_alive and not look.consumer_attached and not look.closed
    with RingReader.attach(path):
        assert inspect_ring(path).consumer_attached
    assert path.read_bytes() == before
    writer.close()
    look = inspect_ring(path)
    assert look.closed and not look.producer_alive and look.abandoned == 2
    path.unlink()
    assert remove_orphan(path)


# What a reader refuses


def damage(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        f.write(data)


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


BAD_HEADERS = {
    "magic": (0, b"NOTARING", RingLayoutError, "4e4f544152494e47.*48535452494e4701"),
    "version": (8, u32(7), RingLayoutError, "version 7, this release reads 2"),
    "header_bytes of 0": (12, u32(0), RingLayoutError, "header_bytes is 0.*4096"),
    "header_bytes not a page": (12, u32(100), RingLayoutError, "header_bytes is 100.*4096"),
    "header_bytes too large": (
        12,
        u32(1 << 30),
        RingLayoutError,
        f"{1 << 30} .*{BYTES}",
    ),
    "capacity of 0": (16, u64(0), RingLayoutError, "capacity_bytes is 0,.*65536"),
    "capacity not a page": (16, u64(CAPACITY + 64), RingLayoutError, f"is {CAPACITY + 64},.*4096"),
    "capacity not the file's": (16, u64(1 << 20), RingLayoutError, "4096 . 1048576 .* 69632"),
    "capacity overflows": (
        16,
        u64((1 << 64) - 4096),
        RingLayoutError,
        f"{(1 << 64) - 4096}.*69632",
    ),
    "info_bytes": (24, u32(3585), RingLayoutError, "info_bytes is 3585.*3584"),
    "head unaligned": (128, u64(65), RingCorruptError, "head is 65, .*64"),
    "head past capacity": (
        128,
        u64(CAPACITY + 64),
        RingCorruptError,
        "head is 65600.*65536.*tail 0",
    ),
    "tail unaligned": (192, u64(1), RingCorruptError, "tail is 1,.*64"),
    "tail past head": (192, u64(1024), RingCorruptError, "tail is 1024, past head 384"),
}


def closed_ring(path: Path) -> None:
    """Two committed records: 192 bytes each, 40 of metadata, 50 of payload."""
    with RingWriter.create(path, CAPACITY, b"") as writer:
        for _ in range(2):
            put(writer, bytes(50), bytes(40))


@pytest.mark.parametrize("look", [RingReader.attach, inspect_ring])
@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_bad_header_is_refused(path: Path, name: str, look: Callable[[Path], object]) -> None:
    offset, data, error, message = BAD_HEADERS[name]
    closed_ring(path)
    damage(path, offset, data)
    with pytest.raises(error, match=message):
        look(path)


@pytest.mark.parametrize("size", [0, 100, HEADER, HEADER + CAPACITY - 1, HEADER + CAPACITY + 4096])
def test_a_file_of_another_size_is_refused(path: Path, size: int) -> None:
    closed_ring(path)
    os.truncate(path, size)
    with pytest.raises(RingLayoutError, match=f"{size}"):
        RingReader.attach(path)


def test_what_is_no_regular_file_is_refused(path: Path, ring_dir: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RingReader.attach(path)
    os.mkfifo(ring_dir / "fifo")
    (ring_dir / "link").symlink_to(path)
    closed_ring(path)
    for name in ("fifo", "link", "."):
        with pytest.raises(RingLayoutError, match="not a ring"):
            RingReader.attach(ring_dir / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_ring_is_refused(path: Path) -> None:
    closed_ring(path)
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match=r"uid 12345, .* uid 0"):
        RingReader.attach(path)


BAD_RECORDS = {
    "ready": (0, u32(3), "ready is 3, must be at most 2"),
    "kind": (4, u32(4), "kind is 4, must be at most 3"),
    "record_bytes of 0": (8, u64(0), "record_bytes is 0,.*64"),
    "record_bytes unaligned": (8, u64(193), "record_bytes is 193,.*64"),
    "record_bytes past head": (8, u64(256), "record_bytes is 256, head comes after 192"),
    "record_bytes past the end": (8, u64(CAPACITY), "record_bytes is 65536, .* ends after 65344"),
    "record_bytes overflows": (8, u64((1 << 64) - 64), f"record_bytes is {(1 << 64) - 64}, "),
    "seq": (16, u64(5), "seq is 5, must be 1"),
    "meta_bytes": (24, u32(129), "meta_bytes is 129, .* room for 128"),
    "payload_bytes": (32, u64(65), "payload_bytes is 65, .* room for 64"),
    "payload_bytes overflows": (32, u64((1 << 64) - 1), f"payload_bytes is {(1 << 64) - 1}, "),
    "payload offset unaligned": (40, u64(100), "payload offset is 100,.*64"),
    "payload offset in metadata": (40, u64(64), "payload offset is 64,.* from 104 to 192"),
    "payload offset past the record": (40, u64(256), "payload offset is 256,.* to 192"),
    "padding in the middle": (4, u32(0), "padding of record_bytes 192, .* 65344"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_bad_record_is_refused(path: Path, name: str) -> None:
    offset, data, message = BAD_RECORDS[name]
    closed_ring(path)
    damage(path, HEADER + 192 + offset, data)
    with RingReader.attach(path) as reader:
        reader.read().release()
        for _ in range(2):  # and it stays refused
            with pytest.raises(RingCorruptError, match=f"position 192: .*{message}.*corrupt"):
                reader.read()
        assert reader.tail == reader.cursor == 192
    if name != "seq":
        with pytest.raises(RingCorruptError, match=message):
            inspect_ring(path)


def test_the_first_seq_after_attaching_is_below_the_next(path: Path) -> None:
    closed_ring(path)
    damage(path, HEADER + 16, u64(2))
    with (
        RingReader.attach(path) as reader,
        pytest.raises(RingCorruptError, match=r"is 2, .* than 2"),
    ):
        reader.read()


def test_a_position_that_goes_back_is_refused(path: Path) -> None:
    closed_ring(path)
    with RingReader.attach(path) as reader:
        reader.read()
        reader.read()
        damage(path, 128, u64(192))
        with pytest.raises(RingCorruptError, match=r"head is 192, before .* 384"):
            reader.read()


def test_a_producer_refuses_a_bad_tail(path: Path) -> None:
    writer = RingWriter.create(path, CAPACITY, b"")
    put(writer, bytes(CAPACITY - 64))
    for tail, message in [(CAPACITY + 64, "past head 65536"), (3, "tail is 3")]:
        damage(path, 192, u64(tail))
        with pytest.raises(RingCorruptError, match=message):
            writer.reserve(ROWS, b"", 64)
    assert not writer.close() and path.exists()
