"""``hstransport-consumer``: the process beside the server that writes the shards."""

from __future__ import annotations

import argparse
import errno
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from hstransport import __version__
from hstransport.errors import HsTransportError
from hstransport.seldom import Seldom
from hstransport.session import check_session_name, default_root
from hstransport.settings import parse_size

from .console import Status, set_up_logging
from .handover import Handover, parse_command
from .packer import RingPacker
from .stream import Streams
from .writer import DatasetWriter

logger = logging.getLogger(__name__)

HANDOVER_FAILED = 3

_EXAMPLE = """\
example:
  HSTRANSPORT=1 python -m sglang.launch_server --model-path MODEL --port 30000
  hstransport-consumer --out /data/shards          # beside it, before or after
  hstransport-consumer --out /data/shards --on-shard 'hstransport verify {}'

The consumer waits for a server if there is none yet, runs until it is interrupted (Ctrl-C or
SIGTERM, which leave all that was received on disk), and goes on in the same directory next time.

--on-shard hands each finished shard to a command. The shard is the command's from then on: it may
upload it, move it or delete it. One whose command fails stays, is named, and is
handed over again by the next consumer of the directory, as is one whose command had not ended when
the consumer died; so a command may see a shard twice. At the end the last shard is finished and
handed over too, and the consumer waits for the commands; a second signal ends at once.

exit status: 0 stopped in order; 1 a bug; 2 bad arguments, a directory or session that cannot be
used, or a disk that fails (one that is full is waited for); 3 stopped in order, and a command of
--on-shard failed. A ring that cannot be used is named in the log and left alone.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    arguments = _parser().parse_args(argv)
    console = Console(stderr=True)
    set_up_logging(console, verbose=arguments.verbose, log_json=arguments.log_json)
    try:
        return _run(arguments, console)
    except (HsTransportError, OSError) as e:
        if arguments.verbose:
            raise
        if arguments.log_json:
            logger.error("%s", e)
        else:
            print(f"hstransport-consumer: error: {e}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hstransport-consumer",
        description="Pack the hidden states of a running SGLang server into zstd shards.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", required=True, type=Path, help="directory of the shards")
    parser.add_argument(
        "--session", help="the server's HSTRANSPORT_SESSION (default: the only one)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=default_root(),
        help="the server's HSTRANSPORT_DIR (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-size",
        default="4GiB",
        help="begin a new shard beyond this, or beyond an index of 32 MiB, which is some 450,000 "
        "tiny samples (default: %(default)s)",
    )
    parser.add_argument("--threads", type=_positive, default=1, help="packing threads (default: 1)")
    parser.add_argument(
        "--durability",
        choices=("process", "machine"),
        default="process",
        help="what survives: the death of this process (default), or of the machine (fsync before "
        "the ring is freed)",
    )
    parser.add_argument(
        "--min-free",
        metavar="SIZE",
        default="0",
        help="leave so much of the disk free: below it, wait as on a full disk (default: 0)",
    )
    parser.add_argument(
        "--flush-s",
        type=_positive_seconds,
        default=0.5,
        help="pack what has come after this many seconds, however little (default: 0.5)",
    )
    parser.add_argument(
        "--on-shard",
        metavar="COMMAND",
        help="run this for each finished shard: split into words as a shell does, but run without "
        "one; {} stands for the shard's path, which comes last otherwise",
    )
    parser.add_argument(
        "--on-shard-jobs",
        metavar="N",
        type=_positive,
        default=1,
        help="so many commands at a time (default: 1)",
    )
    parser.add_argument(
        "--on-shard-backlog",
        metavar="N",
        type=_positive,
        default=8,
        help="packing waits while so many new shards wait for their command (default: 8)",
    )
    parser.add_argument(
        "--exit-when-done", action="store_true", help="stop once the server has ended"
    )
    parser.add_argument(
        "--metrics-port",
        metavar="N",
        type=_port,
        help="answer http://127.0.0.1:N/metrics with counters of server and consumer as Prometheus "
        "text (0: a free port, which the log names; default: none)",
    )
    parser.add_argument(
        "--log-json", action="store_true", help="log one JSON object a line, on a terminal too"
    )
    parser.add_argument("--verbose", action="store_true", help="debug lines and tracebacks")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive.__name__ = "positive number"  # argparse names it in its message


def _positive_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


_positive_seconds.__name__ = "positive number"


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise ValueError
    return value


_port.__name__ = "port number"


class _Stop:
    """Set by SIGINT or SIGTERM; a second signal ends at once, which loses nothing either."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = True


def _run(arguments: argparse.Namespace, console: Console) -> int:
    session = None if arguments.session is None else check_session_name(arguments.session)
    shard_bytes = _size("--shard-size", arguments.shard_size)
    min_free = _size("--min-free", arguments.min_free)
    if shard_bytes < 1:
        raise HsTransportError("--shard-size: at least one byte, such as 4GiB")
    handover = None
    if arguments.on_shard is not None:
        handover = Handover(
            arguments.out,
            parse_command(arguments.on_shard),
            jobs=arguments.on_shard_jobs,
            backlog=arguments.on_shard_backlog,
        )
    stop = _Stop()
    writer = DatasetWriter(
        arguments.out,
        shard_bytes=shard_bytes,
        threads=arguments.threads,
        durability=arguments.durability,
        min_free=min_free,
        on_shard=handover.put if handover else None,
    )
    with ExitStack() as stack:  # undone from the last to the first
        stack.callback(writer.close)  # gives the directory free: nobody hands over twice
        if handover:
            stack.callback(handover.close)
            handover.start()
        stack.callback(writer.finish_shard)
        streams = Streams(arguments.dir, session, arguments.out)
        packer = RingPacker(streams, writer, flush_s=arguments.flush_s)
        stack.callback(packer.close)
        if arguments.metrics_port is not None:
            figures = arguments.out, packer.totals, streams, handover
            stack.callback(_serve_metrics(arguments.metrics_port, *figures))
        with Status(console, handover, log_json=arguments.log_json) as status:
            _loop(packer, streams, status, stop, handover, exit_when_done=arguments.exit_when_done)
    if handover is None:
        return 0
    if handover.failed:
        logger.error("%s: %s", handover, ", ".join(sorted(set(handover.failed))))
        return HANDOVER_FAILED
    logger.info("%s", handover)
    return 0


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as e:
        raise HsTransportError(f"{option}: {e}") from None


def _serve_metrics(port: int, *figures: Any) -> Callable[[], None]:
    """Begin to, and return what ends it."""
    try:
        from . import metrics
    except ImportError:
        raise HsTransportError(
            "--metrics-port needs prometheus_client: pip install prometheus-client"
        ) from None
    port, stop = metrics.serve(port, metrics.Figures(*figures))
    logger.info("metrics at http://%s:%d/metrics", metrics.ADDRESS, port)
    return stop


def _loop(
    packer: RingPacker,
    streams: Streams,
    status: Status,
    stop: _Stop,
    handover: Handover | None,
    *,
    exit_when_done: bool,
) -> None:
    waiting = behind = False
    seldom = Seldom(logger)
    while not stop.asked:
        if handover and handover.full:
            if not behind:
                behind = True
                logger.warning(
                    "--on-shard does not keep up: packing waits whenever %d shards wait for their "
                    "command, and the ring holds what comes, as long as it can",
                    handover.backlog,
                )
            with packer.totals.waiting("on_shard"):
                handover.wait(0.1)
            status.show(packer.totals, streams.live)
            continue
        try:
            packer.step()
        except OSError as e:
            with packer.totals.waiting("disk_full"):
                _wait_for_room(e, stop, seldom)
        if not waiting and not packer.seen:
            waiting = True
            what = f"session {streams.session}" if streams.session else "a server"
            logger.info(
                "waiting for %s under %s: start SGLang with HSTRANSPORT=1, or name its "
                "HSTRANSPORT_DIR with --dir",
                what,
                streams.root,
            )
        status.show(packer.totals, streams.live)
        if exit_when_done and packer.seen and packer.idle:
            break
    packer.drain()
    status.show(packer.totals, streams.live, final=True)


def _wait_for_room(error: OSError, stop: _Stop, seldom: Seldom) -> None:
    """A full disk loses nothing: the records stay in the ring until there is room."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    seldom.error("no room: %s; the ring holds what comes, retrying every second", error)
    for _ in range(10):
        if stop.asked:
            raise error
        time.sleep(0.1)
