"""Finished shards handed over to a command of the user's.

Each shard is handed over at least once: until its command has succeeded, it is handed over again
by the next consumer of the directory. What has been handed over stands in the file ``.handed-over``
of the directory, a line of name and uid for each shard, appended and synced after the command has
succeeded. A line more or less is all that a crash can do to it, and a line that is missing costs a
second command and no data. The shard's own file is no place for the mark: the command may move it.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from hstransport.errors import ConfigError, HsTransportError

from . import directory
from .shard import read_uid

logger = logging.getLogger(__name__)

PLACE = "{}"
_TAIL_LINES = 5
_TAIL_BYTES = 4096


def parse_command(text: str) -> list[str]:
    """The words of a command line, as a shell splits them; ConfigError if there is no such one."""
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise ConfigError(f"--on-shard: {text!r}: {e}") from None
    if not words or PLACE in words[0]:
        raise ConfigError(f"--on-shard: {text!r} names no command")
    if shutil.which(words[0]) is None:
        raise ConfigError(f"--on-shard: {words[0]}: no such command")
    return words if any(PLACE in w for w in words) else [*words, PLACE]


class Handover:
    """Runs ``command`` for each finished shard, ``jobs`` at a time, on threads of its own.

    ``backlog``: so many new shards may wait before :attr:`full` says so. Shards that an earlier
    consumer left come when no new one waits, and do not count.
    """

    def __init__(
        self, path: Path, command: Sequence[str], *, jobs: int = 1, backlog: int = 8
    ) -> None:
        self._directory = path.absolute()
        self._command = list(command)
        self.backlog = backlog
        self._new: deque[Path] = deque()
        self._left: deque[Path] = deque()
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name="hstransport-on-shard", daemon=True)
            for _ in range(jobs)
        ]
        self.done = 0
        """Commands that succeeded."""
        self.failed: list[str] = []
        """Names of the shards whose command failed; they stay where they are."""

    def start(self) -> None:
        """Begin, with what an earlier consumer of the directory left."""
        handed = directory.handed_over(self._directory)
        for entry in directory.list_shards(self._directory):
            if not entry.partial and not self._was_handed(entry.path, handed):
                self._left.append(entry.path)
        if self._left:
            logger.info("%d shards of before are handed over as well", len(self._left))
        for thread in self._threads:
            thread.start()

    def put(self, path: Path) -> None:
        """Hand over a shard that has been finished. Never waits."""
        with self._changed:
            self._new.append(path.absolute())
            self._changed.notify_all()

    @property
    def full(self) -> bool:
        """Whether as many shards wait as may."""
        return len(self._new) >= self.backlog

    @property
    def left(self) -> int:
        """Shards whose command runs or is yet to run."""
        return self._running + len(self._new) + len(self._left)

    def wait(self, timeout_s: float) -> None:
        """Until a command begins or ends, at most ``timeout_s``."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Let all commands that run or wait come to their end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self.left:
            logger.info(
                "waiting for the commands of %d shards; a second signal ends at once, and what is "
                "left is handed over next time",
                self.left,
            )
        for thread in self._threads:
            # With a limit: a signal that comes just before a wait does not end it.
            while thread.is_alive():
                thread.join(0.5)

    def __str__(self) -> str:
        parts = [f"handed over {self.done:,}"]
        if self.failed:
            parts.append(f"{len(self.failed):,} failed")
        if self.left:
            parts.append(f"{self.left:,} to go")
        return ", ".join(parts)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._new and not self._left:
                    if self._closed:
                        return
                    self._changed.wait()
                path = (self._new or self._left).popleft()
                self._running += 1
                self._changed.notify_all()
            try:
                self._hand_over(path)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def _hand_over(self, path: Path) -> None:
        try:
            uid = read_uid(path)
            why = self._run(path)
            if not why:
                directory.note_handed_over(self._directory, path.name, uid)
        except FileNotFoundError as e:
            if not path.exists():
                return  # somebody took it away while it waited
            why = str(e)
        except (HsTransportError, OSError) as e:
            why = str(e)
        if why:
            self.failed.append(path.name)
            logger.error("%s stays: its command %s", path.name, why)
        else:
            self.done += 1
            logger.info("%s was handed over", path.name)

    def _run(self, path: Path) -> str:
        """Run the command; "" if it succeeded, or else what happened and what it said last."""
        words = [w.replace(PLACE, str(path)) for w in self._command]
        # A file, not a pipe: what a command leaves running in the background is not waited for.
        with tempfile.TemporaryFile() as said:
            # In a session of its own: Ctrl-C is for the consumer, which waits for its commands.
            status = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                check=False,
            ).returncode
            if not status:
                return ""
            said.seek(max(said.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            lines = said.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        how = f"ended with status {status}" if status > 0 else f"was killed ({_signal(-status)})"
        return "\n  ".join([f"{how}: {shlex.join(words)}", *lines])

    @staticmethod
    def _was_handed(path: Path, handed: set[bytes]) -> bool:
        try:
            return read_uid(path) in handed
        except (HsTransportError, OSError):
            return False  # its command will say what is wrong with it


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
