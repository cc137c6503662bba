"""What a directory of shards holds, out of the indexes alone: no states are decoded."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from hstransport.protocol import unpack_info

from .directory import PARTIAL
from .reader import ShardDataset, open_shards
from .shard import Shard

LABELS_FROM = 1000
"""Label keys are collected from so many samples at most, evenly spread."""


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Plain data about a directory or a shard. Samples are counted once an id, as they are listed.

    ``tokens`` and ``raw_bytes`` count the rows stored, also those of samples that are not whole.
    Raises what :func:`open_shards` raises.
    """
    dataset = open_shards(path, states=None, partial=True)
    if not dataset.shards:
        raise FileNotFoundError(f"{path} has no shard with data yet")
    meta = dataset.info
    tokens = sum(int(s.tables.c["chunk.rows"].sum()) for s in dataset.shards)
    raw_bytes = tokens * meta.planes * meta.hidden * 2
    shards: list[dict[str, Any]] = [
        {
            "file": s.path.name,
            "bytes": _size(s),
            "samples": s.tables.samples,
            "tokens": int(s.tables.c["chunk.rows"].sum()),
            "finished": not s.path.name.endswith(PARTIAL),
        }
        for s in dataset.shards
    ]
    stored_bytes = sum(s["bytes"] for s in shards)
    states = Counter(sample.state for sample in dataset)
    runs = {r for s in dataset.shards for r in s.tables.runs}
    infos = sorted(map(unpack_info, runs), key=lambda i: (i.created, i.run, i.rank))
    return {
        "path": str(Path(path)),
        "model": meta.model,
        "layers": list(meta.layers),
        "final": meta.final,
        "hidden": meta.hidden,
        "num_layers": meta.num_layers,
        "rows": meta.rows,
        "samples": len(dataset),
        "whole": states["whole"],
        "states": dict(sorted(states.items())),
        "tokens": tokens,
        "raw_bytes": raw_bytes,
        "stored_bytes": stored_bytes,
        "ratio": round(raw_bytes / stored_bytes, 4) if stored_bytes else 0.0,
        "shards": shards,
        "sglang": sorted({i.sglang for i in infos}),
        "runs": [
            {"run": i.run, "rank": i.rank, "session": i.session, "created": i.created}
            for i in infos
        ],
        "labels": _label_keys(dataset),
    }


def _size(shard: Shard) -> int:
    try:
        return shard.end if shard.path.name.endswith(PARTIAL) else shard.path.stat().st_size
    except FileNotFoundError:  # taken away just now: its size but for the footer
        return shard.end


def _label_keys(dataset: ShardDataset) -> list[str]:
    step = max(len(dataset) // LABELS_FROM, 1)
    keys: set[str] = set()
    for sample in dataset[::step]:
        with suppress(FileNotFoundError):  # its beginning lies in a shard that was taken away
            keys.update(sample.labels)
    return sorted(keys)
