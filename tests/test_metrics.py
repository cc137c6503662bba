"""What the consumer tells others while it runs: its metrics port, and its log as JSON."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hstransport_consumer import metrics
from hstransport_consumer.handover import Handover
from hstransport_consumer.packer import Totals
from hstransport_consumer.stream import Streams
from rig.consumer import ConsumerProcess
from rig.producer import Producer
from rig.scrape import address, scrape

from hstransport.counters import RingCounters
from hstransport.errors import ConfigError


def wait_for(look, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_port_tells_counters_of_both_sides_and_keeps_those_of_ended_rings(ring_dir, tmp_path):
    producer = Producer(ring_dir)
    for i in range(60):
        producer.sample(f"s{i}", 100)  # more than the ring holds: nobody reads yet
    counted = producer.ring.counters
    consumer = ConsumerProcess(tmp_path / "s", ring_dir, "--metrics-port", "0")
    with consumer:
        url = address(consumer)
        wait_for(lambda: scrape(url)["samples_total", "whole"])
        got = wait_for(lambda: (g := scrape(url))["samples_total", "dropped"] and g)
        assert got["dropped_pieces_total", "ring_full"] == counted.ring_full > 0
        assert got["dropped_pieces_total", "stage_full"] == 0
        assert got["dropped_bytes_total",] == counted.dropped_bytes
        assert got["server_bytes_total",] == counted.bytes
        assert got["ring_size_bytes", "0", producer.info.run, "s"] == 1 << 20
        assert got["disk_free_bytes",] == pytest.approx(free(tmp_path), rel=0.1)
        assert got["wait_seconds_total", "disk_full"] == 0
        assert got["tokens_total",] % 100 == 0 < got["stored_bytes_total",]
        wait_for(lambda: not scrape(url)["ring_used_bytes", "0", producer.info.run, "s"])
        producer.close()
        after = wait_for(lambda: (g := scrape(url)) and len(g) < len(got) and g)
        assert after["dropped_pieces_total", "ring_full"] == counted.ring_full
        assert sum(v for k, v in after.items() if k[0] == "samples_total") == 60
        assert consumer.stop() == 0
    with pytest.raises(urllib.error.URLError):
        scrape(url)


def free(path):
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def test_waiting_for_slow_commands_is_counted_under_its_reason(ring_dir, tmp_path):
    producer = Producer(ring_dir)
    slow = ("--on-shard", "sh -c 'sleep 0.5'", "--on-shard-backlog", "1", "--shard-size", "1")
    with ConsumerProcess(tmp_path / "s", ring_dir, "--metrics-port", "0", *slow) as consumer:
        url = address(consumer)
        for i in range(5):
            producer.sample(f"s{i}", 5)
            time.sleep(0.15)
        got = wait_for(lambda: (g := scrape(url))["on_shard_total", "done"] and g)
        assert got["wait_seconds_total", "on_shard"] > 0.1
        assert got["wait_seconds_total", "disk_full"] == 0
        assert (got["on_shard_total", "failed"], got["on_shard_left",] > 0) == (0, True)
        producer.close()


def test_port_that_is_taken_is_named_and_without_the_option_there_is_none(ring_dir, tmp_path):
    with ConsumerProcess(tmp_path / "a", ring_dir, "--metrics-port", "0") as consumer:
        port = address(consumer).split(":")[2].split("/")[0]
        other = ConsumerProcess(tmp_path / "b", ring_dir, "--metrics-port", port)
        other.start()
        assert other.process.wait(20) == 2
        assert f"--metrics-port {port}: Address already in use: choose another" in other.log_text()
    with ConsumerProcess(tmp_path / "c", ring_dir) as silent:
        wait_for(lambda: "waiting for a server" in silent.log_text())
        assert "metrics" not in silent.log_text()


def test_without_the_library_the_port_says_what_to_install(ring_dir, tmp_path):
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from hstransport_consumer.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    args = ["--out", tmp_path / "s", "--dir", ring_dir, "--metrics-port", "0"]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: --metrics-port needs prometheus_client: pip install" in done.stderr


def test_every_counter_is_explained_on_the_page(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
    handover = Handover(tmp_path, ["true"])
    figures = metrics.Figures(tmp_path, Totals(), Streams(tmp_path, None), handover)
    told = {s.name for family in figures.collect() for s in (family.samples or [family])}
    told = {name.removeprefix("hstransport_").removesuffix("_total") for name in told}
    assert len(told) > 20
    missing = [name for name in (*RingCounters._fields, *told) if f"`{name}" not in page]
    assert not missing


def test_a_ring_that_ends_is_counted_once_whoever_looks_when(ring_dir):
    class Stream:
        def __init__(self, producer):
            self.place, self.reader = producer.place, producer.ring

    totals = Totals()
    one, two = (Producer(ring_dir, rank=rank) for rank in (0, 1))
    one.sample("a", 3)
    two.sample("b", 3)
    live = [Stream(one), Stream(two)]
    before = totals.servers(live)
    totals.ended[one.place.path] = one.ring.counters
    assert totals.servers(live) == totals.servers(live[1:]) == before
    assert before.records == 6
    for producer in (one, two):
        producer.close()


def test_bind_refused_is_a_config_error(monkeypatch, tmp_path):
    def refuse(*args, **options):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(metrics, "start_http_server", refuse)
    with pytest.raises(ConfigError, match="--metrics-port 80: Permission denied"):
        metrics.serve(80, metrics.Figures(tmp_path, Totals(), None, None))


def test_log_json_is_an_object_a_line(ring_dir, tmp_path):
    producer = Producer(ring_dir)
    producer.sample("a", 5)
    with ConsumerProcess(tmp_path / "s", ring_dir, "--log-json") as consumer:
        consumer.wait_for(["a"])
        other = ConsumerProcess(tmp_path / "s", ring_dir, "--log-json")  # a directory has one
        other.start()
        assert other.process.wait(20) == 2
        assert consumer.stop() == 0
    producer.close()
    lines = [json.loads(line) for line in consumer.log_text().splitlines()]
    assert {"time", "level", "logger", "message"} == set(lines[0])
    assert any(line["message"].startswith("1 samples (1 whole)") for line in lines)
    errors = [line["message"] for line in lines if line["level"] == "error"]
    assert len(errors) == 1 and "is writing into" in errors[0]
    assert all(re.fullmatch(r"\d{4}-.*T.*\+00:00", line["time"]) for line in lines)
