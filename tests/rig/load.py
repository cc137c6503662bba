"""A server's load without a server: the real exporter, in a process that tests may kill.

    PYTHONPATH=tests python -m rig.load ROOT RUN LOG [SAMPLES A SECOND]

Writes a line to LOG for each START and each END that is in the ring: ``S name`` and
``E name tokens end``, the END's end being a position of the ring. SIGTERM ends it in order. What a
sample holds follows from its name alone.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from rig.producer import HIDDEN, Bits, Producer

SESSION = "load"
PLANES = 3
RING_BYTES = 512 << 10
_OPEN = 6


def states_of(name: str, tokens: int) -> Bits:
    """Random finite states ``[planes, tokens, hidden]``."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    floats = rng.standard_normal((PLANES, tokens, HIDDEN), np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16)


def tokens_of(name: str) -> int:
    return 1 + zlib.crc32(name.encode()) % 40


def main() -> None:
    root, run, log = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rate = float(sys.argv[4]) if len(sys.argv) > 4 else 200.0
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    producer = Producer(
        root,
        session=SESSION,
        run=run,
        ring_bytes=RING_BYTES,
        policy="block",
        block_s=600.0,
        publish=True,
    )
    rng = random.Random(run)
    going: dict[str, tuple[object, int]] = {}  # the sample, and how many of its rows are out
    begun, began = 0, time.monotonic()
    while not stop:
        if len(going) < _OPEN and begun < (time.monotonic() - began) * rate:
            name = f"{run}-{begun}"
            begun += 1
            going[name] = producer.start(name, tokens_of(name)), 0
            os.write(fd, f"S {name}\n".encode())
        spans, states = [], []
        open_ = sorted(name for name, (_, at) in going.items() if at < tokens_of(name))
        if not open_:
            time.sleep(0.001)
            continue
        for name in rng.sample(open_, rng.randint(1, len(open_))):
            sample, at = going[name]
            n = min(rng.choice([1, 1, 4, 40]), tokens_of(name) - at)
            spans.append((sample, at, n))
            states.append(states_of(name, tokens_of(name))[:, at : at + n])
            going[name] = sample, at + n
        producer.rows(*spans, states=np.concatenate(states, axis=1))
        for name, (sample, at) in list(going.items()):
            # One is always open, so that a kill leaves something unfinished.
            if at == tokens_of(name) and len(going) > 1:
                del going[name]
                producer.end(sample, at, 1)
                os.write(fd, f"E {name} {at} {producer.ring.head}\n".encode())
    producer.close()


if __name__ == "__main__":
    main()
