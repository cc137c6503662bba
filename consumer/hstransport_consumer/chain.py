"""The shards of a directory, one after another: the one being written, and how the next begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hstransport.errors import ShardError

from . import directory
from . import format as fmt
from .appender import Appender
from .carry import pack_carry
from .format import DatasetMeta, Header, frame_of
from .index import ShardIndex
from .recover import Found, reopen

FULL_INDEX_BYTES = 32 << 20
"""A shard is finished when its index has so many bytes, however small its samples are."""

FULL_SHARDS = fmt.MAX_SHARDS // 2
"""And when its samples have parts in so many others."""


def new_uid() -> bytes:
    """A shard's name for life."""
    return os.urandom(16)


class ShardChain:
    """At most one shard is open; after one that is finished :meth:`current` begins the next.

    ``found``: what the directory holds; its unfinished shard is gone on with, its carry is kept up
    by the indices. The other arguments are those of DatasetWriter. Raises as
    :func:`~hstransport_consumer.recover.reopen`.
    """

    def __init__(
        self,
        path: Path,
        found: Found,
        *,
        shard_bytes: int,
        durable: bool,
        on_shard: Callable[[Path], None] | None,
    ) -> None:
        self._path = path
        self._shard_bytes = shard_bytes
        self._durable = durable
        self._on_shard = on_shard
        self._carry = found.carry
        self._file = reopen(found, durable=durable)  # and the number of what it removes is free
        self._next_number = found.next_number
        self.index = found.unfinished.index if found.unfinished else None
        """Of the open shard; None when there is none."""
        self.out_of_step = False
        """Interrupted after the file had a window and before the index had all of it."""
        if self._file is None and found.meta and found.kept_number < self._next_number:
            # Written by a release without .next, or copied without hidden files. From now on its
            # shards may be taken away.
            self._keep_next(found.meta, pack_carry(self._carry))

    @property
    def begins_next(self) -> bool:
        """Whether :meth:`current` would begin a shard."""
        if self._file is None or self.index is None:
            return True
        return (
            self._file.size >= self._shard_bytes
            or self.index.bytes >= FULL_INDEX_BYTES
            or len(self.index.shards) >= FULL_SHARDS
        )

    def current(self, meta: DatasetMeta) -> tuple[Appender, ShardIndex]:
        """The shard to write to; a full one is finished first."""
        if self.out_of_step:
            raise ShardError(
                f"{self._path}: this writer was interrupted in the midst of a window; close "
                "it and open another, which recovers the shard"
            )
        if self.begins_next:
            self.finish()
            header = Header(new_uid(), self._next_number, meta)
            head = _head(header, pack_carry(self._carry))
            path = directory.partial_path(self._path, self._next_number)
            self._file = Appender.create(path, head, durable=self._durable)
            self.index = ShardIndex(header, self._carry)
            self._next_number += 1
        assert self._file and self.index
        return self._file, self.index

    def finish(self) -> None:
        """Give the open shard its footer and its name. An empty one leaves no file."""
        file, index = self._file, self.index
        if file is None or index is None or self.out_of_step:
            return
        if not index.windows:
            file.discard()
            self._next_number -= 1
            self._file = self.index = None
            return
        carry = pack_carry(self._carry)
        tail = footer_of(index, carry, file.size)
        name = directory.shard_path(self._path, index.header.number)
        # From its name on the shard may be taken away: what is to be known of it comes first.
        file.finish(tail, name, ready=lambda: self._keep_next(index.header.meta, carry))
        self._file = self.index = None
        directory.sync(self._path)
        if self._on_shard:
            self._on_shard(name)

    def sync(self) -> None:
        """Make all that was written outlive the machine."""
        if self._file:
            self._file.sync()

    @property
    def sync_error(self) -> BaseException | None:
        """Why what was written to the last shard is perhaps not on the disk; also when closed."""
        return self._file.sync_error if self._file else None

    def close(self) -> None:
        """Leave the open shard as it is, for the next writer to go on with."""
        if self._file:
            self._file.close()
        self.index = None

    def _keep_next(self, meta: DatasetMeta, carry: bytes) -> None:
        """Note what the next shard is to begin with; its uid it gets when it does."""
        head = _head(Header(bytes(16), self._next_number, meta), carry)
        directory.keep_next(self._path, head)


def footer_of(index: ShardIndex, carry: bytes, at: int) -> list[bytes | memoryview]:
    """What a shard ends with whose frames end at byte ``at``, in parts of bytes."""
    footer = frame_of(fmt.FOOTER, index.tables().pack(carry))
    return [*footer, fmt.pack_trailer(at, sum(map(len, footer)), index.header.uid)]


def _head(header: Header, carry: bytes) -> list[bytes | memoryview]:
    """What a shard begins with that begins now."""
    return [fmt.pack_header(header), *frame_of(fmt.CARRY, [carry])]
