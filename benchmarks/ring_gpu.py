"""From a GPU through the ring into another process, beside plain copies into pinned memory.

All in one run, in turns, arrays by cupy, no torch: the whole way (reserve, gather into the stage,
copy engine, commit by the device; a reading process frees the records), cudaMemcpyAsync of the same
sizes into memory of cudaHostAlloc, and the other way out that was considered, a kernel that stores
straight into the pinned ring from 1 to 16 blocks. No processor can read 55 GB/s: the reader looks
at one word of every 4 KiB of each record, and at all of every 64th.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, SHM, card, expect, finish, median_ratio, parser, rounds, spread

from hstransport import _core
from hstransport.copyout import DeviceCopier
from hstransport.ring import RingReader, RingWriter

PLANES, ROW_BYTES = 4, 8192  # of a model with hidden 4096
SIZES = {
    f"{name}": rows * PLANES * ROW_BYTES
    for name, rows in {"64mib": 2048, "16mib": 512, "1mib": 32, "64kib": 2, "32kib": 1}.items()
}
BLOCKS = (1, 2, 4, 16)
MAX_RECORDS = 40_000  # of one pass
WAIT_S = 30.0


class Bench:
    """A pinned ring, its reader process, and sources on the device."""

    def __init__(self, cp: Any, folder: Path, ring_bytes: int, pass_bytes: int) -> None:
        self.cp = cp
        self.pass_bytes = pass_bytes
        started = time.perf_counter()
        self.ring = RingWriter.create(folder / "bench.ring", ring_bytes, b"benchmark")
        self.create_s = time.perf_counter() - started
        self.copier = DeviceCopier(0, 256 << 20)
        started = time.perf_counter()
        self.copier.pin(self.ring)
        self.pin_s = time.perf_counter() - started
        self.core = self.copier.core
        words = max(SIZES.values()) // 2
        rng = np.random.default_rng(1)
        self.host = rng.integers(0, 1 << 16, words, np.uint16)
        self.source = cp.asarray(self.host)
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.target = cp.cuda.alloc_pinned_memory(ring_bytes // 2)
        self.kernel = gather_kernel(cp)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.reader = context.Process(target=read_all, args=(folder / "bench.ring", theirs))
        self.reader.start()
        theirs.close()
        expect(self.pipe, "attached", WAIT_S)

    def close(self) -> None:
        self.pipe.close()
        self.reader.join(WAIT_S)
        if self.reader.is_alive():
            self.reader.kill()
        self.copier.close()
        self.ring.close()

    def through_ring(self, size: int) -> tuple[float, float]:
        """(seconds until the last record is freed, seconds of this thread's processor a record)."""
        count = self._count(size)
        self.pipe.send((count, size))
        expect(self.pipe, "ready", WAIT_S)
        native = self._native(size)
        core, ring, meta = self.core, self.ring, bytes(64)
        rows = size // PLANES // ROW_BYTES
        spent = 0
        start = time.perf_counter()
        for _ in range(count):
            slot = ring.reserve(1, meta, size, wait_s=WAIT_S)
            if slot is None:
                raise SystemExit("ring_gpu.py: the reader freed nothing for half a minute")
            before = time.perf_counter_ns()
            claim = core.take(native, 0, rows)
            core.send(claim, slot, [(0, 0, size)], size, size, 1)
            spent += time.perf_counter_ns() - before
        expect(self.pipe, 0, WAIT_S)  # records that were not as sent
        return (time.perf_counter() - start) / count, spent / count / 1e9

    def memcpy(self, size: int) -> tuple[float, float]:
        """cudaMemcpyAsync into memory of cudaHostAlloc, back to back on one stream."""
        count = self._count(size)
        runtime = self.cp.cuda.runtime
        room = self.ring.capacity_bytes // 2 // size
        base, source, stream = self.target.ptr, self.source.data.ptr, self.stream.ptr
        start = time.perf_counter()
        for i in range(count):
            runtime.memcpyAsync(base + i % room * size, source, size, 2, stream)
        spent = time.perf_counter() - start
        self.stream.synchronize()
        return (time.perf_counter() - start) / count, spent / count

    def by_kernel(self, size: int, blocks: int) -> tuple[float, float]:
        """The gather kernel storing into pinned memory itself, back to back on one stream."""
        count = self._count(4 * size)
        room = self.ring.capacity_bytes // 2 // size
        start = time.perf_counter()
        for i in range(count):
            target = self.target.ptr + i % room * size
            argument = gather_argument(target, self.source.data.ptr, size)
            self.kernel((blocks,), (256,), (argument,), stream=self.stream)
        spent = time.perf_counter() - start
        self.stream.synchronize()
        return (time.perf_counter() - start) / count, spent / count

    def gather_alone(self, size: int) -> float:
        """Seconds that the gather into the stage keeps the caller's stream busy."""
        native = self._native(size)
        rows = size // PLANES // ROW_BYTES
        start, stop = self.cp.cuda.Event(), self.cp.cuda.Event()
        times = []
        for _ in range(20):
            start.record(self.stream)
            claim = self.core.take(native, 0, rows)
            stop.record(self.stream)
            self.core.drop(claim)
            self.stream.synchronize()
            times.append(self.cp.cuda.get_elapsed_time(start, stop) / 1e3)
        return statistics.median(times)

    def _count(self, size: int) -> int:
        return min(max(self.pass_bytes // size, 1), MAX_RECORDS)

    def _native(self, size: int) -> Any:
        base, plane = self.source.data.ptr, size // PLANES
        places = [(base + p * plane, ROW_BYTES) for p in range(PLANES)]
        rows = size // PLANES // ROW_BYTES
        return _core.Planes(places, rows, ROW_BYTES, 0, self.stream.ptr, self.source)


def gather_kernel(cp: Any) -> Any:
    """The product's own kernel, compiled so that the number of blocks can be chosen."""
    source = (ROOT / "csrc" / "gather.cu").read_text()
    header = (ROOT / "csrc" / "gather.h").read_text().replace("#include <stdint.h>", "")
    types = "".join(
        f"typedef {kind} {name};\n"
        for kind, name in (
            ("unsigned int", "uint32_t"),
            ("unsigned long long", "uint64_t"),
            ("unsigned short", "uint16_t"),
        )
    )
    header = header.replace("#pragma once", types)
    whole = source.replace('#include "gather.h"', header)
    return cp.RawModule(code=whole, options=("-std=c++17",)).get_function("gather16")


def gather_argument(target: int, source: int, size: int) -> np.void:
    """``GatherArguments`` for a record."""
    plane = np.dtype([("address", np.uint64), ("stride", np.uint64)])
    names = ("target", "target_plane", "target_row", "row_bytes")
    counts = [(name, np.uint32) for name in ("rows", "planes")]
    fields = [(name, np.uint64) for name in names]
    a = np.zeros((), np.dtype([*fields, *counts, ("plane", plane, 32)]))
    a["target"], a["target_plane"], a["target_row"] = target, size // PLANES, ROW_BYTES
    a["row_bytes"], a["planes"], a["rows"] = ROW_BYTES, PLANES, size // PLANES // ROW_BYTES
    for p in range(PLANES):
        a["plane"][p] = (source + p * size // PLANES, ROW_BYTES)
    return a[()]


def read_all(path: Path, pipe: Connection) -> None:
    """The reading process: look at every record, free it, and say how many were wrong."""
    words = max(SIZES.values()) // 2
    host = np.random.default_rng(1).integers(0, 1 << 16, words, np.uint16)
    with RingReader.attach(path) as reader:
        pipe.send("attached")
        while True:
            try:
                count, size = pipe.recv()
            except EOFError:
                return
            expected = host[: size // 2]
            sampled = expected[::2048].copy()
            pipe.send("ready")
            bad = done = 0
            while done < count:
                record = reader.read()
                if record is None:
                    continue
                got = record.payload.view(np.uint16)
                whole = done % 64 == 0
                bad += not np.array_equal(
                    got if whole else got[::2048], expected if whole else sampled
                )
                record.release()
                done += 1
            pipe.send(bad)


def figures(bench: Bench, count: int) -> dict[str, Any]:
    result: dict[str, Any] = {"ring_create_s": bench.create_s, "ring_pin_s": bench.pin_s}
    for name, size in SIZES.items():
        ways: dict[str, Any] = {
            "ring": lambda size=size: bench.through_ring(size),
            "memcpy": lambda size=size: bench.memcpy(size),
        }
        for blocks in BLOCKS:
            ways[f"kernel_{blocks}"] = lambda size=size, b=blocks: bench.by_kernel(size, b)
        for way in ways.values():
            way()  # once to warm up
        passes = rounds(ways, count)
        rate = {w: [size / seconds for seconds, _ in ps] for w, ps in passes.items()}
        for way in ways:
            result[f"{way}_{name}_gb_per_s"] = statistics.median(rate[way]) / 1e9
        result[f"ring_{name}_of_memcpy"] = median_ratio(rate["ring"], rate["memcpy"])
        result[f"ring_{name}_of_memcpy_quartiles"] = spread(rate["ring"], rate["memcpy"])
        result[f"enqueue_{name}_us"] = statistics.median(s for _, s in passes["ring"]) * 1e6
        result[f"gather_{name}_us"] = bench.gather_alone(size) * 1e6
    result["fraction_of_memcpy"] = result["ring_64mib_of_memcpy"]
    return result


def main() -> int:
    p = parser(__doc__, f"ring_{card()}.json")
    p.add_argument("--rounds", type=int, default=9, help="(default: 9)")
    arguments = p.parse_args()
    try:
        import cupy as cp
    except ImportError:
        raise SystemExit("ring_gpu.py: cupy is missing: pip install cupy-cuda13x") from None
    ring_bytes, pass_bytes = (1 << 30, 256 << 20) if arguments.smoke else (4 << 30, 8 << 30)
    count = 2 if arguments.smoke else arguments.rounds
    with tempfile.TemporaryDirectory(prefix="hst-bench-", dir=SHM) as folder:
        bench = Bench(cp, Path(folder), ring_bytes, pass_bytes)
        try:
            result = figures(bench, count) | {"has_kernel": bench.copier.has_kernel}
        finally:
            bench.close()
    finish(
        arguments,
        {
            **result,
            "rounds": count,
            "ring_bytes": ring_bytes,
            "bytes_per_pass": pass_bytes,
            "checked": "one word of every 4 KiB of each record, all of every 64th",
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
