"""What the benchmarks share: the file a result goes into, where it came from, rounds, medians.

Figures are compared within one run only: the ways take turns, so that whatever else the machine
does meets all of them, and a ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zstandard

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DATA = ROOT / "data" / "benchmarks"
SHM = Path("/dev/shm")

sys.path.append(str(ROOT / "tests"))  # where the rig is: SGLang servers on a CPU, test models


def parser(doc: str | None, result: str) -> argparse.ArgumentParser:
    """The arguments that all benchmarks have."""
    p = argparse.ArgumentParser(
        description=(doc or "").partition("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("--smoke", action="store_true", help="only show that it works; no real figures")
    p.add_argument(
        "--out",
        type=Path,
        help=f"where the figures go (default: benchmarks/results/{result}; smoke: nowhere)",
    )
    p.set_defaults(result=result, commit=_commit())  # now: a run is long, and HEAD may move
    return p


def finish(
    arguments: argparse.Namespace,
    figures: Mapping[str, Any],
    made: Mapping[str, Any] | None = None,
) -> None:
    """Print the figures and write them with their provenance; ``made``: if that is not from here
    and now."""
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:{width}}  {_short(value)}")
    out = arguments.out or (None if arguments.smoke else RESULTS / arguments.result)
    if out is None:
        print("(smoke: nothing written; give --out for a file)")
        return
    whole = {name: _rounded(value) for name, value in figures.items()}
    whole |= {"smoke": arguments.smoke, **(made or provenance(arguments.commit))}
    text = json.dumps(whole, indent=1, ensure_ascii=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n")
    print(f"written: {out}")


def provenance(commit: str) -> dict[str, Any]:
    """Which code, on what, when, called how."""
    return {
        "commit": commit,
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(_memory_bytes() / 2**30),
            "system": f"{platform.system()} {platform.machine()}",
            **gpu(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "sglang", "hstransport", "numpy")},
            "zstandard": _version("zstandard"),
            "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        },
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "command": _command(),
    }


def gpu() -> dict[str, str]:
    """Name and driver of the first NVIDIA GPU; empty where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode or ", " not in done.stdout:
        return {}
    name, _, driver = done.stdout.splitlines()[0].rpartition(", ")
    return {"gpu": name, "driver": driver}


def need_gpu() -> None:
    """End the program where there is none."""
    if not gpu():
        raise SystemExit("nvidia-smi shows no NVIDIA GPU: --smoke shows on a CPU that this works")


def card() -> str:
    """The word for this machine in a result's name: h200, another GPU's name, or cpu."""
    words = re.findall(r"[a-z0-9]+", gpu().get("gpu", "cpu").lower())
    return "h200" if "h200" in words else "-".join(w for w in words if w != "nvidia")


def tool(name: str) -> str:
    """Where a command of hstransport lies: beside this Python, or on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not installed for {sys.executable}: pip install .")
    return found


def end_in_order() -> None:
    """Let SIGTERM end the program as an error does, so that no ring and no server is left."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("ended by SIGTERM"))


def expect(pipe: Connection, what: Any, within_s: float) -> None:
    """Wait for a process beside this one to say just that, or end the program."""
    if not pipe.poll(within_s):
        raise SystemExit(f"{Path(sys.argv[0]).name}: the reader said nothing; {what!r} was due")
    said = pipe.recv()
    if said != what:
        raise SystemExit(f"{Path(sys.argv[0]).name}: the reader said {said!r}, {what!r} was due")


def rounds(ways: Mapping[str, Callable[[], Any]], count: int) -> dict[str, list[Any]]:
    """Call each way once a round, beginning with another one each round; results by way."""
    results: dict[str, list[Any]] = {name: [] for name in ways}
    names = list(ways)
    for i in range(count):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            results[name].append(ways[name]())
    return results


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of a way's figure by the base's in the same round."""
    return statistics.median(v / b for v, b in zip(values, base, strict=True))


def spread(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Quartiles of the rounds' ratios: half of the rounds lie between them."""
    ratios = [v / b for v, b in zip(values, base, strict=True)]
    if len(ratios) < 2:
        return [*ratios, *ratios]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [low, high]


def _command() -> str:
    """As one would type it in the repository; a path of this machine is nobody's business."""
    words = [f"benchmarks/{Path(sys.argv[0]).name}"]
    for word in sys.argv[1:]:
        path = Path(word)
        words.append(path.name if path.is_absolute() else word)
    return shlex.join(["python", *words])


def _commit() -> str:
    known = os.environ.get("BENCHMARK_COMMIT")  # where the tree came without its history
    if known:
        return known
    head = _git("rev-parse", "HEAD")
    # Results of this very run, or of the one before, do not make the code another one.
    dirty = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return f"{head}-dirty" if dirty else head


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _rounded(value: Any) -> Any:
    """Four digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return value


def _short(value: Any) -> str:
    return json.dumps(_rounded(value), ensure_ascii=False)
