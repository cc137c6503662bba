"""Very many samples, and a very large one: memory must not grow with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import open_shards
from rig.consumer import ConsumerProcess
from rig.memory import MemoryWatch
from rig.producer import Producer, tokens
from test_disk import MIB, wait_until

from hstransport.capture import planes
from hstransport.protocol import FINISHED
from hstransport.recorder import RowSpan

pytestmark = pytest.mark.exhaustive


# What docs/memory.md allows, in MiB, with one thread.
WINDOWS, INDEX, PREFIX, CHUNK = 4 * 8, 64, 2 / 1024, 6 * 2.2


VERIFY = """
import re, sys
from pathlib import Path
from hstransport.cli import main
status = main(["verify", sys.argv[1]])
kib = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())
print(int(kib[1]) >> 10)
sys.exit(status)
"""


def verify_elsewhere(out: Path) -> int:
    """Verify in a process of its own; MiB that it took."""
    command = [sys.executable, "-c", VERIFY, str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1])


def test_a_million_tiny_samples(ring_dir: Path, tmp_path: Path) -> None:
    count, rows, prompts = 1_000_000, 3, 50_000
    out = tmp_path / "out"
    producer = Producer(ring_dir, ring_bytes=256 * MIB, policy="block", block_s=60)
    pool = [producer.states(rows) for _ in range(997)]
    export = producer.exporter
    with ConsumerProcess(out, ring_dir, "--exit-when-done", "--shard-size", "256MiB") as consumer:
        wait_until(lambda: "attached" in consumer.log_text())
        assert consumer.process
        with MemoryWatch(consumer.process.pid) as memory:
            for i in range(count):
                sample = export.start(str(i), f"r-{i}", tokens(rows, i % prompts))
                source = planes(pool[i % len(pool)], producer.info.hidden)
                export.rows([RowSpan(sample, 0, 0, rows)], source)
                export.end(sample, FINISHED, rows, tokens(1))
                if i % 100 == 99:
                    export.flush(60)  # a slow disk may be synced meanwhile
            producer.close()
            assert consumer.process.wait(120) == 0
    verified = verify_elsewhere(out)
    bound = WINDOWS + INDEX + prompts * PREFIX + producer.info.planes * CHUNK
    print(f"consumer grew by {memory.grown_mib:.0f} MiB, verify took {verified} MiB")
    assert memory.grown_mib < bound and verified < 2048
    dataset = open_shards(out)
    assert len(dataset) == count
    for i in range(0, count, 101):
        expected = pool[i % len(pool)].transpose(1, 0, 2)
        assert np.array_equal(dataset[str(i)].hidden_states, expected)


def test_one_sample_of_five_gigabytes(ring_dir: Path, tmp_path: Path) -> None:
    step, hidden = 2048, 4096
    out = tmp_path / "out"
    producer = Producer(
        ring_dir, ring_bytes=1024 * MIB, policy="block", block_s=60, hidden=hidden, rows="prompt"
    )
    count = -(-5_000_000_000 // producer.info.row_bytes // step) * step
    block = producer.states(step)
    with ConsumerProcess(out, ring_dir, "--exit-when-done", "--shard-size", "2GiB") as consumer:
        wait_until(lambda: "attached" in consumer.log_text())
        assert consumer.process
        with MemoryWatch(consumer.process.pid) as memory:
            sample = producer.start("large", count)
            for at in range(0, count, step):
                states = np.ascontiguousarray(np.roll(block, at // step, axis=1))
                producer.rows((sample, at, step), states=states)
            producer.exporter.end(sample, FINISHED, count, tokens(1))
            producer.close()
            assert consumer.process.wait(120) == 0
    verified = verify_elsewhere(out)
    bound = WINDOWS + producer.info.planes * CHUNK
    print(f"consumer grew by {memory.grown_mib:.0f} MiB, verify took {verified} MiB")
    assert memory.grown_mib < bound and verified < 512
    assert len(list(out.glob("shard-*.zst"))) > 1
    (large,) = open_shards(out)
    assert large.state == "whole" and large.tokens == count
    assert np.array_equal(large.token_ids, tokens(count))
    for at in range(0, count, step):
        expected = np.roll(block, at // step, axis=1).transpose(1, 0, 2)
        assert np.array_equal(large.read(at, at + step), expected)
