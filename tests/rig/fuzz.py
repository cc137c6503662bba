"""Files and messages that lie, made by the thousand, and what may come of them.

    PYTHONPATH=tests python -m rig.fuzz shards --inputs 500
    PYTHONPATH=tests python -m rig.fuzz shards --minutes 5

Anything but the package's own errors ends the program with status 1 and with the input, to be
given again (``--again HEX``). So does an input that takes more than INPUT_S or has more than
MAX_BYTES taken at once, a pickle, and a path outside of the directory. ``--atheris`` needs that
package; it has wheels for some Pythons only, so `make setup` does not bring it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

from rig.bend import Choices
from rig.fuzz_targets import INPUT_S, TARGETS, Found, audit


def _hang(*_: object) -> None:
    raise Found(f"it takes more than {INPUT_S} s")


def attempt(target: Callable[[Choices], None], data: bytes) -> None:
    """One input; ends the program when it finds something."""
    try:
        target(Choices(data))
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        traceback.print_exc()
        print(f"found by --again {data.hex()}", file=sys.stderr, flush=True)
        os._exit(1)


def at_random(target: Callable[[Choices], None], inputs: int, minutes: float, seed: int) -> int:
    """Returns how many were tried."""
    rng = random.Random(seed)
    deadline = time.monotonic() + minutes * 60
    done = 0
    while done < inputs or time.monotonic() < deadline:
        attempt(target, rng.randbytes(rng.choice([4, 16, 64, 256])))
        done += 1
    return done


def by_coverage(target: Callable[[Choices], None], minutes: float) -> None:
    """As libFuzzer chooses; it ends the process when the time is over."""
    import atheris

    for f in gc.get_objects():
        if isinstance(f, FunctionType) and str(f.__module__).startswith("hstransport"):
            atheris.instrument_func(f)
    options = [f"-max_total_time={int(minutes * 60)}", f"-timeout={INPUT_S}", "-max_len=256"]
    atheris.Setup([sys.argv[0], *options], lambda data: attempt(target, data))
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--inputs", type=int, default=0, help="at least so many, at random")
    parser.add_argument("--minutes", type=float, default=0.0, help="at least so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="chosen by the code they reach")
    parser.add_argument("--again", metavar="HEX", help="one input that found something")
    parser.add_argument("--dir", help="where to work; a new directory in it is left behind")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _hang)
    target = TARGETS[options.target](Path(tempfile.mkdtemp(prefix="fuzz-", dir=options.dir)))
    tracemalloc.start()
    sys.addaudithook(audit)
    if options.again is not None:
        attempt(target, bytes.fromhex(options.again))
    elif options.atheris:
        by_coverage(target, options.minutes)
    else:
        done = at_random(target, options.inputs, options.minutes, options.seed)
        print(f"{options.target}: {done} inputs, nothing found")


if __name__ == "__main__":
    main()
