"""Two real processes on one ring, and what is left when either is killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hstransport.errors import RingBusyError
from hstransport.ring import RingReader, RingWriter, inspect_ring

CAPACITY = 64 << 10
ROWS = 1
spawn = mp.get_context("spawn")


@pytest.fixture
def path(ring_dir: Path) -> Path:
    return ring_dir / "r-0.ring"


@contextmanager
def child(run: Callable[..., None], *args: Any):
    """Another process; yields it and a pipe to it, and kills it at the end."""
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=run, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        kill(process)


def kill(process: BaseProcess) -> None:
    process.kill()  # SIGKILL: nothing is cleaned up
    # Not join(): that waits for a pipe to close, which a forked grandchild holds open.
    deadline = time.monotonic() + 30
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.exitcode is not None


def receive(pipe: Connection) -> Any:
    assert pipe.poll(60), "the other process says nothing"
    return pipe.recv()


def put(writer: RingWriter, payload: bytes, meta: bytes = b"") -> None:
    slot = writer.reserve(ROWS, meta, len(payload))
    slot.payload[:] = np.frombuffer(payload, np.uint8)
    slot.commit()


def drain(reader: RingReader) -> list[bytes]:
    payloads = []
    while (record := reader.read()) is not None:
        with record:
            payloads.append(bytes(record.payload))
    return payloads


# The other process


def produce_and_wait(pipe: Connection, path: Path, committed: int, pending: int) -> None:
    """Leave records in the ring, the pending ones among the last, then wait to be killed."""
    writer = RingWriter.create(path, CAPACITY, b"info")
    for i in range(committed):
        put(writer, b"%d" % i)
    slots = [writer.reserve(2, b"pending %d" % i, 8) for i in range(pending)]
    put(writer, b"last")
    pipe.send(len(slots))
    pipe.recv()


def create(pipe: Connection, path: Path, capacity: int) -> None:
    pipe.send("now")
    RingWriter.create(path, capacity, b"")
    pipe.recv()


def consume_and_hold(pipe: Connection, path: Path, release: int, hold: int) -> None:
    """Release some records, hold others, then wait to be killed."""
    reader = RingReader.attach(path)
    for _ in range(release):
        reader.read().release()
    held = [reader.read() for _ in range(hold)]
    held[-1].release()  # out of order: it frees nothing
    pipe.send(reader.tail)
    pipe.recv()


def attach_once(pipe: Connection, path: Path) -> None:
    try:
        RingReader.attach(path).close()
        pipe.send("attached")
    except RingBusyError as e:
        pipe.send(str(e))


def produce_and_fork(pipe: Connection, path: Path) -> None:
    """A server whose forked child outlives it."""
    writer = RingWriter.create(path, CAPACITY, b"")
    slot = writer.reserve(ROWS, b"", 8)
    view = slot.payload
    if (pid := os.fork()) == 0:
        assert not writer.close() and path.exists()  # the role is gone
        view[0] = 1  # the memory is not
        signal.pause()
    pipe.send(pid)
    pipe.recv()


def hammer(pipe: Connection, path: Path, records: int) -> None:
    writer = RingWriter.create(path, CAPACITY, b"")
    source = np.random.default_rng(1).integers(0, 256, 8192, np.uint8)
    rng = random.Random(2)
    pipe.send("ready")
    for n in range(records):
        offset, size = rng.randrange(4096), rng.randrange(1, 4096 if n % 64 == 0 else 300)
        meta = b"%d" % zlib.crc32(source[offset : offset + size])
        slot = writer.reserve(ROWS, meta, size, wait_s=60)
        slot.copy_rows(0, source.ctypes.data + offset, 1, size, size)
        if n % 17 == 0:
            slot.abandon()
        else:
            slot.commit()
    writer.close()
    pipe.send(writer.counters)


# What this process sees of it


def test_a_late_consumer_gets_everything(path: Path) -> None:
    with child(produce_and_wait, path, 5, 0) as (_, pipe):
        receive(pipe)
        with RingReader.attach(path) as reader:
            assert reader.info == b"info" and reader.producer_alive()
            assert drain(reader) == [b"0", b"1", b"2", b"3", b"4", b"last"]


def test_a_new_consumer_goes_on_where_a_killed_one_had_freed(path: Path) -> None:
    with RingWriter.create(path, CAPACITY, b"") as writer:
        for i in range(8):
            put(writer, b"%d" % i)
        with child(consume_and_hold, path, 2, 3) as (process, pipe):
            assert receive(pipe) == 2 * 128
            assert writer.consumer_attached()
            with pytest.raises(RingBusyError):
                RingReader.attach(path)
            kill(process)
        assert not writer.consumer_attached()
        with RingReader.attach(path) as reader:
            assert drain(reader) == [b"2", b"3", b"4", b"5", b"6", b"7"]
        assert writer.close() and not path.exists()


def test_a_killed_producers_ring_is_drained_and_removed(path: Path) -> None:
    with child(produce_and_wait, path, 2, 2) as (process, pipe):
        assert receive(pipe) == 2
        with RingReader.attach(path) as reader:
            assert drain(reader) == [b"0", b"1"]
            assert reader.pending() and reader.producer_alive()
            with pytest.raises(RingBusyError, match="producer is alive"):
                reader.skip_pending()
            assert not reader.unlink_if_orphaned()
            kill(process)

            assert not reader.producer_alive() and not reader.closed
            assert inspect_ring(path).pending == 2
            skipped = [reader.skip_pending(), reader.skip_pending()]
            assert [(s.seq, s.kind, s.meta) for s in skipped] == [
                (2, 2, b"pending 0"),
                (3, 2, b"pending 1"),
            ]
            assert [s.position for s in skipped] == [256, 448] and skipped[0].record_bytes == 192
            assert reader.skip_pending() is None and not reader.pending()
            assert not reader.unlink_if_orphaned() and path.exists()
            assert drain(reader) == [b"last"]
            assert reader.unlink_if_orphaned() and not path.exists()


def test_a_producer_killed_while_it_takes_memory_leaves_none(path: Path) -> None:
    with child(create, path, 128 << 20) as (process, pipe):
        assert receive(pipe) == "now"
        time.sleep(0.02)  # (the memory of such a ring takes five times as long)
        kill(process)
    assert {p.name for p in path.parent.iterdir()} <= {path.name}


def test_a_second_consumer_is_refused_while_the_first_lives(path: Path) -> None:
    with RingWriter.create(path, CAPACITY, b""):
        with RingReader.attach(path), child(attach_once, path) as (_, pipe):
            assert "another consumer is attached" in receive(pipe)
        with child(attach_once, path) as (_, pipe):
            assert receive(pipe) == "attached"


def test_closing_another_descriptor_of_the_file_keeps_the_roles(path: Path) -> None:
    with RingWriter.create(path, CAPACITY, b"") as writer, RingReader.attach(path) as reader:
        with path.open("rb") as f:  # POSIX locks would be gone with this close
            f.read(1)
        inspect_ring(path)
        assert reader.producer_alive() and writer.consumer_attached()
        with child(attach_once, path) as (_, pipe):
            assert "another consumer is attached" in receive(pipe)


def test_a_forked_child_does_not_pass_for_its_killed_server(path: Path) -> None:
    with child(produce_and_fork, path) as (process, pipe):
        pid = receive(pipe)
        try:
            with RingReader.attach(path) as reader:
                deadline = time.monotonic() + 30
                while not read_first_byte(path) and time.monotonic() < deadline:
                    time.sleep(0.005)
                assert read_first_byte(path) == 1 and reader.producer_alive()
                kill(process)
                os.kill(pid, 0)  # the child lives on
                assert not reader.producer_alive()
                assert reader.skip_pending().seq == 0
        finally:
            os.kill(pid, signal.SIGKILL)


def read_first_byte(path: Path) -> int:
    with path.open("rb") as f:
        f.seek(4096 + 64)
        return f.read(1)[0]


@pytest.mark.parametrize("records", [200_000])
def test_every_record_arrives_whole_under_load(path: Path, records: int) -> None:
    rng = random.Random(3)
    held = []
    with child(hammer, path, records) as (_, pipe):
        receive(pipe)
        with RingReader.attach(path) as reader:
            seq = 0
            deadline = time.monotonic() + 120
            while seq < records and time.monotonic() < deadline:
                record = reader.read()
                if record is not None:
                    assert record.seq == seq and record.abandoned == (seq % 17 == 0)
                    if not record.abandoned:
                        assert zlib.crc32(record.payload) == int(record.meta)
                    held.append(record)
                    seq += 1
                while held and (record is None or len(held) > 8):
                    held.pop(rng.randrange(len(held))).release()
            for record in held:
                record.release()
            counters = receive(pipe)
            assert seq == counters.records == records and counters.dropped_records == 0
            assert reader.counters == counters and reader.tail == reader.head
            assert reader.closed
