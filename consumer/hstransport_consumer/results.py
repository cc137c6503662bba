"""What a writer says of a window it has written."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ended:
    """A sample that ended in a window."""

    id: str
    state: str
    tokens: int
    """Rows that it should have; see ``State`` for whether it does."""
    reason: str


@dataclass(frozen=True)
class WindowResult:
    """What became of a window."""

    ended: list[Ended] = field(default_factory=list)
    rows: int = 0
    """Rows that were stored."""
    raw_bytes: int = 0
    """Size of those rows as bf16."""
    stored_bytes: int = 0
    """What the shard grew by."""
    repeated: int = 0
    """Records that had been written before, and were dropped."""
    duplicate_rows: int = 0
    orphan_rows: int = 0
    anomalies: int = 0
    shared_rows: int = 0
    """Rows that samples did not have to store, because earlier ones had."""
