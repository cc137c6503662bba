"""msgpack of strangers, and to them: what was unpacked may be anything, of any size."""

from __future__ import annotations

import threading
from typing import Any

import msgpack

from .errors import ProtocolError

_packer = threading.local()


def pack(value: Any) -> bytes:
    # msgpack.packb makes a packer for each call, which costs more than the packing.
    try:
        packer = _packer.packer
    except AttributeError:
        packer = _packer.packer = msgpack.Packer()
    return bytes(packer.pack(value))


def unpack_whole(data: bytes) -> Any:
    """``msgpack.unpackb``, once it is known that all the items are there that the heads announce.

    It takes room for them as it comes to a head, level by level: some bytes could have it take any
    amount. Raises many types for malformed input.
    """
    items = msgpack.Unpacker(max_buffer_size=0)
    items.feed(data)
    items.skip()
    return msgpack.unpackb(data, strict_map_key=True)


def unpack(data: bytes) -> Any:
    """:func:`unpack_whole`; raises ProtocolError on anything malformed."""
    try:
        return unpack_whole(data)
    except Exception as e:  # msgpack raises many types for malformed input
        raise ProtocolError(f"not msgpack: {type(e).__name__}: {e}") from None


def nat(x: Any) -> int:
    """``x``, if it is an integer from 0 to 2**63 - 1; else ProtocolError."""
    if type(x) is not int or not 0 <= x < 1 << 63:
        raise ProtocolError(f"{x!r} is not a non-negative 63-bit integer")
    return x
