"""``hstransport patch``: give an SGLang without plugins the call site that hstransport needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import PatchError
from ..patching import EDITED, PATCHED, find_sglang

HELP = "let SGLang 0.5.9 or 0.5.10 load hstransport"
DESCRIPTION = (
    "SGLang 0.5.11 and later find hstransport by themselves. In 0.5.9 and 0.5.10 a few lines have "
    "to be added to one file, which this command does and undoes."
)
EPILOG = """\
example:
  hstransport patch status
  hstransport patch apply --dry-run
  hstransport patch apply
  hstransport patch revert --site /opt/venv/lib/python3.11/site-packages

Run it again after SGLang was installed anew, and restart the server. A file that is not byte for
byte the released one is never written to.

exit status: 0; 1 `status`: the patch is needed and not applied; 2 it cannot be done.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("status", "apply", "revert"), help="what to do")
    add(
        "--site",
        type=Path,
        metavar="PATH",
        help="the site-packages that SGLang lies in (default: this Python's)",
    )
    add("--dry-run", action="store_true", help="show the difference, write nothing")


def run(arguments: argparse.Namespace) -> int:
    sglang = find_sglang(arguments.site)
    name = f"SGLang {sglang.release} in {sglang.package}"
    if sglang.patch is None:
        print(f"{name}: needs no patch, it finds hstransport as a plugin")
        return 0
    if arguments.action == "status":
        state = sglang.state()
        if state == EDITED:
            raise PatchError(f"{sglang.path} was edited: it is neither as released nor patched")
        print(f"{name}: {state}")
        return 0 if state == PATCHED else 1
    revert = arguments.action == "revert"
    difference = sglang.change(revert=revert, write=not arguments.dry_run)
    if arguments.dry_run:
        print(difference or "nothing to do", end="" if difference else "\n")
        return 0
    done = "reverted" if revert else "applied"
    print(f"{name}: {done if difference else f'was already {done}'}")
    return 0
