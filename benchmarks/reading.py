"""Shards back into memory, for pack.py: beside the files that trainers read today.

The same samples of real states lie on the disk as shards, as .pt files, one a sample, read whole
and mapped, as .safetensors and as gzipped .pt. "sequential" reads all of them in order, from a warm
page cache and on one thread: processor time gives the speed of a core. "sample" is the wall time
until one sample, chosen at random, is there as a tensor, with all cores that there are; for "cold"
its file is first dropped from the page cache. "open" is the time until a directory of very many
samples can be read, and the memory that the process has then.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import median_ratio, rounds
from hstransport_consumer import DatasetWriter, open_shards
from safetensors.torch import load_file, save_file
from shard_kit import make_info
from states import States

from hstransport.protocol import End, Event, Rows, Segment, Start

SETTLE_S = 0.05
"""Threads of torch go on spinning for a while; others are measured without them."""
Load = Callable[[int], Any]

OPEN = """
import json, re, sys, time
from pathlib import Path
from hstransport_consumer import open_shards
began = time.perf_counter()
dataset = open_shards(sys.argv[1])
opened = time.perf_counter() - began
kib = re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())
dataset[len(dataset) // 2].hidden_states
print(json.dumps([len(dataset), opened, int(kib[1]) / 1024]))
"""


class Store:
    """Samples of one model's states in files of every kind."""

    def __init__(self, states: States, tokens: int, count: int, folder: Path) -> None:
        self._states, self._tokens, self.count = states, tokens, count
        self.shards, self._files = folder / "shards", folder / "files"
        self._files.mkdir(parents=True)
        planes, _, hidden = states.bits.shape
        info = make_info(hidden=hidden, layers=tuple(range(1, planes)), num_layers=planes)
        with DatasetWriter(self.shards) as writer:
            writer.begin_run(info)
            for i in range(count):
                events = sample_events(i, self.part(i))
                writer.write_window(info.run, 0, 3 * i, 3 * i + 2, events)
        for i in range(count):
            tensor = torch.from_numpy(self.want(i)).view(torch.bfloat16)
            torch.save(tensor, self.file(i, "pt"))
            save_file({"states": tensor}, self.file(i, "safetensors"))
            plain = io.BytesIO()
            torch.save(tensor, plain)
            self.file(i, "gz").write_bytes(gzip.compress(plain.getvalue(), 6))
        os.sync()
        self.sample_bytes = self.part(0).nbytes

    def part(self, i: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """States of the i-th sample ``[planes, tokens, hidden]``: other tokens each time."""
        return np.ascontiguousarray(self._states.part(i, self._tokens))

    def want(self, i: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """``[tokens, planes, hidden]``, as a trainer reads it."""
        return np.ascontiguousarray(self.part(i).transpose(1, 0, 2))

    def file(self, i: int, kind: str) -> Path:
        return self._files / f"{i}.{kind}"

    def ways(self, threads: int) -> dict[str, Load]:
        dataset = open_shards(self.shards, threads=threads)
        return {
            "shards": lambda i: dataset[str(i)].torch(),
            "torch_load": lambda i: torch.load(self.file(i, "pt"), weights_only=True),
            "torch_mmap": lambda i: torch.load(
                self.file(i, "pt"), mmap=True, weights_only=True
            ).clone(),
            "safetensors": lambda i: load_file(self.file(i, "safetensors"))["states"].clone(),
            "ckpt_gz": lambda i: torch.load(
                gzip.open(self.file(i, "gz")),  # type: ignore[arg-type]
                weights_only=True,
            ),
        }

    def check(self) -> None:
        for name, load in self.ways(2).items():
            for i in range(0, self.count, 7):
                got = load(i).view(torch.int16).numpy().view(np.uint16)
                assert np.array_equal(got, self.want(i)), f"{name}: sample {i}"

    def drop(self, name: str, i: int) -> None:
        """Take what a way reads of a sample out of the page cache."""
        kinds = {"torch_mmap": "pt", "torch_load": "pt", "safetensors": "safetensors"}
        paths = self.shards.glob("*.zst") if name == "shards" else [self.file(i, kinds[name])]
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def sample_events(i: int, states: Any) -> list[tuple[Event, Any]]:
    tokens = states.shape[1]
    return [
        (Start(i, str(i), str(i), np.arange(tokens, dtype=np.int32)), None),
        (Rows((Segment(i, 0, tokens),)), states),
        (End(i, "finished", tokens, np.empty(0, np.int32)), None),
    ]


def sequential(store: Store, load: Load, few: int) -> float:
    """GB of states a second of processor time."""
    time.sleep(SETTLE_S)
    torch.set_num_threads(1)
    for i in range(few):  # for memory that this way has used before
        load(i)
    began = time.process_time()
    for i in range(few):
        load(i)
    return store.sample_bytes * few / (time.process_time() - began) / 1e9


def sample_ms(store: Store, name: str, load: Load, cold: bool, times: int, seed: int) -> float:
    """Median time until a sample is there."""
    time.sleep(SETTLE_S)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    chosen = random.Random(seed)
    taken = []
    for _ in range(times):
        i = chosen.randrange(store.count)
        if cold:
            store.drop(name, i)
        began = time.perf_counter()
        load(i)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def figures(
    states: States, tokens: int, samples: int, times: int, count: int, folder: Path
) -> dict[str, Any]:
    """``samples`` of so many ``tokens``, ``times`` of them at random a round, ``count`` rounds."""
    store = Store(states, tokens, samples, folder)
    store.check()
    ways = store.ways(1)
    few = {name: 2 if name == "ckpt_gz" else store.count for name in ways}
    speeds = rounds(
        {n: partial(sequential, store, load, few[n]) for n, load in ways.items()}, count
    )
    result: dict[str, Any] = {"read_gbs_per_core": statistics.median(speeds["shards"])}
    for name in ways.keys() - {"shards"}:
        result[f"read_{name}_gbs_per_core"] = statistics.median(speeds[name])
    ways = store.ways(len(os.sched_getaffinity(0)))
    del ways["ckpt_gz"]
    for cold in (False, True):
        seeds = {name: iter(range(count)) for name in ways}

        def one(name: str, cold: bool, seeds: dict[str, Any]) -> float:
            return sample_ms(store, name, ways[name], cold, times, next(seeds[name]))

        taken = rounds({n: partial(one, n, cold, seeds) for n in ways}, count)
        word = "cold" if cold else "warm"
        result[f"read_sample_ms_p50_{word}"] = statistics.median(taken["shards"])
        for name in ways.keys() - {"shards"}:
            result[f"read_{name}_sample_ms_p50_{word}"] = statistics.median(taken[name])
            result[f"read_sample_{word}_of_{name}"] = median_ratio(taken["shards"], taken[name])
    return result


def many(folder: Path, samples: int) -> dict[str, Any]:
    """A directory of so many samples of one token, opened by a process of its own."""
    info = make_info(hidden=8)
    rng = np.random.default_rng(0)
    step = 10_000
    with DatasetWriter(folder, shard_bytes=32 << 20) as writer:
        writer.begin_run(info)
        for first in range(0, samples, step):
            states = rng.integers(0, 1 << 15, (info.planes, step, 8)).astype(np.uint16)
            events = [
                event
                for k in range(min(step, samples - first))
                for event in sample_events(first + k, states[:, k : k + 1])
            ]
            writer.write_window(info.run, 0, 3 * first, 3 * first + len(events) - 1, events)
    command = [sys.executable, "-c", OPEN, str(folder)]
    found = []
    for _ in range(3):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        listed, seconds, mib = json.loads(done.stdout)
        assert listed == samples, f"{listed} of {samples} samples"
        found.append((seconds, mib))
    return {
        "open_ms": statistics.median(s for s, _ in found) * 1e3,
        "open_resident_mb": max(mib for _, mib in found) * 2**20 / 1e6,
        "open_samples": samples,
        "open_shards": len(list(folder.glob("*.zst"))),
    }
