"""ZeroMQ tells: one PUB socket for each ring, one SUB socket for each consumer.

Nothing depends on a message arriving. The ring holds every record; a message only repeats a
record's metadata for anyone who listens, and wakes the consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import zmq

from .errors import ProtocolError
from .protocol import Message, pack_messages, unpack_messages

MAX_REPEATED_META_BYTES = 64 << 10
"""Metadata longer than this are not repeated in the message; they are in the ring."""
_QUEUE = 256  # sends kept for a slow subscriber, each of a few records; then ZeroMQ drops


class Publisher:
    """The server's side. Sending never blocks: a full queue drops the message, as PUB does."""

    def __init__(self, endpoint: str) -> None:
        self._path = Path(endpoint.removeprefix("ipc://"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUE)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._path.chmod(0o600)

    def send(self, messages: Sequence[Message]) -> None:
        """Tell of records, in one go: what costs is the wake-up. Never waits."""
        told = [
            m if len(m.meta) <= MAX_REPEATED_META_BYTES else m._replace(meta=b"") for m in messages
        ]
        self._socket.send(pack_messages(told), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)


class Subscriber:
    """The consumer's side: one socket connected to any number of publishers."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUE)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.messages = 0
        """Well-formed messages received."""
        self.malformed = 0
        """Messages that broke the protocol; they were counted here and skipped."""
        self._received: deque[Message] = deque()  # of the last send

    def connect(self, endpoint: str) -> None:
        self._socket.connect(endpoint)

    def disconnect(self, endpoint: str) -> None:
        self._socket.disconnect(endpoint)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message at most ``timeout_s``, take all there are; True when one came."""
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return False
        while self.receive() is not None:
            pass
        return True

    def receive(self) -> Message | None:
        """The next well-formed message, or None when there is none now."""
        while not self._received:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                if len(parts) != 1:
                    raise ProtocolError(f"message of {len(parts)} parts")
                self._received.extend(unpack_messages(parts[0]))
            except ProtocolError:
                self.malformed += 1
        self.messages += 1
        return self._received.popleft()

    def close(self) -> None:
        self._socket.close()
        self._context.term()
