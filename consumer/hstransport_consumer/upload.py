"""States to a device that joins them: the bytes of both planes go up as they are unpacked.

Importing this needs torch. On the host there is only staging memory, which is pinned where the
device is CUDA, so that a thread unpacks the next rows while the last ones are on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from . import codec
from .shard import Plane

STAGING_BYTES = 8 << 20
"""Room of one staging buffer. A chunk of more (32 MiB a plane at most) gets what it needs."""

_BUFFERS = 2  # each thread's: one is filled while the other goes up
_SIGN_AND_MANTISSA = 0x807F - 0x10000


class PackedRows(NamedTuple):
    """Consecutive rows of one plane, still packed."""

    at: int
    """The first one's row in the tensor."""
    rows: int
    layer: int
    """Where the plane is in the tensor."""
    bias: codec.U8
    """The chunk's table."""
    plane: int
    """Where the plane is in the table."""
    unpack: Callable[[Plane], None]
    """Writes exponents and sign+mantissa."""


class _Staging:
    """Host memory that may still be on its way to a device."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copied: Any = None

    def reserve(self, size: int, *, pinned: bool) -> torch.Tensor:
        """``size`` bytes that nobody reads any more; waits for the copy out of them to end."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        if len(self._memory) < size or (pinned and not self._memory.is_pinned()):
            room = max(size, STAGING_BYTES)
            self._memory = torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._memory[:size]

    def to(self, device: torch.device, size: int) -> torch.Tensor:
        """The first ``size`` bytes on the device; they stay reserved until they are there."""
        there = self._memory[:size].to(device, non_blocking=True)
        if device.type == "cuda":
            cuda: Any = torch.cuda
            self._copied = cuda.Event(blocking=True)
            self._copied.record(cuda.current_stream(device))
        return there


class _Local(threading.local):
    def __init__(self) -> None:
        self.staging = [_Staging() for _ in range(_BUFFERS)]


_local = _Local()


def upload(rows: Iterable[PackedRows], shape: tuple[int, int, int], device: Any) -> torch.Tensor:
    """``[tokens, layers, hidden]`` torch.bfloat16 on ``device``, of rows that cover it."""
    device = torch.device(device)
    hidden = shape[2]
    words = torch.empty(shape, dtype=torch.int16, device=device)
    for batch in _batches(rows, STAGING_BYTES // hidden):
        staging = _local.staging.pop(0)
        _local.staging.append(staging)
        count = sum(r.rows for r in batch)
        # One copy for all that the join needs: exponents, sign+mantissa, and a row of bias.
        lines = 2 * count + 1
        host = staging.reserve(lines * hidden, pinned=device.type == "cuda").numpy()
        _fill(batch, host.reshape(lines, hidden))
        there = staging.to(device, lines * hidden).view(lines, hidden)
        first = batch[0]
        target = words[first.at : first.at + count, first.layer]
        join(there[:count], there[count:-1], there[-1], target)
    return words.view(torch.bfloat16)


def join(
    exponents: torch.Tensor, mantissas: torch.Tensor, bias: torch.Tensor, out: torch.Tensor
) -> None:
    """:func:`codec.join` where the tensors are. ``out`` is int16 ``[rows, hidden]``."""
    words = (exponents + bias).to(torch.int16) << 7  # uint8 is added mod 256
    # As a number with a sign, bit 7 is repeated in the bits above: in 15, where it belongs, too.
    signs = mantissas.view(torch.int8).to(torch.int16) & _SIGN_AND_MANTISSA
    torch.bitwise_or(words, signs, out=out)


def _batches(rows: Iterable[PackedRows], limit: int) -> Iterator[list[PackedRows]]:
    """Neighbours of one plane and one bias table, in ``limit`` lines of ``hidden`` bytes."""
    batch: list[PackedRows] = []
    count = 0
    for r in rows:
        if batch and (
            r.layer != batch[0].layer
            or r.bias is not batch[0].bias
            or 2 * (count + r.rows) + 1 > limit
        ):
            yield batch
            batch, count = [], 0
        batch.append(r)
        count += r.rows
    if batch:
        yield batch


def _fill(batch: list[PackedRows], lines: codec.U8) -> None:
    count = len(lines) // 2
    at = 0
    for r in batch:
        end = at + r.rows
        r.unpack((lines[at:end].reshape(-1), lines[count + at : count + end].reshape(-1)))
        at = end
    lines[-1] = batch[0].bias[batch[0].plane]
