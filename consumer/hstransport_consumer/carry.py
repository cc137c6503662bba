"""The carry: what a shard hands on to the next, so that each shard can be read without the others'
footers, and a writer that comes back knows what it has."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack
import numpy as np

from hstransport.errors import ProtocolError
from hstransport.protocol import pack_info, unpack_info
from hstransport.tags import MAX_ID_BYTES

from .format import MAX_SHARDS, MAX_TOKENS, Frame
from .index import Carry, OpenSample, Part, RunState

_PART = np.dtype("<u4")


def pack_carry(carry: Carry) -> bytes:
    """msgpack of all runs: info, next_seq, open samples and where their rows are."""
    refs: dict[bytes, int] = {}

    def ref(uid: bytes) -> int:
        return refs.setdefault(uid, len(refs))

    out = msgpack.Packer(autoreset=False)  # bytes at once: there may be very many samples
    out.pack_map_header(2)
    out.pack("runs")
    out.pack_array_header(len(carry))
    for run in carry.values():
        out.pack_map_header(3)
        for item in ("info", pack_info(run.info), "next", run.next_seq, "open"):
            out.pack(item)
        out.pack_array_header(len(run.open))
        for s in run.open.values():
            out.pack([s.sid, s.id, ref(s.shard), s.start_offset, pack_parts(s.parts, ref)])
    out.pack("shards")
    out.pack(list(refs))
    return bytes(out.bytes())


def pack_parts(parts: Iterable[Part], ref: Callable[[bytes], int]) -> bytes:
    """u32 ``[n, 5]``; ``ref`` numbers the shards' uids."""
    packed = array("I")
    for p in parts:
        packed.extend((p.position, p.rows, ref(p.shard), p.chunk, p.row))
    return packed.tobytes()


def unpack_parts(frame: Frame, packed: Any, shards: Sequence[bytes]) -> list[Part]:
    """Inverse of :func:`pack_parts`; ``shards``: the uids by their numbers."""
    if not isinstance(packed, bytes) or len(packed) % (5 * _PART.itemsize):
        raise frame.corrupt("places of rows are malformed")
    parts = []
    for position, rows, ref, chunk, row in np.frombuffer(packed, _PART).reshape(-1, 5).tolist():
        if ref >= len(shards) or not rows or position + rows > MAX_TOKENS:
            raise frame.corrupt("places of rows are out of bounds")
        parts.append(Part(position, rows, shards[ref], chunk, row))
    return parts


def check_uids(frame: Frame, uids: Any) -> list[bytes]:
    """A list of uids out of a file."""
    few = isinstance(uids, list) and len(uids) <= MAX_SHARDS
    if not few or not all(isinstance(u, bytes) and len(u) == 16 for u in uids):
        raise frame.corrupt("uids of shards are missing or malformed")
    return list(uids)


def unpack_carry(frame: Frame, data: bytes) -> Carry:
    """Inverse of :func:`pack_carry`; ``frame`` says where ``data`` was read."""
    raw = frame.unpack_map(data)
    runs, shards = raw.get("runs"), check_uids(frame, raw.get("shards"))
    if not isinstance(runs, list):
        raise frame.corrupt("carry: runs are missing")
    carry: Carry = {}
    for r in runs:
        if not isinstance(r, dict) or not isinstance(r.get("open"), list):
            raise frame.corrupt("carry: a run is malformed")
        try:
            info = unpack_info(frame.binary(r, "info"))
        except ProtocolError as e:
            raise frame.corrupt(str(e)) from None
        state = RunState(info, frame.nat(r, "next"))
        for fields in r["open"]:
            sample = _sample(frame, fields, shards)
            state.open[sample.sid] = sample
        carry[info.run, info.rank] = state
    return carry


def _sample(frame: Frame, fields: Any, shards: list[bytes]) -> OpenSample:
    if not isinstance(fields, list) or len(fields) < 5:
        raise frame.corrupt("carry: an open sample is malformed")
    sid, sample_id, shard, offset, packed = fields[:5]
    if not isinstance(sample_id, str) or len(sample_id.encode(errors="replace")) > MAX_ID_BYTES:
        raise frame.corrupt("carry: an id is malformed")
    sample = OpenSample(
        frame.number(sid, "sid"),
        sample_id,
        shards[frame.number(shard, "shard", len(shards))],
        frame.number(offset, "offset"),
    )
    for p in unpack_parts(frame, packed, shards):
        stop = p.position + p.rows
        if sample.coverage.missing(p.position, stop) != [(p.position, stop)]:
            raise frame.corrupt(f"carry: sample {sid} has rows {p.position}+{p.rows} twice")
        sample.coverage.add(p.position, stop)
        sample.parts.append(p)
    return sample
