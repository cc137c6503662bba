"""Run the real hstransport-consumer beside a server, and wait for samples in its directory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from hstransport_consumer import Sample, ShardDataset, open_shards


class ConsumerProcess:
    """``hstransport-consumer --out OUT`` as a process of its own."""

    def __init__(self, out: Path, root: Path, *args: str) -> None:
        self.out = out
        beside = Path(sys.executable).parent / "hstransport-consumer"
        self._command = [
            *(str(beside) if beside.exists() else beside.name, "--out", str(out)),
            *("--dir", str(root), "--flush-s", "0.1", *args),
        ]
        self._log = out.parent / f"{out.name}.consumer.log"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ConsumerProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        """kill -9, in the middle of whatever it does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self, timeout_s: float = 30.0) -> int | None:
        """SIGTERM; returns the exit status."""
        process, self.process = self.process, None
        if process is None:
            return None
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def log_text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def wait_for(self, ids: Iterable[str], timeout_s: float = 60.0) -> dict[str, Sample]:
        """Samples of all these ids, whole or not; AssertionError names those that never came."""
        wanted = set(ids)
        found: dict[str, Sample] = {}
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any(self.out.glob("shard-*")):
                dataset = all_samples(self.out)
                found = {i: dataset[i] for i in wanted if i in set(dataset.ids)}
                if len(found) == len(wanted):
                    return found
            if self.process is not None and self.process.poll() is not None:
                break
            time.sleep(0.1)
        missing = sorted(wanted - set(found))
        raise AssertionError(
            f"samples {missing[:10]} never came; consumer:\n{self.log_text()[-4000:]}"
        )


def all_samples(out: Path, states: Sequence[str] | None = None) -> ShardDataset:
    """Every sample in the directory, those of the shard still being written included."""
    return open_shards(out, states=states, partial=True)
