"""Types of the native module; hstransport/ring.py documents the ring for its users."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Counters = tuple[int, ...]

class Reservation:
    """A lease on a pending record: given back once, by ``commit()`` or ``abandon()``."""

    @property
    def seq(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def record_bytes(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def payload(self) -> _Bytes:
        """Writable uint8[payload_bytes], the shared memory itself. LeaseError once given back."""
    @property
    def address(self) -> int:
        """Address of the payload, a multiple of 64. LeaseError once given back."""
    @property
    def ready_address(self) -> int:
        """Address of the 4-byte ready word; 1 commits the record. LeaseError once given back."""
    def copy_rows(
        self, offset: int, address: int, rows: int, row_bytes: int, stride_bytes: int
    ) -> None:
        """Copy rows from ``address``, ``stride_bytes`` apart, to ``payload[offset:]``, contiguous.

        Releases the GIL from 256 KiB on. ConfigError if the rows exceed the payload.
        """
    def commit(self) -> None: ...
    def abandon(self) -> None: ...

class RingWriter:
    @staticmethod
    def create(
        path: str, capacity_bytes: int, info: bytes, progress: Callable[[int], object] | None
    ) -> RingWriter: ...
    def reserve(
        self, kind: int, meta: bytes, payload_bytes: int, wait_s: float, leave_bytes: int
    ) -> Reservation | None: ...
    def put(self, kind: int, meta: bytes) -> tuple[int, int, int] | None: ...
    def max_payload_bytes(self, meta_bytes: int, leave_bytes: int) -> int: ...
    def count(self, counter: int, n: int) -> None: ...
    def consumer_attached(self) -> bool: ...
    def close(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def head(self) -> int: ...
    @property
    def tail(self) -> int: ...
    @property
    def counters(self) -> _Counters: ...

class Record:
    """A lease on a record that was read: a context manager, released once."""

    @property
    def seq(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def end_position(self) -> int: ...
    @property
    def record_bytes(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def meta(self) -> bytes:
        """A copy: it stays after the record is released."""
    @property
    def payload(self) -> _Bytes:
        """Read-only uint8[payload_bytes], the shared memory itself; empty if abandoned.

        LeaseError once released, or once the reader is closed.
        """
    @property
    def abandoned(self) -> bool:
        """The payload never arrived."""
    @property
    def released(self) -> bool: ...
    def release(self) -> None:
        """Give the bytes back. The ring's tail follows the longest prefix of released records."""
    def __enter__(self) -> Record: ...
    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the record unless that was done inside."""

class RingReader:
    @staticmethod
    def attach(path: str) -> RingReader: ...
    def read(self) -> Record | None: ...
    def pending(self) -> bool: ...
    def skip_pending(self) -> tuple[int, int, bytes, int, int] | None: ...
    def tell_out(self, directory: bytes) -> bool: ...
    def check_whole(self) -> None: ...
    def producer_alive(self) -> bool: ...
    def unlink_if_orphaned(self) -> bool: ...
    def close(self) -> None: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def head(self) -> int: ...
    @property
    def tail(self) -> int: ...
    @property
    def cursor(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def info(self) -> bytes: ...
    @property
    def counters(self) -> _Counters: ...

def inspect_ring(
    path: str,
) -> tuple[bytes, _Counters, int, int, int, int, int, int, bool, bool, bool, bytes]: ...
def split_planes(
    src_addr: int,
    rows: int,
    hidden: int,
    src_stride_bytes: int,
    bias: _Bytes,
    exponents: Any,
    mantissas: Any,
) -> None:
    """Split rows of bf16 words into ``(x >> 7) - bias`` and ``s mmmmmmm`` bytes.

    ``exponents`` and ``mantissas`` are writable uint8 buffers of rows * hidden bytes. Releases the
    GIL, as all three do. ConfigError if a size, stride or alignment does not fit.
    """

def join_planes(
    exponents: Any,
    mantissas: Any,
    bias: _Bytes,
    dst_addr: int,
    rows: int,
    hidden: int,
    dst_stride_bytes: int,
) -> None:
    """The exact inverse of :func:`split_planes`."""

def unpack_frame(frame: Any, out: Any) -> bool:
    """Unpack one zstd frame into ``out``, a writable uint8 buffer of as many bytes.

    False, and ``out`` holds anything, unless the frame is as :func:`pack_chunk` writes them, its
    checksum right and nothing behind it: zstd reads it then, or says what is wrong. Releases the
    GIL.
    """

def unpack_plane(
    exponents: Any,
    mantissas: Any,
    bias: _Bytes,
    dst_addr: int,
    rows: int,
    hidden: int,
    dst_stride_bytes: int,
) -> bool:
    """:func:`join_planes` of what two zstd frames hold. False as of :func:`unpack_frame`;
    ConfigError if a size, stride or alignment does not fit. Releases the GIL."""

class PlaneReads:
    """Planes of chunks out of files, by as many threads as call :meth:`work`."""
    def __init__(
        self, places: npt.NDArray[np.uint64], hidden: int, stream: bool, owners: object
    ) -> None:
        """``places`` is uint64 ``[n, 8]``: descriptor; offset of the sign+mantissa frame; its
        bytes; bytes of the exponents' frame behind it; address of the bias, uint8 ``[hidden]``;
        address, rows and bytes from row to row of where the words go. ConfigError if a size, stride
        or alignment does not fit. ``stream``: written past the caches, where rows begin at
        multiples of 32 bytes. ``owners`` of the memory live as long as this."""
    def work(self, most: int) -> bool:
        """Take one plane after another, at most so many; False when none is left. Releases the
        GIL."""
    def __enter__(self) -> PlaneReads: ...
    def __exit__(self, *_: object) -> None:
        """Wait until no thread is at work; later ones find nothing to do. No interrupt can come
        between the block's end and this."""
    def left(self) -> list[int]:
        """Those that could not be read or unpacked, as of :func:`unpack_frame`. After the
        block."""

def odd_rows(src_addr: int, rows: int, hidden: int, src_stride_bytes: int, odd: Any) -> None:
    """Add to ``odd``, uint8 ``[rows]``, what is odd about each row of bf16 words: 1 all zeros (of
    either sign), 2 one value only (and not zero; of one word never), 4 Inf or NaN in it."""

def packed_bound(planes: int, size: int) -> int:
    """Bytes of memory in which :func:`pack_chunk` may write, for planes of ``size`` words."""

def pack_chunk(pieces: npt.NDArray[np.uint64], bias: _Bytes, out: Any) -> list[int]:
    """Pack the planes of a chunk into zstd frames; returns the bytes of each.

    ``pieces`` is uint64 ``[n, 4]``: address of a piece's first row in the first plane, bytes from
    plane to plane, bytes from row to row, rows. ``bias`` is uint8 ``[planes, hidden]``. ``out`` is
    writable, ``packed_bound(planes, rows * hidden)`` bytes: from its beginning on, of each plane
    the frame of its sign+mantissa bytes and that of its exponents. Releases the GIL. ConfigError if
    a size, stride or alignment does not fit.
    """

def median_exponents(src_addr: int, rows: int, hidden: int, src_stride_bytes: int) -> _Bytes:
    """The lower median of each column's exponents, uint8[hidden]; ``rows`` >= 1."""

class Planes:
    """The planes of one forward pass in the order of a run's layers, all in one memory."""

    stream: int
    """Handle of the CUDA stream on which the states are computed; 0 is the default stream."""
    def __init__(
        self,
        planes: Sequence[tuple[int, int]],
        rows: int,
        row_bytes: int,
        device: int | None,
        stream: int,
        owners: object,
    ) -> None:
        """``planes``: (address, bytes between rows). ConfigError for odd or null ones."""
    def __len__(self) -> int: ...
    @property
    def places(self) -> list[tuple[int, int]]:
        """(Address, bytes between rows) of each."""
    @property
    def rows(self) -> int:
        """Rows that every one of them has."""
    @property
    def row_bytes(self) -> int: ...
    @property
    def device(self) -> int | None:
        """Ordinal of the CUDA device; None for host memory."""

def look_into(arrays: list[Any], hidden: int) -> Planes | None:
    """Planes of arrays whose type has DLPack's C exchange interface (torch 2.10 and later).

    None unless all are ``[rows, hidden]`` bf16 with contiguous rows on one device. Their stream is
    the library's current one.
    """

def describe_dlpack(
    array: Any,
) -> tuple[int, tuple[int, ...], tuple[int, ...], int, int, int, int]:
    """Address, shape, strides in bytes, item bytes, type code, device type, device of a capsule."""

def device_of(address: int) -> int:
    """Ordinal of the CUDA device that memory lies on; CudaError when it is none of CUDA's."""

class StageClaim:
    """Room in the stage for one record."""

    @property
    def address(self) -> int:
        """Device address."""
    @property
    def bytes(self) -> int: ...
    @property
    def number(self) -> int:
        """Of what was gathered into it: its sources are free once Copier.gathered() has come here.
        0 before seal()."""

class Steps:
    """Decode steps gathered one by one into one claim: ``[planes, rows, limit, hidden]``."""

    def add(self, planes: Planes) -> int: ...
    def again(self) -> int:
        """Another step out of the same planes; both return the number of steps so far."""
    def seal(self, stream: int) -> StageClaim: ...
    @property
    def count(self) -> int: ...

class Copier:
    """One device's way into a ring; csrc/copier.h says how. Streams are driver handles.

    Every call raises CudaError that names the driver's call and error.
    """

    def __init__(self, device: int, stage_bytes: int) -> None: ...
    def pin(self, ring: RingWriter) -> None: ...
    def take(self, planes: Planes, row: int, rows: int) -> StageClaim | None:
        """Gather rows: ``[planes, rows, hidden]``. None: older claims, unsent, take the room."""
    def begin_steps(self, like: Planes, rows: int, limit: int) -> Steps | None: ...
    def send(
        self,
        claim: StageClaim,
        record: Reservation,
        pieces: Sequence[tuple[int, int, int]],
        from_pitch: int,
        to_pitch: int,
        height: int,
    ) -> None:
        """The device commits the record. ``pieces``: (offset in claim, in record, width)."""
    def drop(self, claim: StageClaim) -> None: ...
    def gathered(self) -> int: ...
    def drain(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def stage_bytes(self) -> int: ...
    @property
    def has_kernel(self) -> bool: ...
    @property
    def stream(self) -> int: ...
