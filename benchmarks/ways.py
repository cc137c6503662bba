"""The servers that the serving benchmark compares, and the consumer beside one of them.

All are up at once, so that rounds can be short and alternate; but an idle SGLang scheduler polls
with a whole core, so the schedulers of those not being measured are stopped (SIGSTOP). They keep
their memory and take no time; their servers' other processes sleep anyway.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, tool
from load import Client
from rig.server import SGLangServer

from hstransport.ring import RingInfo, inspect_ring

SESSION = "benchmark"
PLUGINS = ROOT / "benchmarks"
DRAIN_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Stage:
    """A server that is stopped whenever it is not ``with`` it."""

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        plugins: Sequence[str] = (),
        extra_args: Sequence[str] = (),
        concurrency: int = 4,
        server: type[SGLangServer] = SGLangServer,
        max_running: int = 8,
        max_total_tokens: int = 16384,
    ) -> None:
        variables = {"PYTHONPATH": python_path(folder / name, plugins), **(env or {})}
        self.log = folder / f"{name}.log"
        self.server = server(
            model,
            env=variables,
            extra_args=extra_args,
            log=self.log,
            max_running=max_running,
            max_total_tokens=max_total_tokens,
        )
        self.client = Client("127.0.0.1", self.server.port, concurrency)
        self._schedulers: list[int] = []
        self._warmed = 0

    def start(self) -> None:
        self.server.start()
        self._schedulers = self.server.scheduler_pids()
        self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        if self.server.running():
            self._signal(signal.SIGCONT)
        self.server.stop()

    def __enter__(self) -> Stage:
        self._signal(signal.SIGCONT)
        # Two requests that do not count: caches are warm again, and all threads are awake.
        for _ in range(2):
            self._warmed += 1
            self.client.alone([5] * 200, f"warm-{self._warmed}", tagged=False)
        time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.1)  # what follows the last answer belongs to this pass
        self._signal(signal.SIGSTOP)

    def cpu_s(self) -> float:
        """Processor time of the scheduler's process so far."""
        return sum(cpu_s(pid) for pid in self._schedulers)

    def waited_s(self) -> float:
        """How long the scheduler's thread wanted a core and another process had it."""
        times = [Path(f"/proc/{pid}/schedstat").read_text().split() for pid in self._schedulers]
        return sum(int(waited) for _, waited, _ in times) / 1e9

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._schedulers:
            os.kill(pid, number)


class ConsumerBeside:
    """hstransport-consumer as a user starts it; stopped (SIGSTOP) when it is to be absent."""

    def __init__(self, out: Path, rings: Path, log: Path, arguments: Sequence[str] = ()) -> None:
        self.out = out
        self._rings = rings
        command = [tool("hstransport-consumer"), "--out", str(out), "--session", SESSION]
        command += ["--dir", str(rings), *arguments]
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    def wait_until_attached(self) -> None:
        """Return when it follows the ring."""
        deadline = time.monotonic() + DRAIN_S
        while not self.ring().consumer_attached:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("hstransport-consumer does not attach to the ring")
            time.sleep(0.02)

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    def ring(self) -> RingInfo:
        paths = list((self._rings / SESSION).glob("*.ring"))
        if len(paths) != 1:
            raise SystemExit(f"one server should have one ring, there are {len(paths)}")
        return inspect_ring(paths[0])

    def drain(self, limit_s: float = DRAIN_S) -> float:
        """Wait until all that was captured is in the shard; seconds that took."""
        start = time.perf_counter()
        while self.ring().records:
            if self._process.poll() is not None or time.perf_counter() - start > limit_s:
                raise SystemExit("the consumer does not empty the ring")
            time.sleep(0.005)
        return time.perf_counter() - start

    def finish(self) -> None:
        """SIGTERM: what is left is packed, and the shard finished."""
        self.resume()
        self._process.terminate()
        if self._process.wait(DRAIN_S):
            raise SystemExit(f"hstransport-consumer: exit status {self._process.returncode}")

    def kill(self) -> None:
        """After an error; nothing after :meth:`finish`."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def python_path(folder: Path, plugins: Sequence[str]) -> str:
    """A PYTHONPATH on which SGLang finds ``plugins``, each as if pip had installed it."""
    parts = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    for name in plugins:
        info = folder / f"hst_{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hst-{name}\nVersion: 1.0\n")
        entry = f"[sglang.srt.plugins]\nhst_{name} = hst_{name}:register\n"
        (info / "entry_points.txt").write_text(entry)
        parts += [str(folder), str(PLUGINS / f"{name}_plugin")]
    return os.pathsep.join(parts)


def last_words(folder: Path, kind: object, error: object, trace: object) -> None:
    """On leaving with an error: what the servers said before they are gone."""
    if error is None:
        return
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        errors = [w for w in lines if "rror" in w and "Ignore import" not in w][:5]
        print(f"--- {log.name}", *errors, "…", *lines[-15:], sep="\n", file=sys.stderr)


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def totals(path: Path) -> dict[str, list[float]]:
    """What the profile plugin has counted so far."""
    loaded: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return loaded
