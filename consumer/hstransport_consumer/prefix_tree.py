"""A radix tree over token ids: which tokens have been computed, and where their states are."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from hstransport.protocol import TokenIds

from .index import Part
from .states import Coverage

TREE_BYTES = 256 << 20
"""Memory for the tokens of one run: about 50 million of them, more than a server's cache holds."""
NODE_BYTES, PART_BYTES = 750, 200
"""What Python takes for one."""


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
        return self.tokens.nbytes + NODE_BYTES + PART_BYTES * len(self.parts)

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

    def add(self, tokens: TokenIds, parts: Iterable[Part]) -> None:
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
        number = itertools.count()  # so that nodes are not compared
        leaves = [(n.used, next(number), n) for n in self._nodes() if not n.children]
        heapq.heapify(leaves)
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
