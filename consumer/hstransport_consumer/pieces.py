"""States out of chunks: the rows that a read needs of each, decoded to where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from . import codec
from .shard import Plane, PlaneCache, Shard, fetch
from .workers import together

_LARGE_BYTES = 4 << 20
"""A read of so much is shared by threads (below, waking them takes as long as the work) and goes
past the processor's caches."""
_PLANES_A_STEP = 16
"""So many are read before Python may hear an interrupt."""


class Piece(NamedTuple):
    """Rows of a chunk, and the row of a read's result where they belong."""

    shard: Shard
    chunk: int
    row: int
    rows: int
    at: int

    @property
    def whole(self) -> bool:
        """Whether it has all rows of the chunk."""
        return self.rows == self.shard.chunk_rows(self.chunk)


class _Read(NamedTuple):
    """A plane of a piece, and where its words go."""

    piece: Piece
    plane: int
    fd: int
    place: codec.PlanePlace
    out: codec.U16


class Pieces:
    """``planes``, by number, of pieces that make up a read; planes that are needed in part go
    through ``cache``."""

    def __init__(self, pieces: Sequence[Piece], planes: Sequence[int], cache: PlaneCache) -> None:
        self._pieces = pieces
        self._planes = planes
        self._cache = cache

    def read(self, out: codec.U16, threads: int) -> None:
        """bf16 bits into ``out``: ``[rows, planes, hidden]``. At most ``threads`` do it."""
        with ExitStack() as stack:
            files = {s: stack.enter_context(s.open()) for s in {p.shard for p in self._pieces}}
            large = out.nbytes >= _LARGE_BYTES
            reads = []
            for p in self._pieces:
                fd, rows = files[p.shard], slice(p.at, p.at + p.rows)
                places = [p.shard.place(p.chunk, plane) for plane in self._planes]
                if large:
                    fetch(fd, places)
                reads += [
                    _Read(p, plane, fd, place, out[rows, i])
                    for i, (plane, place) in enumerate(zip(self._planes, places, strict=True))
                ]
            threads = threads if large else 1
            whole = [r for r in reads if r.piece.whole]
            in_part = (r for r in reads if not r.piece.whole)
            left = iter([*_read_whole(whole, threads, large), *in_part])

            def work() -> None:
                for r in left:  # shared: a step of a list's iterator is whole under the GIL
                    self._words(r.piece, r.fd, r.plane, r.out)

            together(work, threads, len(reads))

    def upload(self, device: Any, shape: tuple[int, int, int]) -> Any:
        """A torch.bfloat16 tensor of that shape, ``[rows, planes, hidden]``, joined on ``device``.
        Needs torch."""
        from .upload import PackedRows, upload

        tables = [_bias(p) for p in self._pieces]
        rows = (
            PackedRows(p.at, p.rows, i, bias, plane, partial(self._bytes_into, p, plane))
            for i, plane in enumerate(self._planes)
            for p, bias in zip(self._pieces, tables, strict=True)
        )
        return upload(rows, shape, device)

    def _words(self, p: Piece, fd: int, plane: int, out: codec.U16) -> None:
        """One plane of a piece."""
        if p.whole:
            p.shard.plane_words(fd, p.chunk, plane, out)
        else:
            codec.join(*self._bytes(p, fd, plane), p.shard.bias(fd, p.chunk)[plane], out)

    def _bytes(self, p: Piece, fd: int, plane: int) -> Plane:
        """Exponents and sign+mantissa of a piece's rows."""
        keep = p.rows < p.shard.chunk_rows(p.chunk)
        exponents, mantissas = self._cache.get(p.shard, fd, p.chunk, plane, keep=keep)
        hidden = p.shard.header.meta.hidden
        span = slice(p.row * hidden, (p.row + p.rows) * hidden)
        return exponents[span], mantissas[span]

    def _bytes_into(self, p: Piece, plane: int, out: Plane) -> None:
        with p.shard.open() as fd:
            if p.whole:
                p.shard.plane_into(fd, p.chunk, plane, out)
            else:
                out[0][:], out[1][:] = self._bytes(p, fd, plane)


def _read_whole(reads: Sequence[_Read], threads: int, large: bool) -> Iterator[_Read]:
    """Read planes of whole chunks; returns those that native code did not do alone."""
    if not reads:
        return iter(())
    native = codec.plane_reads(
        [
            codec.PlaneRead(
                r.fd,
                r.place,
                r.piece.shard.bias(r.fd, r.piece.chunk)[r.plane],
                r.out,
            )
            for r in reads
        ],
        stream=large,
    )

    def work() -> None:
        while native.work(_PLANES_A_STEP):
            pass  # an interrupt is heard between two steps

    with native:  # at its end nobody touches `out` any more, however it ends
        together(work, threads, len(reads))
    return (reads[i] for i in native.left())


def _bias(p: Piece) -> codec.U8:
    with p.shard.open() as fd:
        return p.shard.bias(fd, p.chunk)
