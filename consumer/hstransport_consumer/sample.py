"""One sample out of shards: what is known of it, and its states, decoded when asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hstransport.errors import ShardError
from hstransport.protocol import (
    End,
    Label,
    SessionInfo,
    Start,
    TokenIds,
    decode_loss_mask,
    unpack_info,
)

from . import codec
from .index import Part
from .shard import Plane, Shard, fetch
from .tensors import import_torch, to_ml_dtypes, to_torch
from .walk import end_event, end_refs, start_event
from .workers import together

if TYPE_CHECKING:
    from .reader import ShardDataset


_LARGE_BYTES = 4 << 20
"""A read of so much is shared by threads (below, waking them takes as long as the work) and goes
past the processor's caches."""
_PLANES_A_STEP = 16
"""So many are read before Python may hear an interrupt."""


class _Piece(NamedTuple):
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
    """A plane of a part, and where its words go."""

    part: _Piece
    plane: int
    fd: int
    place: codec.PlanePlace
    out: codec.U16


class Sample:
    """A sample of a dataset. Ids, labels and token ids are read on first use, states each time."""

    def __init__(self, dataset: ShardDataset, shard: Shard, row: int) -> None:
        self._dataset = dataset
        self._shard = shard
        self._row = row

    def __repr__(self) -> str:
        return f"<Sample {self.id!r}: {self.state}, {self.tokens} tokens>"

    @cached_property
    def id(self) -> str:
        return self._shard.tables.id(self._row)

    @property
    def state(self) -> str:
        """``whole``, or the name of what is wrong with it."""
        return self._shard.tables.states[self._column("state")]

    @property
    def tokens(self) -> int:
        """How many rows make the sample whole; of an unfinished one, what its rows reach to."""
        return self._column("tokens")

    @property
    def layers(self) -> tuple[int | str, ...]:
        """Names of the layers that are read: canonical ids, ``"final"``."""
        return self._dataset.layers

    @property
    def request_id(self) -> str:
        """SGLang's id of the request."""
        return self.start.rid

    @property
    def labels(self) -> Mapping[str, Label]:
        return self.start.labels

    @property
    def reason(self) -> str:
        """Why the request ended."""
        return self.end.reason

    @property
    def detail(self) -> str:
        """The server's own words on an abort, or why the sample is unfinished."""
        return self.end.detail

    @property
    def prompt_tokens(self) -> int:
        return len(self.start.prompt)

    @property
    def output_ids(self) -> TokenIds:
        """Generated token ids, int32; the last one was never an input."""
        return self.end.output

    @property
    def token_ids(self) -> TokenIds:
        """Token ids of the rows: int32 ``[tokens]``."""
        return self._ids[: self.tokens]

    @property
    def next_token_id(self) -> int | None:
        """The token after the last row, if there is one."""
        return int(self._ids[self.tokens]) if len(self._ids) > self.tokens else None

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8] | None:
        """uint8, one for each of :attr:`token_ids`; None if the request came without a mask."""
        mask = self.start.loss_mask
        return None if mask is None else decode_loss_mask(mask, len(self.token_ids))

    @cached_property
    def run(self) -> SessionInfo:
        """The server run that computed the sample."""
        return unpack_info(self._shard.tables.runs[self._column("run")])

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The ``[start, stop)`` ranges of positions that have rows; ``[(0, tokens)]`` if whole."""
        merged: list[tuple[int, int]] = []
        for p in self.stored:
            if merged and merged[-1][1] == p.position:
                merged[-1] = (merged[-1][0], p.position + p.rows)
            else:
                merged.append((p.position, p.position + p.rows))
        return merged

    @property
    def start_shard(self) -> bytes:
        """uid of the shard that has its START record."""
        return self._shard.tables.shards[self._column("start_shard")]

    @property
    def absent(self) -> list[bytes]:
        """uids of the shards that have a part of the sample and are not here."""
        uids = dict.fromkeys([self.start_shard, *(p.shard for p in self.stored)])
        return [uid for uid in uids if not self._dataset.has(uid)]

    @property
    def hidden_states(self) -> npt.NDArray[np.uint16]:
        """bf16 bits ``[tokens, layers, hidden]``. ShardError if rows are missing."""
        return self.read()

    def bfloat16(self) -> Any:
        """:attr:`hidden_states` as an ml_dtypes.bfloat16 array. Needs ml_dtypes."""
        return to_ml_dtypes(self.hidden_states)

    def torch(self) -> Any:
        """:attr:`hidden_states` as a torch.bfloat16 tensor. Needs torch."""
        return to_torch(self.hidden_states)

    def __getitem__(self, layer: int | str) -> npt.NDArray[np.uint16]:
        """bf16 bits of one layer, ``[tokens, hidden]``. KeyError names the layers there are."""
        return self.read(layers=[layer])[:, 0]

    def read(
        self,
        start: int = 0,
        stop: int | None = None,
        layers: Sequence[int | str] | None = None,
        out: npt.NDArray[np.uint16] | None = None,
    ) -> npt.NDArray[np.uint16]:
        """bf16 bits of the tokens ``[start, stop)``: ``[stop - start, layers, hidden]``.

        Only the chunks and planes asked for are decoded. ``out``: an array of just that shape to
        decode into; memory used again is faster than fresh. IndexError for a range outside of the
        sample, KeyError for an unknown layer, ShardError if rows of the range are missing.
        """
        parts, planes, shape = self._plan(start, stop, layers)
        if out is None:
            out = np.empty(shape, np.uint16)
        elif out.shape != shape or out.dtype != np.uint16:
            raise ValueError(f"out is {out.dtype} {list(out.shape)}, uint16 {list(shape)} is due")
        with ExitStack() as stack:
            files = {s: stack.enter_context(s.open()) for s in {p.shard for p in parts}}
            large = out.nbytes >= _LARGE_BYTES
            reads = []
            for p in parts:
                fd, rows = files[p.shard], slice(p.at, p.at + p.rows)
                places = [p.shard.place(p.chunk, plane) for plane in planes]
                if large:
                    fetch(fd, places)
                reads += [
                    _Read(p, plane, fd, place, out[rows, i])
                    for i, (plane, place) in enumerate(zip(planes, places, strict=True))
                ]
            whole = [r for r in reads if r.part.whole]
            left = iter([*self._read_whole(whole, large), *(r for r in reads if not r.part.whole)])

            def work() -> None:
                for r in left:  # shared: a step of a list's iterator is whole under the GIL
                    self._words(r.part, r.fd, r.plane, r.out)

            together(work, self._threads(large, len(reads)))
        return out

    def _read_whole(self, reads: Sequence[_Read], large: bool) -> Iterator[_Read]:
        """Read planes of whole chunks; returns those that native code did not do alone."""
        if not reads:
            return iter(())
        native = codec.plane_reads(
            [
                codec.PlaneRead(
                    r.fd,
                    r.place,
                    r.part.shard.bias(r.fd, r.part.chunk)[r.plane],
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
            together(work, self._threads(large, len(reads)))
        return (reads[i] for i in native.left())

    def _threads(self, large: bool, most: int) -> int:
        return min(self._dataset.threads, most) if large else 1

    def to(
        self,
        device: Any,
        start: int = 0,
        stop: int | None = None,
        layers: Sequence[int | str] | None = None,
    ) -> Any:
        """What :meth:`read` gives, as a torch.bfloat16 tensor on ``device``. Needs torch.

        On a CUDA device the words are joined there, bit for bit the same. Its work is queued on
        torch's current stream, as that of any operation of torch is. cupy knows no bfloat16; it
        takes the bits, without a copy: ``cupy.from_dlpack(sample.to("cuda").view(torch.int16))``,
        or those of a CPU: ``cupy.asarray(sample.hidden_states)``.
        """
        if import_torch().device(device).type == "cuda":
            return self._join_on(device, start, stop, layers)
        return to_torch(self.read(start, stop, layers)).to(device)

    def _join_on(
        self,
        device: Any,
        start: int = 0,
        stop: int | None = None,
        layers: Sequence[int | str] | None = None,
    ) -> Any:
        """As :meth:`to`, joined on any ``device``."""
        from .upload import PackedRows, upload

        parts, planes, shape = self._plan(start, stop, layers)
        tables = [self._bias(p) for p in parts]
        rows = (
            PackedRows(p.at, p.rows, i, bias, plane, partial(self._bytes_into, p, plane))
            for i, plane in enumerate(planes)
            for p, bias in zip(parts, tables, strict=True)
        )
        return upload(rows, shape, device)

    def _plan(
        self, start: int, stop: int | None, layers: Sequence[int | str] | None
    ) -> tuple[list[_Piece], list[int], tuple[int, int, int]]:
        """Parts that cover the tokens, numbers of the planes, and shape of a read."""
        stop = self.tokens if stop is None else stop
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start}:{stop} of sample {self.id!r}, it has {self.tokens}")
        planes = self._dataset.planes_of(self.layers if layers is None else layers)
        wanted = [p for p in self.stored if max(p.position, start) < min(p.position + p.rows, stop)]
        self._check_covered(wanted, start, stop)
        parts = [self._part(p, start, stop) for p in wanted]
        # Memory is taken by this shape, and rows in the tables bound it; a file's tokens do not.
        return parts, planes, (stop - start, len(planes), self._dataset.info.hidden)

    def _part(self, p: Part, start: int, stop: int) -> _Piece:
        """The rows of ``p`` that lie in ``[start, stop)``."""
        shard = self._dataset.shard(p.shard)
        first, last = max(p.position, start), min(p.position + p.rows, stop)
        row = p.row + first - p.position
        rows = last - first
        total = shard.chunk_rows(p.chunk)
        if row + rows > total:
            raise ShardError(
                f"{self._shard.path}: sample {self.id!r} has rows {row}+{rows} in a chunk of "
                f"{total} in {shard.path}: these files do not belong together"
            )
        return _Piece(shard, p.chunk, row, rows, first - start)

    def _words(self, p: _Piece, fd: int, plane: int, out: codec.U16) -> None:
        """One plane of a part."""
        if p.whole:
            p.shard.plane_words(fd, p.chunk, plane, out)
        else:
            codec.join(*self._bytes(p, fd, plane), p.shard.bias(fd, p.chunk)[plane], out)

    def _bytes(self, p: _Piece, fd: int, plane: int) -> Plane:
        """Exponents and sign+mantissa of a part's rows."""
        keep = p.rows < p.shard.chunk_rows(p.chunk)
        exponents, mantissas = self._dataset.cache.get(p.shard, fd, p.chunk, plane, keep=keep)
        hidden = p.shard.header.meta.hidden
        span = slice(p.row * hidden, (p.row + p.rows) * hidden)
        return exponents[span], mantissas[span]

    def _bytes_into(self, p: _Piece, plane: int, out: Plane) -> None:
        with p.shard.open() as fd:
            if p.whole:
                p.shard.plane_into(fd, p.chunk, plane, out)
            else:
                out[0][:], out[1][:] = self._bytes(p, fd, plane)

    def _bias(self, p: _Piece) -> codec.U8:
        with p.shard.open() as fd:
            return p.shard.bias(fd, p.chunk)

    def _check_covered(self, parts: Sequence[Part], start: int, stop: int) -> None:
        at = start
        for p in parts:
            if p.position > at:
                break
            at = p.position + p.rows
        if at < stop:
            raise ShardError(
                f"sample {self.id!r} is {self.state}: the row at {at} is missing; "
                f"read within its ranges, {self.ranges[:4]}"
            )

    @cached_property
    def stored(self) -> list[Part]:
        """All parts in order of position."""
        t = self._shard.tables
        span = t.segments(self._row)
        names = ("position", "rows", "shard", "chunk", "row")
        columns = [t.c[f"segment.{n}"][span.start : span.stop].tolist() for n in names]
        parts = [
            Part(position, rows, t.shards[shard], chunk, row)
            for position, rows, shard, chunk, row in zip(*columns, strict=True)
        ]
        if any(a.position + a.rows > b.position for a, b in itertools.pairwise(parts)):
            raise ShardError(f"{self._shard.path}: rows of sample {self.id!r} overlap")
        reach = parts[-1].position + parts[-1].rows if parts else 0
        if reach > self.tokens:
            raise ShardError(
                f"{self._shard.path}: sample {self.id!r} has rows up to {reach}, and {self.tokens} "
                "tokens"
            )
        return parts

    @cached_property
    def start(self) -> Start:
        """The START record as the server wrote it."""
        shard = self._dataset.shard(self.start_shard)
        with shard.open() as fd:
            frame = shard.frame(fd, self._column("start"))
        start = start_event(frame)
        if start.id != self.id:
            raise frame.corrupt(f"the START of {start.id!r}, that of {self.id!r} is due")
        return start

    @cached_property
    def end(self) -> End:
        """The END record as the server wrote it."""
        with self._shard.open() as fd:
            end, _ = end_event(self._shard.frame(fd, self._column("end")))
        return end

    @cached_property
    def refs(self) -> tuple[Part, ...]:
        """Rows that other samples stored and that are this one's too: a prefix that the server
        took out of its cache."""
        with self._shard.open() as fd:
            return end_refs(self._shard.frame(fd, self._column("end")))

    @cached_property
    def _ids(self) -> TokenIds:
        return np.concatenate([self.start.prompt, self.end.output]).astype(np.int32, copy=False)

    def _column(self, name: str) -> int:
        return int(self._shard.tables.c[f"sample.{name}"][self._row])
