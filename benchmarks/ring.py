"""The ring alone: records from one process's memory through the ring into another's hands.

The reader is a process of its own and reads every byte: a record's words are summed and compared
with what the writer put in. Beside it in the same run: plain memcpy of the same sizes from the same
memory into shared memory of the same size, by the writer.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from common import SHM, expect, finish, median_ratio, parser, rounds, spread

from hstransport.ring import RingReader, RingWriter

SIZES = {"4kib": 4 << 10, "64kib": 64 << 10, "1mib": 1 << 20, "16mib": 16 << 20}
Words = npt.NDArray[np.uint64]
META = bytes(64)
KIND = 1
WAIT_S = 30.0


class Pass(NamedTuple):
    seconds: float
    records: int
    cpu_s: float
    """Processor time of the writing thread."""
    reader_cpu_s: float = 0.0


class Bench:
    """A ring, its reader process, and source memory large enough to be read from RAM."""

    def __init__(self, folder: Path, ring_bytes: int, pass_bytes: int) -> None:
        self.pass_bytes = pass_bytes
        self.writer = RingWriter.create(folder / "bench.ring", ring_bytes, b"benchmark")
        rng = np.random.default_rng(1)
        self.source = rng.integers(0, 2**64, ring_bytes // 8, np.uint64)
        self.target = np.memmap(folder / "target", np.uint64, "w+", shape=self.source.shape)
        self.target[:] = 0  # touch it, as the ring's memory was touched
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.reader = context.Process(target=read_all, args=(folder / "bench.ring", theirs))
        self.reader.start()
        theirs.close()
        expect(self.pipe, "attached", WAIT_S)

    def close(self) -> None:
        self.pipe.close()  # ends the reader
        self.reader.join(WAIT_S)
        if self.reader.is_alive():
            self.reader.kill()
        self.writer.close()

    def through_ring(self, size: int) -> Pass:
        """All the way: it ends when the reader has summed and freed the last record."""
        count = max(self.pass_bytes // size, 1)
        proof = self._announce(size, count)
        cpu, start = time.thread_time(), time.perf_counter()
        self._write(size, count)
        spent = time.thread_time() - cpu
        expect(self.pipe, proof, WAIT_S)
        seconds = time.perf_counter() - start
        self.pipe.recv()
        return Pass(seconds, count, spent)

    def in_turn(self, size: int) -> Pass:
        """First all is written, then all is read: what each side spends, waiting left out."""
        room = self.writer.capacity_bytes // 2
        count = max(1, min(self.pass_bytes, room) // (size + 256))
        proof = self._announce(size, count, wait=True)
        cpu, start = time.thread_time(), time.perf_counter()
        self._write(size, count)
        done = Pass(time.perf_counter() - start, count, time.thread_time() - cpu)
        self.pipe.send("go")
        expect(self.pipe, proof, WAIT_S)
        return done._replace(reader_cpu_s=self.pipe.recv())

    def memcpy(self, size: int) -> Pass:
        """The same copies into shared memory, without a ring."""
        pairs = list(
            zip(self._parts(self.target, size), self._parts(self.source, size), strict=True)
        )
        count = max(self.pass_bytes // size, 1)
        cpu, start = time.thread_time(), time.perf_counter()
        for i in range(count):
            target, source = pairs[i % len(pairs)]
            np.copyto(target, source)
        return Pass(time.perf_counter() - start, count, time.thread_time() - cpu)

    @staticmethod
    def _parts(memory: Words, size: int) -> Words:
        """The memory as ``[parts, words of a record]``."""
        words = size // 8
        return memory[: len(memory) // words * words].reshape(-1, words)

    def _announce(self, size: int, count: int, wait: bool = False) -> int:
        """Tell the reader how many come; returns what it has to find."""
        sums = self._parts(self.source, size).sum(1).tolist()
        proof = 0
        for i in range(count):
            proof = chain(proof, sums[i % len(sums)])
        self.pipe.send((count, wait))
        expect(self.pipe, "ready", WAIT_S)
        return proof

    def _write(self, size: int, count: int) -> None:
        parts = len(self._parts(self.source, size))
        start = self.source.ctypes.data
        writer = self.writer
        for i in range(count):
            slot = writer.reserve(KIND, META, size, wait_s=WAIT_S)
            if slot is None:
                raise SystemExit("ring.py: the reader freed nothing for half a minute")
            slot.copy_rows(0, start + i % parts * size, 1, size, size)
            slot.commit()


def chain(proof: int, record_sum: int) -> int:
    """Sums of records, put together so that their order counts."""
    return (proof * 31 + record_sum) & (1 << 64) - 1


def read_all(path: Path, pipe: Connection) -> None:
    """The reading process: sum every word of every record, and say what was found."""
    with RingReader.attach(path) as reader:
        pipe.send("attached")
        while True:
            try:
                count, wait = pipe.recv()
            except EOFError:
                return
            pipe.send("ready")
            if wait:
                pipe.recv()
            proof = done = 0
            cpu = time.process_time()
            while done < count:
                record = reader.read()
                if record is None:
                    time.sleep(20e-6)
                    continue
                proof = chain(proof, int(np.add.reduce(record.payload.view(np.uint64))))
                record.release()
                done += 1
            cpu = time.process_time() - cpu
            pipe.send(proof)
            pipe.send(cpu)


def figures(bench: Bench, count: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, size in SIZES.items():
        ways = {
            "memcpy": lambda size=size: bench.memcpy(size),
            "ring": lambda size=size: bench.through_ring(size),
            "turns": lambda size=size: bench.in_turn(size),
        }
        for way in ways.values():
            way()  # once to warm up
        passes = rounds(ways, count)
        rate = {w: [p.records * size / p.seconds for p in ps] for w, ps in passes.items()}
        records = [p.records / p.seconds for p in passes["ring"]]
        result[f"ring_{name}_gb_per_s"] = statistics.median(rate["ring"]) / 1e9
        result[f"ring_{name}_records_per_s"] = statistics.median(records)
        result[f"memcpy_{name}_gb_per_s"] = statistics.median(rate["memcpy"]) / 1e9
        result[f"ring_{name}_of_memcpy"] = median_ratio(rate["ring"], rate["memcpy"])
        # Per second of a core: what others do on the machine is left out.
        spent = {
            "memcpy": [p.cpu_s / p.records for p in passes["memcpy"]],
            "writer": [p.cpu_s / p.records for p in passes["turns"]],
            "reader": [p.reader_cpu_s / p.records for p in passes["turns"]],
        }
        for side, seconds in spent.items():
            each = statistics.median(seconds)
            result[f"{side}_{name}_us_per_record"] = each * 1e6
            result[f"{side}_{name}_gb_per_core_s"] = size / each / 1e9
        result[f"writer_{name}_of_memcpy"] = median_ratio(spent["memcpy"], spent["writer"])
        result[f"writer_{name}_of_memcpy_quartiles"] = spread(spent["memcpy"], spent["writer"])
    return result


def main() -> int:
    p = parser(__doc__, "ring_cpu.json")
    p.add_argument("--rounds", type=int, default=15, help="(default: 15)")
    arguments = p.parse_args()
    ring_bytes, pass_bytes = (64 << 20, 32 << 20) if arguments.smoke else (256 << 20, 512 << 20)
    count = 2 if arguments.smoke else arguments.rounds
    with tempfile.TemporaryDirectory(prefix="hst-bench-", dir=SHM) as folder:
        bench = Bench(Path(folder), ring_bytes, pass_bytes)
        try:
            result = figures(bench, count)
        finally:
            bench.close()
    finish(
        arguments,
        {
            **result,
            "rounds": count,
            "ring_bytes": ring_bytes,
            "bytes_per_pass": pass_bytes,
            "checked": "every word of every record, summed by the reader",
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
