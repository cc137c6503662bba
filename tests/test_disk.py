"""hstransport-consumer on disks that are full, small or not to be written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import open_shards
from hstransport_consumer.verify import verify
from rig.consumer import ConsumerProcess
from rig.disk import mount, mounted
from rig.producer import Producer
from rig.scrape import address, scrape

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 8 MiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "tmpfs") as path:
        yield path


def wait_until(condition: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("ballast", "options", "told"),
    [
        (8 * MIB - 100_000, [], "No space left on device"),
        (5 * MIB, ["--min-free", "4MiB"], "MiB are free and 4 are to stay so"),
    ],
    ids=["full", "min-free"],
)
def test_without_room_the_consumer_says_so_waits_and_goes_on(
    disk: Path, ring_dir: Path, ballast: int, options: list[str], told: str
) -> None:
    out, weight = disk, disk / "ballast"
    producer = Producer(ring_dir, ring_bytes=16 * MIB)
    options = ["--flush-s", "0.05", "--metrics-port", "0", *options]
    with ConsumerProcess(out, ring_dir, *options) as consumer:
        wait_until(lambda: "attached" in consumer.log_text())
        url = address(consumer)

        def waited() -> float:
            return scrape(url)["wait_seconds_total", "disk_full"]

        assert waited() == 0
        weight.write_bytes(bytes(ballast))
        states = {str(i): producer.sample(str(i), 300) for i in range(10)}
        wait_until(lambda: told in consumer.log_text())
        if ballast > 5 * MIB:
            assert "nothing of this write was kept" in consumer.log_text()
        held = producer.ring.used_bytes
        assert held > sum(bits.nbytes for bits in states.values()), "it freed what it did not store"
        time.sleep(1.5)
        assert consumer.log_text().count(told) == 1, "each try fills the log"
        assert producer.ring.used_bytes == held
        before = waited()
        assert before > 0
        wait_until(lambda: waited() > before)
        weight.unlink()
        samples = consumer.wait_for(states)
        before = waited()
        states["later"] = producer.sample("later", 300)
        samples |= consumer.wait_for(["later"])
        assert waited() == before
        for name, bits in states.items():
            assert np.array_equal(samples[name].hidden_states, bits.transpose(1, 0, 2))
        producer.close()
        assert consumer.stop() == 0
    assert verify(out).ok
    assert len(open_shards(out)) == 11


def test_a_read_only_disk_ends_the_consumer_and_the_ring_keeps_all(
    disk: Path, ring_dir: Path, tmp_path: Path
) -> None:
    producer = Producer(ring_dir, ring_bytes=16 * MIB)
    states = producer.sample("a", 50)
    held = producer.ring.used_bytes
    mount("-o", "remount,ro", str(disk))
    with ConsumerProcess(disk, ring_dir) as consumer:
        assert consumer.process and consumer.process.wait(60) == 2
    assert "Read-only file system" in consumer.log_text()
    assert "Traceback" not in consumer.log_text()
    assert producer.ring.used_bytes == held
    with ConsumerProcess(tmp_path / "elsewhere", ring_dir) as consumer:
        sample = consumer.wait_for(["a"])["a"]
    assert np.array_equal(sample.hidden_states, states.transpose(1, 0, 2))
    producer.close()
