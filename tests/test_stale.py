"""A new server run finds what earlier runs of its session left."""

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rig.producer import Producer

from hstransport.errors import ConfigError
from hstransport.protocol import SessionInfo
from hstransport.ring import RingReader
from hstransport.session import session_directory
from hstransport.stale import report_older_rings


@pytest.fixture
def producer(ring_dir):
    producer = Producer(ring_dir)
    yield producer
    producer.close()


def test_ring_with_records_is_kept_and_told_of(producer, ring_dir, caplog):
    producer.sample("a", 5)
    producer.close()
    with caplog.at_level(logging.WARNING):
        report_older_rings(ring_dir, replace(producer.info, run="cd" * 6))
    assert producer.place.path.exists()
    assert "left 3 records" in caplog.text
    assert "hstransport-consumer takes them" in caplog.text


def test_empty_ring_of_a_dead_server_is_removed(ring_dir):
    code = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from rig.producer import Producer
Producer(Path({str(ring_dir)!r}), publish=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(list(ring_dir.rglob("*.ring"))) == 1
    report_older_rings(ring_dir, SessionInfo("cd" * 6, "s", "m", "0", (2,), True, 64, 6))
    assert not list((ring_dir / "s").iterdir())


def test_session_that_is_being_served_is_refused(producer, ring_dir):
    with pytest.raises(ConfigError, match="HSTRANSPORT_SESSION"):
        report_older_rings(ring_dir, replace(producer.info, run="cd" * 6))
    # Another replica of the same server has another rank.
    report_older_rings(ring_dir, replace(producer.info, run="cd" * 6, rank=1))


def test_something_that_is_no_ring_is_left_alone_and_told_of(producer, ring_dir, caplog):
    stranger = producer.place.path.with_name(f"{'ef' * 6}-0.ring")
    stranger.write_bytes(b"x" * 10_000)
    producer.close()
    with caplog.at_level(logging.WARNING):
        report_older_rings(ring_dir, replace(producer.info, run="cd" * 6))
    assert stranger.exists()
    assert str(stranger) in caplog.text


def test_ring_whose_creation_was_cut_short_is_removed_after_a_while(producer, ring_dir):
    fresh = producer.place.path.with_name("1.ring.0123.tmp")
    old = producer.place.path.with_name("2.ring.4567.tmp")
    for path in (fresh, old):
        path.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    producer.close()
    report_older_rings(ring_dir, replace(producer.info, run="cd" * 6))
    assert fresh.exists()
    assert not old.exists()


def jump(path):
    """Make the file look as if the clock had jumped since it was written."""
    os.utime(path, (time.time() - 1e6,) * 2)


def test_ring_that_a_live_server_creates_is_left_alone_whatever_the_clock_says(ring_dir):
    """Where it has a name by then: shared memory gives it none before it is complete."""
    path = session_directory(ring_dir, "s") / ("ab" * 6 + "-0.ring.0123.tmp")
    path.write_bytes(bytes(4096))
    code = f"""
import fcntl, time
ring = open({str(path)!r}, "r+b")
fcntl.lockf(ring, fcntl.LOCK_EX, 1)  # as RingWriter.create holds it
print("held", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    info = SessionInfo("cd" * 6, "s", "m", "0", (2,), True, 64, 6, rank=1)
    try:
        assert child.stdout and child.stdout.readline() == "held\n"
        jump(path)
        report_older_rings(ring_dir, info)
        assert path.exists()
    finally:
        child.kill()
        child.wait()
    report_older_rings(ring_dir, info)
    assert not path.exists()


def test_ring_left_by_a_run_is_drained_by_the_next_consumer(producer, ring_dir):
    producer.sample("a", 5)
    producer.close()
    reader = RingReader.attach(producer.place.path)
    count = 0
    while (record := reader.read()) is not None:
        record.release()
        count += 1
    assert count == 3
    assert reader.unlink_if_orphaned()
    assert not producer.place.path.exists()
