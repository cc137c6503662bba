"""What a producer counts in its ring's header, where anybody may read it without a message."""

from __future__ import annotations

from typing import NamedTuple

DROPS = {
    "ring_full": "the ring is full",
    "stage_full": "the stage is full",
    "too_long": "its prompt is too long for the ring",
    "queue_full": "START and END records that wait for the ring take too much memory",
    "stopped": "capture stopped",
}
"""Why pieces of samples are dropped: the counter's name, and words for people."""


class RingCounters(NamedTuple):
    """Since the ring was created. The order is that of the words in the header."""

    records: int = 0
    """Records reserved, those abandoned later included."""
    bytes: int = 0
    """Their payload."""
    dropped_bytes: int = 0
    """Payload of the pieces dropped, whatever the reason."""
    ring_full: int = 0
    """Pieces of samples that found no room in the ring in the time that the policy gives."""
    stage_full: int = 0
    """That found none in the stage (on a CPU: the memory that waits for the exporter's thread)."""
    too_long: int = 0
    """Of samples whose prompt can never fit into this ring."""
    queue_full: int = 0
    """Of samples whose START found no room even among those that wait."""
    stopped: int = 0
    """That were under way when capture stopped."""
    ring_stall_ns: int = 0
    """How long the exporter's thread waited for room in the ring; serving went on."""
    stage_stall_ns: int = 0
    """How long the scheduler's thread waited for room in the stage: serving stood still."""
    samples_lost: int = 0
    """Samples whose START or END could not be kept."""
    budget_spent: int = 0
    """1 once HSTRANSPORT_BUDGET_BYTES is spent: no new sample is begun."""

    @property
    def drops(self) -> dict[str, int]:
        """Dropped pieces by reason, those that there were."""
        return {reason: n for reason in DROPS if (n := getattr(self, reason))}

    @property
    def dropped_records(self) -> int:
        """Dropped pieces: one for each sample's part of a record."""
        return sum(self.drops.values())

    @property
    def drop_words(self) -> str:
        """``15 (12 ring_full, 3 stage_full)``"""
        by_reason = ", ".join(f"{n:,} {reason}" for reason, n in self.drops.items())
        return f"{self.dropped_records:,}" + (f" ({by_reason})" if by_reason else "")

    @property
    def stall_ns(self) -> int:
        """How long either thread waited."""
        return self.ring_stall_ns + self.stage_stall_ns

    def plus(self, other: RingCounters) -> RingCounters:
        """Sums, counter by counter."""
        return RingCounters(*(a + b for a, b in zip(self, other, strict=True)))


WORDS = {name: word for word, name in enumerate(RingCounters._fields)}
"""Which word of the header a counter is."""
