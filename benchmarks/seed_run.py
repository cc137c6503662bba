"""A run of the size that this project grew out of, on a GPU: 10,000 prompts, every sample packed
and verified.

17.3 million prompt tokens through a server whose states are 7168 wide, three inner layers and the
final one: 924 GiB of bf16. hstransport-consumer packs them; each shard that it closes is handed to
`hstransport verify` and then deleted, so that any machine has room for them.

A run may be made in parts: --prompts and --offset say which prompts, and --merge adds up the
results of several parts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from common import DATA, SHM, card, end_in_order, finish, need_gpu, parser, tool
from hstransport_consumer import open_shards
from load import Client
from rig.gpu_server import MODELS, GpuServer
from rig.models import model_dir
from rig.server import SGLangServer
from ways import SESSION, ConsumerBeside, Stage, last_words

from hstransport.protocol import unpack_info
from hstransport.settings import parse_size

PROMPTS = 10_000
LOW, HIGH, MEAN = 200, 4000, 1730  # tokens of a prompt
GROUP = 6
"""So many shards are verified together, and the one before them with them: a sample may begin in
the shard before that in which it ends, and is not cut in more pieces than two."""
DRAIN_S = 60.0


class Scale(NamedTuple):
    low: int
    high: int
    mean: int
    vocabulary: int
    layers: str
    server: dict[str, Any]


GPU = Scale(
    LOW,
    HIGH,
    MEAN,
    vocabulary=32_000,
    layers="1,3,5,final",
    server={"server": GpuServer, "max_running": 128, "max_total_tokens": 262_144},
)
SMOKE = Scale(
    20,
    100,
    50,
    vocabulary=500,
    layers="1,3,5,final",
    server={"server": SGLangServer},
)


def lengths(scale: Scale) -> npt.NDArray[np.int64]:
    """Tokens of all prompts, the same in every part of a run."""
    # A beta distribution has a mean, both ends, and no lumps.
    share = (scale.mean - scale.low) / (scale.high - scale.low)
    drawn = np.random.default_rng(7).beta(2, 2 / share - 2, PROMPTS)
    return np.rint(scale.low + drawn * (scale.high - scale.low)).astype(np.int64)


class Verifier:
    """Takes closed shards, in order, verifies them in groups in processes, and deletes them."""

    def __init__(self, incoming: Path, workers: int) -> None:
        self.incoming = incoming
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []
        self._groups = incoming.parent / "groups"
        self._groups.mkdir()
        self._last: Path | None = None  # the shard before the next group
        self._waiting: list[Path] = []
        self._made = 0
        self._pool = ThreadPoolExecutor(workers)
        self._jobs: list[Future[None]] = []
        self._lock = threading.Lock()

    def backlog(self) -> int:
        """Bytes of shards that are closed and not deleted yet; looks for new ones too."""
        self._take()
        held = [*self.incoming.iterdir(), *self._groups.rglob("*.zst")]
        sizes = {}
        for path in held:
            with suppress(FileNotFoundError):  # deleted since
                found = path.stat()
                sizes[found.st_ino] = found.st_size
        return sum(sizes.values())

    def finish(self, rest: Path) -> None:
        """The consumer has ended; ``rest`` may hold shards that it did not hand on."""
        for path in sorted(rest.glob("*.zst")):
            path.rename(self.incoming / path.name)
        self._take(rest=True)
        for job in self._jobs:
            job.result()
        self._pool.shutdown()
        shutil.rmtree(self._groups)

    def _take(self, rest: bool = False) -> None:
        known = {p.name for p in self._waiting}
        self._waiting += [p for p in sorted(self.incoming.glob("*.zst")) if p.name not in known]
        while len(self._waiting) >= (1 if rest else GROUP):
            shards, self._waiting = self._waiting[:GROUP], self._waiting[GROUP:]
            folder = self._groups / f"{self._made:04d}"
            folder.mkdir()
            self._made += 1
            if self._last is not None:
                self._last.rename(folder / self._last.name)
            moved = [p.rename(folder / p.name) for p in shards]
            # Linked, not moved: its own group may be over before the next one begins.
            self._last = self._groups / moved[-1].name
            os.link(moved[-1], self._last)
            self._jobs.append(self._pool.submit(self._verify, folder, moved))

    def _verify(self, folder: Path, shards: Sequence[Path]) -> None:
        names = {p.name for p in shards}
        try:
            command = [tool("hstransport"), "verify", "--json", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode not in (0, 1):
                raise RuntimeError(done.stderr[-500:])
            # What the shard before lacks lies before it: that was the group's before to say.
            found = [f for f in json.loads(done.stdout)["findings"] if f["file"] in names]
            counts = [count(p) for p in shards]
        except Exception as e:  # counts as a finding, and the run goes on
            found, counts = [{"file": folder.name, "sample": "", "what": str(e)}], []
        with self._lock:
            self.findings += [f"{f['file']} {f['sample']}: {f['what']}" for f in found]
            for counted in counts:
                self.counts.update(counted)
        shutil.rmtree(folder)


def count(path: Path) -> dict[str, int]:
    """What one shard holds."""
    dataset = open_shards(path, states=None)
    rows = sum(int(s.tables.c["chunk.rows"].sum()) for s in dataset.shards)
    return {
        "shards": 1,
        "whole": sum(s.state == "whole" for s in dataset),
        "tokens": sum(s.tokens for s in dataset),
        "raw_bytes": rows * dataset.info.planes * dataset.info.hidden * 2,
        "stored_bytes": path.stat().st_size,
    }


class Sender:
    """Sends prompts at a fixed concurrency, pausing while too much waits for verification."""

    def __init__(self, client: Client, scale: Scale, concurrency: int) -> None:
        self.failed: list[str] = []
        self.answered = self.tokens = 0
        self.sent = 0
        self.paused_s = 0.0
        self._client, self._scale = client, scale
        self._concurrency = concurrency
        self._lock = threading.Lock()

    def run(
        self, counts: Sequence[int], offset: int, verifier: Verifier, backlog: int, limit_s: float
    ) -> float:
        """Seconds from the first request to the last answer."""
        begun = time.monotonic()
        room = threading.Semaphore(self._concurrency)
        said = begun
        with ThreadPoolExecutor(self._concurrency) as pool:
            for i, count in enumerate(counts, offset):
                room.acquire()
                now = time.monotonic()
                if now - begun > limit_s:
                    say(f"{limit_s:.0f} s are over: no more prompts are sent")
                    break
                while verifier.backlog() > backlog and time.monotonic() - begun < limit_s:
                    time.sleep(0.1)
                self.paused_s += time.monotonic() - now
                if now - said > 10:
                    said = now
                    say(f"{self.answered} answers, {self.tokens:,} tokens, {now - begun:.0f} s")
                self.sent += 1
                pool.submit(self._ask, i, count).add_done_callback(lambda _: room.release())
        return time.monotonic() - begun

    def _ask(self, i: int, count: int) -> None:
        ids = np.random.default_rng([7, i]).integers(3, self._scale.vocabulary, count).tolist()
        try:
            self._client.batch([ids], f"seed-{i}", 1)
        except (Exception, SystemExit) as e:
            with self._lock:
                self.failed.append(f"prompt {i}: {e!r}"[:300])
            return
        with self._lock:
            self.answered += 1
            self.tokens += count


def one_part(a: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Serve, pack and verify the prompts that were asked for."""
    counts = lengths(scale)[a.offset : a.offset + a.prompts]
    DATA.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        temporary = partial(tempfile.TemporaryDirectory, prefix="seed-")
        folder = Path(stack.enter_context(temporary(dir=DATA)))
        shm = Path(stack.enter_context(temporary(dir=SHM)))
        place = Path(stack.enter_context(temporary(dir=a.shards or SHM)))
        rings, out, incoming = shm / "rings", place / "shards", place / "incoming"
        rings.mkdir(mode=0o700)
        incoming.mkdir()
        capture = {
            "HSTRANSPORT": "1",
            "HSTRANSPORT_SESSION": SESSION,
            "HSTRANSPORT_DIR": str(rings),
            "HSTRANSPORT_ROWS": "prompt",
            "HSTRANSPORT_LAYERS": scale.layers,
            "HSTRANSPORT_REQUESTS": "tagged",
            "HSTRANSPORT_RING_BYTES": a.ring,
            "HSTRANSPORT_POLICY": "block",
            "HSTRANSPORT_BLOCK_S": str(a.block_s),
        }
        running = stack.enter_context(ExitStack())
        running.push(partial(last_words, folder))
        stage = Stage("server", a.model, folder, env=capture, **scale.server)
        say(f"starting a server for {a.model.name}")
        running.callback(stage.stop)
        stage.start()
        arguments = ["--threads", str(a.threads), "--shard-size", a.shard_size]
        arguments += ["--on-shard", f"mv -t {incoming} {{}}"]
        consumer = ConsumerBeside(out, rings, folder / "consumer.log", arguments)
        running.callback(consumer.kill)
        consumer.wait_until_attached()
        verifier = Verifier(incoming, a.verifiers)
        ring = consumer.ring()
        info = unpack_info(ring.info)
        # Of what is free now that the ring is there, a quarter is for shards that are not closed.
        backlog = min(parse_size(a.backlog), shutil.disk_usage(place).free * 3 // 4)
        say(f"started; up to {backlog >> 20:,} MiB of closed shards may wait")
        with stage:
            sender = Sender(stage.client, scale, a.concurrency)
            cpu, served = consumer.cpu_s(), stage.cpu_s()
            seconds = sender.run(counts.tolist(), a.offset, verifier, backlog, a.limit_s)
            last_answer = time.monotonic()
            say(f"served {sender.answered} prompts in {seconds:.1f} s")
            packed_s = None
            try:
                consumer.drain(DRAIN_S)
                packed_s = time.monotonic() - last_answer
                ring = consumer.ring()
            except SystemExit as e:  # of a server that died, say: what there is, is still verified
                verifier.findings.append(f"after the last answer: {e}")
            spent, served = consumer.cpu_s() - cpu, stage.cpu_s() - served
        try:
            consumer.finish()
        except (SystemExit, subprocess.TimeoutExpired) as e:
            verifier.findings.append(f"the consumer did not end in order: {e}")
        verifier.finish(out)
        lag_s = time.monotonic() - last_answer
    c = verifier.counts
    dropped = ring.counters.dropped_records
    incomplete = max(sender.answered - c["whole"], 0)
    wrong = abs(c["tokens"] - sender.tokens) if not sender.failed else 0
    return {
        "offset": a.offset,
        "prompts": len(counts),
        "sent": sender.sent,
        "answered": sender.answered,
        "samples_whole": c["whole"],
        "tokens": sender.tokens,
        "tokens_stored": c["tokens"],
        "seconds": seconds,
        "paused_for_verification_s": sender.paused_s,
        "packed_after_s": packed_s,
        "lag_s": lag_s,
        "raw_bytes": c["raw_bytes"],
        "stored_bytes": c["stored_bytes"],
        "verified_shards": c["shards"],
        "requests_failed": len(sender.failed),
        "samples_incomplete": incomplete,
        "verify_findings": len(verifier.findings),
        "records_dropped": dropped,
        "tokens_wrong": wrong,
        "stall_s": ring.counters.stall_ns / 1e9,
        "consumer_cpu_s": spent,
        "scheduler_cpu_s": served,
        "first_errors": [*sender.failed, *verifier.findings][:5],
        "run": info.run,
        "row_bytes": info.row_bytes,
        "hidden": info.hidden,
        "layers": ",".join(map(str, info.layer_names)),
        "model": a.model.name,
        "states": "random" if a.smoke else "dummy weights",
        "ring": a.ring,
        "policy": f"block {a.block_s:g} s",
        "shards_in": "shared memory" if a.shards is None else "a given folder",
        "threads": a.threads,
        "verifiers": a.verifiers,
        "backlog_bytes": backlog,
        "concurrency": a.concurrency,
        "consumer": f"--threads {a.threads} --shard-size {a.shard_size}",
    }


_SUMS = (
    *("prompts", "sent", "answered", "samples_whole", "tokens", "raw_bytes", "stored_bytes"),
    *("verified_shards", "requests_failed", "samples_incomplete", "verify_findings"),
    *("records_dropped", "tokens_wrong"),
)
_SAME = ("model", "states", "hidden", "layers", "row_bytes", "ring", "policy", "consumer")


def figures(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of one or several parts."""
    total = {name: sum(p[name] for p in parts) for name in _SUMS}
    seconds = sum(p["seconds"] for p in parts)
    errors = sum(total[n] for n in _SUMS[8:])
    return {
        "minutes": seconds / 60,
        "errors": errors,
        "samples": total["samples_whole"],
        **{name: total[name] for name in _SUMS if name not in ("raw_bytes", "stored_bytes")},
        "raw_gib": total["raw_bytes"] / 2**30,
        "stored_gib": total["stored_bytes"] / 2**30,
        "ratio": total["raw_bytes"] / max(total["stored_bytes"], 1),
        "gb_per_s": total["raw_bytes"] / seconds / 1e9,
        "tokens_per_s": total["tokens"] / seconds,
        "lag_s": max(p["lag_s"] for p in parts),
        **{name: parts[0][name] for name in _SAME},
        "complete": total["samples_whole"] == PROMPTS,
        "parts": list(parts),
    }


def merged(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The parts that lie in those results, and where they come from."""
    results = [json.loads(p.read_text()) for p in paths]
    parts = sorted((p for r in results for p in r["parts"]), key=lambda p: int(p["offset"]))
    for one, two in pairwise(parts):
        if one["offset"] + one["prompts"] > two["offset"]:
            raise SystemExit(f"prompts from {two['offset']} on are in two of the parts")
    for name in _SAME:
        if len({json.dumps(p[name]) for p in parts}) > 1:
            raise SystemExit(f"the parts differ in {name}: they are not of one run")
    for name in ("commit", "machine", "versions"):
        if len({json.dumps(r[name]) for r in results}) > 1:
            raise SystemExit(f"the parts differ in {name}")
    names = ("commit", "machine", "versions", "date", "load_average", "command")
    return parts, {name: results[0][name] for name in names}


def main() -> int:
    a = arguments_of()
    if a.merge:
        parts, made = merged(a.merge)
        finish(a, figures(parts), made)
        return 0
    if not a.smoke:
        need_gpu()
    end_in_order()
    result = figures([one_part(a, SMOKE if a.smoke else GPU)])
    finish(a, result)
    return 1 if result["errors"] else 0


def arguments_of() -> argparse.Namespace:
    p = parser(__doc__, f"seed_run_{card()}.json")
    p.add_argument("--model", type=Path, help="a model's folder (default: gpu/models/wide)")
    p.add_argument("--prompts", type=int, help=f"(default: {PROMPTS}; smoke: 60)")
    p.add_argument("--offset", type=int, default=0, help="the first prompt (default: 0)")
    p.add_argument("--limit-s", type=float, default=360, help="send nothing after (default: 360)")
    p.add_argument("--concurrency", type=int, default=96, help="requests at once (default: 96)")
    p.add_argument("--threads", type=int, help="of the consumer (default: 8; smoke: 1)")
    p.add_argument("--verifiers", type=int, help="processes (default: 6; smoke: 1)")
    p.add_argument("--ring", help="HSTRANSPORT_RING_BYTES (default: 8GiB; smoke: 64MiB)")
    p.add_argument("--block-s", type=float, default=60, help="HSTRANSPORT_BLOCK_S (default: 60)")
    p.add_argument("--shard-size", help="of the consumer (default: 1GiB; smoke: 256KiB)")
    p.add_argument("--shards", type=Path, help="folder for the shards (default: /dev/shm)")
    p.add_argument("--backlog", help="shards that may wait (default: 32GiB; smoke: 1GiB)")
    p.add_argument("--merge", type=Path, nargs="+", metavar="RESULT", help="only add these up")
    a = p.parse_args()
    for name, full, smoke in (
        ("prompts", PROMPTS, 60),
        ("threads", 8, 1),
        ("verifiers", 6, 1),
        ("ring", "8GiB", "64MiB"),
        ("shard_size", "1GiB", "256KiB"),
        ("backlog", "32GiB", "1GiB"),
    ):
        if getattr(a, name) is None:
            setattr(a, name, smoke if a.smoke else full)
    if a.model is None and not a.merge:
        a.model = model_dir("llama") if a.smoke else MODELS / "wide"
    if not 0 <= a.offset < a.offset + a.prompts <= PROMPTS:
        p.error(f"--offset {a.offset} --prompts {a.prompts}: there are {PROMPTS} prompts")
    return a


def say(words: str) -> None:
    print(f"seed_run: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
