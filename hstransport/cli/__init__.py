"""``hstransport``: ask a server for prompts' states, look into shards, plan a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import HsTransportError, ServerError
from . import doctor, estimate, extract, inspect, patch, repair, top, verify

BAD_INPUT, UNREACHABLE, INTERRUPTED = 2, 3, 130

_EPILOG = """\
example:
  hstransport estimate --model MODEL --tokens 20000000 --out /data/shards
  hstransport extract --server http://127.0.0.1:30000 --prompts prompts.jsonl --out /data/shards
  hstransport extract --model MODEL --prompts prompts.jsonl --out /data/shards
  hstransport inspect /data/shards
  hstransport verify /data/shards
  hstransport repair /data/shards
  hstransport top --out /data/shards
  hstransport doctor --server http://127.0.0.1:30000

`hstransport COMMAND --help` says more. The process that writes the shards is hstransport-consumer.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (HsTransportError, OSError) as e:
        if arguments.debug:
            raise
        print(f"hstransport: error: {_words(e)}", file=sys.stderr)
        return UNREACHABLE if isinstance(e, ServerError) else BAD_INPUT
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        print("hstransport: interrupted", file=sys.stderr)
        return INTERRUPTED


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hstransport",
        description="Hidden states of a running SGLang server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (extract, inspect, verify, repair, top, doctor, estimate, patch):
        command = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        command.set_defaults(run=module.run)
    return parser
