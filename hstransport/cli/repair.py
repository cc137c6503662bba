"""``hstransport repair``: a shard's index made anew from its blocks."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

HELP = "make a damaged index anew from the blocks alone"
DESCRIPTION = """\
Repair shards whose footer cannot be read: everything that the footer says also stands between the
blocks. The damaged file stays beside the new one (.damaged); delete it when you are content. What
an unfinished file holds is finished, as the next consumer would do it. Blocks that are damaged
themselves cannot be repaired: hstransport verify names the samples that they hold."""
EPILOG = """\
example:
  hstransport repair /data/shards --dry-run
  hstransport repair /data/shards && hstransport verify /data/shards

exit status: 0 nothing was to repair, or nothing is lost; 1 something is lost, a line for each file;
2 when a consumer is writing there, or the directory or file cannot be used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="a directory of shards, or a shard")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    from hstransport_consumer.repair import repair

    done = repair(arguments.path, dry_run=arguments.dry_run)
    lost = any(r.lost for r in done)
    if arguments.json:
        print(json.dumps({"lost": lost, "files": [dataclasses.asdict(r) for r in done]}))
        return int(lost)
    for r in done:
        if r.needed:
            print(f"{r.file}: {r.what}")
    if not any(r.needed for r in done):
        print(f"nothing to repair: the indexes of {len(done):,} shards are whole")
    return int(lost)
