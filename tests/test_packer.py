"""From ring to shards: repeats, torn and malformed records, a full disk, several rings."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer.packer import RingPacker
from hstransport_consumer.stream import Streams
from rig.consumer import ConsumerProcess
from rig.producer import Producer, tokens

from hstransport.errors import ConfigError, DatasetMismatchError
from hstransport.protocol import ABORTED, END, FINISHED, ROWS
from hstransport.ring import RingReader

BIN = Path(sys.executable).parent / "hstransport-consumer"


@pytest.fixture
def producer(ring_dir):
    producer = Producer(ring_dir)
    yield producer
    producer.close()


def pack(ring_dir, out, *, session=None, until_idle=True, flush_s=0.0):
    """Run a consumer in this process until its rings have ended (or have nothing left)."""
    streams = Streams(ring_dir, session)
    writer = DatasetWriter(out)
    packer = RingPacker(streams, writer, flush_s=flush_s)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            busy = packer.step(0.01)
            if (packer.idle if until_idle else not busy) and packer.seen:
                break
        packer.drain()
    finally:
        packer.close()
        writer.close()
    return packer


def test_samples_reach_the_shards_bit_for_bit(producer, ring_dir, tmp_path):
    sent = {n: producer.sample(n, 20 + i) for i, n in enumerate("abc")}
    producer.close()
    packer = pack(ring_dir, tmp_path)
    assert packer.totals.states == {"whole": 3}
    assert packer.totals.tokens == 63
    dataset = open_shards(tmp_path)
    for name, states in sent.items():
        assert np.array_equal(dataset[name].hidden_states, states.transpose(1, 0, 2))
        assert dataset[name].labels == {"name": name}
    assert not producer.place.path.exists()


def test_records_stored_before_a_crash_are_not_stored_again(producer, ring_dir, tmp_path):
    """The consumer died between writing a window and freeing it: the ring repeats it."""
    states = producer.sample("a", 10)
    pack(ring_dir, tmp_path, until_idle=False)
    # Put the tail back by hand, as if the release had never happened.
    with producer.place.path.open("r+b") as f:
        f.seek(192)
        f.write((0).to_bytes(8, "little"))
    more = producer.sample("b", 10)
    producer.close()
    packer = pack(ring_dir, tmp_path)
    assert packer.totals.repeated == 3
    dataset = open_shards(tmp_path)
    assert sorted(dataset.ids) == ["a", "b"]
    assert np.array_equal(dataset["a"].hidden_states, states.transpose(1, 0, 2))
    assert np.array_equal(dataset["b"].hidden_states, more.transpose(1, 0, 2))


def reserve(producer, kind, meta, payload_bytes=0):
    return producer.ring.reserve(kind, msgpack.packb(meta), payload_bytes)


def test_malformed_records_are_counted_and_their_samples_named(producer, ring_dir, tmp_path):
    good = producer.sample("good", 4)
    bad = producer.start("bad", 4)
    reserve(producer, ROWS, {"seg": [bad.sid, 0, 4]}, 100).commit()  # a payload of another size
    reserve(producer, END, {"sid": "nonsense"}).commit()
    producer.exporter.end(bad, FINISHED, 4, tokens(0))
    producer.close()
    packer = pack(ring_dir, tmp_path)
    assert packer.totals.malformed == 2
    assert packer.totals.states == {"whole": 1, "incomplete": 1}
    assert np.array_equal(open_shards(tmp_path)["good"].hidden_states, good.transpose(1, 0, 2))


def test_rows_that_were_abandoned_make_the_sample_incomplete(producer, ring_dir, tmp_path):
    sample = producer.start("a", 4)
    payload = 4 * producer.info.row_bytes
    reserve(producer, ROWS, {"seg": [sample.sid, 0, 4]}, payload).abandon()
    producer.exporter.end(sample, FINISHED, 4, tokens(0))
    producer.close()
    assert pack(ring_dir, tmp_path).totals.states == {"incomplete": 1}


def test_record_torn_by_the_servers_death_is_stepped_over(ring_dir, tmp_path):
    code = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from rig.producer import Producer
import msgpack
p = Producer(Path({str(ring_dir)!r}))
p.sample("a", 5)
b = p.start("b", 5)
p.ring.reserve(1, msgpack.packb({{"seg": [b.sid, 0, 5]}}), 5 * p.info.row_bytes)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    packer = pack(ring_dir, tmp_path)
    assert packer.totals.torn == 1
    assert packer.totals.states == {"whole": 1, "unfinished": 1}
    assert not list(ring_dir.rglob("*.ring"))


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_loses_nothing(producer, ring_dir, tmp_path, monkeypatch):
    states = producer.sample("a", 50)
    streams = Streams(ring_dir, None)
    writer = DatasetWriter(tmp_path)
    packer = RingPacker(streams, writer, flush_s=0.0)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", full_disk)
    with pytest.raises(OSError, match="No space"):
        for _ in range(100):
            packer.step(0.01)
    assert producer.ring.used_bytes > 0
    monkeypatch.setattr(os, "pwritev", real)
    producer.close()
    while not packer.idle:
        packer.step(0.01)
    packer.close()
    writer.close()
    assert np.array_equal(open_shards(tmp_path)["a"].hidden_states, states.transpose(1, 0, 2))


def test_rings_of_two_replicas_go_into_one_dataset(producer, ring_dir, tmp_path):
    other = Producer(ring_dir, rank=1)
    a, b = producer.sample("a", 3), other.sample("b", 4)
    producer.close()
    other.close()
    pack(ring_dir, tmp_path)
    dataset = open_shards(tmp_path)
    assert np.array_equal(dataset["a"].hidden_states, a.transpose(1, 0, 2))
    assert np.array_equal(dataset["b"].hidden_states, b.transpose(1, 0, 2))


def test_long_decode_does_not_pin_the_ring(producer, ring_dir, tmp_path):
    """A sample of more rows than the ring holds, one row a step, beside short ones."""
    streams = Streams(ring_dir, None)
    writer = DatasetWriter(tmp_path)
    packer = RingPacker(streams, writer, flush_s=0.0)
    long = producer.start("long", 4000)
    sent = []
    for position in range(4000):
        sent.append(producer.rows((long, position, 1)))
        if position % 400 == 0:
            producer.sample(f"short-{position}", 3)
        if position % 50 == 0:
            packer.step(0.0)
    producer.exporter.end(long, FINISHED, 4000, tokens(0))
    producer.close()
    while not packer.idle:
        packer.step(0.01)
    packer.close()
    writer.close()
    assert packer.totals.states == {"whole": 11}
    got = open_shards(tmp_path)["long"].hidden_states
    assert np.array_equal(got, np.concatenate(sent, axis=1).transpose(1, 0, 2))


def test_another_model_in_the_same_directory_is_refused(producer, ring_dir, tmp_path):
    producer.sample("a", 3)
    producer.close()
    pack(ring_dir, tmp_path)
    other = Producer(ring_dir, run="cd" * 6, layers=(4,))
    other.sample("b", 3)
    with pytest.raises(DatasetMismatchError, match="layers"):
        pack(ring_dir, tmp_path)
    other.close()


def test_several_sessions_must_be_told_apart(producer, ring_dir, tmp_path):
    other = Producer(ring_dir, session="t", run="cd" * 6)
    with pytest.raises(ConfigError, match=r"s, t.*--session"):
        pack(ring_dir, tmp_path)
    producer.sample("a", 3)
    producer.close()
    pack(ring_dir, tmp_path, session="s")
    assert open_shards(tmp_path).ids == ["a"]
    other.close()


def run(*args, timeout=30):
    return subprocess.run([BIN, *map(str, args)], capture_output=True, text=True, timeout=timeout)


def test_consumer_waits_for_a_server_then_stops_in_order_with_all_on_disk(ring_dir, tmp_path):
    consumer = ConsumerProcess(tmp_path / "s", ring_dir)
    consumer.start()
    deadline = time.monotonic() + 10
    while "waiting for a server" not in consumer.log_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "waiting for a server" in consumer.log_text()
    producer = Producer(ring_dir)
    while "attached to session s" not in consumer.log_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    for i in range(20):
        producer.sample(f"s{i}", 5)
    assert consumer.stop() == 0
    assert len(open_shards(tmp_path / "s")) == 20
    assert not list((tmp_path / "s").glob("*.partial"))
    assert "20 samples (20 whole)" in consumer.log_text()
    producer.close()


def test_consumer_resumes_into_the_same_directory(producer, ring_dir, tmp_path):
    half = producer.start("half", 8)
    first = producer.rows((half, 0, 4))
    with ConsumerProcess(tmp_path / "s", ring_dir) as consumer:
        deadline = time.monotonic() + 10
        while producer.ring.used_bytes and time.monotonic() < deadline:
            time.sleep(0.02)
        assert consumer.stop() == 0
    second = producer.rows((half, 4, 4))
    producer.exporter.end(half, FINISHED, 8, tokens(0))
    aborted = producer.start("aborted", 4)
    producer.exporter.end(aborted, ABORTED, 4, tokens(0), detail="by the caller")
    producer.close()
    result = run("--out", tmp_path / "s", "--dir", ring_dir, "--exit-when-done")
    assert result.returncode == 0, result.stderr
    dataset = open_shards(tmp_path / "s", states=None)
    assert dataset["aborted"].state == "aborted"
    joined = np.concatenate([first, second], axis=1).transpose(1, 0, 2)
    assert np.array_equal(dataset["half"].hidden_states, joined)


def test_samples_of_a_run_whose_ring_is_gone_are_named(producer, ring_dir, tmp_path):
    """Somebody deleted the ring (or the machine was restarted) while a sample was open."""
    producer.start("open", 4)
    pack(ring_dir, tmp_path, until_idle=False)
    producer.place.path.unlink()
    other = Producer(ring_dir, run="cd" * 6)
    other.sample("next", 3)
    other.close()
    pack(ring_dir, tmp_path)
    dataset = open_shards(tmp_path, states=None)
    assert {s.id: s.state for s in dataset} == {"open": "unfinished", "next": "whole"}


def test_second_signal_ends_at_once_and_loses_nothing(producer, ring_dir, tmp_path):
    producer.sample("a", 5)
    consumer = ConsumerProcess(tmp_path / "s", ring_dir)
    consumer.start()
    consumer.wait_for(["a"])
    consumer.process.send_signal(signal.SIGINT)
    consumer.process.send_signal(signal.SIGINT)
    consumer.process.wait(10)
    producer.sample("b", 5)
    producer.close()
    assert run("--out", tmp_path / "s", "--dir", ring_dir, "--exit-when-done").returncode == 0
    assert sorted(open_shards(tmp_path / "s").ids) == ["a", "b"]


def test_second_consumer_on_a_directory_or_a_ring_is_refused(producer, ring_dir, tmp_path):
    producer.sample("a", 5)
    with ConsumerProcess(tmp_path / "s", ring_dir) as consumer:
        consumer.wait_for(["a"])
        result = run("--out", tmp_path / "s", "--dir", ring_dir)
        assert result.returncode == 2
        assert "hstransport-consumer: error:" in result.stderr
        with pytest.raises(Exception, match="another consumer"):
            RingReader.attach(producer.place.path)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--out", "/proc/nowhere"], "/proc/nowhere"),
        (["--out", "/dev/null"], "directory"),
        (["--out", "OUT", "--session", "a/b"], "session name"),
        (["--out", "OUT", "--shard-size", "huge"], "--shard-size"),
        (["--out", "OUT", "--threads", "0"], "threads"),
    ],
)
def test_bad_arguments_are_named(ring_dir, tmp_path, args, told):
    result = run(*[str(tmp_path / "s") if a == "OUT" else a for a in args], "--dir", ring_dir)
    assert result.returncode == 2, result.stderr
    assert told in result.stderr
    assert "Traceback" not in result.stderr


def test_help_shows_an_example():
    assert "hstransport-consumer --out /data/shards" in run("--help").stdout


def test_rows_whose_beginning_another_consumer_took_are_counted(producer, ring_dir, tmp_path):
    half = producer.start("half", 4)
    reader = RingReader.attach(producer.place.path)
    reader.read().release()
    reader.close()
    producer.rows((half, 0, 4))
    producer.exporter.end(half, FINISHED, 4, tokens(0))
    producer.close()
    totals = pack(ring_dir, tmp_path).totals
    assert (totals.orphan_rows, totals.anomalies) == (4, 1)


@pytest.mark.parametrize("stopping", [False, True])
def test_damaged_ring_is_given_up_and_the_others_go_on(producer, ring_dir, tmp_path, stopping):
    other = Producer(ring_dir, rank=1)
    streams = Streams(ring_dir, None)
    writer = DatasetWriter(tmp_path)
    packer = RingPacker(streams, writer, flush_s=0.0)
    packer.step(0.0)  # attaches
    states = other.sample("good", 4)
    producer.start("damaged", 4)
    at = producer.ring.head
    producer.sample("behind", 4)
    with producer.place.path.open("r+b") as f:
        f.seek(4096 + at + 8)
        f.write((12345).to_bytes(8, "little"))  # its record_bytes
    other.close()
    for _ in range(0 if stopping else 20):
        packer.step(0.0)
    packer.drain()
    packer.close()
    writer.close()
    dataset = open_shards(tmp_path, states=None)
    assert np.array_equal(dataset["good"].hidden_states, states.transpose(1, 0, 2))
    assert dataset["damaged"].state == "unfinished"
    assert producer.place.path.exists(), "left for a person to look at"
    assert list(streams.refused) == [producer.place.path]


def test_a_ring_whose_header_is_damaged_does_not_end_the_others(producer, ring_dir, tmp_path):
    other = Producer(ring_dir, rank=1)
    streams = Streams(ring_dir, None)
    writer = DatasetWriter(tmp_path)
    packer = RingPacker(streams, writer, flush_s=0.0)
    producer.start("open", 4)
    while producer.ring.used_bytes:
        packer.step(0.0)
    with producer.place.path.open("r+b") as f:
        f.seek(128)
        f.write((13).to_bytes(8, "little"))  # head
    states = other.sample("good", 4)
    other.close()
    while not packer.idle:
        packer.step(0.0)
    packer.close()
    writer.close()
    dataset = open_shards(tmp_path, states=None)
    assert np.array_equal(dataset["good"].hidden_states, states.transpose(1, 0, 2))
    assert dataset["open"].state == "unfinished"
    assert producer.place.path.exists(), "left for a person to look at"
    assert "head is 13" in streams.refused[producer.place.path]


def test_a_ring_that_is_always_full_does_not_keep_others_waiting(ring_dir, tmp_path):
    """Its windows alone would keep the packing threads busy."""
    busy, quiet = Producer(ring_dir, ring_bytes=8 << 20), Producer(ring_dir, rank=1)
    streams = Streams(ring_dir, None)
    writer = DatasetWriter(tmp_path)
    packer = RingPacker(streams, writer, flush_s=0.0)
    number = 0

    def step():
        nonlocal number
        while busy.ring.capacity_bytes - busy.ring.used_bytes > 1 << 20:
            busy.sample(f"busy-{number}", 1024)  # a chunk of its own
            number += 1
        packer.step(0.0)

    while packer.totals.records < 100:
        step()
    for i in range(3):
        quiet.sample(f"quiet-{i}", 4)
        for _ in range(4):
            step()
        assert not quiet.ring.used_bytes, "it had no turn"
    busy.close()
    quiet.close()
    while not packer.idle:
        packer.step(0.0)
    packer.close()
    writer.close()
    assert packer.totals.states == {"whole": number + 3}


def test_runs_of_other_sessions_stay_open(producer, ring_dir, tmp_path):
    half = producer.start("half", 4)
    first = producer.rows((half, 0, 2))
    pack(ring_dir, tmp_path, until_idle=False)
    other = Producer(ring_dir, session="t", run="cd" * 6)
    other.sample("b", 3)
    other.close()
    pack(ring_dir, tmp_path, session="t")
    second = producer.rows((half, 2, 2))
    producer.exporter.end(half, FINISHED, 4, tokens(0))
    producer.close()
    pack(ring_dir, tmp_path, session="s")
    joined = np.concatenate([first, second], axis=1).transpose(1, 0, 2)
    assert np.array_equal(open_shards(tmp_path)["half"].hidden_states, joined)


def test_full_disk_at_the_end_of_a_run_is_tried_again(producer, ring_dir, tmp_path, monkeypatch):
    producer.start("open", 4)
    producer.close()
    streams = Streams(ring_dir, None)
    writer = DatasetWriter(tmp_path)
    packer = RingPacker(streams, writer, flush_s=0.0)
    while not packer.totals.records:
        packer.step(0.01)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", full_disk)
    with pytest.raises(OSError, match="No space"):
        packer.step(0.01)
    assert not packer.idle
    monkeypatch.setattr(os, "pwritev", real)
    packer.step(0.01)
    assert packer.idle
    packer.close()
    writer.close()
    assert open_shards(tmp_path, states=None)["open"].state == "unfinished"


def test_a_record_whose_bytes_come_later_is_waited_for_briefly(producer, ring_dir, tmp_path):
    """Its message came before its bytes did, and there is none for these."""
    sample = producer.start("a", 4)
    streams = Streams(ring_dir, None)
    writer = DatasetWriter(tmp_path)
    packer = RingPacker(streams, writer, flush_s=0.0)
    while packer.step(0.0) or not packer.totals.records:
        pass
    started = time.monotonic()
    assert not packer.step(0.5)
    assert time.monotonic() - started > 0.4, "nothing is to be expected"
    payload = 4 * producer.info.row_bytes
    record = reserve(producer, ROWS, {"seg": [sample.sid, 0, 4]}, payload)
    started = time.monotonic()
    assert not packer.step(0.5)
    assert time.monotonic() - started < 0.4
    record.commit()
    producer.exporter.end(sample, FINISHED, 4, tokens(0))
    producer.close()
    while not packer.idle:
        packer.step(0.01)
    packer.close()
    writer.close()
    assert packer.totals.states == {"whole": 1}


def test_windows_are_packed_side_by_side_and_stored_in_order(
    producer, ring_dir, tmp_path, monkeypatch
):
    """A later window is being packed while the first is; and a full disk has all begun again."""
    sent = {f"s{i}": producer.sample(f"s{i}", 300) for i in range(7)}
    producer.close()
    streams = Streams(ring_dir, None)
    writer = DatasetWriter(tmp_path, shard_bytes=200_000)
    packer = RingPacker(streams, writer, flush_s=0.0)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", full_disk)
    begun = []
    for _ in range(4):
        with pytest.raises(OSError, match="No space"):
            for _ in range(100):
                packer.step(0.0)
                begun.append(writer.begun)
        assert writer.begun == 0
    assert max(begun) >= 2
    monkeypatch.setattr(os, "pwritev", real)
    while not packer.idle:
        packer.step(0.01)
    packer.close()
    writer.close()
    dataset = open_shards(tmp_path)
    assert list(dataset.ids) == list(sent) and len(dataset.shards) > 1
    for name, states in sent.items():
        assert np.array_equal(dataset[name].hidden_states, states.transpose(1, 0, 2))
    assert (packer.totals.states, packer.totals.repeated) == ({"whole": 7}, 0)


def test_draining_leaves_nothing_in_any_ring(ring_dir, tmp_path, monkeypatch):
    """Also of a ring whose window was full when the stop came, and waited for the threads."""
    made = [Producer(ring_dir, rank=rank, ring_bytes=4 << 20) for rank in (0, 1)]
    for producer in made:
        for i in range(10):
            producer.sample(f"{producer.info.rank}-{i}", 600)  # two windows of a MiB, and more
    streams = Streams(ring_dir, None)
    with DatasetWriter(tmp_path) as writer:
        packer = RingPacker(streams, writer, flush_s=60)
        with monkeypatch.context() as patch:
            patch.setattr(DatasetWriter, "hungry", property(lambda self: False))
            packer.step(0)
        packer.drain()
        states = packer.totals.states
        packer.close()
    for producer in made:
        producer.close()
    assert states == {"whole": 20}
