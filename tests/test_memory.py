"""The consumer's memory stays under the bound that docs/memory.md states, however many requests
run at once, have ended, or wait in its ring."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hstransport_consumer import open_shards
from rig.consumer import ConsumerProcess
from rig.memory import MemoryWatch
from rig.producer import Producer, tokens
from test_disk import MIB, wait_until

from hstransport.capture import planes
from hstransport.protocol import FINISHED
from hstransport.recorder import OpenSample, RowSpan

# docs/memory.md, in MiB, for one ring. All prompts are alike here: they take
# no room in the prefix tree.
WINDOWS, PROMPTS, INDEX = 4 * 8, 64, 2 * 32
OPEN, PART, ENDED = 1 / 1024, 100 / MIB, 2 * 75 / MIB


def most(small: int, large: int) -> pytest.MarkDecorator:
    """``count``, of seconds and of minutes."""
    return pytest.mark.parametrize(
        "count", [small, pytest.param(large, marks=pytest.mark.exhaustive)]
    )


class Load:
    """A consumer, and the server's side of its ring: samples of one plane of 64 words a token."""

    def __init__(self, ring_dir: Path, out: Path, *options: str) -> None:
        self.out = out
        self._producer = Producer(
            *(ring_dir,), ring_bytes=32 * MIB, policy="block", block_s=60, layers=()
        )
        self._states = self._producer.states(256)
        self._consumer = ConsumerProcess(out, ring_dir, "--exit-when-done", *options)
        self._started = self._put = 0
        self._behind = False

    @contextmanager
    def watched(self) -> Iterator[MemoryWatch]:
        """The consumer's memory from before the first record until it has ended in order."""
        with self._consumer:
            wait_until(lambda: "attached" in self._consumer.log_text())
            process = self._consumer.process
            assert process
            with MemoryWatch(process.pid) as watch:
                yield watch
                self._producer.close()
                assert process.wait(60) == 0, self._consumer.log_text()

    @contextmanager
    def behind(self) -> Iterator[None]:
        """The consumer gets no processor time, and finds all at once."""
        process = self._consumer.process
        assert process
        process.send_signal(signal.SIGSTOP)
        self._behind = True
        try:
            yield
        finally:
            self._behind = False
            process.send_signal(signal.SIGCONT)

    def start(self, prompt: int) -> OpenSample:
        self._started += 1
        name = str(self._started)
        self._wait_for_room()
        return self._producer.exporter.start(name, f"r-{name}", tokens(prompt))

    def rows(self, samples: list[OpenSample], position: int) -> None:
        """One row of each of at most 256 samples."""
        spans = [RowSpan(sample, position, row, 1) for row, sample in enumerate(samples)]
        source = planes(self._states[:, : len(samples)], self._producer.info.hidden)
        self._producer.exporter.rows(spans, source)
        self._producer.exporter.flush(60)

    def end(self, sample: OpenSample, rows: int) -> None:
        self._wait_for_room()
        self._producer.exporter.end(sample, FINISHED, rows, tokens(1))

    def drain(self) -> None:
        self._producer.exporter.flush(60)
        wait_until(lambda: self._producer.ring.used_bytes == 0, 600)

    def _wait_for_room(self) -> None:
        """The names of samples wait for none: where there is little, some would be lost."""
        self._put += 1
        if self._put % 100 == 0 and not self._behind:
            ring = self._producer.ring
            self._producer.exporter.flush(60)
            wait_until(lambda: ring.used_bytes < ring.capacity_bytes // 2, 600)


@most(50_000, 1_000_000)
def test_tiny_samples_that_wait_for_the_consumer(
    ring_dir: Path, tmp_path: Path, count: int
) -> None:
    """A beginning, a row, an end: their events are larger in memory than they are in the ring."""
    load = Load(ring_dir, tmp_path / "out")

    def samples(some: int) -> None:
        for _ in range(some // 100):
            opened = [load.start(1) for _ in range(100)]
            load.rows(opened, 0)
            for sample in opened:
                load.end(sample, 1)

    with load.watched() as memory:
        with load.behind():
            samples(40_000)
        samples(count - 40_000)
        load.drain()
    bound = WINDOWS + min(ENDED * count, INDEX)
    print(f"{count} tiny samples: {memory.grown_mib:.0f} MiB, bound {bound:.0f}")
    assert memory.grown_mib < bound
    assert len(open_shards(load.out)) == count


@most(30_000, 200_000)
def test_requests_that_all_run_at_once(ring_dir: Path, tmp_path: Path, count: int) -> None:
    """Each with a prompt of 2000 tokens and rows in four windows; shards end meanwhile."""
    load, prompt, passes = Load(ring_dir, tmp_path / "out", "--shard-size", "64MiB"), 2000, 4
    with load.watched() as memory:
        opened = [load.start(prompt) for _ in range(count)]
        for position in range(passes):
            for at in range(0, count, 250):
                load.rows(opened[at : at + 250], position)
            load.drain()
        for sample in opened[: count // 2]:
            load.end(sample, passes)
        load.drain()
    bound = WINDOWS + PROMPTS + count * (OPEN + PART * passes) + min(ENDED * count, INDEX)
    print(f"{count} open samples: {memory.grown_mib:.0f} MiB, bound {bound:.0f}")
    assert memory.grown_mib < bound
    states = [sample.state for sample in open_shards(load.out, states=None)]
    assert states.count("whole") == count // 2
    assert states.count("unfinished") == count - count // 2
