"""kill -9 at any point, under load: of the consumer, and of the process that has the exporter.

A handful of times here, 500 and 100 times in `make stress`. (tests/test_sglang_faults.py kills a
real server.) After each kill: what is acknowledged is there once and bit for bit, what is not whole
is named, nothing unfinished looks finished, nothing needs a hand, and a second consumer is refused.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, Sample
from hstransport_consumer.verify import verify
from rig.consumer import ConsumerProcess, all_samples
from rig.load import SESSION, states_of, tokens_of

from hstransport.errors import DatasetBusyError
from hstransport.ring import inspect_ring
from hstransport.session import find_rings

SHARD = ("--session", SESSION, "--shard-size", "2MiB")


class Load:
    """A producer of samples, and what it says it has put into its ring."""

    def __init__(self, root: Path, run: str, log: Path) -> None:
        self.run = run
        self._root, self._log = root, log
        command = [sys.executable, "-m", "rig.load", str(root), run, str(log)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        self.process = subprocess.Popen(command, env=environment)

    @property
    def ring(self) -> Path | None:
        found = [r.path for r in find_rings(self._root, SESSION) if r.run == self.run]
        return found[0] if found else None

    def said(self) -> tuple[set[str], dict[str, int]]:
        """The samples that have begun; those that have ended, with their ENDs' ends in the ring."""
        lines = self._log.read_text().split("\n")[:-1] if self._log.exists() else []
        words = [line.split() for line in lines]
        return {w[1] for w in words if w[0] == "S"}, {w[1]: int(w[3]) for w in words if w[0] == "E"}


@contextmanager
def load(root: Path, run: str, log: Path) -> Iterator[Load]:
    process = Load(root, run, log)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def wait_for(what: Callable[[], object], consumer: ConsumerProcess, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, (
            f"it never came; consumer:\n{consumer.log_text()[-3000:]}"
        )
        time.sleep(0.005)


class Checker:
    """Looks at the directory again and again; of samples seen whole before only that they are."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._whole: set[str] = set()

    def look(self, acknowledged: set[str]) -> dict[str, Sample]:
        """Every sample by its id. ``acknowledged``: must be whole."""
        if not any(self._out.glob("shard-*")):
            assert not acknowledged and not self._whole
            return {}
        dataset = all_samples(self._out)  # raises if a file that looks finished is not
        stored = sum(s.tables.samples for s in dataset.shards)
        assert stored == len(dataset), "a sample is stored twice"
        found = {sample.id: sample for sample in dataset}
        whole = {name for name, sample in found.items() if sample.state == "whole"}
        assert acknowledged | self._whole <= whole
        for name in whole - self._whole:
            n = tokens_of(name)
            assert found[name].tokens == n
            states = found[name].hidden_states.transpose(1, 0, 2)
            assert np.array_equal(states, states_of(name, n)), name
        self._whole = whole
        return found


def refuse_a_second(consumer: ConsumerProcess, root: Path, *, process: bool) -> None:
    with pytest.raises(DatasetBusyError, match="is writing into"):
        DatasetWriter(consumer.out)
    if process:
        command = [sys.executable, "-m", "hstransport_consumer", "--out", str(consumer.out)]
        done = subprocess.run([*command, "--dir", str(root)], capture_output=True, timeout=60)
        assert done.returncode == 2 and b"is writing into" in done.stderr, done.stderr


def test_a_consumer_killed_at_any_point(
    tmp_path: Path, ring_dir: Path, stress_minutes: float
) -> None:
    kills = 500 if stress_minutes else 6
    rng = random.Random(kills)
    consumer = ConsumerProcess(tmp_path / "out", ring_dir, *SHARD)
    checker = Checker(consumer.out)
    with load(ring_dir, "ab" * 6, tmp_path / "log") as server:
        wait_for(lambda: server.ring, consumer)
        ring = server.ring
        assert ring
        for i in range(kills):
            consumer.start()
            if i % 4:  # else while it starts
                wait_for(lambda: inspect_ring(ring).consumer_attached, consumer)
                refuse_a_second(consumer, ring_dir, process=i % 50 == 1)
            time.sleep(rng.random() * 0.4)
            assert consumer.process and consumer.process.poll() is None, consumer.log_text()
            consumer.kill()
            tail = inspect_ring(ring).tail
            _, ended = server.said()
            checker.look({name for name, end in ended.items() if end <= tail})
        server.process.terminate()
        with consumer:
            assert server.process.wait(60) == 0
            wait_for(lambda: not ring.exists(), consumer)
            assert consumer.stop() == 0
        began, ended = server.said()
    found = checker.look(set(ended))
    assert set(found) == began
    assert {found[name].state for name in began - set(ended)} <= {"aborted", "unfinished"}
    assert len(ended) > 20 * kills, "that was no load"
    assert verify(consumer.out).ok and not list(consumer.out.glob("*.partial"))
    assert not list((ring_dir / SESSION).iterdir())


def test_a_producer_killed_at_any_point(
    tmp_path: Path, ring_dir: Path, stress_minutes: float
) -> None:
    kills = 100 if stress_minutes else 4
    rng = random.Random(kills)
    checker = Checker(tmp_path / "out")
    began: set[str] = set()
    ended: dict[str, int] = {}
    with ConsumerProcess(tmp_path / "out", ring_dir, *SHARD) as consumer:
        for i in range(kills):
            with load(ring_dir, f"{i:012x}", tmp_path / f"log-{i}") as server:
                wait_for(lambda: server.ring, consumer)
                time.sleep(rng.random() * 0.5)
            wait_for(lambda: not server.ring, consumer)
            said = server.said()
            began |= said[0]
            ended |= said[1]
            found = checker.look(set(ended))
            assert began <= set(found)
            open_ = {name: found[name].state for name in began - set(ended)}
            # (One may have ended in the ring before its line was written.)
            assert set(open_.values()) <= {"unfinished", "whole"}, open_
        assert consumer.stop() == 0
    assert len(ended) > 10 * kills, "that was no load"
    assert any(found[name].state == "unfinished" for name in found)
    assert verify(consumer.out).ok
    assert not list((ring_dir / SESSION).iterdir())
