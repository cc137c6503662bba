"""One process, both ends of a ring: records, leases, room, and the GIL."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hstransport.counters import RingCounters
from hstransport.errors import (
    ConfigError,
    LeaseError,
    RingError,
)
from hstransport.ring import RingReader, RingWriter

CAPACITY = 64 << 10
ROWS = 1


def up64(n: int) -> int:
    return (n + 63) // 64 * 64


@pytest.fixture
def path(ring_dir: Path) -> Path:
    return ring_dir / "r-0.ring"


@pytest.fixture
def writer(path: Path) -> Iterator[RingWriter]:
    with RingWriter.create(path, CAPACITY, b"the info") as w:
        yield w


@pytest.fixture
def reader(path: Path, writer: RingWriter) -> Iterator[RingReader]:
    with RingReader.attach(path) as r:
        yield r


def put(writer: RingWriter, payload: bytes, meta: bytes = b"", kind: int = ROWS) -> int:
    slot = writer.reserve(kind, meta, len(payload))
    assert slot is not None
    slot.payload[:] = np.frombuffer(payload, np.uint8)
    slot.commit()
    return slot.seq


# Records


def test_a_record_arrives_as_it_was_written(writer: RingWriter, reader: RingReader) -> None:
    assert reader.read() is None and not reader.pending()
    assert put(writer, b"payload", b"meta", kind=3) == 0
    with reader.read() as record:
        assert (record.seq, record.kind, record.meta) == (0, 3, b"meta")
        assert bytes(record.payload) == b"payload" and not record.abandoned
        assert (record.position, record.end_position, record.record_bytes) == (0, 192, 192)
        assert not record.payload.flags.writeable
        assert reader.tail == 0 and reader.cursor == 192
    assert reader.tail == writer.tail == 192 and writer.used_bytes == 0
    assert reader.info == writer.info == b"the info"
    assert reader.capacity_bytes == CAPACITY
    assert reader.counters == writer.counters == RingCounters(records=1, bytes=7)


def test_records_are_read_in_order_of_reservation(writer: RingWriter, reader: RingReader) -> None:
    first, second = writer.reserve(ROWS, b"1", 8), writer.reserve(ROWS, b"2", 8)
    second.commit()
    assert reader.read() is None and reader.pending()
    first.commit()
    assert [reader.read().meta, reader.read().meta] == [b"1", b"2"]


def test_an_abandoned_record_arrives_without_payload(
    writer: RingWriter, reader: RingReader
) -> None:
    writer.reserve(ROWS, b"m", 100).abandon()
    put(writer, b"next")
    record = reader.read()
    assert record.abandoned and record.seq == 0 and record.meta == b"m"
    assert record.payload_bytes == 100 and record.payload.size == 0
    assert reader.read().seq == 1


def test_addresses_are_those_of_the_payload_and_the_ready_word(
    writer: RingWriter, reader: RingReader
) -> None:
    slot = writer.reserve(ROWS, b"m" * 70, 10)
    assert slot.address == slot.payload.ctypes.data and slot.address % 64 == 0
    assert slot.address - slot.ready_address == up64(64 + 70)
    ctypes.c_uint32.from_address(slot.ready_address).value = 1  # as a GPU's copy stream does
    assert reader.read().seq == 0


def test_copy_rows_gathers_strided_rows_and_stays_in_the_payload(
    writer: RingWriter, reader: RingReader
) -> None:
    source = np.arange(40, dtype=np.uint8).reshape(4, 10)
    slot = writer.reserve(ROWS, b"", 20)
    slot.copy_rows(2, source.ctypes.data, 4, 3, 10)
    slot.copy_rows(14, source.ctypes.data, 2, 3, 3)
    slot.copy_rows(20, source.ctypes.data, 0, 3, 3)
    for offset, rows, row_bytes in [(18, 1, 3), (21, 0, 0), (0, 1 << 62, 8), (1 << 63, 1, 1)]:
        with pytest.raises(ConfigError, match="payload of 20 bytes"):
            slot.copy_rows(offset, source.ctypes.data, rows, row_bytes, 10)
    slot.commit()
    payload = reader.read().payload
    assert (payload[2:14].reshape(4, 3) == source[:, :3]).all()
    assert (payload[14:20] == np.arange(6)).all()


# Leases


def test_a_reservation_is_given_back_once(writer: RingWriter) -> None:
    for first, second in [("commit", "commit"), ("commit", "abandon"), ("abandon", "commit")]:
        slot = writer.reserve(ROWS, b"", 8)
        getattr(slot, first)()
        with pytest.raises(LeaseError, match=f"record {slot.seq} was"):
            getattr(slot, second)()
        for use in (
            lambda s=slot: s.payload,
            lambda s=slot: s.address,
            lambda s=slot: s.copy_rows(0, 1, 1, 1, 1),
        ):
            with pytest.raises(LeaseError):
                use()


def test_a_record_is_released_once(writer: RingWriter, reader: RingReader) -> None:
    put(writer, b"x")
    put(writer, b"y")
    record = reader.read()
    with record:
        record.release()
    assert record.released and record.meta == b"" and reader.tail == 128
    with pytest.raises(LeaseError, match="record 0 was released"):
        record.release()
    with pytest.raises(LeaseError, match="record 0 was released"):
        _ = record.payload
    assert reader.tail == 128


def test_the_tail_follows_the_longest_released_prefix(
    writer: RingWriter, reader: RingReader
) -> None:
    for _ in range(4):
        put(writer, b"x")
    records = [reader.read() for _ in range(4)]
    for index, tail in [(2, 0), (1, 0), (0, 3), (3, 4)]:
        records[index].release()
        assert reader.tail == writer.tail == tail * 128


def test_a_closed_reader_frees_nothing_more(path: Path, writer: RingWriter) -> None:
    put(writer, b"x")
    reader = RingReader.attach(path)
    record = reader.read()
    reader.close()
    reader.close()
    with pytest.raises(LeaseError, match="reader is closed"):
        _ = record.payload
    with pytest.raises(LeaseError, match="reader is closed"):
        record.release()
    for use in (reader.read, reader.pending, reader.producer_alive, reader.unlink_if_orphaned):
        with pytest.raises(RingError, match="closed"):
            use()
    with RingReader.attach(path) as again:
        assert bytes(again.read().payload) == b"x"


def test_views_outlive_both_ends_and_hold_no_role(path: Path) -> None:
    writer = RingWriter.create(path, CAPACITY, b"")
    slot = writer.reserve(ROWS, b"", 5000)
    written = slot.payload
    written[:] = 7
    slot.commit()
    reader = RingReader.attach(path)
    record = reader.read()
    read = record.payload
    reader.close()
    with RingReader.attach(path) as again:  # the view does not keep the consumer's lock
        assert not writer.close() and not again.producer_alive()  # nor the producer's
        again.read().release()
        assert again.unlink_if_orphaned()
    del writer, reader, record, slot, again
    gc.collect()
    written[0] = 9
    assert int(read.sum()) == 7 * 4999 + 9


def test_records_are_released_by_other_threads_while_one_reads(
    writer: RingWriter, reader: RingReader
) -> None:
    held: deque = deque()
    done = threading.Event()

    def release() -> None:
        while held or not done.is_set():
            try:
                held.popleft().release()
            except IndexError:
                time.sleep(0)

    threads = [threading.Thread(target=release, daemon=True) for _ in range(3)]
    for t in threads:
        t.start()
    try:
        for seq in range(5000):
            slot = writer.reserve(ROWS, b"", 500, wait_s=30)
            assert slot is not None and slot.seq == seq
            slot.commit()
            held.append(reader.read())
    finally:
        done.set()
    for t in threads:
        t.join()
    assert reader.tail == reader.head == reader.cursor


# Room


def test_a_full_ring_is_a_value_and_takes_no_seq(writer: RingWriter, reader: RingReader) -> None:
    while writer.reserve(ROWS, b"", 4032):
        pass
    assert writer.used_bytes == CAPACITY
    writer.record_drop("ring_full", 4032)
    writer.record_drop("too_long", 8)
    counted = RingCounters(16, 16 * 4032, dropped_bytes=4040, ring_full=1, too_long=1)
    assert writer.counters == reader.counters == counted
    assert (counted.dropped_records, counted.drops) == (2, {"ring_full": 1, "too_long": 1})
    assert writer.close() is False  # abandons them all
    for _ in range(16):
        reader.read().release()
    assert reader.read() is None


def test_the_seq_after_a_drop_follows_the_last_record(
    writer: RingWriter, reader: RingReader
) -> None:
    put(writer, bytes(CAPACITY - 128))
    assert writer.reserve(ROWS, b"", 64) is None
    reader.read().release()
    assert put(writer, b"x") == 1
    assert reader.read().seq == 1


def test_a_wait_for_room_ends_at_its_bound_and_is_counted(writer: RingWriter) -> None:
    put(writer, bytes(CAPACITY - 64))
    start = time.monotonic()
    assert writer.reserve(ROWS, b"", 1, wait_s=0.05) is None
    assert 0.05 <= time.monotonic() - start < 10
    assert 5e7 <= writer.counters.ring_stall_ns < 1e10


def test_a_wait_for_room_ends_when_bytes_are_freed(writer: RingWriter, reader: RingReader) -> None:
    put(writer, bytes(CAPACITY - 64))
    timer = threading.Timer(0.05, reader.read().release)
    timer.start()
    start = time.monotonic()
    assert writer.reserve(ROWS, b"", 1, wait_s=60) is not None
    assert time.monotonic() - start < 30 and writer.counters.ring_stall_ns > 0


def test_leave_bytes_stay_free(writer: RingWriter) -> None:
    put(writer, bytes(CAPACITY - 64 - 256))
    assert writer.reserve(ROWS, b"", 64, leave_bytes=129) is None
    assert writer.reserve(ROWS, b"", 64, leave_bytes=128) is not None
    assert writer.reserve(2, b"", 64) is not None
    assert writer.used_bytes == CAPACITY


def test_a_record_that_can_never_fit_is_refused(writer: RingWriter) -> None:
    for meta, payload, leave in [
        (b"", CAPACITY - 63, 0),
        (b"m", CAPACITY - 128, 64),
        (b"", 1 << 63, 0),
        (b"", 1, (1 << 64) - 1),
        (bytes(CAPACITY), 0, 0),
    ]:
        with pytest.raises(ConfigError, match=f"{len(meta)} bytes of.*{payload} of.*{CAPACITY}"):
            writer.reserve(ROWS, meta, payload, leave_bytes=leave)
    for kind in (0, 4):
        with pytest.raises(ConfigError, match=f"kind={kind}"):
            writer.reserve(kind, b"", 0)


@pytest.mark.parametrize("leave", [0, 1, 4096, CAPACITY - 400, CAPACITY, CAPACITY + 1])
@pytest.mark.parametrize("meta_bytes", [0, 1, 64, 5000])
def test_max_payload_fits_an_empty_ring_wherever_its_head_stands(
    ring_dir: Path, meta_bytes: int, leave: int
) -> None:
    meta = bytes(meta_bytes)

    def fits(room: int, payload_bytes: int) -> bool:
        """Whether an empty ring takes it with ``room`` bytes before the end of the data area."""
        with RingWriter.create(ring_dir / "r", CAPACITY, b"") as w, RingReader.attach(w.path) as r:
            if room < CAPACITY:
                put(w, bytes(CAPACITY - room - 64))
                r.read().release()
            slot = w.reserve(ROWS, meta, payload_bytes, leave_bytes=leave)
            if slot is not None:
                slot.abandon()
                r.read().release()
            return slot is not None

    with RingWriter.create(ring_dir / "r", CAPACITY, b"") as w:
        largest = w.max_payload_bytes(meta_bytes, leave)
    record_bytes = up64(64 + meta_bytes) + largest
    if largest == 0:
        assert record_bytes + 64 > (CAPACITY - leave + 64) // 2
        return
    for room in (64, 128, record_bytes - 64, record_bytes, record_bytes + 64, CAPACITY):
        assert fits(room, largest), room
    assert not fits(record_bytes, largest + 1)


# Against a model

sizes = st.one_of(
    st.integers(0, 300),
    st.integers(0, CAPACITY),
    st.sampled_from(["to the end", "one less", "one more", "64 less"]),
)
operations = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 200), sizes, st.sampled_from([0, 64, 5000])),
    st.tuples(st.just("read")),
    st.tuples(st.just("release"), st.integers(0, 1000)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(operations, max_size=60))
def test_ring_behaves_as_its_model(ops: list[tuple]) -> None:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        path = Path(folder) / "r"
        with RingWriter.create(path, CAPACITY, b"") as writer, RingReader.attach(path) as reader:
            run_against_model(ops, writer, reader)


def run_against_model(ops: list[tuple], writer: RingWriter, reader: RingReader) -> None:
    head = tail = seq = 0
    waiting: deque = deque()  # (seq, position, end, meta, payload)
    held: list[list] = []  # [record, end, released], oldest first
    for op in ops:
        if op[0] == "write":
            _, meta_bytes, payload_bytes, leave = op
            room = CAPACITY - head % CAPACITY
            offset = up64(64 + meta_bytes)
            if isinstance(payload_bytes, str):
                delta = {"to the end": 0, "one less": -1, "one more": 1, "64 less": -64}
                payload_bytes = max(0, room - offset + delta[payload_bytes])
            record_bytes = up64(offset + payload_bytes)
            meta, payload = os.urandom(meta_bytes), os.urandom(payload_bytes)
            if record_bytes + leave > CAPACITY:
                with pytest.raises(ConfigError):
                    writer.reserve(ROWS, meta, payload_bytes, leave_bytes=leave)
                continue
            position = head if record_bytes <= room else head + room
            slot = writer.reserve(ROWS, meta, payload_bytes, leave_bytes=leave)
            if position + record_bytes - tail + leave > CAPACITY:
                assert slot is None
                continue
            assert (slot.seq, slot.position, slot.record_bytes) == (seq, position, record_bytes)
            slot.payload[:] = np.frombuffer(payload, np.uint8)
            slot.commit()
            head = position + record_bytes
            waiting.append((seq, position, head, meta, payload))
            seq += 1
        elif op[0] == "read":
            record = reader.read()
            if not waiting:
                assert record is None
                continue
            *want, payload = waiting.popleft()
            assert [record.seq, record.position, record.end_position, record.meta] == want
            assert bytes(record.payload) == payload
            held.append([record, record.end_position, False, payload])
        else:
            open_ = [h for h in held if not h[2]]
            if open_:
                chosen = open_[op[1] % len(open_)]
                assert bytes(chosen[0].payload) == chosen[3]  # not overwritten while held
                chosen[0].release()
                chosen[2] = True
            while held and held[0][2]:
                tail = held.pop(0)[1]
        assert (writer.head, writer.tail, reader.head, reader.tail) == (head, tail, head, tail)


# The GIL


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """Other threads run only while the GIL is let go of one's own accord."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("what", ["copy_rows", "reserve"])
def test_other_threads_run_meanwhile(ring_dir: Path, what: str) -> None:
    source = np.zeros(32 << 20, np.uint8)
    turns = 0
    stop = False

    def count() -> None:
        nonlocal turns
        while not stop:
            turns += 1
            time.sleep(0)

    with RingWriter.create(ring_dir / "r", 64 << 20, b"") as writer:
        slot = writer.reserve(ROWS, b"", source.size)
        thread = threading.Thread(target=count)
        thread.start()
        advanced = False
        for _ in range(50):
            before = turns
            if what == "copy_rows":
                slot.copy_rows(0, source.ctypes.data, 1, source.size, source.size)
            else:
                assert writer.reserve(ROWS, b"", source.size, wait_s=0.01) is None
            advanced = turns > before
            if advanced:
                break
        stop = True
        thread.join()
    assert advanced
