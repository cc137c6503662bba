"""What capture costs a real SGLang server on this machine: the same prompts, ways that take turns.

no_capture             the plugin is installed and off
no_capture_again       another such server: how far two equal ones differ is the noise
aux_only               SGLang computes the layers' states, and nobody takes them
hstransport            and hstransport-consumer writes shards on the same machine
hstransport_no_reader  the same server while the consumer is stopped: the ring holds the pass
baseline               torch.save into /dev/shm inside the forward pass
json                   return_hidden_states over HTTP, json.loads by the client
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from common import DATA, SHM, finish, median_ratio, parser, rounds, spread
from hstransport_consumer import open_shards
from load import Pass, Prompt, chats, random_ids
from rig.models import model_dir
from rig.states import returned
from ways import SESSION, ConsumerBeside, Stage, last_words, totals

from hstransport.protocol import SessionInfo, unpack_info

BASE = "no_capture"
RING_BYTES = 256 << 20
CHECKED_SAMPLES = 3
WAYS = (
    BASE,
    "no_capture_again",
    "aux_only",
    "hstransport",
    "hstransport_no_reader",
    "baseline",
    "json",
)


class Turn(NamedTuple):
    """One pass of one way."""

    load: Pass
    scheduler_cpu_s: float
    waited_s: float
    """How long the scheduler waited for a core that another process had."""
    consumer_cpu_s: float = 0.0
    stored_bytes: int = 0
    drain_s: float = 0.0
    """From the last answer until all is in the shard."""


class Bench:
    """All servers, the consumer, and one method for each way."""

    def __init__(
        self,
        model: Path,
        prompts: Sequence[Prompt],
        folder: Path,
        rings: Path,
        concurrency: int,
    ) -> None:
        self.prompts = prompts
        self.ids: list[str] = []
        """Samples that must be whole in the shards."""
        self.passes: dict[str, int] = {}
        self.profiles: dict[str, list[float]] = {}
        self._saved = rings / "baseline"
        self._profile = rings / "profile.json"
        self._rings = rings
        self._turn = 0
        self.out = folder / "shards"
        stage = partial(Stage, model=model, folder=folder, concurrency=concurrency)
        self.plain = stage("plain")
        self.again = stage("again")
        capture = {
            "HSTRANSPORT": "1",
            "HSTRANSPORT_SESSION": SESSION,
            "HSTRANSPORT_DIR": str(rings),
            "HSTRANSPORT_RING_BYTES": str(RING_BYTES),
            "HSTRANSPORT_REQUESTS": "tagged",
            "HST_PROFILE": str(self._profile),
        }
        self.captured = stage("captured", env=capture, plugins=["profile"])
        self.by_hand = stage(
            "by-hand",
            env={"HST_BASELINE_DIR": str(self._saved)},
            plugins=["baseline"],
            extra_args=["--enable-return-hidden-states"],
        )
        self.consumer: ConsumerBeside | None = None
        self._log = folder / "consumer.log"

    def start(self, stack: ExitStack, *, smoke: bool) -> None:
        """Start all of them, several at once because starting is mostly one core's work."""
        stages = [self.captured, self.by_hand, self.plain, *([] if smoke else [self.again])]
        pool = ThreadPoolExecutor(3 if smoke else 2)
        # Last of all: a server ends with the thread that started it (PR_SET_PDEATHSIG).
        stack.callback(pool.shutdown)
        for stage in stages:
            stack.callback(stage.stop)
        list(pool.map(Stage.start, stages))
        self.consumer = ConsumerBeside(self.out, self._rings, self._log)
        stack.callback(self.consumer.kill)

    def turn(self, way: str) -> Turn:
        """One pass of a way."""
        self.passes[way] = self.passes.get(way, 0) + 1
        if way in ("hstransport", "hstransport_no_reader"):
            return self._captured(way, reader=way == "hstransport")
        if way == "baseline":
            return self._saved_by_hand()
        stages = {"no_capture": self.plain, "no_capture_again": self.again}
        return self._pass(stages.get(way, self.by_hand), hidden_states=way == "json")

    def session_info(self) -> SessionInfo:
        """What the captured server says of itself."""
        assert self.consumer is not None
        return unpack_info(self.consumer.ring().info)

    def ask_alone(self) -> list[Callable[[Any], None]]:
        """A few samples, each alone, of all three ways; checks to be made on the dataset."""
        checks: list[Callable[[Any], None]] = []
        for prompt in self.prompts[:CHECKED_SAMPLES]:
            self._turn += 1
            sample_id = f"check-{self._turn}"
            with self.captured as stage:
                stage.client.alone(prompt, sample_id)
            with self.by_hand as stage:
                answer = stage.client.alone(prompt, sample_id, hidden_states=True)
                self._saved.mkdir()
                stage.client.alone(prompt, f"{sample_id}-saved")
            saved = _load(self._saved)
            shutil.rmtree(self._saved)
            self.ids.append(sample_id)
            checks.append(_comparison(sample_id, returned(answer), saved))
        return checks

    def _pass(
        self,
        stage: Stage,
        *,
        hidden_states: bool = False,
        tag: str = "pass",
        begin: Callable[[], object] = lambda: None,
    ) -> Turn:
        """``begin`` is called when the server is warm, and before the pass."""
        self._turn += 1
        with stage:
            begin()
            cpu, waited = stage.cpu_s(), stage.waited_s()
            tag = f"{tag}-{self._turn}"
            done = stage.client.run(self.prompts, tag, hidden_states=hidden_states)
            return Turn(done, stage.cpu_s() - cpu, stage.waited_s() - waited)

    def _saved_by_hand(self) -> Turn:
        turn = self._pass(self.by_hand, begin=self._saved.mkdir)
        stored = _size(self._saved)
        shutil.rmtree(self._saved)
        return turn._replace(stored_bytes=stored)

    def _captured(self, way: str, *, reader: bool) -> Turn:
        consumer = self.consumer
        assert consumer is not None
        before: dict[str, list[float]] = {}
        if reader:
            consumer.resume()
        cpu = consumer.cpu_s()
        turn = self._pass(
            self.captured, tag=way, begin=lambda: before.update(totals(self._profile))
        )
        consumer.resume()
        drain_s = consumer.drain()
        spent = consumer.cpu_s() - cpu
        consumer.pause()
        dropped = consumer.ring().counters.dropped_records
        if dropped:
            raise SystemExit(f"{way}: {dropped} records were dropped: the figures are worthless")
        self._add_profile(way, before)
        self.ids += [f"{way}-{self._turn}-{i}" for i in range(len(self.prompts))]
        return turn._replace(consumer_cpu_s=spent, drain_s=drain_s)

    def _add_profile(self, way: str, before: dict[str, list[float]]) -> None:
        for step, values in totals(self._profile).items():
            was = before.get(step, [0.0, 0.0, 0.0])
            grown = [v - w for v, w in zip(values, was, strict=True)]
            key = f"{way}/{step}"
            self.profiles[key] = [
                a + b for a, b in zip(grown, self.profiles.get(key, [0.0, 0.0, 0.0]), strict=True)
            ]


def verify(out: Path, ids: Sequence[str], checks: Sequence[Callable[[Any], None]]) -> int:
    """Every sample there and whole, and the checked ones bit for bit; returns their tokens."""
    dataset = open_shards(out)
    if sorted(dataset.ids) != sorted(ids):
        raise SystemExit(f"{len(dataset)} samples are stored, {len(ids)} were asked for")
    bad = {s.id: s.state for s in dataset if s.state != "whole"}
    if bad:
        raise SystemExit(f"samples that are not whole: {bad}")
    for check in checks:
        check(dataset)
    return sum(s.tokens for s in dataset)


def _comparison(
    sample_id: str, json_states: npt.NDArray[np.uint16], saved: npt.NDArray[np.uint16]
) -> Callable[[Any], None]:
    """The stored sample against what JSON gave (inner layers) and torch.save (all)."""

    def check(dataset: Any) -> None:
        stored = dataset[sample_id].hidden_states
        if not np.array_equal(stored[:, :-1].reshape(len(stored), -1), json_states):
            raise SystemExit(f"{sample_id}: not the bits that SGLang returned as JSON")
        if not np.array_equal(stored, saved):
            raise SystemExit(f"{sample_id}: not the bits that torch.save stored")

    return check


def _load(folder: Path) -> npt.NDArray[np.uint16]:
    """``[tokens, planes, hidden]`` of the one sample that the baseline saved."""
    import torch

    (path,) = folder.iterdir()
    planes = torch.load(path)
    return torch.stack(planes, 1).view(torch.int16).numpy().view(np.uint16)


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def figures(turns: dict[str, list[Turn]], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What each way did, and how it compares with no capture."""
    tokens, samples = sum(map(len, prompts)), len(prompts)
    speed = {way: [t.load.tokens / t.load.seconds for t in ts] for way, ts in turns.items()}
    # The same without the time that other processes took from the scheduler.
    unhindered = {
        way: [t.load.tokens / (t.load.seconds - t.waited_s) for t in ts]
        for way, ts in turns.items()
    }
    per_cpu = {way: [t.load.tokens / t.scheduler_cpu_s for t in ts] for way, ts in turns.items()}
    result: dict[str, Any] = {}
    for way, ts in turns.items():
        result[f"{way}_tokens_per_s"] = statistics.median(speed[way])
        if way != BASE:
            result[f"{way}_ratio"] = median_ratio(speed[way], speed[BASE])
            result[f"{way}_ratio_quartiles"] = spread(speed[way], speed[BASE])
            result[f"{way}_unhindered_ratio"] = median_ratio(unhindered[way], unhindered[BASE])
            quartiles = spread(unhindered[way], unhindered[BASE])
            result[f"{way}_unhindered_ratio_quartiles"] = quartiles
            result[f"{way}_scheduler_cpu_ratio"] = median_ratio(per_cpu[way], per_cpu[BASE])
        seconds = statistics.median(t.load.seconds for t in ts)
        result[f"{way}_seconds_per_sample"] = seconds / samples
        result[f"{way}_latency_s"] = statistics.median(t.load.latency_s for t in ts)
        waited = statistics.median(t.waited_s / t.load.seconds for t in ts)
        result[f"{way}_waiting_for_a_core"] = waited
        cpu_s = statistics.median(t.scheduler_cpu_s for t in ts)
        result[f"{way}_scheduler_cpu_ms_per_token"] = cpu_s / tokens * 1e3
    with_reader = turns["hstransport"]
    result["hstransport_drain_s"] = statistics.median(t.drain_s for t in with_reader)
    spent = statistics.median(t.consumer_cpu_s for t in with_reader)
    result["hstransport_consumer_cpu_ms_per_token"] = spent / tokens * 1e3
    saved = statistics.median(t.stored_bytes for t in turns["baseline"])
    result["baseline_bytes_per_sample"] = saved / samples
    sent = statistics.median(t.load.body_bytes for t in turns["json"])
    result["json_bytes_per_sample"] = sent / samples
    return result


def tap_figures(bench: Bench, row_bytes: int) -> dict[str, Any]:
    """Where hstransport's time goes in the scheduler's process, from the timers in it."""
    result: dict[str, Any] = {}
    for way in ("hstransport", "hstransport_no_reader"):
        lead = f"{way}/"
        steps = {k[len(lead) :]: v for k, v in bench.profiles.items() if k.startswith(lead)}
        batches, _, batch_cpu = steps["batch"]
        tap = sum(steps[s][2] for s in ("plan", "take", "post"))
        result[f"{way}_tap_share"] = tap / (batch_cpu + steps["result"][2])
        if way == "hstransport":
            tokens = sum(map(len, bench.prompts)) * bench.passes[way]
            result["tap_batches"] = int(batches)
            result["tap_tokens_per_batch"] = tokens / batches
            result["tap_bytes_per_batch"] = tokens * row_bytes / batches
            result["tap_batch_cpu_ms"] = batch_cpu / batches * 1e3
            elsewhere = ("follow", "start", "rows", "reserve", "send", "end")  # exporter's thread
            for step in ("plan", "take", "post", *elsewhere):
                result[f"tap_{step}_us_per_batch"] = steps[step][2] / batches * 1e6
            result["tap_rows_gb_per_s"] = tokens * row_bytes / steps["rows"][2] / 1e9
    return result


def main() -> int:
    arguments = arguments_of()
    smoke = arguments.smoke
    path = Path(arguments.model)
    model = path if path.is_dir() else model_dir(arguments.model)
    if (model / "tokenizer.json").exists():
        prompts = chats(model, arguments.prompts, arguments.samples)
    else:
        prompts = random_ids(arguments.samples, *((20, 60) if smoke else (100, 400)))
    DATA.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        # Shards go to a disk, as they do in use; rings and the baseline's files to shared memory.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serving-", dir=DATA)))
        rings = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hst-bench-", dir=SHM)))
        bench = Bench(model, prompts, folder, rings, arguments.concurrency)
        with ExitStack() as running:
            say(f"starting servers for {model.name}")
            running.push(partial(last_words, folder))
            bench.start(running, smoke=smoke)
            assert bench.consumer is not None
            checks = bench.ask_alone()
            ways = [*WAYS[:1], *WAYS[2:]] if smoke else WAYS
            calls = {name: lambda name=name: bench.turn(name) for name in ways}
            for way in ways:
                bench.turn(way)  # a pass that does not count
            bench.profiles.clear()
            bench.passes.clear()
            turns = rounds(calls, arguments.rounds)
            info = bench.session_info()
            bench.consumer.finish()
        tokens = verify(bench.out, bench.ids, checks)
        stored = _size(bench.out)
    row_bytes = info.row_bytes
    per_pass = sum(map(len, prompts))
    result = figures(turns, prompts)
    result["hstransport_bytes_per_sample"] = stored / tokens * per_pass / len(prompts)
    result["raw_bytes_per_sample"] = row_bytes * per_pass / len(prompts)
    result |= tap_figures(bench, row_bytes)
    result |= {
        "model": model.name,
        "layers": ",".join(map(str, info.layer_names)),
        "hidden": info.hidden,
        "rounds": arguments.rounds,
        "samples_per_pass": len(prompts),
        "tokens_per_pass": per_pass,
        "concurrency": arguments.concurrency,
        "samples_whole": len(bench.ids),
        "samples_lost": 0,
        "samples_bit_identical": len(checks),
    }
    finish(arguments, result)
    return 0


def arguments_of() -> argparse.Namespace:
    p = parser(__doc__, "serving_cpu.json")
    p.add_argument("--model", help="smollm2, llama, … or a folder (default: smollm2; smoke: llama)")
    p.add_argument("--prompts", type=Path, help="JSON lines with input_ids, text or messages")
    p.add_argument("--rounds", type=int, help="(default: 8; smoke: 1)")
    p.add_argument("--samples", type=int, help="prompts of a pass (default: 12; smoke: 6)")
    p.add_argument("--concurrency", type=int, default=4, help="(default: 4)")
    arguments = p.parse_args()
    for name, full, smoke in (("model", "smollm2", "llama"), ("rounds", 8, 1), ("samples", 12, 6)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, smoke if arguments.smoke else full)
    return arguments


def say(words: str) -> None:
    print(f"serving: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
