"""Verifying rows that a sample shares: are they those of the same tokens at the same positions?"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import lru_cache

import numpy as np

from hstransport.protocol import TokenIds

from .findings import Run, Walked
from .index import Part
from .sample import Sample
from .walk import end_event, start_event


class Owners:
    """Whose rows lie where in shards that have been walked."""

    def __init__(self, walked: Mapping[bytes, Walked]) -> None:
        self._walked = walked
        self._ended = {key: w for w in walked.values() for key in w.ends}
        self._started = {key: w for w in walked.values() for key in w.starts}
        # One prompt may be everybody's.
        self._tokens = lru_cache(maxsize=256)(self._read_tokens)

    def wrong_refs(self, sample: Sample, excused: Container[bytes]) -> Iterator[str]:
        """What is wrong with the rows of others that complete a sample.

        ``excused``: shards that need not be here.
        """
        for part in sample.refs:
            if part.shard in excused:
                continue
            found = self._walked.get(part.shard)
            owners = found.owners if found else []
            if part.chunk >= len(owners):
                yield f"shares rows of chunk {part.chunk} of a shard, which is not there"
                continue
            run, segments = owners[part.chunk]
            if part.row + part.rows > sum(s.rows for s in segments):
                yield f"shares rows {part.row}+{part.rows} of chunk {part.chunk}, which has fewer"
                continue
            row = 0
            for sid, position, rows in segments:
                if row < part.row + part.rows and part.row < row + rows:
                    yield from self._wrong_owner(sample, part, position - row, (run, sid))
                row += rows

    def _wrong_owner(
        self, sample: Sample, part: Part, offset: int, owner: tuple[Run, int]
    ) -> Iterator[str]:
        """``offset``: of the owner's positions from the chunk's rows."""
        run, _ = owner
        if (sample.run.run, sample.run.rank) != run:
            yield f"shares rows of another run, {run[0]}"
        elif part.position != part.row + offset:
            yield f"shares rows of position {part.row + offset} for its position {part.position}"
        else:
            tokens = self._tokens(owner)
            # Generated ids stand in the owner's END, which may be elsewhere.
            stop = min(part.position + part.rows, len(tokens) if tokens is not None else 0)
            if tokens is not None and not np.array_equal(tokens[:stop], sample.token_ids[:stop]):
                yield f"shares rows up to {stop} with a sample of other tokens"

    def _read_tokens(self, owner: tuple[Run, int]) -> TokenIds | None:
        """Token ids of a sample, None when its START is not here; it may not have ended."""
        first, last = self._started.get(owner), self._ended.get(owner)
        if first is None:
            return None
        with first.shard.open() as fd:
            ids = start_event(first.shard.frame(fd, first.starts[owner])).prompt
        if last is None:
            return ids
        with last.shard.open() as fd:
            end, _ = end_event(last.shard.frame(fd, last.ends[owner]))
        return np.concatenate([ids, end.output])
