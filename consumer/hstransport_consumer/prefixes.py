"""Rows that several samples share: stored once, and found again by their tokens.

A request whose first tokens the server's radix cache holds computes only the rest. The states of
those first tokens were stored with the request that filled the cache, and follow from the tokens
alone: so they are found again by the tokens, as the server finds its cache, and referred to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hstransport.errors import HsTransportError
from hstransport.protocol import TokenIds, unpack_info

from .directory import Entry, list_shards, partial_path, shard_path
from .format import read_frame
from .index import OpenSample, Part, RunState
from .plan import Touched, WindowPlan
from .prefix_tree import NODE_BYTES, PART_BYTES, TREE_BYTES, PrefixTree
from .reader import ShardDataset
from .sample import Sample
from .shard import open_shard, open_unfinished, read_uid
from .states import State
from .walk import start_event

logger = logging.getLogger(__name__)

PROMPT_BYTES = 64 << 20
"""Memory for the prompts of open samples."""
KEPT_BYTES = 300
"""What Python takes for one, besides its tokens."""
_LEARN_S = 5.0
"""How long shards are looked into after a restart; the ring takes what comes meanwhile."""
_MOST_SHARDS = 4096
"""Shards that one window's shared rows may lie in."""

Key = tuple[str, int]
"""Run and rank: each scheduler has a cache of its own."""


class Prefixes:
    """What a writer knows of tokens and rows in its directory."""

    def __init__(self, directory: Path, older: Iterable[Key]) -> None:
        self._directory = directory
        self._older = set(older)
        """Runs of which shards may say more than the trees."""
        self._trees: dict[Key, PrefixTree] = {}
        self._prompts: dict[Key, dict[int, TokenIds]] = {}
        """Of open samples, as many as PROMPT_BYTES allow."""
        self._prompt_bytes = 0
        self._numbers: dict[bytes, int] = {}
        self._unknown: set[bytes] = set()  # uids of shards that are not here
        self._current = b""
        self._unwritten: int | None = None  # first chunk of the window that was resolved last

    def begin_shard(self, uid: bytes, number: int) -> None:
        """From now on the writer writes this shard."""
        self._current = uid
        self._numbers[uid] = number

    def resolve(self, run: RunState, plan: WindowPlan, first_chunk: int) -> None:
        """Complete samples that end in a window with rows stored before.

        The window is about to be written to the current shard, its chunks from number
        ``first_chunk`` on. Samples that become whole get their ``refs`` and that state.
        """
        key = run.info.run, run.info.rank
        self._unwritten = first_chunk
        tree = self._trees.setdefault(key, PrefixTree())
        places = _places(plan, self._current, first_chunk)
        lacking: list[tuple[Touched, TokenIds]] = []
        for t in plan.touched.values():
            if t.state is State.UNFINISHED:
                continue  # the run is over
            opened = run.open.get(t.sid)
            prompt = self._prompt(key, t, opened)
            if prompt is None:
                continue
            parts, tokens = places.get(t.sid, []), prompt
            if t.end is not None:
                # Until now nobody knew what tokens its last rows are of, or perhaps its prompt.
                parts = [*(opened.parts if opened else ()), *parts]
                # The overlap scheduler computes the last token too, and caches it: that row is
                # surplus in this sample and may be the next one's.
                tokens = np.concatenate([prompt, t.end.output])
                if t.state is State.PREFIX_MISSING:
                    lacking.append((t, tokens))
            tree.add(tokens, parts)
        present: dict[bytes, bool] = {}

        def here(uid: bytes) -> bool:
            if uid not in present:
                present[uid] = self._here(uid)
            return present[uid]

        shards: set[bytes] = set()
        for t, tokens in lacking:
            self._complete(run, t, tokens, here, shards)

    def end_run(self, key: Key) -> None:
        """The run computes no more."""
        self._trees.pop(key, None)
        self._older.discard(key)
        for prompt in self._prompts.pop(key, {}).values():
            self._prompt_bytes -= _size(prompt)

    def written(self) -> None:
        """The window that was resolved last is in the shard."""
        self._unwritten = None

    def take_back(self) -> None:
        """It could not be written."""
        if self._unwritten is not None:
            for tree in self._trees.values():
                tree.take_back(self._current, self._unwritten)

    def _complete(
        self,
        run: RunState,
        t: Touched,
        tokens: TokenIds,
        here: Callable[[bytes], bool],
        shards: set[bytes],
    ) -> None:
        key = run.info.run, run.info.rank
        if t.end is None or len(tokens) < t.end.tokens:
            return
        holes = t.coverage.missing(0, t.end.tokens)
        refs = self._find(key, tokens, holes, here)
        if refs is None and key in self._older:
            self._older.discard(key)
            self._learn(key, run.open.values())
            refs = self._find(key, tokens, holes, here)
        if refs is None or len(shards | {p.shard for p in refs}) > _MOST_SHARDS:
            return
        shards |= {p.shard for p in refs}
        t.refs, t.state = refs, State.WHOLE

    def _find(
        self,
        key: Key,
        tokens: TokenIds,
        holes: Sequence[tuple[int, int]],
        here: Callable[[bytes], bool],
    ) -> list[Part] | None:
        """Parts that fill all holes, or None."""
        parts: list[Part] = []
        for start, stop in holes:
            found = self._trees[key].find(tokens, start, stop, here)
            if sum(p.rows for p in found) < stop - start:
                return None
            parts += found
        return parts

    def _prompt(self, key: Key, t: Touched, opened: OpenSample | None) -> TokenIds | None:
        """The prompt of a sample that a window touches, kept until it ends.

        None while there is no memory to keep it in: when the sample ends, its START is read.
        """
        kept = self._prompts.setdefault(key, {})
        prompt = kept.get(t.sid)
        if prompt is not None:
            if t.end is not None:
                del kept[t.sid]
                self._prompt_bytes -= _size(prompt)
            return prompt
        room = self._prompt_bytes < PROMPT_BYTES
        if t.start is not None:
            prompt = t.start.prompt
        elif opened is not None and (room or t.end is not None):
            prompt = self._read_prompt(opened)
        if prompt is not None and room and t.end is None:
            kept[t.sid] = prompt
            self._prompt_bytes += _size(prompt)
        return prompt

    def _read_prompt(self, opened: OpenSample) -> TokenIds | None:
        """The prompt of a sample that began before this writer did, or a failed write."""
        path = self._path(opened.shard)
        if path is None:
            return None
        try:
            with path.open("rb", buffering=0) as file:
                fd = file.fileno()
                size = os.fstat(fd).st_size
                return start_event(read_frame(fd, opened.start_offset, size, path)).prompt
        except (HsTransportError, OSError) as e:
            logger.warning("the prompt of sample %r cannot be read: %s", opened.id, e)
            return None

    def _learn(self, key: Key, opened: Iterable[OpenSample]) -> None:
        """Take in what the shards of the directory say of a run, the newest first.

        To share rows is an economy: whatever is wrong with an older shard must not cost this one.
        """
        tree = self._trees[key]
        for o in opened:
            prompt = self._prompts[key].get(o.sid)
            prompt = self._read_prompt(o) if prompt is None else prompt
            if prompt is not None:
                tree.add(prompt, o.parts)
        learned: list[tuple[TokenIds, list[Part]]] = []
        size = tree.bytes
        deadline = time.monotonic() + _LEARN_S
        for entry in reversed(list_shards(self._directory)):
            try:
                for tokens, parts in _samples_of(entry, key):
                    learned.append((tokens, parts))
                    size += tokens.nbytes + NODE_BYTES + PART_BYTES * len(parts)
                    if size > TREE_BYTES // 2 or time.monotonic() > deadline:
                        break
                else:
                    continue
                break
            except Exception as e:
                logger.warning("prefixes in %s are not found: %s", entry.path, e)
        for tokens, parts in reversed(learned):  # so that the newest is forgotten last
            tree.add(tokens, parts)

    def _here(self, uid: bytes) -> bool:
        return self._path(uid) is not None

    def _path(self, uid: bytes) -> Path | None:
        """The file of a shard, None when it was taken away."""
        if uid not in self._numbers and uid not in self._unknown:
            self._scan()
        number = self._numbers.get(uid)
        if number is None:
            self._unknown.add(uid)
            return None
        if uid == self._current:
            return partial_path(self._directory, number)
        path = shard_path(self._directory, number)
        return path if path.exists() else None

    def _scan(self) -> None:
        known = set(self._numbers.values())
        for entry in list_shards(self._directory):
            if entry.number in known:
                continue
            with contextlib.suppress(HsTransportError, OSError):
                self._numbers[read_uid(entry.path)] = entry.number


def _samples_of(entry: Entry, key: Key) -> Iterator[tuple[TokenIds, list[Part]]]:
    """Tokens and places of rows of a run's samples in a shard, the last first."""
    shard = open_unfinished(entry.path) if entry.partial else open_shard(entry.path)
    if shard is None:
        return
    dataset = ShardDataset(entry.path, [shard])  # which finds its neighbours
    infos = [unpack_info(run) for run in shard.tables.runs]
    mine = [i for i, info in enumerate(infos) if (info.run, info.rank) == key]
    for row in np.flatnonzero(np.isin(shard.tables.c["sample.run"], mine))[::-1].tolist():
        sample = Sample(dataset, shard, row)
        if not any(uid != shard.header.uid for uid in sample.absent):
            yield sample.token_ids, sample.stored


def _size(prompt: TokenIds) -> int:
    """Memory that a kept prompt takes."""
    return prompt.nbytes + KEPT_BYTES


def _places(plan: WindowPlan, uid: bytes, first_chunk: int) -> dict[int, list[Part]]:
    """Where a window's rows will be, by sample."""
    places: dict[int, list[Part]] = {}
    for number, chunk in enumerate(plan.chunks, first_chunk):
        row = 0
        for sid, piece in chunk.pieces:
            part = Part(piece.position, piece.rows, uid, number, row)
            places.setdefault(sid, []).append(part)
            row += piece.rows
    return places
