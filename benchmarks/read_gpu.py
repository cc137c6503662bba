"""Samples out of shards onto a GPU: words joined on the CPU and uploaded, or joined on the GPU.

"cpu_join" is ``sample.torch().to("cuda")``. "cpu_join_pinned" reads into pinned memory that is
used again, and uploads that: the best that a caller could make of the CPU's join.
"device_join" is ``sample.to("cuda")``: bytes of the planes go up, and are joined there. Each takes
a sample from its file (in shared memory) to where the GPU's stream has it. A figure is of one
pass over all samples by so many threads; milliseconds are those of one sample in one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import SHM, finish, median_ratio, parser, rounds, spread
from hstransport_consumer import DatasetWriter, Sample, ShardDataset, open_shards
from hstransport_consumer.tensors import to_torch
from states import synthetic

from hstransport.protocol import FINISHED, End, Rows, Segment, SessionInfo, Start

PLANES = 4  # as many as states.synthetic makes
Way = Callable[[Sample], torch.Tensor]


class Pass(NamedTuple):
    seconds: float
    cpu_seconds: float
    samples: list[float]
    """Seconds of each."""


class PinnedCpuJoin:
    """One pinned buffer a thread."""

    def __init__(self, device: torch.device, shape: tuple[int, int, int]) -> None:
        self._device, self._shape = device, shape
        self._local = threading.local()

    def __call__(self, sample: Sample) -> torch.Tensor:
        if not hasattr(self._local, "bits"):
            pinned = self._device.type == "cuda"
            words = torch.empty(self._shape, dtype=torch.int16, pin_memory=pinned)
            self._local.bits = words.numpy().view(np.uint16)
            self._local.states = words.view(torch.bfloat16)
        sample.read(out=self._local.bits)
        there = self._local.states.to(self._device, non_blocking=True, copy=True)
        wait(self._device)  # the buffer is free again
        return there


def ways_of(device: torch.device, shape: tuple[int, int, int]) -> dict[str, Way]:
    return {
        "cpu_join": lambda sample: to_torch(sample.read()).to(device),
        "cpu_join_pinned": PinnedCpuJoin(device, shape),
        # What to() does when the device is CUDA; without a GPU it is torch's CPU that joins.
        "device_join": lambda sample: sample._join_on(device),
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def timed(way: Way, dataset: ShardDataset, device: torch.device, pool: ThreadPoolExecutor) -> Pass:
    """Every sample once; each thread has a stream of its own, and waits for each sample."""

    def one(sample: Sample) -> float:
        start = time.perf_counter()
        way(sample)
        wait(device)
        return time.perf_counter() - start

    start, cpu = time.perf_counter(), time.process_time()
    samples = list(pool.map(one, dataset))
    return Pass(time.perf_counter() - start, time.process_time() - cpu, samples)


def own_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


def write(folder: Path, samples: int, tokens: int, hidden: int) -> float:
    """Shards of made-up states whose channels differ as those of models do; raw by stored bytes."""
    bits = synthetic(tokens, hidden).bits
    info = SessionInfo(
        run="0123456789ab",
        session="benchmark",
        model="synthetic",
        sglang="none",
        layers=tuple(range(1, PLANES)),
        final=True,
        hidden=hidden,
        num_layers=100,
        rows="prompt",
        rank=0,
        vocab_size=1 << 20,
        created=0.0,
        producer="benchmark",
    )
    ids = np.arange(tokens, dtype=np.int32)
    with DatasetWriter(folder) as writer:
        writer.begin_run(info)
        for sid in range(samples):
            # No two alike, at the price of no more random numbers.
            mine = np.ascontiguousarray(np.roll(bits, sid, axis=1))
            events = [
                (Start(sid, f"s{sid}", f"r{sid}", ids), None),
                (Rows((Segment(sid, 0, tokens),)), mine),
                (End(sid, FINISHED, tokens, np.empty(0, np.int32)), None),
            ]
            writer.write_window(info.run, 0, 3 * sid, 3 * sid + 2, events)
    stored = sum(p.stat().st_size for p in folder.glob("*.zst"))
    return samples * bits.nbytes / stored


def check(ways: Mapping[str, Way], dataset: ShardDataset) -> None:
    """Ends the run unless all ways give the bits that the CPU reads."""
    for sample in dataset:
        bits = torch.from_numpy(sample.read().view(np.int16))
        for name, way in ways.items():
            got = way(sample)
            if got.dtype != torch.bfloat16 or not torch.equal(got.view(torch.int16).cpu(), bits):
                sys.exit(f"{name} gives other bits of sample {sample.id}")


def figures(
    dataset: ShardDataset, device: torch.device, threads: Sequence[int], count: int
) -> dict[str, Any]:
    shape = dataset[0].hidden_states.shape
    ways = ways_of(device, shape)
    check(ways, dataset)
    gigabytes = len(dataset) * np.prod(shape).item() * 2 / 1e9
    result: dict[str, Any] = {"sample_mb": gigabytes * 1e3 / len(dataset)}
    for n in threads:
        with ThreadPoolExecutor(n, initializer=own_stream, initargs=(device,)) as pool:
            for way in ways.values():
                timed(way, dataset, device, pool)
            passes = rounds(
                {name: lambda w=w: timed(w, dataset, device, pool) for name, w in ways.items()},
                count,
            )
        base = [1 / p.seconds for p in passes["cpu_join"]]
        pinned = [1 / p.seconds for p in passes["cpu_join_pinned"]]
        for name, ps in passes.items():
            lead = f"{name}_{n}_threads"
            speeds = [1 / p.seconds for p in ps]
            result[f"{lead}_gb_per_s"] = gigabytes * statistics.median(speeds)
            result[f"{lead}_ms_p50"] = 1e3 * statistics.median(s for p in ps for s in p.samples)
            result[f"{lead}_cpu_ms_per_sample"] = (
                1e3 * statistics.median(p.cpu_seconds for p in ps) / len(dataset)
            )
            result[f"{lead}_of_cpu_join"] = median_ratio(speeds, base)
            result[f"{lead}_of_cpu_join_pinned"] = median_ratio(speeds, pinned)
            result[f"{lead}_of_cpu_join_pinned_quartiles"] = spread(speeds, pinned)
    return result


def arguments() -> argparse.Namespace:
    p = parser(__doc__, "read_h200.json")
    p.add_argument("--rounds", type=int, default=11, help="(default: 11)")
    p.add_argument("--samples", type=int, default=16, help="of 67 MB each (default: 16)")
    p.add_argument("--threads", type=int, nargs="+", default=[1, 4], help="(default: 1 4)")
    p.add_argument("--device", default="cuda", help="(default: cuda; smoke: cpu)")
    a = p.parse_args()
    a.tokens, a.hidden = 2048, 4096
    if a.smoke:
        a.rounds, a.samples, a.threads, a.device = 2, 3, [1, 2], "cpu"
        a.tokens, a.hidden = 300, 256
    return a


def main() -> int:
    a = arguments()
    device = torch.device(a.device)
    with tempfile.TemporaryDirectory(prefix="hst-bench-", dir=SHM) as folder:
        ratio = write(Path(folder), a.samples, a.tokens, a.hidden)
        result = figures(open_shards(folder), device, a.threads, a.rounds)
    result |= {"samples": a.samples, "tokens": a.tokens, "planes": PLANES, "hidden": a.hidden}
    result |= {"ratio": ratio, "rounds": a.rounds, "device": a.device}
    if device.type == "cuda":
        result |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    finish(a, {**result, "checked": "every bit of every sample, of all ways"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
