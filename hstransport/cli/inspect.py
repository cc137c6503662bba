"""``hstransport inspect``: what is in a directory of shards."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .units import size

HELP = "what is in a directory of shards"
DESCRIPTION = (
    "Say which model, layers and samples a directory of shards holds, and how well packed."
)
EPILOG = """\
example:
  hstransport inspect /data/shards
  hstransport inspect /data/shards --json | python3 -m json.tool

Reads the indexes alone, so it is quick. A shard that is being written counts as far as it is whole.

exit status: 0; 2 when the directory cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a directory of shards, or one shard")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    # Imported here: the other commands do without the consumer's package until they need it.
    from hstransport_consumer.inspect import inspect

    found = inspect(arguments.directory)
    if arguments.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(found):
        table.add_row(name, Text(value))
    Console(highlight=False).print(table)


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(fact, words) in the order in which they are shown."""
    layers = [*map(str, found["layers"]), *(["final"] if found["final"] else [])]
    files = found["shards"]
    growing = sum(not f["finished"] for f in files)
    unfinished = f" ({growing} unfinished)" if growing else ""
    states = ", ".join(f"{count:,} {state}" for state, count in found["states"].items())
    tokens = "prompt tokens" if found["rows"] == "prompt" else "prompt and generated tokens"
    sessions = sorted({run["session"] for run in found["runs"]})
    return [
        ("model", found["model"]),
        ("layers", f"{', '.join(layers)} (of {found['num_layers']}), hidden {found['hidden']}"),
        ("samples", f"{found['samples']:,}" + (f": {states}" if states else "")),
        ("rows", f"{found['tokens']:,} ({tokens})"),
        ("raw", size(found["raw_bytes"])),
        ("stored", f"{size(found['stored_bytes'])} in {len(files):,} shards{unfinished}"),
        ("ratio", f"{found['ratio']:.3f}"),
        ("labels", ", ".join(found["labels"]) or "none"),
        ("written by", f"{len(found['runs'])} runs of SGLang {', '.join(found['sglang'])}"),
        ("sessions", ", ".join(sessions)),
    ]
