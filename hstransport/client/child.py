"""Processes of one's own that end with the thread that started them, however that one ends.

    python -m hstransport.client.child SIGNAL PARENT MODULE [ARGUMENT ...]

runs ``python -m MODULE`` in its place, which gets SIGNAL when its parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_SHOWN_LINES = 30


class Child:
    """``python -m MODULE`` in a session of its own, where no Ctrl-C reaches it; it writes a log.

    ``orphaned``: the signal that it gets when the starting thread is gone. With ``piped`` its
    stdin and stdout are pipes, else stdout goes to the log as stderr does.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        orphaned: signal.Signals,
        log: Path,
        environ: Mapping[str, str] | None = None,
        piped: bool = False,
    ) -> None:
        self.module = module
        self.log = log
        # Not a function between fork and exec: this process may have threads by now.
        command = [sys.executable, "-m", __name__, str(int(orphaned)), str(os.getpid()), module]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, *arguments],
                env=environ,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit status; raises subprocess.TimeoutExpired."""
        return self._process.wait(timeout_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and all its own children; those that are gone are none the wiser."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def last_words(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:])


def main() -> None:
    number, parent, module, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))  # outlives the exec
    if os.getppid() != int(parent):
        sys.exit("the parent ended before its child began")
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
