"""Shards as a sequence of samples.

dataset = open_shards("shards/", layers=[3, 31, "final"])
sample = dataset["my sample"]
sample.token_ids, sample.torch()
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from hstransport.errors import ShardError

from .directory import PARTIAL, Entry, list_shards, named
from .format import DatasetMeta
from .index import id_hash
from .sample import Sample
from .shard import PlaneCache, Shard, open_shard, open_unfinished, read_uid
from .states import STATES, State
from .workers import default_threads

LayerNames = Sequence[int | str]


def open_shards(
    path: str | os.PathLike[str],
    *,
    layers: LayerNames | None = None,
    states: Sequence[str] | None = (State.WHOLE.value,),
    partial: bool = False,
    threads: int | None = None,
) -> ShardDataset:
    """Open a directory of shards, or one shard.

    ``layers``: which to read, by canonical id or ``"final"``, in this order; all by default.
    ``states``: which samples to list (None: all). ``partial``: also read what is whole in a file
    that is still being written. ``threads``: so many unpack a large sample; by default the cores
    there are, and one in a process that another process of Python started.

    Of several samples with one id the first whole one is listed, or else the last.

    Raises FileNotFoundError, NotAShardError, ShardVersionError, TornShardError, CorruptShardError,
    DatasetMismatchError; KeyError for a layer that was not captured.
    """
    return _reopen(Path(path), layers, states, partial, threads)


def _reopen(
    path: Path,
    layers: LayerNames | None,
    states: Sequence[str] | None,
    partial: bool,
    threads: int | None,
    uids: Sequence[bytes] | None = None,
) -> ShardDataset:
    """``uids``: of the shards that it is to have, and no others."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: at least one, or None")
    unknown = [s for s in states or () if s not in STATES]
    if unknown:
        raise ValueError(f"states {unknown} are unknown: choose from {', '.join(STATES)}")
    arguments = (path, layers, None if states is None else tuple(states), partial, threads)
    shards = _open_all(path, partial)
    if uids is not None:
        here = {s.header.uid: s for s in shards}
        away = [uid.hex() for uid in uids if uid not in here]
        if away:
            raise FileNotFoundError(
                f"{path}: {len(away)} shards that the pickled dataset had are gone "
                f"({away[0]}, …): put them back, or open it anew"
            )
        shards = [here[uid] for uid in uids]
    dataset = ShardDataset(path, shards, layers=layers, states=states)
    dataset._wanted_threads = threads
    dataset._arguments = arguments
    return dataset


class ShardDataset(Sequence[Sample]):
    """Samples of a directory, in the order in which they ended.

    Indexed by number, by slice or by sample id. May be used in several threads and processes; a
    pickled dataset is opened again, by its path and with the same shards, where it is unpickled.
    """

    def __init__(
        self,
        path: Path,
        shards: Sequence[Shard],
        *,
        layers: LayerNames | None = None,
        states: Sequence[str] | None = None,
    ) -> None:
        self.path = path
        self.shards = list(shards)
        self.cache = PlaneCache()
        self._wanted_threads: int | None = None
        self._arguments: tuple[Any, ...] = (path, layers, states, False, None)
        self._by_uid = {s.header.uid: s for s in self.shards}
        self._meta: DatasetMeta | None = None
        for shard in self.shards:
            self._meta = self._meta or shard.header.meta
            self._meta.check_same(shard.header.meta, str(self.shards[0].path))
        self._layers = None if layers is None else tuple(layers)
        if self._meta and layers is not None:
            self.planes_of(layers)
        self._choose(states)

    def __reduce__(self) -> tuple[Any, ...]:
        uids = tuple(s.header.uid for s in self.shards if s.tables.windows)  # empty ones may go
        return _reopen, (*self._arguments, uids)

    @property
    def threads(self) -> int:
        """So many unpack a large sample; asked of the process that reads, which may be a fork."""
        return self._wanted_threads or default_threads()

    @property
    def info(self) -> DatasetMeta:
        """What all samples have in common. FileNotFoundError while there is no shard."""
        if self._meta is None:
            raise FileNotFoundError(f"{self.path} has no finished shard yet")
        return self._meta

    @property
    def model(self) -> str:
        return self.info.model

    @property
    def layers(self) -> tuple[int | str, ...]:
        """Names of the layers that are read, in order: canonical ids, ``"final"``."""
        return self.info.names if self._layers is None else self._layers

    @property
    def ids(self) -> Sequence[str]:
        """The samples' ids, in order; each is decoded when asked for."""
        return _Ids(self)

    def __len__(self) -> int:
        return len(self._row)

    def __repr__(self) -> str:
        return f"<ShardDataset {self.path}: {len(self)} samples in {len(self.shards)} shards>"

    @overload
    def __getitem__(self, key: int | str) -> Sample: ...
    @overload
    def __getitem__(self, key: slice) -> list[Sample]: ...
    def __getitem__(self, key: int | str | slice) -> Sample | list[Sample]:
        if isinstance(key, slice):
            return [self._sample(i) for i in range(*key.indices(len(self)))]
        if isinstance(key, str):
            return self._sample(self._find(key))
        i = key + len(self) if key < 0 else key
        if not 0 <= i < len(self):
            raise IndexError(f"sample {key} of {len(self)}")
        return self._sample(i)

    def __iter__(self) -> Iterator[Sample]:
        return map(self._sample, range(len(self)))

    def __contains__(self, key: object) -> bool:
        """Whether there is a sample with this id."""
        try:
            return isinstance(key, str) and self._find(key) >= 0
        except KeyError:
            return False

    def planes_of(self, layers: LayerNames) -> list[int]:
        """Numbers of the planes that hold ``layers``. KeyError names those there are."""
        names = self.info.names
        for layer in layers:
            if layer not in names:
                raise KeyError(f"layer {layer!r} was not captured; there are {list(names)}")
        return [names.index(layer) for layer in layers]

    def shard(self, uid: bytes) -> Shard:
        """The shard of this uid. One file that was opened alone finds its neighbours by it."""
        found = self._by_uid.get(uid)
        if found is None:
            found = self._by_uid[uid] = self._neighbour(uid)
        return found

    def has(self, uid: bytes) -> bool:
        """Whether the shard of this uid is here."""
        try:
            return bool(self.shard(uid))
        except FileNotFoundError:
            return False

    def id_at(self, i: int) -> str:
        return self.shards[int(self._shard[i])].tables.id(int(self._row[i]))

    def _neighbour(self, uid: bytes) -> Shard:
        if self.path.is_file():
            for entry in list_shards(self.path.parent):
                try:
                    wanted = read_uid(entry.path) == uid
                except (ShardError, OSError):
                    continue  # whatever lies there
                other = _open_present(entry) if wanted else None
                if other:
                    self.info.check_same(other.header.meta, str(self.path))
                    return other
        raise FileNotFoundError(
            f"{self.path}: shard {uid.hex()} holds the beginning of a sample and is not here; "
            "put it back beside the others"
        )

    def _sample(self, i: int) -> Sample:
        return Sample(self, self.shards[int(self._shard[i])], int(self._row[i]))

    def _choose(self, states: Sequence[str] | None) -> None:
        """List each id once, of the wanted states, and prepare the lookup by id."""
        counts = [s.tables.samples for s in self.shards]
        shard = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        row = _concatenate([np.arange(n, dtype=np.uint32) for n in counts], np.uint32)
        hashes = _concatenate([s.tables.c["sample.hash"] for s in self.shards], np.uint64)
        self._shard, self._row = shard, row
        keep = self._first_whole_or_last(hashes)
        if states is not None:
            keep &= self._in_states(states)
        if not keep.all():
            self._shard, self._row, hashes = shard[keep], row[keep], hashes[keep]
        self._by_hash = np.argsort(hashes, kind="stable").astype(np.uint32)
        self._hashes = hashes[self._by_hash]

    def _in_states(self, states: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Which of all samples are in one of ``states``."""
        parts = []
        for s in self.shards:
            wanted = np.array([name in states for name in s.tables.states], np.bool_)
            parts.append(wanted[s.tables.c["sample.state"]])
        return _concatenate(parts, np.bool_)

    def _first_whole_or_last(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        keep = np.ones(len(hashes), np.bool_)
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        twins = np.flatnonzero(ordered[1:] == ordered[:-1])
        if not len(twins):
            return keep
        whole = self._in_states([State.WHOLE])
        chosen: dict[str, int] = {}
        for i in np.unique(np.concatenate([order[twins], order[twins + 1]])).tolist():
            key = self.id_at(i)
            before = chosen.get(key)
            if before is None:
                chosen[key] = i
            elif whole[before]:
                keep[i] = False
            else:
                keep[before] = False
                chosen[key] = i
        return keep

    def _find(self, sample_id: str) -> int:
        wanted = np.uint64(id_hash(sample_id))
        at = int(np.searchsorted(self._hashes, wanted))
        while at < len(self._hashes) and self._hashes[at] == wanted:
            i = int(self._by_hash[at])
            if self.id_at(i) == sample_id:
                return i
            at += 1
        raise KeyError(f"no sample {sample_id!r} among the {len(self)} listed in {self.path}")


class _Ids(Sequence[str]):
    """Ids of a dataset without decoding them all."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, key: int) -> str: ...
    @overload
    def __getitem__(self, key: slice) -> list[str]: ...
    def __getitem__(self, key: int | slice) -> str | list[str]:
        if isinstance(key, slice):
            return [self._dataset.id_at(i) for i in range(*key.indices(len(self)))]
        i = key + len(self) if key < 0 else key
        if not 0 <= i < len(self):
            raise IndexError(f"sample {key} of {len(self)}")
        return self._dataset.id_at(i)

    def __contains__(self, key: object) -> bool:
        return key in self._dataset

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return f"<{len(self)} sample ids>"


def _concatenate(parts: list[npt.NDArray[Any]], kind: type) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, kind)


def _open_all(path: Path, partial: bool) -> list[Shard]:
    if path.is_file():
        if path.name.endswith(PARTIAL):
            shard = open_unfinished(path)
            return [shard] if shard else []
        return [open_shard(path)]
    shards: list[Shard | None] = []
    for entry in named(path):
        if not entry.partial or partial:
            shards.append(_open_present(entry))
        else:
            warnings.warn(
                f"{entry.path} holds unfinished data, which is left out: pass partial=True to "
                "read what is whole in it; if no consumer is writing it, start "
                f"hstransport-consumer --out {path} again, which recovers and finishes it",
                stacklevel=4,
            )
    return [s for s in shards if s is not None]


def _open_present(entry: Entry) -> Shard | None:
    """A shard, unless it was taken away or removed as empty since the directory was read."""
    try:
        return open_unfinished(entry.path) if entry.partial else open_shard(entry.path)
    except FileNotFoundError:
        return None


__all__ = ["Sample", "ShardDataset", "open_shards"]
