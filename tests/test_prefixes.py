"""Rows that samples share: found by their tokens, stored once, and never another sequence's."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hstransport_consumer import (
    DatasetWriter,
    chain,
    index,
    open_shards,
    plan,
    prefix_tree,
    prefixes,
)
from hstransport_consumer.index import Part
from hstransport_consumer.prefix_tree import PrefixTree
from hstransport_consumer.verify import verify
from shard_kit import make_info

from hstransport.protocol import End, Rows, Segment, Start

INFO = make_info(rows="all")


def state(tokens: list[int]) -> np.ndarray:
    """The states of the last of these tokens: they follow from all of them, and nothing else."""
    rng = np.random.default_rng([len(tokens), *tokens])
    return rng.integers(0x3C00, 0x4400, (INFO.planes, INFO.hidden)).astype(np.uint16)


@dataclass
class Request:
    sid: int
    prompt: list[int]
    output: list[int]
    done: int = 0
    cached: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


@dataclass
class CachingServer:
    """Prefills and decodes what its cache does not hold; records in ring order."""

    page: int = 1
    records: list[tuple[Any, Any]] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    cached: list[list[int]] = field(default_factory=list)

    def begin(self, prompt: list[int], output: list[int]) -> Request:
        request = Request(len(self.requests), prompt, output)
        self.requests[f"s{request.sid}"] = request
        hit = max((common(prompt, c) for c in self.cached), default=0)
        # The last token of a prompt is always computed; pages are cached whole.
        request.cached = request.done = min(hit, len(prompt) - 1) // self.page * self.page
        ids = np.array(prompt, np.int32)
        name = f"s{request.sid}"
        self.records.append((Start(request.sid, name, f"r{request.sid}", ids), None))
        return request

    def compute(self, *passes: tuple[Request, int]) -> None:
        """One forward pass: so many more rows of each request."""
        segments, states = [], []
        for request, rows in passes:
            segments.append(Segment(request.sid, request.done, rows))
            for _ in range(rows):
                request.done += 1
                states.append(state(request.tokens[: request.done]))
            if request.done <= len(request.prompt):
                self.cached.append(request.tokens[: request.done])
        self.records.append((Rows(tuple(segments)), np.stack(states, axis=1)))

    def finish(self, request: Request) -> None:
        n = len(request.tokens) - 1
        self.compute((request, n - request.done)) if request.done < n else None
        self.cached.append(request.tokens[:n])
        output = np.array(request.output, np.int32)
        end = End(request.sid, "finished", n, output, cached=request.cached)
        self.records.append((end, None))

    def run(self, prompt: list[int], output: list[int]) -> None:
        request = self.begin(prompt, output)
        self.compute((request, len(prompt) - request.done))
        self.finish(request)


def common(a: list[int], b: list[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def write(
    server: CachingServer, out: Path, windows: list[int], *, first: int = 0, **options: Any
) -> int:
    """Write records in windows of so many; returns how many rows were not stored again."""
    shared = 0
    with DatasetWriter(out, **options) as writer:
        writer.begin_run(INFO)
        for n in windows:
            last = min(first + n, len(server.records)) - 1
            events = server.records[first : last + 1]
            if events:
                shared += writer.write_window(INFO.run, 0, first, last, events).shared_rows
            first = last + 1
    return shared


def check(out: Path, server: CachingServer, *, missing: tuple[str, ...] = ()) -> None:
    dataset = open_shards(out, states=None)
    assert sorted(dataset.ids) == sorted(server.requests)
    for sample in dataset:
        request = server.requests[sample.id]
        tokens = request.tokens[:-1]
        assert sample.token_ids.tolist() == tokens
        if sample.id in missing:
            assert sample.state == "prefix_missing"
        else:
            assert sample.state == "whole"
            expected = np.stack([state(tokens[: i + 1]) for i in range(len(tokens))])
            np.testing.assert_array_equal(sample.hidden_states, expected)
    report = verify(out)
    assert not report.findings, report.findings


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 240)  # 10 rows
    monkeypatch.setattr(plan, "SMALL_BYTES", 96)


SYSTEM = list(range(100, 130))


def test_a_system_prompt_is_stored_once(tmp_path: Path) -> None:
    server = CachingServer()
    for i in range(5):
        server.run([*SYSTEM, 200 + i, 300 + i], [7, 8, 9])
    shared = write(server, tmp_path / "out", [1000])
    assert shared == 4 * len(SYSTEM)
    check(tmp_path / "out", server)
    dataset = open_shards(tmp_path / "out")
    rows = sum(int(s.tables.c["chunk.rows"].sum()) for s in dataset.shards)
    assert rows == len(SYSTEM) + 5 * 4


def test_turns_of_a_chat_refer_to_generated_tokens_of_the_turn_before(tmp_path: Path) -> None:
    server = CachingServer()
    history = list(SYSTEM)
    for turn in range(4):
        history = [*history, 400 + turn, 401 + turn]
        answer = [500 + turn, 501 + turn, 502 + turn]
        server.run(history, answer)
        history = [*history, *answer]
    write(server, tmp_path / "out", [4] * 10)
    check(tmp_path / "out", server)


def test_the_prompt_of_a_request_that_still_runs_is_found(tmp_path: Path) -> None:
    server = CachingServer()
    long = server.begin([*SYSTEM, 1], [7] * 20)
    server.compute((long, 10))
    server.compute((long, 21))
    server.run([*SYSTEM, 2], [8])
    server.finish(long)
    for windows in ([100], [1] * 20, [3] * 10):
        out = tmp_path / f"{len(windows)}"
        assert write(server, out, windows) == len(SYSTEM)
        check(out, server)


def test_prompts_that_are_not_kept_in_memory_are_read_when_their_samples_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "PROMPT_BYTES", 0)
    server = CachingServer()
    for i in range(3):
        request = server.begin([*SYSTEM, i], [9, 9])
        if not i:
            server.compute((request, 12))  # a window of its own, neither with START nor with END
        server.compute((request, len(request.prompt) - request.done))
        server.finish(request)
    out = tmp_path / "out"
    assert write(server, out, [1] * len(server.records), shard_bytes=1) == 2 * len(SYSTEM)
    check(out, server)


@pytest.mark.parametrize("seed", range(12))
def test_random_branches_chunks_windows_shards_and_restarts(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    server = CachingServer(page=rng.choice([1, 1, 4]))
    history: list[list[int]] = [SYSTEM]
    running: list[Request] = []
    for _ in range(150):
        if len(running) < 4 and rng.random() < 0.5:
            base = rng.choice(history)
            base = base[: rng.randint(1, len(base))]
            prompt = [*base, *(rng.randint(0, 3) for _ in range(rng.randint(1, 15)))]
            output = [rng.randint(0, 3) for _ in range(rng.randint(1, 9))]
            running.append(server.begin(prompt, output))
        passes = []
        for request in rng.sample(running, rng.randint(0, len(running))):
            due = len(request.prompt) - request.done
            rows = rng.randint(1, due) if due > 0 else 1
            if request.done + rows <= len(request.tokens) - 1:
                passes.append((request, rows))
        if passes:
            server.compute(*passes)
        for request in [r for r in running if r.done >= len(r.prompt) and rng.random() < 0.2]:
            running.remove(request)
            server.finish(request)
            history.append(request.tokens[:-1])
    for request in running:
        server.finish(request)
    out = tmp_path / "out"
    first = 0
    while first < len(server.records):
        windows = [rng.randint(1, 12) for _ in range(rng.randint(1, 6))]
        write(server, out, windows, first=first, shard_bytes=rng.choice([1, 6000, 1 << 20]))
        first += sum(windows)
    check(out, server)


def fill(out: Path, **options: Any) -> CachingServer:
    """A shard of its own for each of four samples that share a prompt."""
    server = CachingServer()
    for i in range(4):
        server.run([*SYSTEM, i], [9])
    write(server, out, [3] * 3, shard_bytes=1, **options)
    return server


def test_rows_in_a_shard_that_was_taken_away_are_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    server = fill(out)
    (out / "shard-000000.zst").unlink()  # the system prompt is gone with it
    server.run([*SYSTEM, 77], [9])
    server.run([*SYSTEM, 78], [9])
    write(server, out, [100], first=9)
    found = {s.id: s for s in open_shards(out, states=None)}
    assert found["s3"].state == found["s4"].state == "prefix_missing"
    assert len(found["s1"].absent) == 1


def test_rows_of_a_shard_that_is_handed_over_and_removed_are_missing(tmp_path: Path) -> None:
    server = CachingServer()
    for i in range(3):
        server.run([*SYSTEM, i], [9])
    with DatasetWriter(tmp_path / "out", shard_bytes=1, on_shard=Path.unlink) as writer:
        writer.begin_run(INFO)
        ended = [
            writer.write_window(INFO.run, 0, at, at + 2, server.records[at : at + 3]).ended[0]
            for at in range(0, 9, 3)
        ]
    # The first shard is removed when the third window begins another one.
    assert [e.state for e in ended] == ["whole", "prefix_missing", "prefix_missing"]


def test_rows_of_another_token_sequence_are_seen_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = CachingServer()
    server.run([*SYSTEM, 5, 6], [9])
    server.run([*SYSTEM, 5, 7], [9])
    other = [*SYSTEM[:10], 55, *SYSTEM[11:], 5]
    server.cached.append(other)  # what the tree will be made to believe
    server.run([*other, 8], [9])
    real = prefix_tree._common
    monkeypatch.setattr(prefix_tree, "_common", lambda a, b: max(real(a, b), min(len(a), len(b))))
    write(server, tmp_path / "out", [3] * 3)
    findings = verify(tmp_path / "out").findings
    assert {(f.sample, "of other tokens" in f.what) for f in findings} == {("s2", True)}


def test_after_a_restart_earlier_shards_are_looked_into(tmp_path: Path) -> None:
    out = tmp_path / "out"
    server = fill(out)
    assert write(server, out, [100], first=9) == len(SYSTEM)
    check(out, server)


def test_what_the_server_computed_before_is_missing(tmp_path: Path) -> None:
    server = CachingServer()
    server.cached.append(SYSTEM[:20])
    server.run([*SYSTEM, 1], [9])
    server.run([*SYSTEM, 2], [9])
    write(server, tmp_path / "out", [100])
    check(tmp_path / "out", server, missing=("s0", "s1"))


def test_another_runs_rows_are_not_taken(tmp_path: Path) -> None:
    """Another server may have had other weights under the same name."""
    out = tmp_path / "out"
    fill(out)
    server = CachingServer(cached=[SYSTEM])
    server.run([*SYSTEM, 5], [9])
    other = make_info("beef0000", rows="all")
    with DatasetWriter(out) as writer:
        writer.begin_run(other)
        (ended,) = writer.write_window(other.run, 0, 0, 2, server.records).ended
    assert ended.state == "prefix_missing"


def test_after_a_failed_write_the_same_window_finds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    server = CachingServer()
    first = server.begin([*SYSTEM, 0], [9] * 8)
    server.compute((first, 31))
    server.run([*SYSTEM, 1], [9])
    server.run([*SYSTEM, 2], [9])
    server.finish(first)
    real = os.pwritev
    fail = [False]

    def pwritev(*arguments: Any) -> int:
        if fail[0]:
            raise OSError(errno.ENOSPC, "full")
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", pwritev)
    with DatasetWriter(out, shard_bytes=1) as writer:
        writer.begin_run(INFO)
        for at in range(len(server.records)):
            fail[0] = True
            with pytest.raises(OSError, match="full"):
                writer.write_window(INFO.run, 0, at, at, server.records[at : at + 1])
            fail[0] = False
            writer.write_window(INFO.run, 0, at, at, server.records[at : at + 1])
    check(out, server)


def test_memory_is_bounded_and_what_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = PrefixTree(100_000)
    for i in range(2000):
        tokens = np.arange(50, dtype=np.int32) + 1000 * i
        tree.add(tokens, [Part(0, 50, b"u", i, 0)])
        tree.find(np.arange(50, dtype=np.int32), 0, 50, lambda uid: True)
        assert tree.bytes <= 100_000
    tokens = np.arange(50, dtype=np.int32)
    assert tree.find(tokens, 0, 50, lambda uid: True) == [Part(0, 50, b"u", 0, 0)]
    assert tree.find(tokens + 1000 * 1999, 0, 50, lambda uid: True)
    assert not tree.find(tokens + 1000 * 5, 0, 50, lambda uid: True)


def test_what_was_used_longest_ago_is_forgotten_first_in_chains_too() -> None:
    """An old chain of many short edges goes before branches that were used just now."""
    tree = PrefixTree(400_000)
    chain = np.arange(300, dtype=np.int32)
    for n in range(1, 301):
        tree.add(chain[:n], [Part(n - 1, 1, b"u", 0, n - 1)])
    branches = [np.arange(50, dtype=np.int32) + 1000 * i for i in range(1, 250)]
    for i, tokens in enumerate(branches):
        tree.add(tokens, [Part(0, 50, b"u", i, 0)])
        assert tree.find(tokens, 0, 50, lambda uid: True), "forgotten at once"
    assert all(tree.find(tokens, 0, 50, lambda uid: True) for tokens in branches[-200:])
    assert len(tree.find(chain, 0, 300, lambda uid: True)) < 300


def test_what_is_wrong_with_an_older_shard_costs_only_what_it_holds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    server = fill(out)
    path = out / "shard-000001.zst"
    path.write_bytes(path.read_bytes()[:-60] + bytes(60))  # neither footer nor trailer
    with DatasetWriter(out) as writer:
        writer.begin_run(INFO)
        server.run([*SYSTEM, 50], [9])
        events = server.records[9:]
        (first, second) = writer.write_window(INFO.run, 0, 9, 14, events).ended
    assert (first.state, second.state) == ("whole", "whole")


def end_with(refs: list[Part], out: Path) -> None:
    """A shard, unfinished, whose second sample says that it shares these rows."""
    server = CachingServer()
    server.run([*SYSTEM, 1], [9])
    server.run([*SYSTEM, 2], [9])
    pid = os.fork()
    if not pid:  # a writer that dies
        writer = DatasetWriter(out)
        writer.begin_run(INFO)
        writer.write_window(INFO.run, 0, 0, 2, server.records[:3])
        uid = writer._shards.index.header.uid  # type: ignore[union-attr]
        fake = [p._replace(shard=uid) if p.shard == b"" else p for p in refs]
        prefixes.Prefixes._find = lambda *a: fake  # type: ignore[method-assign]
        index.ShardIndex._check_place = lambda *a: None  # type: ignore[method-assign]
        writer.write_window(INFO.run, 0, 3, 5, server.records[3:])
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    "refs",
    [
        [Part(0, 30, b"", 4000, 0)],
        [Part(0, 30, b"", 0, 1 << 31)],
        [Part(0, 30, b"", 0, 5)],
    ],
    ids=["no such chunk", "far rows", "rows beyond the chunk"],
)
def test_places_of_shared_rows_that_cannot_be_are_cut_off(tmp_path: Path, refs: list[Part]) -> None:
    out = tmp_path / "out"
    end_with(refs, out)
    server = CachingServer()
    server.run([*SYSTEM, 1], [9])
    server.run([*SYSTEM, 2], [9])
    with DatasetWriter(out) as writer:
        writer.begin_run(INFO)
        assert writer.next_seq(INFO.run, 0) == 3, "the window with the bad places was kept"
        writer.write_window(INFO.run, 0, 3, 5, server.records[3:])
    check(out, server)


def test_a_part_in_a_shard_that_is_elsewhere_is_no_finding(tmp_path: Path) -> None:
    """The owner's END, with its generated ids, was handed over; its rows and START are here."""
    out, server = tmp_path / "out", CachingServer()
    owner = server.begin(SYSTEM, [7, 8, 9, 10])
    server.compute((owner, 30))
    server.compute((owner, 3))
    server.finish(owner)
    server.run([*SYSTEM, 7, 8, 9, 5], [9])
    write(server, out, [3, 2, 9], shard_bytes=1)
    names = sorted(p.name for p in out.glob("shard-*"))
    assert len(names) == 3
    other = tmp_path / "other"
    other.mkdir()
    (out / names[1]).rename(other / names[1])
    report = verify(out / names[2])
    assert not report.findings, report.findings


def test_a_shard_that_names_many_others_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "FULL_SHARDS", 3)
    server = fill(tmp_path / "out")
    for i in range(20):
        server.run([*SYSTEM, i % 4, 60 + i], [9])
    write(server, tmp_path / "out", [6] * 12, first=9)
    check(tmp_path / "out", server)
    for shard in open_shards(tmp_path / "out").shards:
        assert len(shard.tables.shards) <= 4
    monkeypatch.setattr(index, "MAX_SHARDS", 2)
    assert any("more than 2 shards" in f.what for f in verify(tmp_path / "out").findings)


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_finds_what_a_list_of_all_sequences_finds(seed: int) -> None:
    rng = random.Random(seed)
    tree = PrefixTree(1 << 30)
    known: dict[int, tuple[list[int], list[bool]]] = {}
    for n in range(60):
        tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 12))]
        a, b = sorted((rng.randint(0, len(tokens)), rng.randint(0, len(tokens))))
        if a < b:
            tree.add(np.array(tokens, np.int32), [Part(a, b - a, b"u", n, 5)])
            known[n] = tokens, [a <= i < b for i in range(len(tokens))]
        query = [rng.randint(0, 1) for _ in range(12)]
        found = tree.find(np.array(query, np.int32), 0, 12, lambda uid: True)
        have = [False] * 12
        for p in found:
            for i in range(p.position, p.position + p.rows):
                assert not have[i]
                have[i] = True
                tokens, rows = known[p.chunk]
                assert tokens[: i + 1] == query[: i + 1] and rows[i]
                assert p.row + i - p.position == 5 + i - rows.index(True)
        expected = [
            any(t[: i + 1] == query[: i + 1] and i < len(t) and r[i] for t, r in known.values())
            for i in range(12)
        ]
        assert have == expected
