"""A planned window into the file: a bias table if there is a new one, STARTs, chunks, ENDs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

from hstransport.protocol import pack_event

from . import codec
from . import format as fmt
from .appender import Transaction
from .carry import pack_parts
from .direct import LEAST_BYTES, PAGE
from .format import pack_frame, pack_map
from .index import BiasRecord, ChunkRecord, EndRecord, Item, Part, StartRecord, WindowRecord
from .plan import ChunkPlan, WindowPlan
from .workers import wait_all

Metadata = tuple[bytes, BiasRecord | StartRecord | EndRecord]
"""A metadata frame, and the record of it with its offset still to be filled in."""


class Bias(NamedTuple):
    """The table that a window's chunks are packed with."""

    number: int
    """Its number within the shard."""
    table: codec.U8
    rows: int
    """Rows that it was estimated from."""
    new: bool
    """Whether the shard does not have it yet."""


class ChunkPacker:
    """Packs chunks on a number of threads, ahead of the one who has them written.

    Chunks are written in the order in which they were passed, by a thread of its own (and no more:
    kernels let one thread at a time write into a file). Two buffers for each thread and three bound
    the memory: a thread that is done goes on while an earlier chunk is still packed or written.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "hstransport-pack")
        self._writer = ThreadPoolExecutor(1, "hstransport-write")
        self._free = [codec.FrameBuffer() for _ in range(2 * threads + 3)]
        self._waiting: deque[tuple[ChunkPlan, codec.U8]] = deque()
        self._ahead: deque[tuple[Future[codec.Packed], codec.FrameBuffer]] = deque()
        self._writing: deque[tuple[Future[None], codec.FrameBuffer]] = deque()
        self.depth = len(self._free)
        """Chunks that may be packed and not written yet."""

    def begin(self, chunks: Iterable[ChunkPlan], table: codec.U8) -> None:
        """Begin to pack chunks, after those passed before."""
        self._waiting.extend((chunk, table) for chunk in chunks)
        self._start()

    def write_next(
        self, out: Transaction, head: Callable[[codec.Packed, int], bytes]
    ) -> codec.Packed:
        """Have the oldest chunk's frames written behind ``head`` of them and the place where that
        goes; ``out`` waits for it."""
        while not self._ahead:  # all buffers are being written
            self._take_back(wait_for_one=True)
            self._start()
        future, buffer = self._ahead[0]
        packed = future.result()  # interrupted, it is still at work: for `forget` to wait for
        write = out.put_by(self._writer, head(packed, out.end), packed.data)
        self._ahead.popleft()
        self._writing.append((write, buffer))
        self._start()
        return packed

    def wait(self) -> None:
        """Until all that was passed to :meth:`write_next` is written; chunks of later windows are
        packed meanwhile."""
        while self._writing:
            self._take_back(wait_for_one=True)
            self._start()

    def forget(self) -> None:
        """Drop all chunks; nobody is at work on the caller's rows, or on a buffer, afterwards."""
        self._waiting.clear()
        for future, _ in self._ahead:
            future.cancel()
        under_way: list[tuple[Future[Any], codec.FrameBuffer]] = [*self._ahead, *self._writing]
        try:
            wait_all([future for future, _ in under_way])
        finally:
            self._free += [buffer for _, buffer in under_way]
            self._ahead.clear()
            self._writing.clear()

    def close(self) -> None:
        self.forget()
        self._pool.shutdown()
        self._writer.shutdown()

    def _start(self) -> None:
        # A chunk gets its buffer before its thread: chunks that wait for one another never hold
        # the buffers that the oldest of them needs.
        self._take_back()
        while self._free and self._waiting:
            chunk, table = self._waiting.popleft()
            buffer = self._free.pop()
            pieces = [piece for _, piece in chunk.pieces]
            future = self._pool.submit(codec.encode_chunk, pieces, table, buffer)
            self._ahead.append((future, buffer))

    def _take_back(self, *, wait_for_one: bool = False) -> None:
        """Buffers of chunks that are written, well or not: that the transaction says."""
        if wait_for_one:
            wait([self._writing[0][0]])
        while self._writing and self._writing[0][0].done():
            self._free.append(self._writing.popleft()[1])


def write_window(
    out: Transaction,
    run: int,
    first_seq: int,
    next_seq: int,
    plan: WindowPlan,
    bias: Bias | None,
    packer: ChunkPacker,
    check: Callable[[], None],
) -> WindowRecord:
    """Write a window whose chunks are the next that ``packer`` was given.

    Its head is written last, because it is what makes the window count, and after ``check``, which
    raises when the rows that were packed are not to be trusted.
    """
    offset = out.leave(fmt.WINDOW_HEAD_BYTES)
    items: list[Item] = []
    _put(out, items, _before(plan, bias))
    if bias is not None:
        for chunk in plan.chunks:
            raw = {
                "rows": chunk.rows,
                "bias": bias.number,
                "seg": [x for s in chunk.segments for x in s],
            }
            packed = packer.write_next(out, partial(_head, raw))
            at = out.end - sum(packed.sizes)
            segments = tuple(chunk.segments)
            items.append(ChunkRecord(at, chunk.rows, bias.number, packed.sizes, segments))
    _put(out, items, _ends(plan))
    packer.wait()
    out.wait()
    check()
    size = out.end - offset - fmt.WINDOW_HEAD_BYTES
    out.fill(offset, fmt.pack_window(run, first_seq, next_seq, size))
    return WindowRecord(offset, out.end, run, first_seq, next_seq, tuple(items))


def _head(raw: dict[str, Any], packed: codec.Packed, at: int) -> bytes:
    align = PAGE if len(packed.data) >= LEAST_BYTES else 1
    return fmt.pack_chunk_head(raw | {"sizes": list(packed.sizes)}, at, align)


def _put(out: Transaction, items: list[Item], parts: Iterable[Metadata]) -> None:
    """Write metadata frames together, and note where each is."""
    frames = []
    at = out.end
    for frame, item in parts:
        items.append(item._replace(offset=at))
        frames.append(frame)
        at += len(frame)
    out.put(frames)


def _before(plan: WindowPlan, bias: Bias | None) -> Iterator[Metadata]:
    if bias and bias.new:
        raw = {"rows": bias.rows, "table": bias.table.tobytes()}
        yield pack_map(fmt.BIAS, raw), BiasRecord(0, bias.rows)
    for t in plan.touched.values():
        if t.start is not None:
            _, meta = pack_event(t.start)
            yield pack_frame(fmt.START, meta), StartRecord(0, t.sid, t.start.id)


def _ends(plan: WindowPlan) -> Iterator[Metadata]:
    for t in plan.touched.values():
        if t.end is not None and t.state is not None:
            _, meta = pack_event(t.end)
            raw: dict[str, Any] = {"state": t.state.value, "end": meta}
            if t.refs:
                raw |= _places(t.refs)
            record = EndRecord(0, t.sid, t.end.tokens, t.state.value, tuple(t.refs))
            yield pack_map(fmt.END, raw), record


def _places(refs: list[Part]) -> dict[str, Any]:
    """``refs`` and ``shards`` of an END."""
    uids: dict[bytes, int] = {}
    packed = pack_parts(refs, lambda uid: uids.setdefault(uid, len(uids)))
    return {"refs": packed, "shards": list(uids)}
