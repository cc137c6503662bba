"""What is said through the ring and over ZeroMQ: pure functions between bytes and values.

A *record* of the ring has a kind, msgpack metadata and (for ``ROWS``) a payload. Records of one
run form one ordered stream, numbered by ``seq``:

    START sid=7  the request enters capture: ids, prompt tokens, labels
    ROWS         rows of one forward pass, of one or more samples, in any interleaving
    END   sid=7  the request is over: how, how many rows it must have, generated tokens

``sid`` is the sample's number within the run. Metadata are msgpack maps with short keys; fields
are only ever appended, readers ignore keys they do not know and use defaults for absent ones.

Payload of ``ROWS``: ``[planes, rows, hidden]`` bf16 little-endian, contiguous; the planes are
``SessionInfo.layers`` in order and then, if ``SessionInfo.final``, the state after the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from .errors import ProtocolError
from .tags import MAX_ID_BYTES, Label, check_labels, check_loss_mask
from .wire import nat, pack, unpack

PROTOCOL_VERSION = 1

ROWS, START, END = 1, 2, 3
KINDS = {ROWS: "rows", START: "start", END: "end"}

MAX_META_BYTES = 8 << 20
"""Largest metadata of a record; a START carries its prompt's token ids in it (4 bytes each)."""
MAX_MESSAGE_BYTES = 16 << 20
"""Largest ZeroMQ message that is looked at; one tells of the records of one forward pass."""

TokenIds = npt.NDArray[np.int32]

# Why a request ended (END.reason).
FINISHED, LENGTH, ABORTED = "finished", "length", "aborted"


@dataclass(frozen=True)
class SessionInfo:
    """What is true of every record of one run; stored in the ring's header and in each shard."""

    run: str
    """Random hex id of this server run; with ``rank`` it names the ring."""
    session: str
    model: str
    """Model path or name, as given to the server."""
    sglang: str
    """SGLang's version."""
    layers: tuple[int, ...]
    """Canonical layer ids: id k is the residual stream after k decoder layers."""
    final: bool
    """Whether the last plane is the state after the final norm."""
    hidden: int
    """Width of a state, in elements."""
    num_layers: int
    """Number of decoder layers of the model."""
    rows: str = "prompt"
    """``prompt``: states of the prompt's tokens; ``all``: of generated tokens too."""
    dtype: str = "bfloat16"
    final_norm: str = "post"
    """``final`` is taken after the final norm; there is no other value in version 1."""
    rank: int = 0
    """Data-parallel rank; only the first tensor-parallel rank of each writes."""
    vocab_size: int = 0
    created: float = 0.0
    """Unix time at which the run's ring was created."""
    producer: str = ""
    """hstransport's version in the server."""

    @property
    def planes(self) -> int:
        """Number of states kept for each token."""
        return len(self.layers) + self.final

    @property
    def row_bytes(self) -> int:
        """Bytes of all the states of one token, uncompressed."""
        return self.planes * self.hidden * 2

    @property
    def layer_names(self) -> tuple[int | str, ...]:
        """The planes' names in order: canonical ids, then ``"final"``."""
        return (*self.layers, "final") if self.final else self.layers


# Events are tuples: the server makes one or more for every request on its own thread.


class Start(NamedTuple):
    """A request enters capture."""

    sid: int
    id: str
    """The sample's id: the caller's own, or else the request id."""
    rid: str
    """SGLang's request id."""
    prompt: TokenIds
    labels: Mapping[str, Label] = MappingProxyType({})
    loss_mask: tuple[int, ...] | None = None
    """Alternating run lengths beginning with zeros (``[0,0,1,1,1]`` is ``(2, 3)``)."""
    time: float = 0.0


class Segment(NamedTuple):
    """``rows`` consecutive rows of sample ``sid``, the first at token ``position``."""

    sid: int
    position: int
    rows: int


class Rows(NamedTuple):
    """Which rows a record holds, in the order of its payload."""

    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.segments)


class End(NamedTuple):
    """A request is over. Rows at positions >= ``tokens`` are surplus and are not kept."""

    sid: int
    reason: str
    tokens: int
    """How many rows (positions 0 .. tokens-1) make this sample whole."""
    output: TokenIds
    """Generated token ids, all of them; the last one was never an input."""
    dropped: int = 0
    """Rows of this sample that the ring had no room for."""
    cached: int = 0
    """Leading tokens whose rows were not computed because the radix cache held them."""
    detail: str = ""
    """For people: the server's own words on an abort."""


Event = Start | Rows | End


def pack_info(info: SessionInfo) -> bytes:
    """Serialise for the ring's header and the shard's header."""
    return bytes(msgpack.packb({"v": PROTOCOL_VERSION, **asdict(info)}))


def unpack_info(data: bytes) -> SessionInfo:
    """Inverse of :func:`pack_info`; raises ProtocolError on anything malformed."""
    raw = _unpack_map(data)
    version = raw.get("v")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"session info has protocol version {version!r}, this release reads "
            f"{PROTOCOL_VERSION}: use the same hstransport release on both sides"
        )
    known = {f.name for f in fields(SessionInfo)}
    raw = {k: v for k, v in raw.items() if k in known}
    try:
        raw["layers"] = tuple(nat(k) for k in raw["layers"])
        info = SessionInfo(**raw)
    except (KeyError, TypeError) as e:
        raise ProtocolError(f"session info is incomplete: {e}") from None
    check_types(info)
    if not (0 < nat(info.hidden) <= 1 << 20 and 0 < info.planes <= 1024):
        raise ProtocolError(f"session info: hidden={info.hidden}, planes={info.planes} are absurd")
    if info.dtype != "bfloat16":
        raise ProtocolError(f"session info: dtype {info.dtype!r} is not bfloat16")
    return info


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "tuple[int, ...]": (tuple,),
}


def check_types(record: Any) -> None:
    """ProtocolError that names the first field of a dataclass that is not of its type.

    What was unpacked may be anything: a list cannot be a key, nor 24.0 a width.
    """
    for f in fields(record):
        value = getattr(record, f.name)
        if type(value) not in _TYPES[str(f.type)]:
            raise ProtocolError(f"{f.name} is {value!r:.40}, not of type {f.type}")
        if f.type == "int":
            nat(value)


def pack_event(event: Event) -> tuple[int, bytes]:
    """Return ``(kind, metadata)`` of a record."""
    if isinstance(event, Rows):
        return ROWS, pack({"seg": [x for s in event.segments for x in s]})
    if isinstance(event, Start):
        meta: dict[str, Any] = {
            "sid": event.sid,
            "id": event.id,
            "rid": event.rid,
            "prompt": _pack_tokens(event.prompt),
            "time": event.time,
        }
        if event.labels:
            meta["labels"] = dict(event.labels)
        if event.loss_mask is not None:
            meta["mask"] = list(event.loss_mask)
        return START, pack(meta)
    meta = {
        "sid": event.sid,
        "reason": event.reason,
        "n": event.tokens,
        "out": _pack_tokens(event.output),
    }
    for key, value in (("dropped", event.dropped), ("cached", event.cached)):
        if value:
            meta[key] = value
    if event.detail:
        meta["detail"] = event.detail
    return END, pack(meta)


def unpack_event(kind: int, data: bytes) -> Event:
    """Inverse of :func:`pack_event`; raises ProtocolError on anything malformed."""
    raw = _unpack_map(data)
    try:
        if kind == ROWS:
            flat = [nat(x) for x in raw["seg"]]
            if not flat or len(flat) % 3:
                raise ProtocolError(f"rows: {len(flat)} segment numbers, not a multiple of 3")
            segments = tuple(Segment(*flat[i : i + 3]) for i in range(0, len(flat), 3))
            if any(s.rows == 0 for s in segments):
                raise ProtocolError("rows: an empty segment")
            return Rows(segments)
        if kind == START:
            mask = raw.get("mask")
            return Start(
                sid=nat(raw["sid"]),
                id=_text(raw["id"]),
                rid=_text(raw["rid"]),
                prompt=_tokens(raw["prompt"]),
                labels=check_labels(raw.get("labels", {})),
                loss_mask=None if mask is None else check_loss_mask(mask),
                time=float(raw.get("time", 0.0)),
            )
        if kind == END:
            return End(
                sid=nat(raw["sid"]),
                reason=_text(raw["reason"]),
                tokens=nat(raw["n"]),
                output=_tokens(raw["out"]),
                dropped=nat(raw.get("dropped", 0)),
                cached=nat(raw.get("cached", 0)),
                detail=str(raw.get("detail", ""))[:4096],
            )
    except (KeyError, TypeError, ValueError) as e:
        raise ProtocolError(f"{KINDS.get(kind, kind)} metadata: {type(e).__name__}: {e}") from None
    raise ProtocolError(f"record kind {kind} is unknown")


class Message(NamedTuple):
    """What ZeroMQ tells of a record: its metadata and its place in the ring."""

    run: str
    rank: int
    kind: int
    seq: int
    position: int
    """Where the record begins, in the ring's ever-growing byte position."""
    record_bytes: int
    meta: bytes


def pack_messages(messages: Sequence[Message]) -> bytes:
    """One msgpack array for records of one ring; later fields may be appended, to both levels.

    ``[version, run, rank, [[kind, seq, position, record_bytes, meta], …]]``
    """
    first = messages[0]
    return pack([PROTOCOL_VERSION, first.run, first.rank, [m[2:] for m in messages]])


def unpack_messages(data: bytes) -> list[Message]:
    """Inverse of :func:`pack_messages`; raises ProtocolError on anything malformed."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    raw = unpack(data)
    if not isinstance(raw, list) or len(raw) < 4 or raw[0] != PROTOCOL_VERSION:
        raise ProtocolError(f"message is not a version {PROTOCOL_VERSION} array of 4 fields")
    run, rank, records = _text(raw[1]), nat(raw[2]), raw[3]
    if not isinstance(records, list):
        raise ProtocolError("message has no list of records")
    messages = []
    for record in records:
        if not isinstance(record, list) or len(record) < 5:
            raise ProtocolError("a record in a message is not an array of 5 fields")
        kind, seq, position, record_bytes = (nat(x) for x in record[:4])
        if not isinstance(record[4], bytes):
            raise ProtocolError("message metadata is not bytes")
        messages.append(Message(run, rank, kind, seq, position, record_bytes, record[4]))
    return messages


def _pack_tokens(tokens: npt.ArrayLike) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def _tokens(data: Any) -> TokenIds:
    if not isinstance(data, bytes) or len(data) % 4:
        raise ProtocolError("token ids are not bytes in a multiple of 4")
    return np.frombuffer(data, "<i4")


def _text(x: Any) -> str:
    if not isinstance(x, str) or len(x.encode()) > MAX_ID_BYTES:
        raise ProtocolError(f"{x!r:.60} is not a string of at most {MAX_ID_BYTES} bytes")
    return x


def _unpack_map(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_META_BYTES:
        raise ProtocolError(f"metadata of {len(data)} bytes exceeds {MAX_META_BYTES}")
    raw = unpack(data)
    if not isinstance(raw, dict):
        raise ProtocolError(f"metadata is a {type(raw).__name__}, not a map")
    return raw
