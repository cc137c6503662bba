"""The consumer's side: samples straight off the ring, shards on disk, and the way back.

Importing this needs neither torch nor SGLang; names are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .live import LiveSample
    from .reader import Sample, ShardDataset, open_shards
    from .samples import Consumer
    from .writer import DatasetWriter

_HOME = {
    "Consumer": "samples",
    "LiveSample": "live",
    "open_shards": "reader",
    "ShardDataset": "reader",
    "Sample": "reader",
    "DatasetWriter": "writer",
}

__all__ = [
    "Consumer",
    "DatasetWriter",
    "LiveSample",
    "Sample",
    "ShardDataset",
    "open_shards",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
