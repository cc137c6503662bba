"""hstransport-consumer on disks that fail, stand still or lose power."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer.verify import verify
from rig.consumer import ConsumerProcess
from rig.disk import CACHED, DIRECT, mounted, tampered
from rig.producer import Bits, Producer
from test_disk import MIB, wait_until


def started(consumer: ConsumerProcess) -> subprocess.Popen[bytes]:
    """The process, once it follows the ring."""
    wait_until(lambda: "attached" in consumer.log_text())
    assert consumer.process
    return consumer.process


def stored(producer: Producer) -> bool:
    return producer.ring.used_bytes == 0


def same(out: Path, expected: Mapping[str, Bits]) -> None:
    dataset = open_shards(out)
    assert sorted(dataset.ids) == sorted(expected)
    for name, bits in expected.items():
        assert np.array_equal(dataset[name].hidden_states, bits.transpose(1, 0, 2))
    assert verify(out).ok


@pytest.mark.parametrize(
    ("durability", "call", "hidden"),
    [("process", CACHED, 64), ("process", DIRECT, 2048), ("machine", "fdatasync", 64)],
    ids=["cached", "direct", "sync"],
)
def test_an_error_in_mid_write_ends_the_consumer_and_the_next_one_goes_on(
    durability: str, call: str, hidden: int, ring_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    producer = Producer(ring_dir, ring_bytes=64 * MIB, hidden=hidden)
    with ConsumerProcess(out, ring_dir, "--durability", durability) as consumer:
        process = started(consumer)
        states = {"before": producer.sample("before", 300)}
        wait_until(lambda: stored(producer))
        with tampered(process, f"{call}:error=EIO"):
            states |= {str(i): producer.sample(str(i), 300) for i in range(5)}
            held = producer.ring.used_bytes
            assert process.wait(30) == 2
    assert "Input/output error" in consumer.log_text() and str(out) in consumer.log_text()
    assert "Traceback" not in consumer.log_text()
    assert producer.ring.used_bytes == held, "it freed what it did not store"
    assert open_shards(out, partial=True).ids == ["before"]
    with ConsumerProcess(out, ring_dir, "--durability", durability) as consumer:
        wait_until(lambda: stored(producer))
        producer.close()
        assert consumer.stop() == 0
    same(out, states)


def test_a_disk_that_is_full_when_it_syncs_is_waited_for(ring_dir: Path, tmp_path: Path) -> None:
    """Blocks may be given out late: the write succeeds and the sync does not."""
    out = tmp_path / "out"
    producer = Producer(ring_dir, ring_bytes=16 * MIB)
    with ConsumerProcess(out, ring_dir, "--durability", "machine") as consumer:
        with tampered(started(consumer), "fdatasync:error=ENOSPC"):
            states = {str(i): producer.sample(str(i), 300) for i in range(5)}
            held = producer.ring.used_bytes
            wait_until(lambda: "No space left on device" in consumer.log_text())
            assert producer.ring.used_bytes == held
        wait_until(lambda: stored(producer))
        producer.close()
        assert consumer.stop() == 0
    same(out, states)


def test_on_a_disk_that_stands_still_a_server_that_drops_never_waits(
    ring_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    producer = Producer(ring_dir, ring_bytes=4 * MIB, policy="drop")
    with ConsumerProcess(out, ring_dir) as consumer:
        with tampered(started(consumer), f"{CACHED}:delay_enter=200000"):
            states = {str(i): producer.sample(str(i), 300) for i in range(200)}
        counters = producer.ring.counters
        assert counters.ring_full and not counters.ring_stall_ns and not counters.stage_stall_ns
        wait_until(lambda: stored(producer))
        producer.sample("after", 300)
        samples = consumer.wait_for([*states, "after"])
        producer.close()
        assert consumer.stop() == 0
    state = {name: samples[name].state for name in states}
    assert samples["after"].state == "whole"
    assert set(state.values()) == {"whole", "dropped"}, "it was not slow, or lost a sample"
    for name in (n for n in states if state[n] == "whole"):
        assert np.array_equal(samples[name].hidden_states, states[name].transpose(1, 0, 2))
    dropped = f"drops {counters.ring_full} ({counters.ring_full} ring_full)"
    assert dropped in consumer.log_text().replace(",", "")
    assert verify(out).ok


@pytest.mark.parametrize(
    "durability", ["machine", pytest.param("process", marks=pytest.mark.exhaustive)]
)
def test_what_was_acknowledged_is_on_the_disk_when_the_power_goes(
    durability: str, ring_dir: Path, tmp_path: Path
) -> None:
    """A copy of the device, made when the ring is free, is what a machine finds after the cut."""
    device, later = tmp_path / "device", tmp_path / "later"
    with device.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(device)], check=True)
    producer = Producer(ring_dir, ring_bytes=16 * MIB)
    states = {}
    with mounted(tmp_path / "disk", "-o", "loop,commit=600", device) as disk:
        options = ["--durability", durability, "--shard-size", "200KiB"]
        with ConsumerProcess(disk / "out", ring_dir, *options) as consumer:
            started(consumer)
            for i in range(6):
                states[str(i)] = producer.sample(str(i), 300)
                wait_until(lambda: stored(producer))
            if durability == "machine":
                shutil.copy(device, later)
            else:  # of process only shards that have their names are on the disk
                consumer.kill()
                shutil.copy(device, later)
    producer.close()
    with mounted(tmp_path / "disk-later", "-o", "loop", later) as disk:
        out = disk / "out"
        (out / ".lock").write_text("1 before-the-cut\n")
        if durability == "machine":
            DatasetWriter(out).close()
            same(out, states)
        else:
            assert verify(out).ok
            assert 0 < len(open_shards(out)) < len(states)


def test_a_ring_that_is_deleted_under_both_goes_on_to_its_end(
    ring_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    producer = Producer(ring_dir, ring_bytes=MIB, policy="block", publish=True)
    with ConsumerProcess(out, ring_dir, "--exit-when-done") as consumer:
        process = started(consumer)
        states = {"before": producer.sample("before", 100)}
        for path in (ring_dir / "s").iterdir():
            path.unlink()
        for i in range(50):  # several times what the ring holds
            states[str(i)] = producer.sample(str(i), 300)
        producer.close()
        assert process.wait(30) == 0
    same(out, states)
    assert not list((ring_dir / "s").iterdir())
