"""A planned window to bytes: its head, a bias table if there is a new one, STARTs, chunks, ENDs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from typing import NamedTuple

from hstransport.protocol import pack_event

from . import codec
from . import format as fmt
from .format import pack_frame, pack_map
from .index import BiasRecord, ChunkRecord, EndRecord, Item, StartRecord, WindowRecord
from .plan import ChunkPlan, WindowPlan

Part = tuple[bytes, Item | None]
"""A frame, and the record of it with its offset still to be filled in."""


class Bias(NamedTuple):
    """The table that a window's chunks are packed with."""

    number: int
    """Its number within the shard."""
    table: codec.U8
    rows: int
    """Rows that it was estimated from."""
    new: bool
    """Whether the shard does not have it yet."""


def encode_window(
    run: int,
    first_seq: int,
    next_seq: int,
    plan: WindowPlan,
    bias: Bias | None,
    offset: int,
    pool: Executor | None,
) -> tuple[list[bytes], WindowRecord]:
    """The bytes of a window that will be at ``offset``, and the record that says what is where."""
    parts = [*_before(plan, bias), *_chunks(plan.chunks, bias, pool), *_ends(plan)]
    length = sum(len(data) for data, _ in parts)
    raw = {"run": run, "first": first_seq, "next": next_seq, "bytes": length}
    head = pack_map(fmt.WINDOW, raw)
    buffers, items = [head], []
    at = offset + len(head)
    for data, item in parts:
        if item is not None:
            # A chunk is found by its data, which follow its frame.
            skip = len(data) if isinstance(item, ChunkRecord) else 0
            items.append(item._replace(offset=at + skip))
        buffers.append(data)
        at += len(data)
    return buffers, WindowRecord(offset, at, run, first_seq, next_seq, tuple(items))


def _before(plan: WindowPlan, bias: Bias | None) -> Iterator[Part]:
    if bias and bias.new:
        raw = {"rows": bias.rows, "table": bias.table.tobytes()}
        yield pack_map(fmt.BIAS, raw), BiasRecord(0, bias.rows)
    for t in plan.touched.values():
        if t.start is not None:
            _, meta = pack_event(t.start)
            yield pack_frame(fmt.START, meta), StartRecord(0, t.sid, t.start.id)


def _chunks(chunks: list[ChunkPlan], bias: Bias | None, pool: Executor | None) -> Iterator[Part]:
    if bias is None:
        return
    table = bias.table

    def encode(chunk: ChunkPlan) -> list[bytes]:
        return codec.encode_chunk([piece for _, piece in chunk.pieces], table)

    packed = pool.map(encode, chunks) if pool else map(encode, chunks)
    for chunk, frames in zip(chunks, packed, strict=True):
        sizes, segments = tuple(map(len, frames)), tuple(chunk.segments)
        raw = {
            "rows": chunk.rows,
            "bias": bias.number,
            "seg": [x for s in segments for x in s],
            "sizes": list(sizes),
        }
        record = ChunkRecord(0, chunk.rows, bias.number, sizes, segments)
        yield pack_map(fmt.CHUNK, raw), record
        for frame in frames:
            yield frame, None


def _ends(plan: WindowPlan) -> Iterator[Part]:
    for t in plan.touched.values():
        if t.end is not None and t.state is not None:
            _, meta = pack_event(t.end)
            data = pack_map(fmt.END, {"state": t.state.value, "end": meta})
            yield data, EndRecord(0, t.sid, t.end.tokens, t.state.value)
