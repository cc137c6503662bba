"""What the consumer's directory holds so far: the one place that knows the reader's interface."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import TornShardError

if TYPE_CHECKING:
    from hstransport_consumer.reader import Sample, ShardDataset

WHOLE, PREFIX_MISSING = "whole", "prefix_missing"
_COST_SHARE = 20
"""A look at the directory may take one part in this many of the time between two looks."""


class Found(NamedTuple):
    """A sample that is in the directory."""

    state: str
    rid: str
    """SGLang's id of the request; only known for samples that are not whole."""
    detail: str


class Stored:
    """Looks into a directory of shards that a consumer may be writing, on change alone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._dataset: ShardDataset | None = None
        self._seen: tuple[object, ...] | None = None
        self._next_look = 0.0

    def look(self, *, now: bool = False) -> bool:
        """Look again if files have changed and it is time to; whether there may be news.

        Raises what open_shards raises: a damaged shard, shards of two models.
        """
        if not now and time.monotonic() < self._next_look:
            return False
        started = time.monotonic()
        seen = self._files()
        if seen == self._seen:
            self._next_look = started + 0.1
            return False
        try:
            self._dataset = self._open() if seen else None
            self._seen = seen
        except (FileNotFoundError, TornShardError):
            # The consumer finished or removed a file between the listing and the opening.
            self._next_look = started + 0.1
            return False
        cost = time.monotonic() - started
        self._next_look = time.monotonic() + max(0.1, _COST_SHARE * cost)
        return True

    def sample(self, sample_id: str) -> Sample | None:
        """The sample of this id, as of the last look: a whole one, or else the last."""
        if self._dataset is None:
            return None
        try:
            return self._dataset[sample_id]
        except KeyError:
            return None

    def find(self, sample_id: str) -> Found | None:
        """What :meth:`sample` is."""
        sample = self.sample(sample_id)
        if sample is None:
            return None
        if sample.state == WHOLE:
            return Found(WHOLE, "", "")
        return Found(sample.state, sample.request_id, sample.detail or "")

    def _open(self) -> ShardDataset:
        from hstransport_consumer.reader import open_shards

        return open_shards(self._directory, states=None, partial=True)

    def _files(self) -> tuple[object, ...]:
        found: list[object] = []
        if self._directory.is_dir():
            for path in sorted(self._directory.glob("shard-*")):
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                found.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)
