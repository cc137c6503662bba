"""A planned window into the file: a bias table if there is a new one, STARTs, chunks, ENDs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from hstransport.protocol import pack_event

from . import codec
from . import format as fmt
from .appender import Transaction
from .format import pack_frame, pack_map
from .index import BiasRecord, ChunkRecord, EndRecord, Item, StartRecord, WindowRecord
from .plan import ChunkPlan, WindowPlan

Part = tuple[bytes, BiasRecord | StartRecord | EndRecord]
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


class Packer:
    """Packs chunks on a number of threads, ahead of the one who writes them."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "hstransport-pack") if threads > 1 else None
        # One more than are packing, so that the threads go on while a chunk is written.
        self._buffers = [codec.FrameBuffer() for _ in range(threads + 1 if self._pool else 1)]

    def pack(self, chunks: Iterable[ChunkPlan], table: codec.U8) -> Iterator[codec.Packed]:
        """Each chunk's frames in order; they are valid until the next are asked for."""

        def encode(chunk: ChunkPlan, buffer: codec.FrameBuffer) -> codec.Packed:
            return codec.encode_chunk([piece for _, piece in chunk.pieces], table, buffer)

        if self._pool is None:
            for chunk in chunks:
                yield encode(chunk, self._buffers[0])
            return
        ahead: deque[Future[codec.Packed]] = deque()
        try:
            for i, chunk in enumerate(chunks):
                if len(ahead) == len(self._buffers):
                    yield ahead.popleft().result()
                buffer = self._buffers[i % len(self._buffers)]
                ahead.append(self._pool.submit(encode, chunk, buffer))
            while ahead:
                yield ahead.popleft().result()
        finally:
            # After an error nobody may be at work on the caller's rows, or on a buffer.
            wait(ahead)

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()


def write_window(
    out: Transaction,
    run: int,
    first_seq: int,
    next_seq: int,
    plan: WindowPlan,
    bias: Bias | None,
    packer: Packer,
) -> WindowRecord:
    """Write a window; its head last, because it is what makes the window count."""
    offset = out.leave(fmt.WINDOW_HEAD_BYTES)
    items: list[Item] = []
    _put(out, items, _before(plan, bias))
    if bias is not None:
        for chunk, packed in zip(plan.chunks, packer.pack(plan.chunks, bias.table), strict=True):
            segments = tuple(chunk.segments)
            raw = {
                "rows": chunk.rows,
                "bias": bias.number,
                "seg": [x for s in segments for x in s],
                "sizes": list(packed.sizes),
            }
            head = pack_map(fmt.CHUNK, raw)
            at = out.end + len(head)
            items.append(ChunkRecord(at, chunk.rows, bias.number, packed.sizes, segments))
            out.put([head, packed.data])
    _put(out, items, _ends(plan))
    size = out.end - offset - fmt.WINDOW_HEAD_BYTES
    out.fill(offset, fmt.pack_window(run, first_seq, next_seq, size))
    return WindowRecord(offset, out.end, run, first_seq, next_seq, tuple(items))


def _put(out: Transaction, items: list[Item], parts: Iterable[Part]) -> None:
    """Write metadata frames together, and note where each is."""
    frames = []
    at = out.end
    for frame, item in parts:
        items.append(item._replace(offset=at))
        frames.append(frame)
        at += len(frame)
    out.put(frames)


def _before(plan: WindowPlan, bias: Bias | None) -> Iterator[Part]:
    if bias and bias.new:
        raw = {"rows": bias.rows, "table": bias.table.tobytes()}
        yield pack_map(fmt.BIAS, raw), BiasRecord(0, bias.rows)
    for t in plan.touched.values():
        if t.start is not None:
            _, meta = pack_event(t.start)
            yield pack_frame(fmt.START, meta), StartRecord(0, t.sid, t.start.id)


def _ends(plan: WindowPlan) -> Iterator[Part]:
    for t in plan.touched.values():
        if t.end is not None and t.state is not None:
            _, meta = pack_event(t.end)
            data = pack_map(fmt.END, {"state": t.state.value, "end": meta})
            yield data, EndRecord(0, t.sid, t.end.tokens, t.state.value)
