"""``hstransport top``: what rings and disk say, without a word from server or consumer."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple

import pytest
from rig.consumer import ConsumerProcess
from rig.producer import Producer

from hstransport.cli import main, watch
from hstransport.cli.watch import Watch
from hstransport.ring import RingReader


@pytest.fixture
def producer(ring_dir):
    producer = Producer(ring_dir)
    yield producer
    producer.close()


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

        time = staticmethod(time.time)

    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


def top(capsys, ring_dir, *args):
    """(exit status, the printed object, stderr) of one look."""
    words = ["top", "--dir", ring_dir, "--once", "--json", "--interval", "0.05", *args]
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, json.loads(out), err


def test_rates_fill_and_lag_are_those_of_the_ring(producer, ring_dir, clock):
    seen = Watch(ring_dir, None, None)
    producer.sample("a", 50)
    first = seen.look().rings[0]
    assert (first.session, first.rank, first.model) == ("s", 0, "model")
    assert (first.in_gbs, first.out_gbs, first.lag_s) == (None, None, None)
    assert (first.lag_records, first.used_bytes) == (3, producer.ring.used_bytes)
    assert first.remarks == ["no consumer"]
    head = producer.ring.head
    producer.sample("b", 80)
    with RingReader.attach(producer.place.path) as reader:
        for _ in range(3):
            reader.read().release()
        clock.now += 2
        then = seen.look().rings[0]
    assert then.in_gbs == pytest.approx((producer.ring.head - head) / 2e9)
    assert then.out_gbs == pytest.approx(producer.ring.tail / 2e9)
    assert then.lag_records == 3 and then.remarks == []
    assert then.lag_s == pytest.approx(2 * producer.ring.used_bytes / producer.ring.tail)


def test_drops_stalls_and_whoever_is_missing_are_named(capsys, ring_dir):
    producer = Producer(ring_dir, policy="block", block_s=0.1)
    for i in range(2000):
        producer.sample(f"s{i}", 40)
    producer.close()  # with ENDs that found no room
    counted = producer.ring.counters
    status, view, _ = top(capsys, ring_dir)
    (row,) = view["rings"]
    assert status == 0
    assert row["counters"] == counted._asdict()
    assert row["counters"]["ring_full"] and row["counters"]["ring_stall_ns"] > 0.9e8
    assert row["remarks"] == [
        "server ended",
        "no consumer",
        f"{counted.samples_lost:,} samples lost",
    ]
    assert main(["top", "--dir", str(ring_dir), "--once", "--interval", "0.05"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["session", "rank"]
    assert f"{counted.ring_full:,} ({counted.ring_full:,} ring_full)" in line
    assert "0.1 s ring" in line and "server ended, no consumer" in line


def test_time_to_full_is_that_of_the_last_minute(monkeypatch, ring_dir, tmp_path, clock):
    usage = namedtuple("usage", "total used free")
    free = [1000]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2000, 0, free[0]))
    seen = Watch(ring_dir, None, tmp_path)
    assert seen.look().disks[0].full_in_s is None
    for left in (900, 700, 650):
        clock.now, free[0] = clock.now + 40, left
        disk = seen.look().disks[0]
    assert (disk.free_bytes, disk.size_bytes) == (650, 2000)
    assert disk.full_in_s == pytest.approx(650 / (50 / 40))
    clock.now, free[0] = clock.now + 40, 800
    assert (seen.look().disks[0].gbs, seen.look().disks[0].full_in_s) == (None, None)


def test_a_running_consumer_empties_the_ring_and_ctrl_c_ends_in_order(producer, ring_dir, tmp_path):
    command = [sys.executable, "-m", "hstransport.cli", "top", "--dir", str(ring_dir)]
    command += ["--json", "--interval", "0.1", "--out", str(tmp_path)]
    producer.sample("a", 50)
    with ConsumerProcess(tmp_path / "s", ring_dir) as consumer:
        consumer.wait_for(["a"])
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            view = json.loads(process.stdout.readline())
            if not view["rings"][0]["lag_records"]:
                break
        assert view["rings"][0]["remarks"] == [] and view["rings"][0]["lag_s"] == 0
        assert [(d["path"], d["free_bytes"] > 0) for d in view["disks"]] == [(str(tmp_path), True)]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(10) == 0


def test_the_disk_is_that_of_the_consumer_at_work(capsys, producer, ring_dir, tmp_path):
    def told():
        _, view, _ = top(capsys, ring_dir)
        return view["rings"][0]["out"], [disk["path"] for disk in view["disks"]]

    producer.sample("a", 50)
    assert told() == (None, [])
    out = tmp_path / "shärds"
    with ConsumerProcess(out, ring_dir) as consumer:
        consumer.wait_for(["a"])
        assert told() == (str(out), [str(out)])
        assert main(["top", "--dir", str(ring_dir), "--once", "--interval", "0.05"]) == 0
        assert f"disk {out}: " in capsys.readouterr().out.replace("\n", "")
        consumer.kill()
    assert told() == (None, [])
    with RingReader.attach(producer.place.path):  # a consumer that stores nothing
        assert told() == (None, [])
    with RingReader.attach(producer.place.path) as reader:
        assert reader.tell_out(tmp_path / "not seen from here")
        assert told() == (str(tmp_path / "not seen from here"), [])
        assert not reader.tell_out(tmp_path / ("x" * 1024))


def test_a_ring_that_cannot_be_read_is_named_beside_the_others(capsys, producer, ring_dir):
    other = producer.place.path.with_name("cd" * 6 + "-1.ring")
    shutil.copy(producer.place.path, other)
    other.chmod(0o600)
    with other.open("r+b") as f:
        f.seek(8)
        f.write((1).to_bytes(4, "little"))
    _, view, _ = top(capsys, ring_dir)
    said = {row["rank"]: row["remarks"][0] for row in view["rings"]}
    assert said[0] == "no consumer"
    assert said[1].startswith("unreadable: ") and "version 1, this release reads 2" in said[1]
    assert main(["top", "--dir", str(ring_dir), "--once", "--interval", "0.05"]) == 0
    assert "unreadable" in capsys.readouterr().out


def test_sessions_are_shown_together_or_one_alone(capsys, producer, ring_dir):
    other = Producer(ring_dir, session="t", run="cd" * 6)
    assert [row["session"] for row in top(capsys, ring_dir)[1]["rings"]] == ["s", "t"]
    assert [r["session"] for r in top(capsys, ring_dir, "--session", "t")[1]["rings"]] == ["t"]
    other.close()


def test_no_ring_and_bad_arguments_say_what_to_do(capsys, ring_dir, tmp_path):
    status, view, err = top(capsys, ring_dir, "--session", "x")
    assert (status, view["rings"], view["disks"]) == (1, [], [])
    assert f"no ring of session x under {ring_dir}: start a server with HSTRANSPORT=1" in err
    for args in (["--out", tmp_path / "none"], ["--session", "a/b"]):
        words = ["top", "--dir", ring_dir, "--once", *args]
        assert main([str(word) for word in words]) == 2
        assert str(args[1]) in capsys.readouterr().err
