"""Another process that checks every byte of records as soon as they are ready: ``main`` below.

A record's metadata say where in a sequence of random words its payload was taken from.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from hstransport.ring import RingReader


def check_records(path: str, count: int, words: int) -> int:
    """Number of records, out of ``count``, whose bytes were not those that were sent."""
    source = np.random.default_rng(7).integers(0, 1 << 16, words, np.uint16)
    bad = done = 0
    silent_since = time.monotonic()
    with RingReader.attach(path) as reader:
        print("attached", flush=True)
        while done < count:
            record = reader.read()
            if record is None:
                if time.monotonic() - silent_since > 60:
                    raise SystemExit(f"nothing came for a minute after {done} records")
                continue
            start = int.from_bytes(record.meta, "little")
            got = record.payload.view(np.uint16)
            bad += not np.array_equal(got, source[start : start + len(got)])
            record.release()
            done += 1
            if done % 1024 == 0:
                silent_since = time.monotonic()
    return bad


if __name__ == "__main__":
    print(check_records(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
