"""Is every sample in a directory what it says? Reads and decodes everything."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hstransport.errors import DatasetMismatchError, HsTransportError

from .directory import NEXT, Entry, HandedOver, handed_numbers, named, shard_path
from .findings import Finding, VerifyReport, Walked
from .reader import ShardDataset
from .recover import read_next
from .verify_frames import verify_file
from .verify_refs import Owners
from .verify_samples import ALLOW_LABEL, verify_sample


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Verify a directory of shards, or one shard: every checksum, the footers, each sample's rows.

    Goes on after a finding. One shard is verified alone, whatever lies beside it: of a sample that
    has a part in another one, its part here. In a directory only shards that were handed over may
    be missing, while it is verified too. FileNotFoundError if there are no shards.
    """
    path = Path(path)
    report = VerifyReport()
    whole = path.is_dir()
    base = path if whole else path.parent
    away = HandedOver(path) if whole else None
    due = _due(path, report) if whole else 0  # first: shards may be finished meanwhile
    entries = named(path)
    walked: dict[bytes, Walked] = {}
    last: tuple[int, Walked] | None = None
    for entry in entries:
        found = verify_file(entry.path, entry.number, entry.partial, report)
        if found is None:
            continue
        if last and last[0] == entry.number - 1 and last[1].carry_out != found.carry_in:
            report.note(entry.path, "does not go on where the shard before it ends")
        last = (entry.number, found)
        if _belongs(found, walked, report):
            walked[found.shard.header.uid] = found
    if away is not None:
        for first, count in _missing(path, entries, due):
            more = f", nor are the {count - 1:,} after it" if count > 1 else ""
            what = f"is not here and was not handed over{more}; put it back beside the others"
            report.note(shard_path(path, first), what)
    dataset = ShardDataset(base, [w.shard for w in walked.values()])
    owners = Owners(walked)
    for w in walked.values():
        for row in range(w.shard.tables.samples):
            verify_sample(dataset, w.shard, row, walked, owners, away, report)
    return report


def _due(path: Path, report: VerifyReport) -> int:
    """The number that the next shard of a directory is to get; 0 if that is not known."""
    try:
        head = read_next(path)
    except HsTransportError as e:
        report.note(path / NEXT, str(e))
        return 0
    return head.header.number if head else 0


def _missing(path: Path, entries: Sequence[Entry], due: int) -> Iterator[tuple[int, int]]:
    """Shards that have been finished and are not in the directory, though they should be: the
    number of the first, and how many follow one another."""
    found = {entry.number for entry in entries} | handed_numbers(path)
    next_number = 0
    for number in [*sorted(found), due]:
        while next_number < number and shard_path(path, next_number).exists():
            next_number += 1  # it got its name while the directory was listed
        if next_number < number:
            yield next_number, number - next_number
        next_number = number + 1


def _belongs(found: Walked, walked: dict[bytes, Walked], report: VerifyReport) -> bool:
    """Whether the shard is of the same dataset as the first, and no copy."""
    shard = found.shard
    twin = walked.get(shard.header.uid)
    if twin:
        report.note(shard.path, f"is a copy of {twin.shard.path.name}: remove one")
        return False
    first = next(iter(walked.values()), None)
    if first:
        try:
            first.shard.header.meta.check_same(shard.header.meta, first.shard.path.name)
        except DatasetMismatchError as e:
            report.note(shard.path, str(e))
            return False
    return True


__all__ = ["ALLOW_LABEL", "Finding", "VerifyReport", "verify"]
