"""What --durability machine costs beside process: ring to file, for windows of several sizes.

A ring in shared memory is filled with samples of made-up states. Timed is what hstransport-consumer
does with it, from attaching to the finished shard: with both there is a sync at the end; "machine"
also waits for one after each window, before it frees the window's part of the ring.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import DATA, SHM, finish, median_ratio, parser, rounds, spread
from hstransport_consumer import packer
from pack import Bench, Timing, consume
from states import synthetic

WINDOWS = {"64mib": 64 << 20, "4mib": 4 << 20, "256kib": 256 << 10}
"""Full windows; what a server prefills in half a second; and what it decodes."""


def figures(bench: Bench, name: str, window: int, count: int) -> dict[str, Any]:
    """``window``: bytes of the ring, in records of a sample each, that are written together."""
    packer.WINDOW_BYTES = window
    ways = {d: lambda d=d: bench.timed(consume(1, durability=d)) for d in ("process", "machine")}
    for way in ways.values():
        way()
        bench.check()
    timings = rounds(ways, count)
    rate = {d: [t.raw_bytes / t.wall_s for t in ts] for d, ts in timings.items()}
    result: dict[str, Any] = {
        f"{d}_{name}_gb_per_s": statistics.median(values) / 1e9 for d, values in rate.items()
    }
    pair = rate["machine"], rate["process"]
    waits = map(_more_s, timings["machine"], timings["process"])
    windows = timings["machine"][0].raw_bytes / window
    return result | {
        f"machine_{name}_of_process": median_ratio(*pair),
        f"machine_{name}_of_process_quartiles": spread(*pair),
        f"machine_{name}_ms_per_window": 1000 * statistics.median(waits) / windows,
    }


def _more_s(a: Timing, b: Timing) -> float:
    return a.wall_s - b.wall_s


def main() -> int:
    p = parser(__doc__, "durability_cpu.json")
    p.add_argument("--rounds", type=int, default=7, help="(default: 7)")
    p.add_argument("--place", type=Path, default=DATA, help="of the files (default: data/)")
    a = p.parse_args()
    count = 2 if a.smoke else a.rounds
    a.place.mkdir(parents=True, exist_ok=True)
    states = synthetic(tokens=1024, hidden=256 if a.smoke else 1024)
    result: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="hst-bench-", dir=SHM) as folder,
        tempfile.TemporaryDirectory(prefix="durability-", dir=a.place) as place,
    ):
        ring = (32 if a.smoke else 512) << 20
        # A sample is a record of 256 KiB of the full run.
        bench = Bench(states, 32, ring, Path(folder), Path(place))
        for name, window in WINDOWS.items():
            result |= figures(bench, name, window, count)
    finish(a, {**result, "raw_mb": ring * 0.9 / 1e6, "rounds": count})
    return 0


if __name__ == "__main__":
    sys.exit(main())
