"""What a new server run does about the rings that earlier runs of its session left."""

from __future__ import annotations

import fcntl
import logging
import time
from pathlib import Path

from .errors import ConfigError, RingError
from .protocol import SessionInfo
from .ring import inspect_ring, remove_orphan
from .session import find_rings

logger = logging.getLogger(__name__)

_CREATING_S = 60.0
"""A ring is locked as soon as its file is there; this is far longer than it takes."""


def report_older_rings(root: Path, info: SessionInfo) -> None:
    """Say what is in them, remove those that are empty, refuse a session that is being served.

    Raises ConfigError when a live server already writes this session and rank.
    """
    remove_unfinished(root / info.session, older_than_s=_CREATING_S)
    for ring in find_rings(root, info.session):
        try:
            state = inspect_ring(ring.path)
            if state.producer_alive:
                if ring.rank == info.rank:
                    raise ConfigError(
                        f"session {info.session!r} is already served by another process (ring "
                        f"{ring.path}): give this server its own HSTRANSPORT_SESSION"
                    )
            elif state.records == 0:
                remove_orphan(ring.path)
                ring.path.with_suffix(".sock").unlink(missing_ok=True)
            else:
                logger.warning(
                    "hstransport: an earlier run of session %s left %d records (%d bytes) in %s "
                    "that no consumer has taken; hstransport-consumer takes them and then removes "
                    "the ring, or delete the file to give them up",
                    info.session,
                    state.records,
                    state.bytes,
                    ring.path,
                )
        except (RingError, OSError) as e:
            logger.warning("hstransport: ring %s of an earlier run: %s", ring.path, e)


def remove_unfinished(directory: Path, *, older_than_s: float) -> None:
    """Rings whose server was killed while it created them: as large as a ring, and nobody's."""
    for path in directory.glob("*.ring.*.tmp"):
        try:
            old = time.time() - path.stat().st_mtime >= older_than_s
            if old and not _held(path):  # a clock that jumps takes no ring from a live server
                path.unlink()
                logger.warning("hstransport: removed %s, a ring that was never finished", path)
        except FileNotFoundError:
            continue


def _held(path: Path) -> bool:
    """Whether a process creates this ring: it holds the producer's lock, which is on byte 0."""
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError:
            return True
    return False
