"""What capture costs a real SGLang server on a GPU: the same load, servers that take turns.

off          hstransport is installed and off
off_again    another such server: how far two equal ones differ is the noise. The base that all
             ways are compared with is the mean of these two in the same round
aux_only     SGLang computes the inner layers' states, and nobody takes them
untouched    capture is on, but not for these requests (HSTRANSPORT_REQUESTS=tagged)
hstransport  every row is captured, and hstransport-consumer writes shards on the same machine
baseline     torch.save of .cpu() into /dev/shm inside the forward pass
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import (
    DATA,
    SHM,
    card,
    end_in_order,
    finish,
    median_ratio,
    need_gpu,
    parser,
    spread,
    tool,
)
from hstransport_consumer import open_shards
from load import Prompt
from rig.gpu_server import MODELS, GpuServer
from rig.models import model_dir
from rig.server import SGLangServer
from ways import SESSION, ConsumerBeside, Stage, last_words

from hstransport.protocol import SessionInfo, unpack_info

OFF = ("off", "off_again")
WAYS = (*OFF, "aux_only", "untouched", "hstransport", "baseline")
TIMED_PASSES = 3
"""Passes of each load with the tap's timers on: 48 prefill batches, 765 decode steps."""


class Load(NamedTuple):
    """One request that holds ``count`` prompts of ``tokens`` random ids."""

    count: int
    tokens: int
    new_tokens: int

    @property
    def rows(self) -> int:
        """Rows that capture stores of it: the last new token is never an input."""
        return self.count * (self.tokens + self.new_tokens - 1)


class Scale(NamedTuple):
    prefill: Load
    decode: Load
    vocabulary: int
    ring_bytes: int
    consumer: Sequence[str]
    server: dict[str, Any]


GPU = Scale(
    Load(64, 2048, 1),
    Load(32, 32, 256),
    vocabulary=100_000,
    ring_bytes=8 << 30,
    consumer=["--threads", "2"],
    server={"server": GpuServer, "max_running": 64, "max_total_tokens": 49152},
)
SMOKE = Scale(
    Load(6, 48, 1),
    Load(3, 8, 8),
    vocabulary=500,
    ring_bytes=64 << 20,
    consumer=[],
    server={"server": SGLangServer},
)


class Turn(NamedTuple):
    """One pass of both loads."""

    prefill_s: float
    decode_s: float
    drain_s: float = 0.0
    """From the last answer until all is in the shard."""
    consumer_cpu_s: float = 0.0
    stored_bytes: int = 0


class Bench:
    """All servers, up at once, and one method that lets a way take its turn."""

    def __init__(self, model: Path, scale: Scale, folder: Path, shm: Path) -> None:
        self.scale = scale
        self.ids: list[str] = []
        """Samples that must be whole in the shards."""
        self.tokens = 0
        """Tokens that those samples have."""
        self.dropped = 0
        self.info: SessionInfo | None = None
        self.shards: list[Path] = []
        self._turns = 0
        self._folder = folder
        self._rings = shm / "rings"
        self._saved = shm / "baseline"
        self._switch = shm / "tap-time"
        self._switch.write_bytes(b"\0")
        stage = partial(Stage, model=model, folder=folder, **scale.server)
        capture = {
            "HSTRANSPORT": "1",
            "HSTRANSPORT_SESSION": SESSION,
            "HSTRANSPORT_DIR": str(self._rings),
            "HSTRANSPORT_ROWS": "all",
            "HSTRANSPORT_REQUESTS": "tagged",  # the requests that warm a server up are not
            "HSTRANSPORT_RING_BYTES": str(scale.ring_bytes),
            "HST_TAP_TIME": str(self._switch),
        }
        baseline = {"HST_BASELINE_DIR": str(self._saved), "HST_BASELINE_DECODE": "1"}
        self._captured = stage("captured", env=capture, plugins=["tap_time"])
        self._by_hand = stage("by-hand", env=baseline, plugins=["baseline"])
        self._plain = stage("plain")
        self._again = self._plain if scale is SMOKE else stage("again")

    def start(self, stack: ExitStack) -> None:
        """All at once: starting is mostly work of one core each."""
        stages = list({self._captured, self._by_hand, self._plain, self._again})
        pool = ThreadPoolExecutor(len(stages) if self.scale is GPU else 2)
        # Last of all: a server ends with the thread that started it (PR_SET_PDEATHSIG).
        stack.callback(pool.shutdown)
        # Several at once, too: each takes seconds to end.
        stack.callback(lambda: list(pool.map(Stage.stop, stages)))
        list(pool.map(Stage.start, stages))

    def turn(self, way: str) -> Turn:
        """One pass of both loads by a way."""
        self._turns += 1
        if way == "hstransport":
            return self._capture(timed=False)
        stages = dict(zip(OFF, (self._plain, self._again), strict=True))
        stages["untouched"] = self._captured
        with stages.get(way, self._by_hand) as stage:
            if way == "baseline":
                self._saved.mkdir()
            tagged = way != "untouched"
            try:
                turn = Turn(*(self._pass(stage, load, tagged=tagged) for load in self._loads()))
                if way == "baseline":
                    turn = turn._replace(stored_bytes=size(self._saved))
            finally:
                shutil.rmtree(self._saved, ignore_errors=True)
        return turn

    def tap_times(self) -> dict[str, list[float]]:
        """Microseconds of the tap in each pass, from passes that count for nothing else."""
        with self._switch.open("r+b", buffering=0) as switch:
            switch.write(b"\1")  # in place: the server has it mapped
            for _ in range(TIMED_PASSES):
                self._turns += 1
                self._capture(timed=True)
        times: dict[str, list[float]] = {"prefill": [], "decode": []}
        for line in self._switch.with_suffix(".log").read_text().splitlines():
            kind, microseconds = line.split()
            times[kind].append(float(microseconds))
        return times

    def _loads(self) -> tuple[Load, Load]:
        return self.scale.prefill, self.scale.decode

    def _pass(self, stage: Stage, load: Load, tag: str = "pass", *, tagged: bool = True) -> float:
        # Fresh ids each time, so that SGLang's radix cache has nothing to answer with.
        rng = np.random.default_rng([self._turns, load.count])
        ids = rng.integers(3, self.scale.vocabulary, (load.count, load.tokens))
        prompts: list[Prompt] = ids.tolist()
        name = f"{tag}-{self._turns}-{load.count}"
        return stage.client.batch(prompts, name, load.new_tokens, tagged=tagged)

    def _capture(self, *, timed: bool) -> Turn:
        """A consumer of its own for each turn: shards that hold whole samples only."""
        out = self._folder / f"shards-{self._turns}"
        log = self._folder / "consumer.log"
        with self._captured as stage:
            consumer = ConsumerBeside(out, self._rings, log, self.scale.consumer)
            try:
                consumer.wait_until_attached()
                cpu = consumer.cpu_s()
                seconds = []
                for load in self._loads():
                    seconds.append(self._pass(stage, load, "captured"))
                    tag = f"captured-{self._turns}-{load.count}"
                    self.ids += [f"{tag}-{i}" for i in range(load.count)]
                    self.tokens += load.rows
                drain_s = consumer.drain()
                spent = consumer.cpu_s() - cpu
                ring = consumer.ring()
                self.dropped = ring.counters.dropped_records
                self.info = unpack_info(ring.info)
                consumer.finish()
            finally:
                consumer.kill()
        self.shards.append(out)
        say(f"captured{' and timed' if timed else ''}: drained {drain_s:.1f} s after the answers")
        return Turn(*seconds, drain_s, spent, size(out))


def verify(bench: Bench) -> dict[str, Any]:
    """Everything that was written, by ``hstransport verify``: several directories at once."""

    def one(folder: Path) -> dict[str, Any]:
        command = [tool("hstransport"), "verify", "--json", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise SystemExit(f"hstransport verify: {done.stderr}")
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(one, bench.shards))
    findings = [f for report in reports for f in report["findings"]]
    return {
        "samples_sent": len(bench.ids),
        "samples_stored": sum(r["samples"] for r in reports),
        "samples_whole": sum(r["whole"] for r in reports),
        "tokens_sent": bench.tokens,
        "tokens_stored": sum(s.tokens for d in bench.shards for s in open_shards(d)),
        "records_dropped": bench.dropped,
        "verify_findings": len(findings),
        "verify_first_findings": findings[:5],
    }


def figures(bench: Bench, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """What each way did, and how it compares with the plugin off."""
    prefill, decode = bench.scale.prefill, bench.scale.decode
    done = {"prefill": prefill.count * prefill.tokens, "decode": decode.count * decode.new_tokens}
    result: dict[str, Any] = {}
    for kind, tokens in done.items():
        speed = {w: [tokens / getattr(t, f"{kind}_s") for t in ts] for w, ts in turns.items()}
        base = [statistics.fmean(pair) for pair in zip(*(speed[w] for w in OFF), strict=True)]
        for way, values in speed.items():
            result[f"{way}_{kind}_tokens_per_s"] = statistics.median(values)
            key = f"{kind}_ratio" if way == "hstransport" else f"{way}_{kind}_ratio"
            result[key] = median_ratio(values, base)
            result[f"{key}_quartiles"] = spread(values, base)
            result[f"{key}_rounds"] = [v / b for v, b in zip(values, base, strict=True)]
    captured = turns["hstransport"]
    rows = prefill.rows + decode.rows
    assert bench.info is not None
    raw = rows * bench.info.row_bytes
    result["raw_bytes_per_token"] = bench.info.row_bytes
    result["raw_by_stored"] = raw / statistics.median(t.stored_bytes for t in captured)
    result["prefill_raw_gb_per_s"] = (
        result["hstransport_prefill_tokens_per_s"] * bench.info.row_bytes / 1e9
    )
    result["hstransport_drain_s"] = statistics.median(t.drain_s for t in captured)
    cpu_s = statistics.median(t.consumer_cpu_s for t in captured)
    result["hstransport_consumer_cpu_us_per_token"] = cpu_s / rows * 1e6
    if "baseline" in turns:
        result["baseline_bytes"] = statistics.median(t.stored_bytes for t in turns["baseline"])
    return result


def tap_figures(times: dict[str, list[float]]) -> dict[str, Any]:
    """The tap's time on the scheduler's thread, per prefill batch and per decode step."""
    result: dict[str, Any] = {"tap_us_p50": {}, "tap_us_p99": {}}
    for kind, values in times.items():
        for p in (50, 99):
            value = float(np.percentile(values, p))
            result[f"tap_us_{kind}_p{p}"] = result[f"tap_us_p{p}"][kind] = value
        result[f"tap_{kind}_passes"] = len(values)
    return result


def main() -> int:
    arguments = arguments_of()
    scale = SMOKE if arguments.smoke else GPU
    if not arguments.smoke:
        need_gpu()
    end_in_order()
    model = arguments.model or (model_dir("llama") if arguments.smoke else MODELS / "qwen3-8b")
    begun = time.monotonic()
    DATA.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        # Shards go to a disk, as they do in use; rings and the baseline's files to shared memory.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serving-", dir=DATA)))
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hst-bench-", dir=SHM)))
        (shm / "rings").mkdir(mode=0o700)
        bench = Bench(model, scale, folder, shm)
        with ExitStack() as running:
            running.push(partial(last_words, folder))
            say(f"starting servers for {model.name}")
            bench.start(running)
            say(f"started after {time.monotonic() - begun:.0f} s")
            for way in WAYS:
                say(f"{way}, which does not count: {bench.turn(way)}")
            turns: dict[str, list[Turn]] = {way: [] for way in WAYS}
            for i in range(arguments.rounds):
                if time.monotonic() - begun > arguments.limit_s:
                    say(f"{arguments.limit_s:.0f} s are over")
                    break
                order = [*WAYS[i % len(WAYS) :], *WAYS[: i % len(WAYS)]]
                for way in order:
                    turns[way].append(bench.turn(way))
                    say(f"round {i + 1}: {way}: {turns[way][-1]}")
            times = bench.tap_times()
        say(f"verifying after {time.monotonic() - begun:.0f} s")
        checked = verify(bench)
    count = len(turns[OFF[0]])
    if not count:
        raise SystemExit("no round was finished within --limit-s")
    result = figures(bench, turns) | tap_figures(times) | checked
    assert bench.info is not None
    result |= {
        "model": model.name,
        "weights": "random" if arguments.smoke else "dummy weights",
        "layers": ",".join(map(str, bench.info.layer_names)),
        "hidden": bench.info.hidden,
        "num_layers": bench.info.num_layers,
        "prefill": "{} prompts of {} tokens, {} new".format(*scale.prefill),
        "decode": "{} prompts of {} tokens, {} new".format(*scale.decode),
        "ring_bytes": scale.ring_bytes,
        "consumer": " ".join(["hstransport-consumer", *scale.consumer]),
        "rounds": count,
        "seconds": time.monotonic() - begun,
    }
    finish(arguments, result)
    return 0 if sound(checked) else 1


def sound(checked: dict[str, Any]) -> bool:
    """Whether nothing was lost; if not, the figures are written all the same, and so is this."""
    sent = checked["samples_sent"]
    good = (
        checked["samples_stored"] == checked["samples_whole"] == sent
        and checked["tokens_stored"] == checked["tokens_sent"]
        and not checked["verify_findings"]
        and not checked["records_dropped"]
    )
    if not good:
        say(f"NOT SOUND: {checked}")
    return good


def size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def arguments_of() -> argparse.Namespace:
    p = parser(__doc__, f"serving_{card()}.json")
    p.add_argument("--model", type=Path, help="a model's folder (default: gpu/models/qwen3-8b)")
    p.add_argument("--rounds", type=int, help="(default: 5; smoke: 1)")
    p.add_argument(
        "--limit-s", type=float, default=360, help="begin no round after this (default: 360)"
    )
    arguments = p.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.smoke else 5
    return arguments


def say(words: str) -> None:
    print(f"serving_gpu: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
