"""Is every sample in a directory what it says? Reads and decodes everything."""

from __future__ import annotations

import os
from pathlib import Path

from hstransport.errors import DatasetMismatchError

from .directory import handed_over, named
from .findings import Finding, VerifyReport, Walked
from .reader import ShardDataset
from .verify_frames import verify_file
from .verify_refs import Owners
from .verify_samples import ALLOW_LABEL, verify_sample


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Verify a directory of shards, or one shard: every checksum, the footers, each sample's rows.

    Goes on after a finding. One shard is verified alone, whatever lies beside it: of a sample that
    has a part in another one, its part here. In a directory only shards that were handed over may
    be missing. FileNotFoundError if there are no shards.
    """
    path = Path(path)
    entries = named(path)
    away, base = (handed_over(path), path) if path.is_dir() else (None, path.parent)
    report = VerifyReport()
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
    dataset = ShardDataset(base, [w.shard for w in walked.values()])
    owners = Owners(walked)
    for w in walked.values():
        for row in range(w.shard.tables.samples):
            verify_sample(dataset, w.shard, row, walked, owners, away, report)
    return report


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
