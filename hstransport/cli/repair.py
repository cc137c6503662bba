"""``hstransport repair``: new indexes for shards whose own are damaged or missing."""

from __future__ import annotations

import argparse
import dataclasses
import json

HELP = "make a shard's damaged or missing index anew"
DESCRIPTION = """\
Make footer and trailer of a shard anew, out of its frames alone: of a finished shard whose own
cannot be read, or of a .partial file that no consumer will finish. The new file is written beside
the old one, verified, and only then takes its name. Reads and decodes all shards; those that are
sound stay as they are."""
EPILOG = """\
example:
  hstransport repair /data/shards
  hstransport repair /data/shards/shard-000007.zst

Blocks are not brought back. Where a shard is damaged before its index, the new one ends with the
last window that is whole, and the old file is kept beside it (….damaged). A shard whose index is
sound is left alone, whatever else is wrong with it: it is read through its index. Needs room for
the largest shard, and no consumer at work in the directory.

exit status: 0 every shard is sound now; 1 something that was stored is lost (a line for each
shard); 2 when nothing could be done.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a directory of shards, or a shard")
    parser.add_argument("--json", action="store_true", help="print one JSON object a shard")


def run(arguments: argparse.Namespace) -> int:
    from hstransport_consumer.repair import repair

    lost = False
    for done in repair(arguments.path):
        lost |= done.lost
        if arguments.json:
            print(json.dumps(dataclasses.asdict(done)))
        else:
            print(f"{done.file}: {done.what}")
    return 1 if lost else 0
