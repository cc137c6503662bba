"""How a sample ended, and which of its positions have rows."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum

from hstransport.protocol import ABORTED

Range = tuple[int, int]


class State(str, Enum):
    """What is true of an ended sample. The names are part of the format and never change."""

    WHOLE = "whole"
    """Rows cover the positions 0 .. tokens-1, once each."""
    DROPPED = "dropped"
    """Rows are missing, and the ring had no room for some."""
    ABORTED = "aborted"
    """The request was aborted; it may still have all its rows."""
    PREFIX_MISSING = "prefix_missing"
    """Only rows that the server took out of its prefix cache are missing."""
    INCOMPLETE = "incomplete"
    """Rows are missing for no stated reason, or no rows were due at all."""
    UNFINISHED = "unfinished"
    """The server died, or the session ended, before the request did."""

    __str__ = str.__str__


STATES = tuple(s.value for s in State)


class Coverage:
    """Which positions have a row: sorted, disjoint ``[start, stop)`` ranges that never touch."""

    __slots__ = ("ranges",)

    def __init__(self, ranges: list[Range] | None = None) -> None:
        self.ranges: list[Range] = list(ranges or ())

    def missing(self, start: int, stop: int) -> list[Range]:
        """The parts of ``[start, stop)`` that have no rows, in order."""
        holes = []
        i = max(bisect_left(self.ranges, (start, start)) - 1, 0)
        while start < stop and i < len(self.ranges):
            a, b = self.ranges[i]
            if start < a:
                holes.append((start, min(a, stop)))
            start = max(start, b)
            i += 1
        if start < stop:
            holes.append((start, stop))
        return holes

    def add(self, start: int, stop: int) -> None:
        """Note rows at ``[start, stop)``, which must have been missing."""
        i = bisect_left(self.ranges, (start, start))
        j = i
        if i and self.ranges[i - 1][1] >= start:
            i -= 1
            start = self.ranges[i][0]
        while j < len(self.ranges) and self.ranges[j][0] <= stop:
            stop = max(stop, self.ranges[j][1])
            j += 1
        self.ranges[i:j] = [(start, stop)]


def judge(reason: str, tokens: int, dropped: int, cached: int, covered: Coverage) -> State:
    """The state of a sample whose END has come, from that END and the rows it has.

    An abort is told before anything else, so that nobody trains on half an answer. Rows that
    were dropped or cached and came later (a retracted request is computed again) are not missing.
    """
    if reason == ABORTED:
        return State.ABORTED
    holes = covered.missing(0, tokens)
    if tokens and not holes:
        return State.WHOLE
    if dropped:
        return State.DROPPED
    if holes and holes[-1][1] <= cached:
        return State.PREFIX_MISSING
    return State.INCOMPLETE
