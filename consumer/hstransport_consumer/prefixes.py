"""Rows that several samples share: which tokens have been computed, and where their states are.

A request whose first tokens the server's radix cache holds computes only the rest. The states of
those first tokens were stored with the request that filled the cache, and follow from the tokens
alone: so they are found again by the tokens, as the server finds its cache, and referred to.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hstransport.errors import HsTransportError
from hstransport.protocol import TokenIds, unpack_info

from .directory import Entry, list_shards, partial_path, shard_path
from .format import read_frame, read_header
from .index import OpenSample, Part, RunState
from .plan import Touched, WindowPlan
from .reader import ShardDataset
from .sample import Sample
from .shard import open_shard, open_unfinished
from .states import Coverage, State
from .walk import start_event

logger = logging.getLogger(__name__)

TREE_BYTES = 256 << 20
"""Memory for the tokens of one run: about 50 million of them, more than a server's cache holds."""
_NODE_BYTES, _PART_BYTES = 750, 150  # what Python takes for one
_LEARN_S = 5.0
"""How long shards are looked into after a restart; the ring takes what comes meanwhile."""
_MOST_SHARDS = 4096
"""Shards that one window's shared rows may lie in."""

Key = tuple[str, int]
"""Run and rank: each scheduler has a cache of its own."""


class _Node:
    """An edge of the tree: consecutive tokens after which no known sequence parts ways."""

    __slots__ = ("children", "covered", "parent", "parts", "start", "tokens", "used")

    def __init__(self, tokens: TokenIds, start: int, parent: _Node | None) -> None:
        self.tokens = tokens
        self.start = start
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.parts: list[Part] = []
        self.covered = Coverage()
        self.used = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes + _NODE_BYTES + _PART_BYTES * len(self.parts)

    def take(self, parts: Iterable[Part]) -> None:
        """Note where rows of these tokens are, unless it is known."""
        for p in _within(parts, self.start, self.stop):
            for a, b in self.covered.missing(p.position, p.position + p.rows):
                self.parts.append(_cut(p, a, b))
                self.covered.add(a, b)
        self.parts.sort()

    def keep(self, parts: list[Part]) -> None:
        self.parts = parts
        self.covered = Coverage()
        for p in parts:
            self.covered.add(p.position, p.position + p.rows)


class PrefixTree:
    """A radix tree over token ids whose edges know where their tokens' rows are stored.

    What was used longest ago is forgotten when it takes more than ``limit_bytes``.
    """

    def __init__(self, limit_bytes: int = TREE_BYTES) -> None:
        self._root = _Node(np.empty(0, np.int32), 0, None)
        self._limit_bytes = limit_bytes
        self._clock = itertools.count(1)
        self.bytes = 0

    def add(self, tokens: TokenIds, parts: Sequence[Part]) -> None:
        """Note where rows are of a sequence that begins with ``tokens``; those known stay."""
        parts = list(_within(parts, 0, len(tokens)))
        if not parts:
            return
        tokens = tokens[: max(p.position + p.rows for p in parts)]
        now = next(self._clock)
        node = self._root
        while node.stop < len(tokens):
            child = node.children.get(int(tokens[node.stop]))
            if child is None:
                child = _Node(tokens[node.stop :].astype(np.int32), node.stop, node)
                node.children[int(child.tokens[0])] = child
            else:
                self.bytes -= child.bytes
                same = _common(child.tokens, tokens[node.stop :])
                if same < len(child.tokens):
                    child = self._split(child, same)
            child.used = now
            child.take(parts)
            self.bytes += child.bytes
            node = child
        if self.bytes > self._limit_bytes:
            self._forget()

    def find(
        self, tokens: TokenIds, start: int, stop: int, here: Callable[[bytes], bool]
    ) -> list[Part]:
        """Where rows of the tokens ``start`` to ``stop - 1`` are, as far as that is known.

        Parts in shards that are not ``here`` are forgotten.
        """
        found: list[Part] = []
        now = next(self._clock)
        node = self._root
        while node.stop < stop:
            child = node.children.get(int(tokens[node.stop]))
            if child is None:
                break
            same = _common(child.tokens, tokens[node.stop : stop])
            if not all(here(p.shard) for p in child.parts):
                self.bytes -= child.bytes
                child.keep([p for p in child.parts if here(p.shard)])
                self.bytes += child.bytes
            child.used = now
            found += _within(child.parts, start, child.start + same)
            if same < len(child.tokens):
                break
            node = child
        return found

    def _split(self, lower: _Node, at: int) -> _Node:
        """Put a node above ``lower`` that has its first ``at`` tokens; returns that."""
        upper = _Node(lower.tokens[:at].copy(), lower.start, lower.parent)
        upper.used = lower.used
        assert lower.parent is not None
        lower.parent.children[int(upper.tokens[0])] = upper
        upper.keep(list(_within(lower.parts, upper.start, upper.stop)))
        lower.tokens, lower.start, lower.parent = lower.tokens[at:].copy(), upper.stop, upper
        lower.keep(list(_within(lower.parts, lower.start, lower.stop)))
        upper.children[int(lower.tokens[0])] = lower
        self.bytes += lower.bytes
        return upper

    def take_back(self, shard: bytes, first_chunk: int) -> None:
        """Forget parts in a shard's chunks from ``first_chunk`` on."""
        for node in self._nodes():
            kept = [p for p in node.parts if p.shard != shard or p.chunk < first_chunk]
            if len(kept) < len(node.parts):
                self.bytes -= node.bytes
                node.keep(kept)
                self.bytes += node.bytes

    def _forget(self) -> None:
        leaves = [(n.used, i, n) for i, n in enumerate(self._nodes()) if not n.children]
        heapq.heapify(leaves)
        number = itertools.count(len(leaves) + 1_000_000_000)  # nodes are not compared
        while leaves and self.bytes > self._limit_bytes * 3 // 4:
            _, _, leaf = heapq.heappop(leaves)
            above = leaf.parent
            assert above is not None
            del above.children[int(leaf.tokens[0])]
            self.bytes -= leaf.bytes
            if not above.children and above is not self._root:
                heapq.heappush(leaves, (above.used, next(number), above))

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


class Prefixes:
    """What a writer knows of tokens and rows in its directory."""

    def __init__(self, directory: Path, older: Iterable[Key]) -> None:
        self._directory = directory
        self._older = set(older)
        """Runs of which shards may say more than the trees."""
        self._trees: dict[Key, PrefixTree] = {}
        self._prompts: dict[tuple[Key, int], TokenIds] = {}
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
        ended: list[tuple[Touched, TokenIds]] = []
        for t in plan.touched.values():
            opened = run.open.get(t.sid)
            prompt = self._prompt(key, t, opened)
            if prompt is None:
                continue
            parts, tokens = places.get(t.sid, []), prompt
            if t.end is not None:
                if len(t.end.output):  # until now nobody knew which tokens its last rows are of
                    parts = [*(opened.parts if opened else ()), *parts]
                    tokens = np.concatenate([prompt, t.end.output])
                ended.append((t, tokens))
            tree.add(tokens, parts)
        present: dict[bytes, bool] = {}

        def here(uid: bytes) -> bool:
            if uid not in present:
                present[uid] = self._here(uid)
            return present[uid]

        shards: set[bytes] = set()
        for t, tokens in ended:
            self._complete(run, t, tokens, here, shards)

    def end_run(self, key: Key) -> None:
        """The run computes no more."""
        self._trees.pop(key, None)
        self._older.discard(key)
        for prompt in [p for p in self._prompts if p[0] == key]:
            del self._prompts[prompt]

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
        if t.end is None or t.state is not State.PREFIX_MISSING or len(tokens) < t.end.tokens:
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
        """The prompt of a sample that a window touches, kept until it ends."""
        prompt = t.start.prompt if t.start else self._prompts.get((key, t.sid))
        if prompt is None and opened is not None:
            prompt = self._read_prompt(opened)
        if t.end is not None:
            self._prompts.pop((key, t.sid), None)
        elif prompt is not None:
            self._prompts[key, t.sid] = prompt
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
            prompt = self._prompts.get((key, o.sid))
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
                    size += tokens.nbytes + _NODE_BYTES + _PART_BYTES * len(parts)
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
            try:
                with entry.path.open("rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    header, _ = read_header(file.fileno(), size, entry.path)
            except (HsTransportError, OSError):
                continue
            self._numbers[header.uid] = entry.number


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


def _within(parts: Iterable[Part], start: int, stop: int) -> Iterator[Part]:
    """What of the parts lies in ``[start, stop)``."""
    for p in parts:
        a, b = max(p.position, start), min(p.position + p.rows, stop)
        if a < b:
            yield _cut(p, a, b)


def _cut(p: Part, start: int, stop: int) -> Part:
    return Part(start, stop - start, p.shard, p.chunk, p.row + start - p.position)


def _common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
