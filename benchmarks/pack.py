"""Ring to file and back: how fast hidden states are packed, per core and on several threads, and
how fast samples are read (reading.py says how that is measured).

A ring in shared memory is filled with samples of real states, and emptied, twice. Timed is the
second time, from a full ring to the finished shard, fsync included: as beside a server that has
been running for a while, when the ring's pages and the packing threads' memory have been seen
before. Processor time of the process gives the speed of a core, wall time the scaling. "zstd3" and
"zipnn" read the same ring and write a file as well, on one thread. Every bit of one round is read
back and compared.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import reading
import zstandard
from common import DATA, SHM, card, finish, median_ratio, parser, rounds
from hstransport_consumer import DatasetWriter, codec, open_shards
from hstransport_consumer.direct import DirectFile, Piece
from hstransport_consumer.packer import RingPacker
from hstransport_consumer.stream import RingStream, Streams
from rig.producer import Producer
from states import MODELS, States, real, synthetic

from hstransport.session import ring_path
from hstransport.settings import parse_size

PIECE_BYTES = 2 << 20
"""What zstd3 and ZipNN get at a time: one plane of one of our chunks."""
DISK_PIECE_BYTES, USUAL_RATIO = 3 << 20, 1.49
"""A chunk of four planes, and what makes it so small."""
SESSION, RUN = "s", "ab" * 6


class Timing(NamedTuple):
    cpu_s: float
    wall_s: float
    raw_bytes: int
    """Of states that were packed in this time."""
    ratio: float
    """Raw bytes by file bytes, of all that was packed."""
    amplification: float
    """What the kernel counts as written to the disk for this process by file bytes; 0 in shared
    memory."""


class Way(Protocol):
    """One that empties rings into files."""

    def empty(self) -> None:
        """Until the ring is empty and all is handed to the kernel."""

    def finish(self) -> None:
        """Until all is on the disk."""

    def close(self) -> None: ...


class Bench:
    """Rings of one model's states, each emptied by one way."""

    def __init__(self, states: States, tokens: int, ring: int, folder: Path, place: Path) -> None:
        self.states = states
        self._tokens = tokens
        self._ring_bytes = ring
        self._rings, self._out = folder / "rings", place / "out"
        self._rings.mkdir(mode=0o700, parents=True)

    def timed(
        self, start: Callable[[Path, Path], Way], ready: Callable[[], Any] | None = None
    ) -> Timing:
        """Have a ring emptied twice; between, wait until all are ``ready``."""
        shutil.rmtree(self._out, ignore_errors=True)
        self._out.mkdir(parents=True)
        self._samples = 0
        written = _written()
        with contextlib.closing(self._producer()) as producer:
            raw = self._fill(producer)
            with contextlib.closing(start(self._rings, self._out)) as way:
                way.empty()
                way.finish()
                assert self._fill(producer) == raw
                if ready:
                    ready()
                cpu, wall = time.process_time(), time.monotonic()
                way.empty()
                way.finish()
                cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        ring_path(self._rings, SESSION, RUN, 0).path.unlink(missing_ok=True)
        files = sum(p.stat().st_size for p in self._out.glob("*.zst"))
        return Timing(cpu, wall, raw, 2 * raw / files, (_written() - written) / files)

    def check(self) -> None:
        """What the last way stored is what was in the ring, bit for bit."""
        dataset = open_shards(self._out)
        assert len(dataset) == self._samples, f"{len(dataset)} of {self._samples} samples"
        for sample in dataset:
            want = self.states.part(int(sample.id), self._tokens)
            assert np.array_equal(sample.hidden_states, want.transpose(1, 0, 2)), sample.id

    def _producer(self) -> Producer:
        planes, _, hidden = self.states.bits.shape
        return Producer(
            self._rings,
            session=SESSION,
            run=RUN,
            ring_bytes=self._ring_bytes,
            layers=tuple(range(1, planes)),
            hidden=hidden,
            vocab_size=1 << 20,
        )

    def _fill(self, producer: Producer) -> int:
        """As much as the ring takes; returns the bytes of states."""
        part = self.states.part(0, self._tokens).nbytes
        count = int(self._ring_bytes * 0.9) // part
        for i in range(self._samples, self._samples + count):
            states = self.states.part(i, self._tokens)
            sample = producer.start(str(i), states.shape[1])
            producer.rows((sample, 0, states.shape[1]), states=states)
            producer.end(sample, states.shape[1], 1)
        assert not producer.ring.counters.dropped_records
        self._samples += count
        return count * part


class Consume:
    """As hstransport-consumer does it."""

    def __init__(self, rings: Path, out: Path, threads: int) -> None:
        self._writer = DatasetWriter(out, threads=threads)
        self._packer = RingPacker(Streams(rings, SESSION), self._writer)

    def empty(self) -> None:
        self._packer.step()
        self._packer.drain()  # as when it is stopped: a window that is not full is not waited for

    def finish(self) -> None:
        self._writer.finish_shard()

    def close(self) -> None:
        self._packer.close()
        self._writer.close()


class Through:
    """Another codec on the same ring: each piece packed and written, one after the other."""

    def __init__(self, rings: Path, out: Path, pack: Callable[[Any], Any]) -> None:
        self._stream = RingStream(ring_path(rings, SESSION, RUN, 0))
        self._pack = pack
        self._file = (out / "all.zst").open("wb", buffering=0)

    def empty(self) -> None:
        while (received := self._stream.read()) is not None:
            if received.states is not None:
                raw = received.states.reshape(-1).view(np.uint8)
                for at in range(0, len(raw), PIECE_BYTES):
                    self._file.write(self._pack(raw[at : at + PIECE_BYTES]))
            received.record.release()

    def finish(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        self._stream.close()


class InMemory(Consume):
    """As :class:`Consume`, and what is packed is written nowhere: what the cores alone allow."""

    def __init__(self, rings: Path, out: Path, threads: int) -> None:
        super().__init__(rings, out, threads)
        self._real = DirectFile.write
        DirectFile.write = lambda _, pieces: None  # type: ignore[method-assign,assignment]

    def close(self) -> None:
        super().close()
        DirectFile.write = self._real  # type: ignore[method-assign]


class Disk:
    """As many bytes as the shards have, in pieces as large as theirs, out of memory that is ready:
    what the disk allows."""

    def __init__(self, rings: Path, out: Path) -> None:
        self._stream = RingStream(ring_path(rings, SESSION, RUN, 0))
        path = out / "all.zst"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._file = DirectFile(path, self._fd)
        self._piece = codec.FrameBuffer().reserve(DISK_PIECE_BYTES).data
        self._at = 0

    def empty(self) -> None:
        due = 0.0
        while (received := self._stream.read()) is not None:
            if received.states is not None:
                due += received.states.nbytes / USUAL_RATIO
            received.record.release()
            while due >= len(self._piece):
                self._file.write([Piece(self._at, b"", self._piece)])
                self._at += len(self._piece)
                due -= len(self._piece)

    def finish(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        self._file.close()
        os.close(self._fd)
        self._stream.close()


def zipnn() -> Callable[[Any], Any] | None:
    try:
        from zipnn import ZipNN
    except ImportError as e:
        print(f"ZipNN left out: {e} (pip install -r benchmarks/requirements.txt)")
        return None
    tool = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    return lambda piece: tool.compress(piece.tobytes())  # it reorders its input in place


def beside(bench: Bench, threads: int, start: Any, pipe: Any) -> None:
    """One of several consumers, in a process of its own."""
    start.wait()
    pipe.send(bench.timed(partial(Consume, threads=threads), start.wait))


def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a process of its own: one that reads has not packed before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class Together:
    """Several consumers at once, each with its ring and its files, as beside several servers."""

    def __init__(self, benches: list[Bench], threads: int) -> None:
        self._benches, self._threads = benches, threads

    def timed(self) -> Timing:
        """Sums; of the wall times the longest, of the ratios the first."""
        context = multiprocessing.get_context("spawn")
        start = context.Barrier(len(self._benches))
        pipes, processes = [], []
        for bench in self._benches:
            mine, theirs = context.Pipe()
            process = context.Process(target=beside, args=(bench, self._threads, start, theirs))
            process.start()
            pipes.append(mine)
            processes.append(process)
        timings = [Timing(*pipe.recv()) for pipe in pipes]
        for process in processes:
            process.join()
        return timings[0]._replace(
            cpu_s=sum(t.cpu_s for t in timings),
            wall_s=max(t.wall_s for t in timings),
            raw_bytes=sum(t.raw_bytes for t in timings),
        )


def faster(timings: list[Timing], base: list[Timing]) -> float:
    return median_ratio([1 / t.wall_s for t in timings], [1 / t.wall_s for t in base])


def figures(
    bench: Bench, several: list[Bench], count: int, threads: list[int], others: bool
) -> dict[str, Any]:
    single: dict[str, Callable[[Path, Path], Way]] = {
        f"threads{n}": partial(Consume, threads=n) for n in threads
    }
    single |= {f"memory{n}": partial(InMemory, threads=n) for n in threads}
    single["disk"] = Disk
    if others:
        packs = {"zstd3": zstandard.ZstdCompressor(level=3).compress, "zipnn": zipnn()}
        single |= {n: partial(Through, pack=pack) for n, pack in packs.items() if pack}
    bench.timed(single[f"threads{threads[-1]}"])
    bench.check()
    ways = {n: lambda w=w: bench.timed(w) for n, w in single.items()}
    if several:
        ways["together"] = Together(
            several, max(len(os.sched_getaffinity(0)) // len(several), 1)
        ).timed
    timings = rounds(ways, count)
    one = timings["threads1"]
    result: dict[str, Any] = {
        "ratio": one[0].ratio,
        "pack_gbs_per_core": statistics.median(t.raw_bytes / t.cpu_s for t in one) / 1e9,
        "write_amplification": max(t.amplification for t in one),
        "raw_mb": one[0].raw_bytes / 1e6,
    }
    for n in threads:
        ts = timings[f"threads{n}"]
        result[f"pack_gbs_threads{n}"] = statistics.median(t.raw_bytes / t.wall_s for t in ts) / 1e9
        result[f"pack_cores_threads{n}"] = statistics.median(t.cpu_s / t.wall_s for t in ts)
        nowhere = timings[f"memory{n}"]
        result[f"pack_gbs_threads{n}_without_disk"] = (
            statistics.median(t.raw_bytes / t.wall_s for t in nowhere) / 1e9
        )
        if n > 1:
            result[f"pack_scaling_threads{n}"] = faster(ts, one)
            result[f"pack_scaling_threads{n}_without_disk"] = faster(nowhere, timings["memory1"])
        result[f"pack_threads{n}_of_disk"] = faster(ts, timings["disk"])
    result["disk_file_gbs"] = (
        statistics.median(t.raw_bytes / USUAL_RATIO / t.wall_s for t in timings["disk"]) / 1e9
    )
    if several:
        ts = timings["together"]
        rates = [t.raw_bytes / t.wall_s for t in ts]
        result["pack_gbs_consumers"] = statistics.median(rates) / 1e9
        result["pack_consumers"] = len(several)
        result["pack_cores_consumers"] = statistics.median(t.cpu_s / t.wall_s for t in ts)
    for name in ways.keys() & {"zstd3", "zipnn"}:
        ts = timings[name]
        result[f"{name}_ratio"] = ts[0].ratio
        result[f"{name}_gbs_per_core"] = statistics.median(t.raw_bytes / t.cpu_s for t in ts) / 1e9
        result[f"of_{name}"] = median_ratio([1 / t.cpu_s for t in one], [1 / t.cpu_s for t in ts])
    return result


def _written() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    return 0


def main() -> int:
    p = parser(__doc__, f"pack_{card()}.json")
    p.add_argument("--rounds", type=int, default=7, help="(default: 7)")
    p.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="(default: both)")
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    p.add_argument(
        "--consumers",
        type=int,
        default=0,
        help="also so many processes at once, each with half a ring and its share of the cores",
    )
    p.add_argument("--tokens", type=int, default=2048, help="of a sample (default: 2048)")
    p.add_argument("--ring", default="1GiB", help="bytes of a ring (default: 1GiB)")
    p.add_argument("--place", type=Path, default=DATA, help="of the files (default: data/)")
    p.add_argument("--synthetic", type=int, metavar="HIDDEN", help="made-up states of this width")
    p.add_argument("--samples", type=int, default=40, help="to be read (default: 40)")
    p.add_argument("--many", type=int, default=1_000_000, help="samples to open (default: 10^6)")
    p.add_argument("--no-read", action="store_true", help="leave out reading")
    p.add_argument("--no-others", action="store_true", help="leave out zstd 3 and ZipNN")
    a = p.parse_args()
    count = 2 if a.smoke else a.rounds
    if a.smoke:
        a.ring, a.tokens, a.samples, a.many = "32MiB", 512, 8, 20_000
        sources = [synthetic()]
    elif a.synthetic:
        sources = [synthetic(tokens=2 * a.tokens, hidden=a.synthetic)]
    else:
        sources = [real(name) for name in a.models]
    result: dict[str, Any] = {}
    a.place.mkdir(parents=True, exist_ok=True)
    for states in sources:
        with (
            tempfile.TemporaryDirectory(prefix="hst-bench-", dir=SHM) as folder,
            tempfile.TemporaryDirectory(prefix="pack-", dir=a.place) as place,
        ):
            ring = parse_size(a.ring)
            bench = Bench(states, a.tokens, ring, Path(folder), Path(place))
            several = [
                Bench(states, a.tokens, ring // 2, Path(folder, str(i)), Path(place, str(i)))
                for i in range(a.consumers)
            ]
            found = figures(bench, several, count, sorted({1, *a.threads}), not a.no_others)
        if not a.no_read:
            with tempfile.TemporaryDirectory(prefix="read-", dir=a.place) as place:
                times = 3 if a.smoke else 30
                found |= elsewhere(
                    reading.figures, states, a.tokens, a.samples, times, count, Path(place)
                )
        result |= {f"{states.name}_{name}": value for name, value in found.items()}
    if not a.no_read:
        with tempfile.TemporaryDirectory(prefix="open-", dir=a.place) as place:
            result |= reading.many(Path(place), a.many)
    finish(a, {**result, "tokens": a.tokens, "rounds": count})
    return 0


if __name__ == "__main__":
    sys.exit(main())
