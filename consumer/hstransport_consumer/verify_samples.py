"""Verifying one sample: are its rows, its tokens and its state what they should be?"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import numpy as np

from hstransport.errors import HsTransportError

from .findings import CONSTANT, NOT_FINITE, ZERO, Flags, VerifyReport, Walked
from .index import id_hash
from .reader import ShardDataset
from .sample import Sample
from .shard import Shard
from .states import Coverage, State, judge
from .verify_refs import Owners

ALLOW_LABEL = "hstransport.allow"
"""A sample with this label true may have zero, constant and non-finite rows."""

_WORDS = {ZERO: "only zeros", CONSTANT: "one value only", NOT_FINITE: "Inf or NaN"}


def verify_sample(
    dataset: ShardDataset,
    shard: Shard,
    row: int,
    walked: Mapping[bytes, Walked],
    owners: Owners,
    away: Container[bytes | str] | None,
    report: VerifyReport,
) -> None:
    """Note what is wrong with the sample of a shard's ``row``.

    ``away``: uids and names of shards that need not be here; None: any but the sample's own.
    """
    sample = Sample(dataset, shard, row)
    report.samples += 1
    excused: set[bytes] = set()
    try:
        report.whole += sample.state == State.WHOLE
        absent = sample.absent
        excused = set(absent) if away is None else {uid for uid in absent if uid in away}
        report.parted += bool(excused)
        wrong = []
        if sample.start_shard not in excused:
            wrong = list(owners.wrong_refs(sample, excused))
        # Rows that are not there cannot be looked at.
        for what in wrong or _problems(sample, shard, row, walked, excused):
            report.note(shard.path, what, sample.id)
    except FileNotFoundError as e:
        if away is not None and e.filename and Path(e.filename).name in away:
            report.parted += not excused  # it was taken away since its frames were verified
        else:
            report.note(shard.path, str(e), f"#{row}")
    except (HsTransportError, UnicodeDecodeError) as e:
        report.note(shard.path, str(e), f"#{row}")


def _problems(
    sample: Sample,
    shard: Shard,
    row: int,
    walked: Mapping[bytes, Walked],
    excused: Container[bytes],
) -> Iterator[str]:
    if int(shard.tables.c["sample.hash"][row]) != id_hash(sample.id):
        yield "cannot be found by its id: wrong hash"
    # Its START lies in the first of its shards.
    start = None if sample.start_shard in excused else sample.start
    end = sample.end
    covered = Coverage(sample.ranges)
    if sample.state != State.UNFINISHED:
        due = judge(end.reason, end.tokens, end.dropped, end.cached, covered)
        if sample.state != due:
            yield f"is {sample.state} by name and {due} by its rows"
    if sample.state != State.WHOLE:
        return
    if covered.missing(0, sample.tokens):
        yield f"is whole and lacks rows at {covered.missing(0, sample.tokens)[:4]}"
    if start is None:
        return  # nor is it known which rows it allows
    if len(sample.token_ids) != sample.tokens:
        yield f"has {sample.tokens} rows and {len(sample.token_ids)} token ids"
    if start.labels.get(ALLOW_LABEL) is not True:
        yield from _odd_rows(sample, walked, excused)


def _odd_rows(
    sample: Sample, walked: Mapping[bytes, Walked], excused: Container[bytes]
) -> Iterator[str]:
    seen: list[tuple[int, Flags]] = []
    for p in sample.stored:
        if p.shard in excused:
            continue
        chunks = walked[p.shard].flags if p.shard in walked else []
        found: Flags | None = chunks[p.chunk] if p.chunk < len(chunks) else None
        if found is None or p.row + p.rows > len(found):
            yield f"rows {p.position} to {p.position + p.rows - 1} cannot be decoded"
        else:
            seen.append((p.position, found[p.row : p.row + p.rows]))
    for flag, words in _WORDS.items():
        rows = [position + np.flatnonzero(flags & flag) for position, flags in seen]
        count = sum(map(len, rows))
        if count:
            first = min(int(r[0]) for r in rows if len(r))
            yield (
                f"{count} rows hold {words} in some layer, the first at token {first} "
                f"(label {ALLOW_LABEL} = true allows it)"
            )
