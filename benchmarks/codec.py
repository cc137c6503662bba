"""The codec on real hidden states, against the usual ones: ratio, speed of one core, bits checked.

All codecs get the same pieces, those that the shard writer cuts: one plane of a chunk.
"hstransport" is the product's own code: its plan, its bias estimate, its packing and unpacking.
"writer" is the whole shard writer and reader on files in shared memory, everything included.
Times are processor time of the process, so that neither its own threads nor other work deceive.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import zstandard
from common import SHM, finish, median_ratio, parser, rounds
from hstransport_consumer import DatasetWriter, codec, open_shards
from hstransport_consumer.bias import ENOUGH_ROWS
from hstransport_consumer.plan import Entry, WindowPlan, plan_window
from states import MODELS, States, real, synthetic

from hstransport.protocol import FINISHED, End, Rows, Segment, SessionInfo, Start

SAMPLE_TOKENS = 512
Bits = npt.NDArray[np.uint16]


class Way(Protocol):
    """A codec at work on all the states. ``pack`` and ``unpack`` are timed, the rest is not."""

    def prepare(self) -> None: ...

    def pack(self) -> int:
        """Bytes that came out."""
        ...

    def unpack(self) -> None:
        """Undo what :meth:`prepare` packed."""
        ...

    def check(self) -> None:
        """Ends the run unless unpacking gives every bit that was packed."""
        ...


class Ours:
    """``encode_chunk`` over the plan's chunks as the writer calls it on one thread, and back."""

    def __init__(self, states: States) -> None:
        planes, _, hidden = states.bits.shape
        chunks = plan_of(states).chunks
        self._chunks = [[piece for _, piece in c.pieces] for c in chunks]
        self._bias = self._estimate(planes, hidden)
        self._buffer = codec.FrameBuffer()
        self._out = [np.empty((planes, c.rows, hidden), np.uint16) for c in chunks]
        self._packed: list[list[memoryview]] = []

    def prepare(self) -> None:
        if self._packed:
            return
        for pieces in self._chunks:
            packed = codec.encode_chunk(pieces, self._bias, self._buffer)
            data, ends = memoryview(bytes(packed.data)), np.cumsum(packed.sizes).tolist()
            frames = [data[a:b] for a, b in itertools.pairwise([0, *ends])]
            self._packed.append(frames)

    def pack(self) -> int:
        size = self._bias.nbytes
        for pieces in self._chunks:
            size += sum(codec.encode_chunk(pieces, self._bias, self._buffer).sizes)
        return size

    def unpack(self) -> None:
        for frames, out in zip(self._packed, self._out, strict=True):
            for plane, target in enumerate(out):
                mantissas, exponents = frames[2 * plane : 2 * plane + 2]
                codec.unpack_plane(exponents, mantissas, self._bias[plane], target)

    def check(self) -> None:
        for out in self._out:
            out[:] = 0
        self.unpack()
        for pieces, out in zip(self._chunks, self._out, strict=True):
            same(np.concatenate([rows_of(p) for p in pieces], axis=1), out)

    def _estimate(self, planes: int, hidden: int) -> codec.U8:
        """As the writer settles it: from the first rows, and then for good."""
        first: list[codec.Piece] = []
        left = ENOUGH_ROWS
        for piece in (p for pieces in self._chunks for p in pieces):
            if left:
                first.append(piece._replace(rows=min(piece.rows, left)))
                left -= first[-1].rows
        return codec.median_exponents(first, planes, hidden)


class Bytes:
    """Any codec from bytes to bytes, on the same planes of chunks, which lie ready for it."""

    def __init__(
        self,
        states: States,
        pack: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
        size: Callable[[Any], int] = len,
        feed: Callable[[Bits], Any] = lambda piece: piece,
    ) -> None:
        self._pieces = [
            np.concatenate([rows_of(p)[plane] for _, p in chunk.pieces])
            for chunk in plan_of(states).chunks
            for plane in range(len(states.bits))
        ]
        self._pack, self._unpack, self._size, self._feed = pack, unpack, size, feed
        self._inputs: list[Any] = []
        self._packed: list[Any] = []

    def prepare(self) -> None:
        self._inputs = [self._feed(piece) for piece in self._pieces]
        if not self._packed:
            self._packed = [self._pack(self._feed(piece)) for piece in self._pieces]

    def pack(self) -> int:
        return sum(self._size(self._pack(piece)) for piece in self._inputs)

    def unpack(self) -> None:
        for packed in self._packed:
            self._unpack(packed)

    def check(self) -> None:
        for piece, packed in zip(self._pieces, self._packed, strict=True):
            same(piece.reshape(-1), np.frombuffer(self._unpack(packed), np.uint16))


class Writer:
    """The shard writer and reader whole, on files in shared memory."""

    def __init__(self, states: States, folder: Path) -> None:
        planes, _, hidden = states.bits.shape
        self._folder = folder
        self._entries = entries_of(states)
        self._arrays = [a for _, a in self._entries if a is not None]
        self._out = [np.empty((a.shape[1], planes, hidden), np.uint16) for a in self._arrays]
        self._info = SessionInfo(
            run="0123456789ab",
            session="benchmark",
            model=states.name,
            sglang="none",
            layers=tuple(int(k) for k in states.layers[:-1]),
            final=True,
            hidden=hidden,
            num_layers=100,
            rows="prompt",
            rank=0,
            vocab_size=1 << 20,
            created=0.0,
            producer="benchmark",
        )

    def prepare(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def pack(self) -> int:
        with DatasetWriter(self._folder) as writer:
            writer.begin_run(self._info)
            writer.write_window(self._info.run, 0, 0, len(self._entries) - 1, self._entries)
        return sum(p.stat().st_size for p in self._folder.glob("*.zst"))

    def unpack(self) -> None:
        dataset = open_shards(self._folder)
        for i, out in enumerate(self._out):
            dataset[i].read(out=out)

    def check(self) -> None:
        for out in self._out:
            out[:] = 0
        self.unpack()
        for mine, out in zip(self._arrays, self._out, strict=True):
            same(mine.transpose(1, 0, 2), out)


def zstd3(states: States) -> Bytes:
    into, out = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    return Bytes(states, into.compress, out.decompress)


def split_zstd1(states: States) -> Bytes:
    """High bytes and low bytes apart (by numpy), each through zstd 1."""
    into, out = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def pack(piece: Bits) -> tuple[bytes, ...]:
        halves = piece.view(np.uint8).reshape(-1, 2)
        return tuple(into.compress(np.ascontiguousarray(halves[:, i])) for i in (0, 1))

    def unpack(packed: tuple[bytes, ...]) -> npt.NDArray[np.uint8]:
        halves = [np.frombuffer(out.decompress(frame), np.uint8) for frame in packed]
        joined = np.empty((len(halves[0]), 2), np.uint8)
        joined[:, 0], joined[:, 1] = halves
        return joined

    return Bytes(states, pack, unpack, size=lambda packed: sum(map(len, packed)))


def zipnn(states: States) -> Bytes | None:
    try:
        from zipnn import ZipNN
    except ImportError as e:
        print(f"ZipNN left out: {e} (pip install -r benchmarks/requirements.txt)")
        return None
    tool = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    # It reorders its input in place, so each time it gets a copy that is its own.
    return Bytes(states, tool.compress, tool.decompress, feed=lambda piece: piece.tobytes())


def entries_of(states: States) -> list[Entry]:
    """The states as they come off a ring: samples, each of one record."""
    entries: list[Entry] = []
    none = np.empty(0, np.int32)
    for sid, at in enumerate(range(0, states.bits.shape[1], SAMPLE_TOKENS)):
        array = states.bits[:, at : at + SAMPLE_TOKENS]
        rows = array.shape[1]
        entries.append((Start(sid, f"s{sid}", f"r{sid}", np.arange(rows, dtype=np.int32)), None))
        entries.append((Rows((Segment(sid, 0, rows),)), array))
        entries.append((End(sid, FINISHED, rows, none), None))
    return entries


def plan_of(states: States) -> WindowPlan:
    planes, _, hidden = states.bits.shape
    return plan_window(lambda sid: None, entries_of(states), planes, hidden)


def rows_of(piece: codec.Piece) -> Bits:
    """``[planes, rows, hidden]`` of a piece."""
    array: Bits = piece.source.owner[:, piece.row : piece.row + piece.rows]
    return array


def same(mine: Bits, theirs: Bits) -> None:
    if not np.array_equal(mine, theirs):
        raise SystemExit("codec.py: bits differ, so no figure of this run is worth anything")


class Timing(NamedTuple):
    packed_bytes: int
    pack_s: float
    unpack_s: float


def timed(way: Way) -> Timing:
    way.prepare()
    start = time.process_time()
    size = way.pack()
    middle = time.process_time()
    way.unpack()
    return Timing(size, middle - start, time.process_time() - middle)


def figures(states: States, count: int, folder: Path) -> dict[str, Any]:
    """Ratios and speeds of every codec on these states; the states' name leads each figure."""
    ways: dict[str, Way] = {
        "hstransport": Ours(states),
        "writer": Writer(states, folder / "shards"),
        "zstd3": zstd3(states),
        "split_zstd1": split_zstd1(states),
    }
    other = zipnn(states)
    if other is not None:
        ways["zipnn"] = other
    for way in ways.values():
        timed(way)
        way.check()
    timings: Mapping[str, list[Timing]] = rounds(
        {n: lambda w=w: timed(w) for n, w in ways.items()}, count
    )
    raw = states.bits.nbytes
    base = timings["zstd3"]
    result: dict[str, Any] = {}
    for name, ts in timings.items():
        lead = f"{states.name}_{name}"
        result[f"{lead}_ratio"] = raw / ts[0].packed_bytes
        result[f"{lead}_in_gb_per_s"] = raw / 1e9 / statistics.median(t.pack_s for t in ts)
        result[f"{lead}_out_gb_per_s"] = raw / 1e9 / statistics.median(t.unpack_s for t in ts)
        result[f"{lead}_bytes_of_zstd3"] = ts[0].packed_bytes / base[0].packed_bytes
        result[f"{lead}_in_of_zstd3"] = median_ratio(
            [1 / t.pack_s for t in ts], [1 / t.pack_s for t in base]
        )
        result[f"{lead}_out_of_zstd3"] = median_ratio(
            [1 / t.unpack_s for t in ts], [1 / t.unpack_s for t in base]
        )
    result[f"{states.name}_tokens"] = states.bits.shape[1]
    result[f"{states.name}_hidden"] = states.bits.shape[2]
    result[f"{states.name}_layers"] = ",".join(states.layers)
    return result


def main() -> int:
    p = parser(__doc__, "codec_cpu.json")
    p.add_argument("--rounds", type=int, default=11, help="(default: 11)")
    p.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="(default: both)")
    arguments = p.parse_args()
    count = 2 if arguments.smoke else arguments.rounds
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hst-bench-", dir=SHM) as folder:
        for states in [synthetic()] if arguments.smoke else map(real, arguments.models):
            result |= figures(states, count, Path(folder))
    checked = "every bit of every codec, unpacked and compared"
    finish(arguments, {**result, "rounds": count, "checked": checked})
    return 0


if __name__ == "__main__":
    sys.exit(main())
