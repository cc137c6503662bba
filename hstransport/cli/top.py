"""``hstransport top``: what every session on this host does, seen from its rings' headers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..client.progress import duration
from ..counters import RingCounters
from ..session import check_session_name, default_root
from .checks import positive_float
from .units import size
from .watch import Disk, Row, View, Watch

HELP = "watch the sessions of this host: rates, rings, drops, disk"
DESCRIPTION = """\
Show every session of this host: GB/s into and out of its rings, how full they are, what waits to be
stored, drops and stalls by reason, how long the consumers' disks last. Reads the headers of the
rings and asks nobody: it costs a server nothing and shows one that hangs. Ctrl-C ends it."""
EPILOG = """\
example:
  hstransport top
  hstransport top --once --json | python3 -m json.tool

docs/operations.md says what each counter means and what to do.

exit status: 0; 1 with --once when there is no ring; 2 bad arguments, or a directory that cannot be
read.
"""


_COLUMNS = "session", "rank", "in GB/s", "out GB/s", "ring", "lag", "drops", "waited", "state"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--session", help="only this one (default: all)")
    add(
        "--dir",
        type=Path,
        default=default_root(),
        help="the servers' HSTRANSPORT_DIR (default: %(default)s)",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="when is its disk full? (default: the directories of the sessions' consumers)",
    )
    add(
        "--interval",
        type=positive_float,
        default=1.0,
        metavar="SECONDS",
        help="look so often; rates are those of one interval (default: 1)",
    )
    add("--once", action="store_true", help="show one interval and end")
    add("--json", action="store_true", help="print one JSON object a look, one a line")


def run(arguments: argparse.Namespace) -> int:
    session = None if arguments.session is None else check_session_name(arguments.session)
    watch = Watch(arguments.dir, session, arguments.out)
    nothing = (
        f"no ring {f'of session {session} ' if session else ''}under {arguments.dir}: start a "
        "server with HSTRANSPORT=1, or name its HSTRANSPORT_DIR with --dir"
    )
    watch.look()  # rates need two
    # Into a pipe or a file each ring is one line.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    live = Live(console=console, auto_refresh=False)
    is_live = console.is_terminal and not arguments.once and not arguments.json
    try:
        if is_live:
            live.start()
        while True:
            time.sleep(arguments.interval)
            view = watch.look()
            if arguments.json:
                print(json.dumps(asdict(view)), flush=True)
            elif is_live:
                live.update(show(view, nothing), refresh=True)
            else:
                console.print(show(view, nothing))
            if arguments.once:
                if not view.rings and arguments.json:
                    print(f"hstransport: {nothing}", file=sys.stderr)
                return 0 if view.rings else 1
    except KeyboardInterrupt:
        return 0
    finally:
        live.stop()


def show(view: View, nothing: str) -> RenderableType:
    """The view as a table; ``nothing``: what to say when there is no ring."""
    parts: list[RenderableType] = []
    if view.rings:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in _COLUMNS:
            table.add_column(name, justify="right" if "GB/s" in name else "left", overflow="fold")
        for row in view.rings:
            table.add_row(*map(Text, _cells(row)))
        parts.append(table)
    else:
        parts.append(Text(nothing))
    parts += [Text(_disk_words(disk)) for disk in view.disks]
    return Group(*parts)


def _cells(row: Row) -> tuple[str, ...]:
    state = ", ".join(row.remarks) or "ok"
    if row.size_bytes is None or row.used_bytes is None:
        return (row.session, str(row.rank), *[""] * 6, state)
    counters = RingCounters(**row.counters)
    lag = f"{row.lag_records:,} records"
    if row.lag_s:
        lag += f", {row.lag_s:.1f} s"
    return (
        row.session,
        str(row.rank),
        _rate(row.in_gbs),
        _rate(row.out_gbs),
        f"{row.used_bytes / row.size_bytes:.0%} of {size(row.size_bytes)}",
        lag,
        counters.drop_words,
        _waits(counters),
        state,
    )


def _waits(counters: RingCounters) -> str:
    waits = {"ring": counters.ring_stall_ns, "stage": counters.stage_stall_ns}
    return ", ".join(f"{ns / 1e9:.1f} s {what}" for what, ns in waits.items() if ns) or "0"


def _rate(gbs: float | None) -> str:
    return "" if gbs is None else f"{gbs:.2f}"


def _disk_words(disk: Disk) -> str:
    words = f"disk {disk.path}: {size(disk.free_bytes)} of {size(disk.size_bytes)} free"
    if disk.gbs is None or disk.full_in_s is None:
        return words
    return f"{words}, full in {duration(disk.full_in_s)} at {disk.gbs:.2f} GB/s"
