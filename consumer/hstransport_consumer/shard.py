"""One shard opened for reading: its tables in memory, its data read on demand.

No descriptor is kept: a read opens the file, so a dataset of any number of shards may be used in
threads and in forked workers alike.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hstransport.errors import NotAShardError, TornShardError

from . import codec, directory
from .directory import PARTIAL
from .format import Frame, Header, corrupt, pread_into, read_footer, read_frame, read_header
from .recover import read_unfinished
from .tables import Tables, parse_tables
from .walk import read_bias


def _in_memory(fd: int, at: int) -> bool:
    """Whether a byte can be read without waiting; False where that cannot be told."""
    try:
        return os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError, NotImplementedError):  # the latter: built for an old libc
        return False


def fetch(fd: int, places: Sequence[codec.PlanePlace]) -> None:
    """Let the disk begin to read planes of one chunk, unless they are in memory."""
    if places and not _in_memory(fd, places[-1].at):
        for at, first, second in places:
            with suppress(OSError):  # it is a hint
                os.posix_fadvise(fd, at, first + second, os.POSIX_FADV_WILLNEED)


Plane = tuple[codec.U8, codec.U8]
"""Exponents and sign+mantissa of one plane of a chunk, each ``[rows * hidden]``."""


class Shard:
    """Header and tables of one file; ``end`` bounds all that its offsets may point to."""

    def __init__(self, path: Path, header: Header, tables: Tables, end: int) -> None:
        self.path = path
        self.header = header
        self.tables = tables
        self.end = end
        self._bias: dict[int, codec.U8] = {}

    @contextmanager
    def open(self) -> Iterator[int]:
        """A descriptor for a few reads. An unfinished shard may have been finished meanwhile."""
        fd = open_file(self.path)
        try:
            yield fd
        finally:
            os.close(fd)

    def frame(self, fd: int, offset: int) -> Frame:
        """The metadata frame at ``offset``."""
        return read_frame(fd, offset, self.end, self.path)

    def chunk_rows(self, chunk: int) -> int:
        """Rows of a chunk; CorruptShardError if another shard names one that is not here."""
        if chunk >= self.tables.chunks:
            raise corrupt(self.path, 0, f"chunk {chunk} is named by another shard and not here")
        return int(self.tables.c["chunk.rows"][chunk])

    def plane(self, fd: int, chunk: int, plane: int) -> Plane:
        """Decode one plane of a chunk."""
        size = self.chunk_rows(chunk) * self.header.meta.hidden
        with self._frames(fd, chunk, plane) as (first, second):
            return codec.decode_frame(first, size), codec.decode_frame(second, size)

    def plane_into(self, fd: int, chunk: int, plane: int, out: Plane) -> None:
        """Decode one plane of a chunk into ``out``."""
        with self._frames(fd, chunk, plane) as frames:
            for frame, target in zip(frames, out, strict=True):
                codec.decode_frame_into(frame, target)

    def plane_words(self, fd: int, chunk: int, plane: int, out: codec.U16) -> None:
        """Decode and join one plane of a chunk into ``out``, uint16 ``[rows, hidden]``."""
        bias = self.bias(fd, chunk)[plane]
        with self._frames(fd, chunk, plane) as frames:
            codec.unpack_plane(*frames, bias, out)

    def place(self, chunk: int, plane: int) -> codec.PlanePlace:
        """Where a plane's frames are; CorruptShardError if they are too long for its rows."""
        meta = self.header.meta
        sizes = self.tables.sizes(meta.planes)[chunk]
        at = int(self.tables.c["chunk.offset"][chunk]) + int(sizes[:plane].sum())
        first, second = sizes[plane].tolist()
        size = self.chunk_rows(chunk) * meta.hidden
        if max(first, second) > codec.max_frame_bytes(size):
            raise corrupt(self.path, at, f"frames of {first} and {second} bytes for {size}")
        return codec.PlanePlace(at, first, second)

    @contextmanager
    def _frames(self, fd: int, chunk: int, plane: int) -> Iterator[tuple[memoryview, memoryview]]:
        """The frames of a plane's exponents and sign+mantissa, in memory of this thread's;
        CorruptShardError if they are not what the block expects."""
        at, first, second = self.place(chunk, plane)
        data = codec.room_for_frames(first + second)
        pread_into(fd, data, at, self.path)
        try:
            yield data[first:], data[:first]
        except ValueError as e:
            raise corrupt(self.path, at, f"chunk {chunk}, plane {plane}: {e}") from None

    def bias(self, fd: int, chunk: int) -> codec.U8:
        """The bias table of a chunk, uint8 ``[planes, hidden]``."""
        number = int(self.tables.c["chunk.bias"][chunk])
        table = self._bias.get(number)
        if table is None:
            offset = self.tables.bias[number][0]
            table = read_bias(fd, offset, self.end, self.path, self.header.meta)
            self._bias[number] = table
        return table


class PlaneCache:
    """Planes of chunks that were needed in part and will be needed again by a neighbour."""

    def __init__(self, limit_bytes: int = 64 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._planes: OrderedDict[tuple[bytes, int, int], Plane] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, shard: Shard, fd: int, chunk: int, plane: int, *, keep: bool) -> Plane:
        """The plane, decoded unless it is here; kept if ``keep``."""
        key = (shard.header.uid, chunk, plane)
        with self._lock:
            found = self._planes.get(key)
            if found is not None:
                self._planes.move_to_end(key)
                return found
        decoded = shard.plane(fd, chunk, plane)
        if keep:
            self._put(key, decoded)
        return decoded

    def _put(self, key: tuple[bytes, int, int], plane: Plane) -> None:
        with self._lock:
            if key not in self._planes:
                self._planes[key] = plane
                self._bytes += 2 * plane[0].nbytes
            while self._bytes > self._limit_bytes:
                _, old = self._planes.popitem(last=False)
                self._bytes -= 2 * old[0].nbytes


def open_file(path: Path) -> int:
    """A descriptor of ``path``, or of the finished file that an unfinished one became."""
    try:
        return directory.open_file(path)
    except FileNotFoundError:
        if path.name.endswith(PARTIAL):
            return directory.open_file(path.with_name(path.name[: -len(PARTIAL)]))
        raise


def read_uid(path: Path) -> bytes:
    """The uid in a shard's header; errors as those of :func:`open_shard`."""
    fd = open_file(path)
    try:
        return read_header(fd, os.fstat(fd).st_size, path)[0].uid
    finally:
        os.close(fd)


def open_shard(path: Path) -> Shard:
    """Open a finished shard.

    NotAShardError, ShardVersionError, TornShardError, CorruptShardError or FileNotFoundError.
    """
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size
        header, _ = read_header(fd, size, path)
        footer = read_footer(fd, size, path, header.uid)
        return Shard(path, header, parse_tables(footer, header.meta, header.uid), footer.offset)
    except TornShardError as e:
        if not os.fstat(fd).st_size:
            raise NotAShardError(f"{path} is empty: move it out of the directory") from None
        raise e
    finally:
        os.close(fd)


def open_unfinished(path: Path) -> Shard | None:
    """Open what is whole in a file that is being written, or was left by a writer that died.

    None if it has not even a header yet.
    """
    fd = open_file(path)
    try:
        done = read_unfinished(fd, path, check_all=False, check_last=False)
    except TornShardError:
        return None
    finally:
        os.close(fd)
    return Shard(path, done.index.header, done.index.tables(), done.end)
