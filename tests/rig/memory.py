"""What a process takes of memory of its own, watched while it runs."""

from __future__ import annotations

import threading
from pathlib import Path


def own_bytes(pid: int) -> int:
    """Memory of the process without files and shared memory, a ring above all; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(x.split()[1]) << 10 for x in status.splitlines() if x.startswith("RssAnon"))


class MemoryWatch:
    """The most that a process takes beyond what it takes now, while the block runs."""

    def __init__(self, pid: int, every_s: float = 0.01) -> None:
        self._pid, self._every_s = pid, every_s
        self._before = self._most = own_bytes(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def grown_mib(self) -> float:
        return (self._most - self._before) / (1 << 20)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self._most = max(self._most, own_bytes(self._pid))
