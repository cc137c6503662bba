"""Out of a model's memory into reserved records of the ring, in two steps.

``gather`` takes hold of rows on the thread, and at the point of its stream, where the states are
still what they were computed as; the :class:`GatheredRows` that it returns fill a record later, on
the exporter's thread. In host memory to take hold is to keep a reference. On a GPU the rows are
gathered into a *stage*, a ring of device memory, on the caller's stream: behind the states' own
kernels and before whatever comes next (say, the replay of a CUDA graph that overwrites them). From
there the copy engine takes them into the record, on a stream of the copier's own, which then writes
the record's ready word: no thread waits for a copy. csrc/copier.h has the picture.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from . import _core
from ._core import Planes
from .errors import CudaError, HsTransportError
from .ring import Reservation, RingWriter

logger = logging.getLogger(__name__)

MAX_HELD_BYTES = 256 << 20
"""Host memory that waits for the exporter's thread; beyond it there is no room."""
DRAIN_S = 5.0
"""How long close() waits for copies that still run. They take milliseconds."""


class RowRange(NamedTuple):
    """Consecutive rows of a pass's planes."""

    row: int
    rows: int


class GatheredRows(Protocol):
    """Rows that were gathered together. Either is called once, in the order of gathering."""

    def fill(self, record: Reservation, ranges: Sequence[RowRange]) -> None:
        """Fill the record with some of them, plane by plane, and commit it or have it committed.

        ``ranges`` count from the first gathered row.
        """

    def drop(self) -> None:
        """Throw them away."""


class GatheredSteps(GatheredRows, Protocol):
    """Rows of consecutive decode steps; in the record each row has all its steps together."""

    def add(self, planes: Planes) -> int:
        """Gather the rows of one more step; how many steps that makes."""

    def again(self) -> int:
        """The same, out of the planes of the step before."""

    def seal(self) -> None:
        """No more steps will come."""


class Copier(Protocol):
    """What the exporter needs of either memory. All but release() and close() may be called beside
    the methods of :class:`GatheredRows`, from another thread."""

    max_bytes: int
    """Most that can be gathered together."""

    def gather(self, rows: RowRange, planes: Planes) -> GatheredRows | None:
        """Take hold of these rows; None when too many wait already."""

    def gather_steps(self, rows: int, planes: Planes, steps: int) -> GatheredSteps | None:
        """The same for the first ``rows`` rows of up to ``steps`` decode steps, one by one."""

    def release(self) -> bool:
        """Let go of sources that are copied by now; True when some are not."""

    def close(self) -> None:
        """Wait for copies that run, then give everything back; never raises."""


class HostCopier:
    """Rows of host memory, copied by the exporter's thread."""

    max_bytes = MAX_HELD_BYTES

    def __init__(self) -> None:
        # Each is counted by one thread only.
        self._gathered_bytes = 0
        self._copied_bytes = 0

    def gather(self, rows: RowRange, planes: Planes) -> GatheredRows | None:
        if planes.device is not None:
            raise CudaError(f"states lie on cuda:{planes.device}, this copier takes host memory")
        size = len(planes) * planes.row_bytes * rows.rows
        waiting = self._gathered_bytes - self._copied_bytes
        if waiting and waiting + size > MAX_HELD_BYTES:
            return None
        self._gathered_bytes += size
        return _HostRows(self, rows.row, planes, size)

    def gather_steps(self, rows: int, planes: Planes, steps: int) -> GatheredSteps | None:
        return None

    def copied(self, size: int) -> None:
        self._copied_bytes += size

    def release(self) -> bool:
        return False

    def close(self) -> None:
        pass


class _HostRows(NamedTuple):
    copier: HostCopier
    first: int
    planes: Planes
    size: int

    def fill(self, record: Reservation, ranges: Sequence[RowRange]) -> None:
        offset, row_bytes = 0, self.planes.row_bytes
        for address, stride_bytes in self.planes.places:
            for r in ranges:
                start = address + (self.first + r.row) * stride_bytes
                record.copy_rows(offset, start, r.rows, row_bytes, stride_bytes)
                offset += r.rows * row_bytes
        record.commit()
        self.drop()

    def drop(self) -> None:
        self.copier.copied(self.size)


class DeviceCopier:
    """Rows of one CUDA device, copied by the device.

    ``stage_bytes`` of device memory are taken at once, by a plain allocation. They should hold the
    rows of the largest forward pass: with less, the caller's *stream* waits on the device for the
    copy engine to catch up (55 GB/s on PCIe 5). Raises CudaError where there is no driver, device
    or memory.
    """

    def __init__(self, device: int, stage_bytes: int) -> None:
        self.core = _core.Copier(device, stage_bytes)
        """The native object."""
        self.device = device
        self.max_bytes = self.core.stage_bytes
        self._held: deque[tuple[int, Any]] = deque()

    @property
    def has_kernel(self) -> bool:
        """Whether the gather kernel runs on this device; else the driver's 2-D copies gather."""
        return self.core.has_kernel

    def pin(self, ring: RingWriter) -> None:
        """Register the ring's memory with the driver (about 50 ms for each GiB).

        Raises CudaError that says what to do when the driver or a limit on memory refuses. There is
        no way around: into memory that is not pinned a GPU cannot write by itself.
        """
        self.core.pin(ring.core)

    def gather(self, rows: RowRange, planes: Planes) -> GatheredRows | None:
        self._check(planes)
        claim = self.core.take(planes, rows.row, rows.rows)
        if claim is None:
            return None
        self.hold(claim.number, planes)
        return _DeviceRows(self.core, claim, rows.rows, len(planes), planes.row_bytes)

    def gather_steps(self, rows: int, planes: Planes, steps: int) -> GatheredSteps | None:
        self._check(planes)
        native = self.core.begin_steps(planes, rows, steps)
        return None if native is None else _DeviceSteps(self, native, rows, steps, planes)

    def _check(self, planes: Planes) -> None:
        if planes.device != self.device:
            where = "host memory" if planes.device is None else f"cuda:{planes.device}"
            raise CudaError(f"states lie in {where}, this copier takes cuda:{self.device}")

    def hold(self, number: int, sources: Any) -> None:
        """Keep sources until what was sealed under ``number`` is gathered."""
        self._held.append((number, sources))

    def release(self) -> bool:
        if self._held:
            done = self.core.gathered()
            while self._held and self._held[0][0] <= done:
                self._held.popleft()
        return bool(self._held)

    def close(self) -> None:
        try:
            if not self.core.drain(DRAIN_S):
                logger.error(
                    "hstransport: copies out of the GPU did not end in %.0f s; their memory is "
                    "left to the end of the process",
                    DRAIN_S,
                )
                return  # and so are the sources
            self._held.clear()
        except HsTransportError as e:  # whoever met it first has reported it
            logger.debug("hstransport: the last copies were lost: %s", e)
        finally:
            self.core.close()


class _DeviceRows(NamedTuple):
    """In the stage: ``[planes, rows, hidden]``."""

    core: _core.Copier
    claim: _core.StageClaim
    rows: int
    planes: int
    row_bytes: int

    def fill(self, record: Reservation, ranges: Sequence[RowRange]) -> None:
        width = self.row_bytes
        kept = sum(r.rows for r in ranges)
        whole = self.planes * kept * width
        if kept == self.rows:  # one long piece
            self.core.send(self.claim, record, [(0, 0, whole)], whole, whole, 1)
        else:
            pieces = _pieces(ranges, width, width)
            self.core.send(self.claim, record, pieces, self.rows * width, kept * width, self.planes)

    def drop(self) -> None:
        self.core.drop(self.claim)


class _DeviceSteps:
    """Decode steps in the stage: ``[planes, rows, steps, hidden]``."""

    def __init__(
        self, copier: DeviceCopier, native: _core.Steps, rows: int, limit: int, like: Planes
    ) -> None:
        self.again = native.again
        self._copier = copier
        self._native = native
        self._rows = rows
        self._limit = limit
        self._stream = like.stream
        self._count = len(like)
        self._row_bytes = like.row_bytes
        self._steps = 0
        self._claim: _core.StageClaim | None = None
        self._sources: list[Planes] = []

    def add(self, planes: Planes) -> int:
        self._copier._check(planes)
        if not self._sources or self._sources[-1] is not planes:
            self._sources.append(planes)
        return self._native.add(planes)

    def seal(self) -> None:
        self._claim = self._native.seal(self._stream)
        self._steps = self._native.count
        sources, self._sources = self._sources, []
        self._copier.hold(self._claim.number, sources)

    def fill(self, record: Reservation, ranges: Sequence[RowRange]) -> None:
        # Of each row the record takes the steps that there were, in the stage there is room for
        # more.
        width, pitch = self._steps * self._row_bytes, self._limit * self._row_bytes
        kept = sum(r.rows for r in ranges)
        whole = self._count * kept * width
        if kept == self._rows and width == pitch:  # one long piece
            layout = [(0, 0, whole)], whole, whole, 1
        elif kept == self._rows:
            layout = [(0, 0, width)], pitch, width, self._count * kept
        else:
            single = [RowRange(r.row + i, 1) for r in ranges for i in range(r.rows)]
            pieces = _pieces(single, pitch, width)
            layout = pieces, self._rows * pitch, kept * width, self._count
        self._copier.core.send(self._sealed, record, *layout)

    def drop(self) -> None:
        self._copier.core.drop(self._sealed)

    @property
    def _sealed(self) -> _core.StageClaim:
        assert self._claim is not None, "decode steps are sealed before they are used"
        return self._claim


def _pieces(ranges: Iterable[RowRange], pitch: int, width: int) -> list[tuple[int, int, int]]:
    """(offset in the stage, offset in the record, bytes) of row ranges in each plane."""
    pieces = []
    at = 0
    for r in ranges:
        pieces.append((r.row * pitch, at * width, r.rows * width))
        at += r.rows
    return pieces
