"""What a check has to say."""

from __future__ import annotations

from typing import NamedTuple

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"


class Finding(NamedTuple):
    """One line: ``text`` says what was seen and, unless all is well, what to do."""

    name: str
    status: str
    """``ok``; ``warn``: perhaps meant so; ``fail``: not to be trusted; ``skipped``: not known."""
    text: str
