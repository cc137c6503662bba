"""Log lines that may come thousands of times."""

from __future__ import annotations

import logging
import time

EVERY_S = 10.0


class Seldom:
    """Logs a line at most every ``every_s`` seconds, and says how many like it were left out.

    Lines are alike when their ``key`` is: words for people, by default the line without its
    arguments. There must be few keys. Not thread-safe: at worst a line comes twice.
    """

    def __init__(self, logger: logging.Logger, every_s: float = EVERY_S) -> None:
        self._logger = logger
        self._every_s = every_s
        self._said: dict[str, tuple[float, int]] = {}  # when, and how many were left out since

    def warning(self, line: str, *args: object, key: str = "") -> None:
        self.log(logging.WARNING, line, *args, key=key)

    def error(self, line: str, *args: object, key: str = "") -> None:
        self.log(logging.ERROR, line, *args, key=key)

    def log(self, level: int, line: str, *args: object, key: str = "") -> None:
        now = time.monotonic()
        key = key or line
        then, left_out = self._said.get(key, (float("-inf"), 0))
        if now - then < self._every_s:
            self._said[key] = (then, left_out + 1)
            return
        self._said[key] = (now, 0)
        if left_out:
            line, args = f"{line} (%d more like this were left out)", (*args, left_out)
        self._logger.log(level, line, *args)

    def close(self) -> None:
        """Say what was left out since the last lines; nothing comes after them any more."""
        for key, (_, left_out) in self._said.items():
            if left_out:
                self._logger.warning("%s (%d more like this were left out)", key, left_out)
        self._said.clear()
