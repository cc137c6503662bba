"""Another process truncates a ring's file: what is gone is a SIGBUS to touch, and nobody dies."""

from __future__ import annotations

import faulthandler
import mmap
import multiprocessing as mp
import os
import resource
import signal
import subprocess
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hstransport_consumer import Consumer, DatasetWriter, open_shards
from hstransport_consumer.packer import RingPacker
from hstransport_consumer.stream import Streams
from rig.consumer import ConsumerProcess
from rig.producer import Producer, tokens

from hstransport.errors import RingCorruptError
from hstransport.protocol import FINISHED
from hstransport.ring import RingReader, RingWriter

spawn = mp.get_context("spawn")
CAPACITY = 256 << 10
ROWS = 1


@pytest.fixture
def path(ring_dir: Path) -> Path:
    return ring_dir / "r-0.ring"


@contextmanager
def child(run: Any, *args: Any):
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=run, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(30)


def receive(pipe: Connection) -> Any:
    assert pipe.poll(60), "the other process says nothing"
    return pipe.recv()


def truncate(path: Path, size: int) -> None:
    subprocess.run(["truncate", "-s", str(size), str(path)], check=True)


def put(writer: RingWriter, byte: int, size: int = 30_000) -> None:
    slot = writer.reserve(ROWS, b"", size)
    slot.payload[:] = byte
    slot.commit()


def write_without_end(pipe: Connection, path: Path) -> None:
    """A server that goes on, whatever becomes of capture."""
    faulthandler.enable()  # as SGLang's scheduler does
    with RingWriter.create(path, CAPACITY, b"") as writer, RingReader.attach(path) as reader:
        pipe.send("ready")
        try:
            while True:
                put(writer, 7)
                with suppress(RingCorruptError):  # the reader has a mapping of its own
                    reader.read().release()
        except RingCorruptError as e:
            pipe.send(str(e))
        try:
            put(writer, 7)
        except RingCorruptError:
            pipe.send(writer.close())
    pipe.recv()


def read_another_file(pipe: Connection, path: Path, sandwich: bool) -> None:
    """One that has a ring, and dies of another file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    other, last = path.with_name("other"), path.with_name("s-0.ring")
    other.write_bytes(bytes(8192))
    with other.open("r+b") as f, RingWriter.create(path, CAPACITY, b"") as writer:
        if sandwich:  # a handler that has ours behind it, and ours again before it
            faulthandler.enable()
            writer = RingWriter.create(last, CAPACITY, b"")
        view = mmap.mmap(f.fileno(), 8192)
        os.truncate(other, 0)
        pipe.send(view[4096] + writer.head)


@pytest.mark.parametrize("size", [0, 100_000])
def test_the_server_lives_and_its_capture_ends(path: Path, size: int) -> None:
    with child(write_without_end, path) as (process, pipe):
        receive(pipe)
        truncate(path, size)
        assert "another process has truncated the file" in receive(pipe)
        assert receive(pipe) is False, "closed, and left for a person to look at"
        assert process.is_alive() and path.stat().st_size == size


@pytest.mark.parametrize("sandwich", [False, True])
def test_faults_of_other_files_are_whose_they_were(path: Path, sandwich: bool) -> None:
    with child(read_another_file, path, sandwich) as (process, _):
        process.join(60)
        assert process.exitcode == -signal.SIGBUS


def test_what_was_read_counts_only_if_the_file_is_whole_afterwards(path: Path) -> None:
    with RingWriter.create(path, CAPACITY, b"") as writer, RingReader.attach(path) as reader:
        for byte in (1, 2):
            put(writer, byte)
        one, two = reader.read(), reader.read()
        truncate(path, 4096 + 30_000)
        assert set(one.payload[:20_000]) == {1}
        assert not two.payload[-5000:].any()
        with pytest.raises(RingCorruptError, match="another process has truncated"):
            reader.check_whole()
        with pytest.raises(RingCorruptError, match="another process has truncated"):
            reader.read()
        assert not reader.unlink_if_orphaned()


@pytest.mark.parametrize("gone", ["pages", "the end of a page"])
def test_a_window_of_zeros_is_not_stored(gone: str, ring_dir: Path, tmp_path: Path) -> None:
    producer = Producer(ring_dir)
    writer = DatasetWriter(tmp_path)
    streams = Streams(ring_dir, None)
    packer = RingPacker(streams, writer, flush_s=1e9)
    states = producer.sample("before", 50)
    while not packer.step(0):
        pass
    packer.drain()
    half = producer.start("half", 50)
    producer.rows((half, 0, 50))
    used = producer.ring.head
    for _ in range(5):
        packer.step(0)  # reads the records, and packs none
    assert streams.live[0].reader.cursor == used
    lost = 9000 if gone == "pages" else used % 4096 - 64
    assert lost > 500
    truncate(producer.place.path, 4096 + used - lost)
    packer._flush_s = 0.0
    for _ in range(5):
        packer.step(0)
    packer.close()
    writer.close()
    samples = open_shards(tmp_path, states=None)
    assert np.array_equal(samples["before"].hidden_states, states.transpose(1, 0, 2))
    assert set(samples.ids) == {"before"} and "truncated" in str(streams.refused)
    producer.close()


def test_a_live_sample_of_zeros_is_not_given_out(ring_dir: Path) -> None:
    """Its END lies where the file still is, and its rows, which are put together, do not."""
    producer = Producer(ring_dir, ring_bytes=CAPACITY)
    with Consumer.attach(root=ring_dir, wait_s=10) as samples:
        ids = iter(samples)
        producer.sample("before", 220)
        assert next(ids).id == "before"
        half = producer.start("half", 300)
        for at in (0, 150):
            producer.rows((half, at, 150))
        assert producer.ring.head < CAPACITY
        producer.sample("other", 150)  # its rows fit at the beginning of the ring again
        assert next(ids).id == "other" and producer.ring.head > CAPACITY
        producer.exporter.end(half, FINISHED, 300, tokens(0))
        producer.exporter.flush()
        truncate(producer.place.path, 4096 + 100_000)
        with pytest.raises(RingCorruptError, match="another process has truncated"):
            next(ids)
    producer.close()


@pytest.mark.parametrize("size", [0, 8192])
def test_the_consumer_goes_on_with_other_rings(ring_dir: Path, tmp_path: Path, size: int) -> None:
    cut = Producer(ring_dir)
    good = Producer(ring_dir, rank=1)
    with ConsumerProcess(tmp_path / "s", ring_dir) as consumer:
        cut.sample("before", 50)
        half = cut.start("open", 50)
        cut.rows((half, 0, 40))
        consumer.wait_for(["before"])
        truncate(cut.place.path, size)
        with pytest.raises(RingCorruptError):
            while True:  # a server that goes on
                cut.sample("lost", 50)
        states = good.sample("after", 50)
        samples = consumer.wait_for(["before", "open", "after"])
        assert samples["before"].state == "whole" and samples["open"].state == "unfinished"
        assert np.array_equal(samples["after"].hidden_states, states.transpose(1, 0, 2))
        assert "another process has truncated the file" in consumer.log_text()
        good.close()
        assert consumer.stop() == 0
    cut.close()
    assert cut.place.path.stat().st_size == size
