"""``hstransport verify``: is every sample of a directory, or of one shard, what it says?"""

from __future__ import annotations

import argparse
import dataclasses
import json

from .units import size

HELP = "read and check everything in a directory of shards, or in one shard"
DESCRIPTION = """\
Check every checksum, index and sample of a directory of shards: reads and decodes all of it, and
goes on after it has found something. Of one shard: what it holds, whatever lies beside it."""
EPILOG = """\
example:
  hstransport verify /data/shards && echo all good

exit status: 0 nothing is wrong; 1 something is (a line for each finding); 2 when the directory or
file cannot be read at all.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="PATH", help="a directory of shards, or a shard")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    from hstransport_consumer.verify import verify

    report = verify(arguments.directory)
    if arguments.json:
        print(json.dumps({"ok": report.ok, **dataclasses.asdict(report)}))
        return 0 if report.ok else 1
    for finding in report.findings:
        sample = f", sample {finding.sample}" if finding.sample else ""
        print(f"{finding.file}{sample}: {finding.what}")
    for name in report.unfinished:
        print(f"{name} is unfinished: what is whole in it was checked")
    if report.parted:
        print(f"{report.parted:,} samples lie partly in shards elsewhere: what is here was checked")
    verdict = "ok" if report.ok else f"{len(report.findings)} findings"
    print(
        f"{verdict}: {report.samples:,} samples ({report.whole:,} whole), {report.tokens:,} rows, "
        f"{size(report.bytes)} in {report.shards:,} shards"
    )
    return 0 if report.ok else 1
