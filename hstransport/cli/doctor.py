"""``hstransport doctor``: prove, or disprove, that a running server's states are the right ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..doctor.finding import FAIL, WARN, Finding
from ..doctor.run import Options, diagnose
from ..errors import ConfigError, ServerError
from ..session import check_session_name, default_root
from . import access
from .checks import positive_float

HELP = "prove, on a running server, that its states are the right ones"
DESCRIPTION = """\
Send a few requests to a running server that captures (HSTRANSPORT=1) and judge what is stored of
them: rows, layers, before or after the final norm, batches, the prefix cache, the ring, the
consumer. One line each: ok, warn, fail (with what to do) or skipped (with why); docs/doctor.md
explains each.

Run it on the server's host, as its user. Where no consumer is attached, doctor packs its own
samples into a temporary directory; where one is, name its directory with --shards. There doctor's
samples stay: 14 short ones, with the label hstransport.doctor and a loss mask of zeros."""
EPILOG = """\
example:
  hstransport doctor --server http://127.0.0.1:30000 --reference /models/SmolLM2-135M-Instruct
  hstransport doctor --server http://127.0.0.1:30000 --shards /data/shards --json

exit status: 0 nothing is wrong (a warning or two perhaps); 1 something is; 2 it could not be run:
bad arguments, no server, no ring, or records that are another consumer's.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--server", required=True, metavar="URL", help="such as http://127.0.0.1:30000")
    add(
        "--reference",
        metavar="MODEL",
        help="the checkpoint that is served, a folder or a name: transformers loads it, in float32 "
        "on the CPU, and every layer is compared",
    )
    add("--shards", type=Path, metavar="DIR", help="what the attached consumer writes")
    add("--session", help="the server's HSTRANSPORT_SESSION (default: the one of its model)")
    add(
        "--dir",
        type=Path,
        default=default_root(),
        help="the server's HSTRANSPORT_DIR (default: %(default)s)",
    )
    add(
        "--settle-timeout",
        type=positive_float,
        default=30.0,
        metavar="SECONDS",
        help="wait for the consumer until no sample came for this long (default: 30)",
    )
    access.add_arguments(parser)
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the reference",
    )
    add("--json", action="store_true", help="print one JSON object, at the end")


def run(arguments: argparse.Namespace) -> int:
    server = access.connect(arguments)
    options = Options(
        root=arguments.dir,
        session=None if arguments.session is None else check_session_name(arguments.session),
        shards=arguments.shards,
        reference=arguments.reference,
        trust_remote_code=arguments.trust_remote_code,
        settle_timeout_s=arguments.settle_timeout,
    )
    findings: list[Finding] = []
    try:
        for finding in diagnose(server, options):
            findings.append(finding)
            if not arguments.json:
                print(f"{finding.status:<8}{finding.name:<10}{finding.text}", flush=True)
    except ServerError as e:
        raise ConfigError(
            f"{arguments.server} does not answer as it should ({e}): start the server with "
            "HSTRANSPORT=1, or correct --server"
        ) from None
    wrong = sum(f.status == FAIL for f in findings)
    if arguments.json:
        said = [finding._asdict() for finding in findings]
        print(json.dumps({"ok": not wrong, "server": arguments.server, "findings": said}))
    else:
        warnings = sum(f.status == WARN for f in findings)
        print(f"{wrong} wrong, {warnings} warnings, {len(findings)} checks")
    return 1 if wrong else 0
