"""Out of a model's memory into reserved records of the ring.

Two ways, one for each sort of memory. :class:`HostCopier` copies and commits at once.
:class:`DeviceCopier` only enqueues: rows are gathered on the caller's stream into a *stage*, a ring
of device memory, and leave it through the copy engine on a stream of the copier's own, which then
writes the record's ready word. So a copy is ordered behind the states' own kernels and before
whatever the caller enqueues next (say, the replay of a CUDA graph that overwrites them), and no
thread ever waits for it. csrc/copier.h has the picture.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from . import _core
from .capture import Planes
from .errors import CudaError
from .ring import Reservation, RingWriter

logger = logging.getLogger(__name__)

MAX_DECODE_STEPS = 32
"""Decode steps that are gathered into one record: the step itself then costs one kernel launch."""
DRAIN_S = 5.0
"""How long close() waits for copies that still run. They take milliseconds."""


class RowRange(NamedTuple):
    """Consecutive rows of a pass's planes."""

    row: int
    rows: int


class Copier(Protocol):
    """What the exporter needs of either way."""

    max_bytes: int | None
    """Largest record that it can copy; None: any."""

    def copy(self, record: Reservation, ranges: Sequence[RowRange], planes: Planes) -> None:
        """Fill the record with these rows of each plane, plane by plane, and commit it."""

    def open_steps(self, rows: int, planes: Planes, steps: int) -> Steps | None:
        """Make room for ``steps`` decode steps of ``rows`` rows; None: it copies each at once."""

    def release(self) -> None:
        """Let go of sources that are copied by now."""

    def close(self) -> None:
        """Wait for copies that run, then give everything back."""


class Steps(Protocol):
    """Rows of consecutive decode steps, gathered until they fill a record."""

    def add(self, ranges: Sequence[RowRange], planes: Planes) -> None:
        """Gather the rows of one more step."""

    def send(self, record: Reservation) -> None:
        """Fill the record, row by row with all its steps, plane by plane, and commit it."""

    def drop(self) -> None:
        """Throw away what was gathered."""


class HostCopier:
    """Rows of host memory, copied by the calling thread."""

    max_bytes: int | None = None

    def copy(self, record: Reservation, ranges: Sequence[RowRange], planes: Planes) -> None:
        if planes.device is not None:
            raise CudaError(
                f"states lie on cuda:{planes.device}, this run's copier takes host memory"
            )
        offset = 0
        for p in planes.planes:
            for r in ranges:
                address = p.address + r.row * p.stride_bytes
                record.copy_rows(offset, address, r.rows, p.row_bytes, p.stride_bytes)
                offset += r.rows * p.row_bytes
        record.commit()

    def open_steps(self, rows: int, planes: Planes, steps: int) -> Steps | None:
        return None

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


class DeviceCopier:
    """Rows of one CUDA device, copied by the device.

    ``stage_bytes`` of device memory are taken at once, by a plain allocation. They should hold the
    rows of the largest forward pass: with less, the caller's *stream* waits on the device for the
    copy engine to catch up (55 GB/s on PCIe 5). Raises CudaError where there is no driver, device
    or memory.
    """

    def __init__(self, device: int, stage_bytes: int) -> None:
        self._core = _core.Copier(device, stage_bytes)
        self.device = device
        self.stage_bytes = int(self._core.stage_bytes)
        self.max_bytes: int | None = self.stage_bytes
        self._held: deque[tuple[int, Any]] = deque()

    @property
    def has_kernel(self) -> bool:
        """Whether the gather kernel runs on this device; else the driver's 2-D copies gather."""
        return bool(self._core.has_kernel)

    @property
    def stream(self) -> int:
        """Handle of the stream on which records are copied and committed."""
        return int(self._core.stream)

    def pin(self, ring: RingWriter) -> None:
        """Register the ring's memory with the driver (about 50 ms for each GiB).

        Raises CudaError that says what to do when the driver or a limit on memory refuses. There is
        no way around: into memory that is not pinned a GPU cannot write by itself.
        """
        self._core.pin(ring.core)

    def copy(self, record: Reservation, ranges: Sequence[RowRange], planes: Planes) -> None:
        """Enqueue the copy; the device commits the record. The planes are held until then."""
        native = self._native(planes)
        rows = sum(r.rows for r in ranges)
        size = record.payload_bytes
        claim = self._core.claim(planes.stream, size)
        self._core.gather(planes.stream, claim, native, _gather_runs(ranges, 1), rows)
        number = self._core.send(planes.stream, claim, record, size, size, 1)
        self._hold(number, planes)

    def open_steps(self, rows: int, planes: Planes, steps: int) -> DeviceSteps | None:
        return DeviceSteps(self, rows, planes, steps)

    def release(self) -> None:
        if self._held:
            done = self._core.completed()
            while self._held and self._held[0][0] <= done:
                self._held.popleft()

    def close(self) -> None:
        """Wait for copies that run, then give everything back; it never raises."""
        try:
            if not self._core.drain(DRAIN_S):
                logger.error(
                    "hstransport: copies out of the GPU did not end in %.0f s; their memory is "
                    "left to the end of the process",
                    DRAIN_S,
                )
        except CudaError as e:  # whoever met it first has reported it
            logger.debug("hstransport: the last copies were lost: %s", e)
        finally:
            self._core.close()
            self._held.clear()

    def _native(self, planes: Planes) -> Any:
        if planes.native is None:
            if planes.device != self.device:
                where = "host memory" if planes.device is None else f"cuda:{planes.device}"
                raise CudaError(f"states lie in {where}, this copier takes cuda:{self.device}")
            planes.native = _core.device_planes(
                [(p.address, p.stride_bytes) for p in planes.planes], planes.planes[0].row_bytes
            )
        return planes.native

    def _hold(self, number: int, sources: Any) -> None:
        self.release()
        self._held.append((number, sources))


class DeviceSteps:
    """Decode steps in the stage: ``[planes, rows, steps, hidden]``."""

    def __init__(self, copier: DeviceCopier, rows: int, planes: Planes, steps: int) -> None:
        self._copier = copier
        self._core = copier._core
        self._row_bytes = planes.planes[0].row_bytes
        self._planes = len(planes.planes)
        self._rows = rows
        self._limit = steps
        self._stream = planes.stream
        self._claim = self._core.claim(planes.stream, self._planes * rows * steps * self._row_bytes)
        self._steps = 0
        self._sources: list[Planes] = []

    def add(self, ranges: Sequence[RowRange], planes: Planes) -> None:
        native = planes.native or self._copier._native(planes)
        if not self._sources or self._sources[-1] is not planes:
            self._sources.append(planes)
        runs = _gather_runs(ranges, self._limit, self._steps)
        self._core.gather(self._stream, self._claim, native, runs, self._rows * self._limit)
        self._steps += 1

    def send(self, record: Reservation) -> None:
        width = self._steps * self._row_bytes
        number = self._core.send(
            self._stream,
            self._claim,
            record,
            width,
            self._limit * self._row_bytes,
            self._planes * self._rows,
        )
        self._copier._hold(number, self._sources)

    def drop(self) -> None:
        self._core.drop(self._stream, self._claim)


def _gather_runs(
    ranges: Iterable[RowRange], step: int, first: int = 0
) -> list[tuple[int, int, int, int]]:
    """(source row, rows, target row, target step) of each range, one behind the other."""
    runs = []
    target = first
    for r in ranges:
        runs.append((r.row, r.rows, target, step))
        target += r.rows * step
    return runs


def copier_for(device: int | None, stage_bytes: int) -> Copier:
    """The way out of a device's memory; None is the host's."""
    return HostCopier() if device is None else DeviceCopier(device, stage_bytes)
