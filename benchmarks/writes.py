"""Which way of writing a shard's bytes costs least: page cache, past it, or through io_uring?

fio (https://fio.readthedocs.io, which every distribution has) appends large blocks to one file, as
the consumer's writing thread does, and syncs at the end. "direct_copied" adds what frames of any
length need to be written past the page cache: one copy into aligned memory.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import DATA, card, finish, median_ratio, parser, rounds

from hstransport.settings import parse_size

BLOCK = 4 << 20
WAYS = {
    "pages": ("psync", 0, 1),
    "direct": ("psync", 1, 1),
    "uring_direct": ("io_uring", 1, 4),
    "uring_pages": ("io_uring", 0, 4),
}
"""fio's engine, whether past the page cache, blocks under way at a time."""


class Timing(NamedTuple):
    cpu_s_per_gb: float
    gb_per_s: float
    """fsync included."""


def fio(place: Path, size: int, engine: str, direct: int, depth: int) -> Timing:
    options = {
        "name": "w",
        "filename": str(place / "file"),
        "rw": "write",
        "bs": BLOCK,
        "size": size,
        "ioengine": engine,
        "direct": direct,
        "iodepth": depth,
        "end_fsync": 1,
        "fallocate": "none",
        "refill_buffers": 0,
        "output-format": "json",
    }
    command = ["fio", *(f"--{k}={v}" for k, v in options.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    (place / "file").unlink(missing_ok=True)
    if done.returncode:
        raise SystemExit(f"fio: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout)["jobs"][0]
    # Of the whole job, the sync at the end too.
    seconds = job["job_runtime"] / 1000
    cpu = seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100
    return Timing(cpu / (size / 1e9), size / 1e9 / seconds)


def copying() -> float:
    """Processor seconds to copy a GB that was just packed into aligned memory."""
    source, target = np.ones(BLOCK, np.uint8), np.ones(BLOCK, np.uint8)
    begun = time.process_time()
    for _ in range(250):
        np.copyto(target, source)
    return (time.process_time() - begun) / (250 * BLOCK / 1e9)


def main() -> int:
    p = parser(__doc__, f"writes_{card()}.json")
    p.add_argument("--rounds", type=int, default=7, help="(default: 7)")
    p.add_argument("--size", default="2GiB", help="of the file (default: 2GiB; smoke: 64MiB)")
    p.add_argument("--place", type=Path, default=DATA, help="of the file (default: data/)")
    a = p.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("writes.py needs fio: apt-get install fio")
    size, count = (64 << 20, 2) if a.smoke else (parse_size(a.size), a.rounds)
    a.place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="writes-", dir=a.place) as place:
        ways = {n: lambda w=w: fio(Path(place), size, *w) for n, w in WAYS.items()}
        timings: dict[str, list[Timing]] = rounds(ways, count)
    result: dict[str, Any] = {}
    base = [t.cpu_s_per_gb for t in timings["pages"]]
    for name, ts in timings.items():
        result[f"{name}_cpu_s_per_gb"] = statistics.median(t.cpu_s_per_gb for t in ts)
        result[f"{name}_gb_per_s"] = statistics.median(t.gb_per_s for t in ts)
        result[f"{name}_cpu_of_pages"] = median_ratio([t.cpu_s_per_gb for t in ts], base)
    copy = statistics.median(copying() for _ in range(count))
    result["copy_cpu_s_per_gb"] = copy
    result["direct_copied_cpu_s_per_gb"] = result["direct_cpu_s_per_gb"] + copy
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()
    finish(a, {**result, "block_bytes": BLOCK, "size": a.size, "fio": version, "rounds": count})
    return 0


if __name__ == "__main__":
    sys.exit(main())
