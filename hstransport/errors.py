"""The one error tree: every message says what is wrong and what to do about it.

Python's own exceptions are used where Python has one (``FileNotFoundError``, ``TimeoutError``,
``PermissionError``). Operating conditions (ring full, nothing to read) are return values.
"""


class HsTransportError(Exception):
    """Base of all errors raised by hstransport and hstransport_consumer."""


class ConfigError(HsTransportError, ValueError):
    """A setting has a bad value; the message names it and the values allowed."""


class CaptureError(HsTransportError):
    """This model, layer or serving mode cannot be captured exactly."""


class PatchError(HsTransportError):
    """An installed SGLang cannot be patched, or its patch taken out again."""


class CudaError(HsTransportError):
    """A call of the CUDA driver failed, or there is no driver; the message names both."""


class RingError(HsTransportError):
    """Something is wrong with a ring file."""


class RingLayoutError(RingError):
    """The file is no ring, or one of another version or size; both values are in the message."""


class RingCorruptError(RingError):
    """A position or record in the ring contradicts its own header."""


class RingBusyError(RingError):
    """Another process already holds this role (producer or consumer) on the ring."""


class LeaseError(RingError):
    """A record was used after it was given back, or given back twice."""


class ProtocolError(HsTransportError):
    """A record's metadata or a message breaks the protocol; it is counted and skipped."""


class ShardError(HsTransportError):
    """Something is wrong with a shard or a directory of shards."""


class NotAShardError(ShardError):
    """The file does not begin with a shard's header."""


class ShardVersionError(ShardError):
    """The shard was written in a format version that this release cannot read."""


class TornShardError(ShardError):
    """The shard ends in the middle of a frame, or lacks its footer."""


class CorruptShardError(ShardError):
    """A frame's checksum, size or metadata is wrong."""


class DatasetMismatchError(ShardError):
    """The directory holds samples of another model, set of layers or hidden size."""


class DatasetBusyError(ShardError):
    """Another consumer is writing into this directory."""


class ServerError(HsTransportError):
    """The SGLang server cannot be reached, or refused what was asked."""
