"""What rig/fuzz.py tries, and what it watches for."""

from __future__ import annotations

import os
import shutil
import signal
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer.verify import verify
from shard_kit import Script, bf16, make_info

from hstransport.errors import HsTransportError, ProtocolError
from hstransport.protocol import (
    End,
    Message,
    Rows,
    Segment,
    Start,
    pack_event,
    pack_info,
    pack_messages,
    unpack_event,
    unpack_info,
    unpack_messages,
)
from rig.bend import Choices, bend_bytes, bend_packed, bend_shard

MAX_BYTES = 64 << 20
"""What an input of some kilobytes may have taken at once."""
INPUT_S = 20


class Found(Exception):
    """Something that must not be."""


# What the interpreter is asked to do while an input is tried.

_watched: list[Path] = []
_OUTSIDE = ("/proc/", "/dev/", "/sys/")


def audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event.startswith("pickle."):
        raise Found(f"{event} {args}")
    if event in ("open", "os.remove", "os.rename", "os.mkdir", "os.link", "os.symlink"):
        for name in args[: 2 if event != "open" else 1]:
            if isinstance(name, str | bytes) and not _inside(os.fsdecode(name)):
                raise Found(f"{event} of {name!r}")


def _inside(name: str) -> bool:
    path = os.path.realpath(name)
    code = path.endswith((".py", ".pyc", ".so"))
    return code or path.startswith(_OUTSIDE) or any(path.startswith(str(w)) for w in _watched)


@contextmanager
def watched(directory: Path) -> Iterator[None]:
    """No pickle, no path outside of ``directory``, no more memory than MAX_BYTES, no hang."""
    signal.alarm(INPUT_S)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    _watched.append(directory)
    try:
        yield
    finally:
        _watched.clear()
        signal.alarm(0)
    taken = tracemalloc.get_traced_memory()[1] - before
    if taken > MAX_BYTES:
        raise Found(f"{taken} bytes were taken at once")


# Targets: each takes decisions, and raises what it should not.


class Messages:
    """Metadata of records, session infos, ZeroMQ messages."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        tokens = np.arange(5, dtype=np.int32)
        start = Start(7, "id", "rid", tokens, {"k": "v", "n": 1}, (1, 2), 5.5)
        end = End(7, "length", 3, tokens, dropped=2, cached=1, detail="why")
        rows = Rows((Segment(7, 0, 3), Segment(9, 12, 1)))
        self._events = [pack_event(e) for e in (start, rows, end)]
        self._info = pack_info(make_info())
        self._message = pack_messages([Message("ab", 0, k, 1, 64, 128, d) for k, d in self._events])

    def __call__(self, c: Choices) -> None:
        kind, data = c.one_of(self._events)
        what = c.below(4)
        bent = bend_packed(c, (data, data, self._info, self._message)[what])
        with watched(self._directory):
            try:
                if what < 2:
                    event = unpack_event(kind if c.below(8) else c.below(256), bent)
                    pack_event(event)
                elif what == 2:
                    info = unpack_info(bent)
                    pack_info(info)
                    hash((info.run, info.rank, info.planes * info.hidden, info.layer_names))
                else:
                    unpack_messages(bent)
            except ProtocolError:
                pass


class Records:
    """Bent metadata out of a ring, all the way into a shard that can be read and verified."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._good = good_script()

    def __call__(self, c: Choices) -> None:
        info = self._good.info
        rng = np.random.default_rng(0)
        entries: list[Any] = []
        for event, states in self._good.records:
            assert event is not None
            if c.below(4):
                entries.append((event, states))
                continue
            kind, data = pack_event(event)
            try:
                bent = unpack_event(kind, bend_packed(c, data))
            except ProtocolError:
                entries.append((None, None))
                continue
            if isinstance(bent, Rows):
                if bent.rows > 1000:  # more than the payload has: RingStream refuses it
                    entries.append((None, None))
                    continue
                states = bf16(rng, info.planes, bent.rows, info.hidden)
            entries.append((bent, states))
        out = self._directory / "out"
        shutil.rmtree(out, ignore_errors=True)
        with watched(self._directory):
            with DatasetWriter(out) as writer:
                writer.begin_run(info)
                half = len(entries) // 2
                writer.write_window(info.run, info.rank, 0, half - 1, entries[:half])
                writer.write_window(info.run, info.rank, half, len(entries) - 1, entries[half:])
                writer.close_run(info.run, info.rank, "the end")
            read_all(out)
            report = verify(out)
        wrong = [f.what for f in report.findings if "hold" not in f.what]  # (rows may be zeros)
        if wrong and not all("token ids" in w for w in wrong):
            raise Found(f"what was written does not verify: {wrong[:3]}")


class Shards:
    """Bent shards: opened, read, verified, and taken up by a writer."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._good = directory / "good"
        self._work = directory / "work"
        script = good_script()
        writer = DatasetWriter(self._good, shard_bytes=9000)
        script.write(writer, [3] * 100)
        writer._lock.close()  # it dies
        self._files = {p.name: p.read_bytes() for p in sorted(self._good.iterdir())}

    def __call__(self, c: Choices) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir()
        files = dict(self._files)
        for _ in range(1 + c.below(2)):
            name = c.one_of(sorted(files))
            bend = bend_shard if name.startswith(("shard", ".next")) else bend_bytes
            try:
                files[name] = bend(c, files[name])
            except Exception:  # bent twice: there is no telling its frames apart any more
                files[name] = bend_bytes(c, files[name])
        for name, data in files.items():
            (self._work / name).write_bytes(data)
        with watched(self._work):
            try:
                c.one_of([self._read, self._verify, self._write])()
            except HsTransportError as e:
                if str(self._work) not in str(e):
                    raise Found(f"no word of where it is: {e}") from e

    def _read(self) -> None:
        read_all(self._work)

    def _verify(self) -> None:
        """Says what it finds, and raises nothing."""
        try:
            verify(self._work)
        except HsTransportError as e:
            raise Found(f"verify: {e}") from e

    def _write(self) -> None:
        with DatasetWriter(self._work) as writer:
            info = make_info("another")
            writer.begin_run(info)
            script = Script(info)
            script.whole(1, 3)
            script.write(writer, [])


TARGETS: dict[str, Callable[[Path], Callable[[Choices], None]]] = {
    "messages": Messages,
    "records": Records,
    "shards": Shards,
}


def good_script() -> Script:
    """Samples that start, get rows and end in each other's midst; one stays open."""
    script = Script(make_info())
    script.start(1, 40, labels={"a": 1, "b": "x"}, loss_mask=(3, 4))
    script.start(2, 9)
    script.rows((1, 0, 25), (2, 0, 9))
    script.end(2)
    script.rows((1, 25, 15))
    script.end(1)
    for sid in range(3, 6):
        script.whole(sid, 12)
    script.start(9, 5)
    script.rows((9, 0, 3))
    return script


def read_all(directory: Path) -> None:
    """Every sample, row, token and label."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = open_shards(directory, states=None, partial=True)
    for sample in dataset:
        try:
            _ = sample.id in dataset, sample.state, sample.run, sample.labels, sample.refs
            _ = sample.reason, sample.request_id, sample.next_token_id, sample.loss_mask
            assert len(sample.token_ids) <= sample.tokens
            for a, b in sample.ranges:
                sample.read(a, b)
        except HsTransportError:
            continue  # the others must be readable none the less
        except FileNotFoundError as e:
            if "put it back" not in str(e):
                raise
