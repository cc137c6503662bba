"""One sample out of shards: what is known of it, and its states, decoded when asked for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hstransport.errors import ShardError
from hstransport.protocol import End, SessionInfo, Start, TokenIds, unpack_info
from hstransport.tags import Label, decode_loss_mask

from .index import Part
from .pieces import Piece, Pieces
from .shard import Shard
from .tensors import import_torch, to_ml_dtypes, to_torch
from .walk import end_event, end_refs, start_event

if TYPE_CHECKING:
    from .reader import ShardDataset


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
        pieces, shape = self._plan(start, stop, layers)
        if out is None:
            out = np.empty(shape, np.uint16)
        elif out.shape != shape or out.dtype != np.uint16:
            raise ValueError(f"out is {out.dtype} {list(out.shape)}, uint16 {list(shape)} is due")
        pieces.read(out, self._dataset.threads)
        return out

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
        pieces, shape = self._plan(start, stop, layers)
        return pieces.upload(device, shape)

    def _plan(
        self, start: int, stop: int | None, layers: Sequence[int | str] | None
    ) -> tuple[Pieces, tuple[int, int, int]]:
        """What covers the tokens, and the shape of a read."""
        stop = self.tokens if stop is None else stop
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start}:{stop} of sample {self.id!r}, it has {self.tokens}")
        planes = self._dataset.planes_of(self.layers if layers is None else layers)
        wanted = [p for p in self.stored if max(p.position, start) < min(p.position + p.rows, stop)]
        self._check_covered(wanted, start, stop)
        pieces = Pieces([self._piece(p, start, stop) for p in wanted], planes, self._dataset.cache)
        # Memory is taken by this shape, and rows in the tables bound it; a file's tokens do not.
        return pieces, (stop - start, len(planes), self._dataset.info.hidden)

    def _piece(self, p: Part, start: int, stop: int) -> Piece:
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
        return Piece(shard, p.chunk, row, rows, first - start)

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
