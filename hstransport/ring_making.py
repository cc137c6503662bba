"""A server's ring from its first byte, taken while the model loads, until it is open."""

from __future__ import annotations

import atexit
import logging
import threading
import time

from .channel import Publisher
from .copyout import Copier, DeviceCopier
from .errors import ConfigError
from .exporter import Exporter
from .protocol import SessionInfo, pack_info
from .ring import RingWriter
from .session import ring_path
from .settings import Settings
from .stale import report_older_rings

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 5.0


class RingInTheMaking:
    """A ring that a thread makes ready while the model loads: its memory is cleared on the way.

    Raises ConfigError when nothing is to be captured, or another server serves this session. What
    goes wrong on the thread is raised by :meth:`open`.
    """

    def __init__(self, settings: Settings, info: SessionInfo) -> None:
        if info.planes == 0:
            raise ConfigError("HSTRANSPORT_LAYERS names no layer: give ids, 'eagle3' or 'final'")
        self.info = info
        self._settings = settings
        self._started = time.monotonic()
        self._logged = self._started
        self._failure: BaseException | None = None
        report_older_rings(settings.root, info)
        self._place = ring_path(settings.root, info.session, info.run, info.rank)
        self._thread = threading.Thread(target=self._make, name="hstransport-ring", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            self._ring = RingWriter.create(
                self._place.path, self._settings.ring_bytes, pack_info(self.info), self._progress
            )
            # An orderly exit says so in the ring; after a kill the kernel's lock tells the others.
            atexit.register(self._ring.close)
        except BaseException as e:
            self._failure = e

    def _progress(self, done: int) -> None:
        now = time.monotonic()
        if now - self._logged >= _PROGRESS_EVERY_S:
            self._logged = now
            total = self._settings.ring_bytes
            logger.info("hstransport: ring %d of %d MiB ready", done >> 20, total >> 20)

    def discard(self) -> None:
        """Wait until the ring is ready, and remove it: nothing will be written into it."""
        self._thread.join()
        if self._failure is None:
            self._ring.close()

    def open(self, copier: Copier) -> Exporter:
        """Wait until the ring is ready, pin it if a GPU is to write into it, and open it."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        settings, info, ring = self._settings, self.info, self._ring
        if isinstance(copier, DeviceCopier):
            copier.pin(ring)
        exporter = Exporter(
            ring,
            Publisher(self._place.endpoint),
            info,
            copier=copier,
            policy=settings.policy,
            block_s=settings.block_s,
        )
        atexit.register(exporter.close)  # runs before the ring's own, and gives the pages back
        logger.info(
            "hstransport: session %s captures layers %s of %s, rows=%s requests=%s, into %s "
            "(%d MiB, policy %s; ready %.1f s after the model began to load)%s",
            info.session,
            ",".join(map(str, info.layer_names)),
            info.model,
            info.rows,
            settings.requests,
            self._place.path,
            settings.ring_bytes >> 20,
            settings.policy,
            time.monotonic() - self._started,
            _way_out(copier),
        )
        return exporter


def _way_out(copier: Copier) -> str:
    if not isinstance(copier, DeviceCopier):
        return ""
    by = "the gather kernel" if copier.has_kernel else "2-D copies (built without nvcc)"
    return f"; out of cuda:{copier.device} by {by} and a stage of {copier.max_bytes >> 20} MiB"
