"""What a writer finds in a directory: finished shards, and at most one that was left unfinished."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hstransport.errors import CorruptShardError, ShardError, TornShardError

from .appender import Appender
from .bias import BiasEstimate
from .carry import unpack_carry
from .directory import NEXT, list_shards, opened
from .format import DatasetMeta, read_footer, read_header
from .index import Carry, ChunkRecord, ShardIndex, WindowRecord
from .tables import parse_tables
from .walk import Head, Record, apply, chunk_planes, read_bias, read_head, walk

logger = logging.getLogger(__name__)


@dataclass
class Unfinished:
    """What is whole in a ``.partial`` file."""

    index: ShardIndex
    end: int
    """Where the last whole window ends; the rest of the file is to be cut."""
    why: str = ""
    """Why it ends there, if not for a plain cut."""


@dataclass
class Found:
    """All that a directory says to its next writer."""

    next_number: int = 0
    kept_number: int = -1
    """The number that ``.next`` holds; -1 without it."""
    meta: DatasetMeta | None = None
    carry: Carry = field(default_factory=dict)
    estimate: BiasEstimate = field(default_factory=BiasEstimate)
    partial: Path | None = None
    unfinished: Unfinished | None = None


def look(directory: Path, *, trust_kernel: bool) -> Found:
    """Read what the directory holds; changes nothing.

    ``trust_kernel``: the machine has not restarted since the last write, so of the windows that
    are complete only the last one need be decoded. Otherwise all are.
    """
    entries = list_shards(directory)
    partial = [e for e in entries if e.partial]
    finished = [e for e in entries if not e.partial]
    if len(partial) > 1 or (partial and finished and finished[-1].number >= partial[0].number):
        names = ", ".join(e.path.name for e in partial)
        raise ShardError(
            f"{directory}: only the last shard can be unfinished, not {names}; "
            "move what does not belong here out of the directory"
        )
    found = Found(next_number=entries[-1].number + 1 if entries else 0)
    due = read_next(directory)
    if due:
        found.kept_number = due.header.number
        found.next_number = max(found.next_number, due.header.number)
    if finished and (due is None or finished[-1].number + 1 >= due.header.number):
        _read_finished(found, finished[-1].path)
    elif due:  # the last shards were taken away
        found.meta, found.carry = due.header.meta, due.carry
    if partial:
        found.partial = partial[0].path
        _read_partial(found, partial[0].path, trust_kernel)
    return found


def reopen(found: Found, *, durable: bool) -> Appender | None:
    """Cut the unfinished shard back to its last whole window, ready for more.

    A file without even a whole head holds nothing and is removed; its number is used again.
    """
    if found.partial is None:
        return None
    size = found.partial.stat().st_size
    if found.unfinished is None:
        logger.warning("removed %s: %d bytes, no whole header", found.partial, size)
        found.partial.unlink()
        found.next_number -= 1
        return None
    end, why = found.unfinished.end, found.unfinished.why
    if size > end:
        logger.warning("cut %s from %d to %d bytes %s", found.partial, size, end, why)
    return Appender.resume(found.partial, end, durable=durable)


def read_unfinished(fd: int, path: Path, *, check_all: bool, check_last: bool) -> Unfinished:
    """Walk a file's whole windows.

    TornShardError or CorruptShardError when not even its head is whole. ``check_all`` and
    ``check_last``: verify the data of all windows, or of the last.
    """
    size = os.fstat(fd).st_size
    head = read_head(fd, size, path)
    done = Unfinished(ShardIndex(head.header, head.carry), head.end)
    held: Record | None = None
    meta = head.header.meta
    try:
        for record in _whole(walk(fd, head.end, size, path, meta), done):
            if held is not None:
                _accept(done, held, fd, path, check_all)
            held = record
        if held is not None:
            _accept(done, held, fd, path, check_all or check_last)
    except CorruptShardError as e:
        # The record may have been taken in by half.
        again = read_head(fd, size, path)
        done = Unfinished(ShardIndex(again.header, again.carry), done.end, f"({e})")
        for record in walk(fd, again.end, done.end, path, meta):
            apply(done.index, record, path)
    return done


def _whole(records: Iterator[Record], done: Unfinished) -> Iterator[Record]:
    """The records before the first that is not whole."""
    try:
        yield from records
    except TornShardError:
        return
    except CorruptShardError as e:
        done.why = f"({e})"


def _accept(done: Unfinished, record: Record, fd: int, path: Path, check: bool) -> None:
    if check and isinstance(record, WindowRecord):
        for item in record.items:
            if isinstance(item, ChunkRecord):
                meta = done.index.header.meta
                any_bias = np.zeros((meta.planes, meta.hidden), np.uint8)
                deque(chunk_planes(fd, item, any_bias, path), maxlen=0)  # for the checksums
    apply(done.index, record, path)
    done.end = record.end


def read_next(directory: Path) -> Head | None:
    """What the next shard is to begin with, if a writer has noted it."""
    path = directory / NEXT
    try:
        with opened(path) as fd:
            return read_head(fd, os.fstat(fd).st_size, path)
    except FileNotFoundError:
        return None


def _read_finished(found: Found, path: Path) -> None:
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        header, _ = read_header(fd, size, path)
        footer = read_footer(fd, size, path, header.uid)
        tables = parse_tables(footer, header.meta, header.uid)
        found.meta = header.meta
        found.carry = unpack_carry(footer, tables.carry)
        if tables.bias:
            offset, rows = tables.bias[-1]
            table = read_bias(fd, offset, footer.offset, path, header.meta)
            found.estimate = BiasEstimate.resume(table, rows)


def _read_partial(found: Found, path: Path, trust_kernel: bool) -> None:
    with opened(path, follow=False) as fd:  # it will be written to
        if not trust_kernel:  # after a failed sync the page cache has what the disk lacks
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            done = read_unfinished(fd, path, check_all=not trust_kernel, check_last=True)
        except TornShardError:
            return
        index = done.index
        if found.meta:
            found.meta.check_same(index.header.meta, str(path))
        found.unfinished = done
        found.meta = index.header.meta
        found.carry = index.carry
        if index.bias:
            last = index.bias[-1]
            table = read_bias(fd, last.offset, done.end, path, index.header.meta)
            found.estimate = BiasEstimate.resume(table, last.rows)
