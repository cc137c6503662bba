"""What is left when the writer dies, the disk fills up or the machine restarts."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, appender, codec, directory, open_shards, plan
from hstransport_consumer.direct import DirectFile
from hstransport_consumer.index import ShardIndex
from hstransport_consumer.verify import verify
from shard_kit import Script, check, make_info, only_shard, split_frames

from hstransport.errors import CorruptShardError, DatasetBusyError, DatasetMismatchError, ShardError

Copy = Callable[[], Path]


def long_script(samples: int = 40, hidden: int = 64) -> Script:
    """Samples that start, get rows and end in each other's midst."""
    script = Script(make_info(hidden=hidden), seed=4)
    rng = random.Random(4)
    open_: dict[int, tuple[int, int]] = {}
    sid = 0
    while sid < samples or open_:
        if sid < samples and len(open_) < 5:
            n = rng.choice([1, 7, 40, 150])
            script.start(sid, n)
            open_[sid] = (0, n)
            sid += 1
        segments = []
        for s in rng.sample(sorted(open_), min(3, len(open_))):
            at, n = open_[s]
            step = min(rng.choice([1, 5, 64]), n - at)
            segments.append((s, at, step))
            open_[s] = (at + step, n)
        script.rows(*segments)
        for s, (at, n) in list(open_.items()):
            if at == n:
                script.end(s)
                del open_[s]
    return script


# kill -9

CHILD = """
import sys
sys.path[:0] = [{tests!r}]
from hstransport_consumer import DatasetWriter
from test_shard_crash import long_script
script = long_script()
writer = DatasetWriter({out!r}, shard_bytes=60_000, threads=2)
writer.begin_run(script.info)
first = max(writer.next_seq(script.info.run, 0) - {again}, 0)
print("go", flush=True)
while first < len(script.records):
    last = min(first + 3, len(script.records) - 1)
    script.begin_window(writer, first, last)
    first = last + 1
    if writer.begun == 3:
        writer.finish_window()
while writer.begun:
    writer.finish_window()
writer.close()
"""


def test_killed_writers_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    rng = random.Random(1)
    kills = 0
    for _ in range(60):
        code = CHILD.format(tests=str(Path(__file__).parent), out=str(out), again=rng.randint(0, 9))
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout and child.stdout.readline() == b"go\n"
        time.sleep(rng.random() * 0.012)
        child.send_signal(signal.SIGKILL)
        if child.wait() == 0:
            break
        kills += 1
        partial = list(out.glob("*.partial"))
        assert len(partial) <= 1
        if kills >= 8:  # let it come to an end
            subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
            break
    assert kills >= 3, "the writer was never caught at work"
    check(open_shards(out), long_script().samples.values())
    assert verify(out).ok


# Files cut at any place


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, Path]:
    """A directory whose writer died: one finished shard, one unfinished."""
    script = long_script(samples=12)
    out = tmp_path_factory.mktemp("written") / "out"
    writer = DatasetWriter(out, shard_bytes=90_000)
    script.write(writer, [5] * 100)
    died = out.with_name("died")
    shutil.copytree(out, died)
    writer.close()
    assert [p.suffix for p in sorted(died.glob("shard*"))] == [".zst", ".partial"]
    return script, died


@pytest.fixture
def died(written: tuple[Script, Path], tmp_path: Path) -> Iterator[Copy]:
    """Makes copies of that directory, on the fly."""
    made: list[Path] = []

    def copy() -> Path:
        path = tmp_path / f"copy-{len(made)}"
        shutil.copytree(written[1], path)
        made.append(path)
        return path

    yield copy


def finish(script: Script, directory: Path) -> None:
    """Come back, write what is missing, and check everything."""
    with DatasetWriter(directory) as writer:
        writer.begin_run(script.info)
        first = writer.next_seq(script.info.run, 0)
        script.write(writer, [4] * 200, first=max(first - 2, 0)) if first < len(
            script.records
        ) else None
    check(open_shards(directory), script.samples.values())
    assert verify(directory).ok


def test_a_file_cut_anywhere_goes_on_at_its_last_whole_window(
    written: tuple[Script, Path], died: Copy
) -> None:
    script, original = written
    (partial,) = original.glob("*.partial")
    data = partial.read_bytes()
    frames = split_frames(data)
    assert len(frames) > 50
    cuts = {c for _, _, end in frames for c in (end - 1, end, end + 1) if c <= len(data)}
    cuts |= {0, 1, 15, 16, 17}
    for cut in sorted(cuts):
        directory = died()
        os.truncate(directory / partial.name, cut)
        finish(script, directory)
        shutil.rmtree(directory)


def test_what_is_cut_is_gone(written: tuple[Script, Path], died: Copy) -> None:
    """Nothing that follows may be taken for a window later, when less is written after it."""
    _, original = written
    (partial,) = original.glob("*.partial")
    data = partial.read_bytes()
    (first, second) = [at for kind, at, _ in split_frames(data) if kind == b"HSwn"][:2]
    directory = died()
    bent = bytearray(data)
    bent[first + 20 : second] = bytes(second - first - 20)
    (directory / partial.name).write_bytes(bent)
    writer = DatasetWriter(directory)
    assert (directory / partial.name).stat().st_size == first
    writer.close()
    assert verify(directory).ok and open_shards(directory, states=None)


def test_seq_tells_which_windows_a_cut_file_holds(written: tuple[Script, Path], died: Copy) -> None:
    script, original = written
    (partial,) = original.glob("*.partial")
    windows = [at for kind, at, _ in split_frames(partial.read_bytes()) if kind == b"HSwn"]
    directory = died()
    seqs = []
    for at in reversed(windows[1:]):
        os.truncate(directory / partial.name, at)
        writer = DatasetWriter(directory)
        seqs.append(writer.next_seq(script.info.run, 0))
        writer._lock.close()  # dies
    assert seqs == sorted(seqs, reverse=True) and len(set(seqs)) == len(seqs)


def test_a_footer_without_a_trailer_is_taken_back(written: tuple[Script, Path], died: Copy) -> None:
    script, _ = written
    directory = died()
    DatasetWriter(directory).close()
    last = max(directory.glob("shard-*.zst"))
    partial = last.rename(last.with_name(last.name + ".partial"))
    os.truncate(partial, partial.stat().st_size - 10)
    finish(script, directory)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_bent_last_window_is_cut(written: tuple[Script, Path], died: Copy) -> None:
    script, original = written
    (partial,) = original.glob("*.partial")
    frames = split_frames(partial.read_bytes())
    last_window = max(i for i, (kind, _, _) in enumerate(frames) if kind == b"HSwn")
    for _, at, end in frames[last_window:]:
        directory = died()
        flip(directory / partial.name, (at + end) // 2)
        finish(script, directory)


def test_a_window_without_its_head_is_cut(written: tuple[Script, Path], died: Copy) -> None:
    """The head is written last: until then there is a hole."""
    script, original = written
    (partial,) = original.glob("*.partial")
    frames = split_frames(partial.read_bytes())
    _, at, end = [f for f in frames if f[0] == b"HSwn"][-1]
    directory = died()
    with (directory / partial.name).open("r+b") as file:
        file.seek(at)
        file.write(bytes(end - at))
    assert len(open_shards(directory, states=None, partial=True)) > 0
    assert verify(directory).ok
    finish(script, directory)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_in_the_midst_of_a_window_leaves_the_file_as_it_was(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hstransport_consumer import codec

    script = long_script(12)
    with DatasetWriter(tmp_path, threads=threads) as writer:
        writer.begin_run(script.info)
        script.write_window(writer, 0, 9)
        before = only_shard(tmp_path).read_bytes()
        real, calls = codec.encode_chunk, []

        def fail_once(*args: object) -> object:
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(codec, "encode_chunk", fail_once)
        monkeypatch.setattr(plan, "CHUNK_BYTES", 640)
        with pytest.raises(MemoryError):
            script.write_window(writer, 10, 30)
        assert only_shard(tmp_path).read_bytes() == before
        script.write_window(writer, 10, 30)
        script.write(writer, [], first=31)
    check(open_shards(tmp_path), script.samples.values())


def test_after_an_error_none_of_the_windows_begun_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = long_script(12)
    with DatasetWriter(tmp_path, threads=2) as writer:
        writer.begin_run(script.info)
        script.write_window(writer, 0, 9)
        before = only_shard(tmp_path).read_bytes()
        for first in (10, 20, 30):
            script.begin_window(writer, first, first + 9)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
            with pytest.raises(OSError, match="may be repeated"):
                writer.finish_window()
        assert writer.begun == 0 and writer.next_seq(script.info.run, 0) == 10
        assert only_shard(tmp_path).read_bytes() == before
        for first in (10, 20, 30):
            script.begin_window(writer, first, first + 9)
        with pytest.raises(ValueError, match="finish them first"):
            script.write_window(writer, 40, 49)
        while writer.begun:
            writer.finish_window()
        script.write(writer, [], first=40)
    check(open_shards(tmp_path), script.samples.values())
    assert verify(tmp_path).ok


def test_an_interrupt_before_the_index_knows_leaves_the_shard_to_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = long_script(12)
    writer = DatasetWriter(tmp_path)
    writer.begin_run(script.info)
    script.write_window(writer, 0, 9)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShardIndex, "apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            script.write_window(writer, 10, 19)
    with pytest.raises(ShardError, match="interrupted"):
        script.write_window(writer, 20, 29)
    writer.close()
    assert only_shard(tmp_path).suffix == ".partial"
    with DatasetWriter(tmp_path) as writer:
        assert writer.next_seq(script.info.run, 0) == 20
    finish(script, tmp_path)


def slow(real: Callable[..., Any], interrupts: int, done: list[int]) -> Callable[..., Any]:
    """``real`` on another thread, while the main thread waits for it and is interrupted."""
    main = threading.main_thread().ident
    assert main

    def run(*args: object) -> object:
        for _ in range(0 if done else interrupts):
            time.sleep(0.1)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        try:
            return real(*args)
        finally:
            done.append(1)

    return run


def test_nobody_packs_on_when_a_window_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's rows and the buffers are somebody else's by then."""
    script = long_script(12)
    done: list[int] = []
    with DatasetWriter(tmp_path) as writer:
        writer.begin_run(script.info)
        script.write_window(writer, 0, 9)
        with monkeypatch.context() as patch:
            patch.setattr(codec, "encode_chunk", slow(codec.encode_chunk, 1, done))
            with pytest.raises(KeyboardInterrupt):
                script.write_window(writer, 10, 19)
            assert done
        script.write(writer, [7] * 100, first=10)
    check(open_shards(tmp_path), script.samples.values())
    assert verify(tmp_path).ok


def test_nobody_writes_on_when_a_window_was_interrupted_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes behind the cut would stand behind the footer."""
    script = Script(make_info(hidden=2048))
    for sid in range(3):
        script.whole(sid, 400)
    done: list[int] = []
    with DatasetWriter(tmp_path) as writer:
        writer.begin_run(script.info)
        script.write_window(writer, 0, 2)
        size = only_shard(tmp_path).stat().st_size
        with monkeypatch.context() as patch:
            patch.setattr(DirectFile, "write", slow(DirectFile.write, 3, done))
            with pytest.raises(KeyboardInterrupt):
                script.write_window(writer, 3, 8)
        assert done and only_shard(tmp_path).stat().st_size == size
    assert verify(tmp_path).ok
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [], first=3)
    check(open_shards(tmp_path), script.samples.values())


def test_after_a_restart_of_the_machine_every_window_is_checked(
    written: tuple[Script, Path], died: Copy
) -> None:
    script, original = written
    (partial,) = original.glob("*.partial")
    frames = split_frames(partial.read_bytes())
    _, at, end = next(f for f in frames if f[0] == b"data")
    directory = died()
    flip(directory / partial.name, (at + end) // 2)
    (directory / ".lock").write_text("1 another-boot\n")
    finish(script, directory)


def test_on_the_same_boot_only_the_last_window_is_decoded(
    written: tuple[Script, Path], died: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hstransport_consumer import recover

    checked = []
    real = recover.chunk_planes
    monkeypatch.setattr(recover, "chunk_planes", lambda *a: checked.append(a) or real(*a))
    writer = DatasetWriter(died())
    assert writer._shards.index and 0 < len(checked) < writer._shards.index.tables().chunks
    writer.close()


# Disks


@contextmanager
def small_disk(kind: str, tmp_path: Path) -> Iterator[Path]:
    """A directory that has room for about 300 kB."""
    if kind == "tmpfs":
        path = tmp_path / "disk"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(path)]
        if os.getuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("cannot mount a tmpfs here")
        try:
            yield path
        finally:
            subprocess.run(["umount", "-l", str(path)], check=True)
    else:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
        try:
            yield tmp_path / "disk"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["tmpfs", "rlimit"])
def test_a_full_disk_takes_the_same_window_later(kind: str, tmp_path: Path) -> None:
    script = Script(make_info(hidden=256))
    for sid in range(8):
        script.whole(sid, 60)
    with small_disk(kind, tmp_path) as out:
        ballast = out / "ballast"
        if kind == "tmpfs":
            ballast.write_bytes(bytes(100_000))
        writer = DatasetWriter(out)
        writer.begin_run(script.info)
        failed = None
        for first in range(0, len(script.records), 3):
            size = only_shard(out).stat().st_size if first else 0
            try:
                script.write_window(writer, first, first + 2)
            except OSError as e:
                failed = first
                assert e.errno in (errno.ENOSPC, errno.EFBIG)
                assert "may be repeated" in str(e)
                assert only_shard(out).stat().st_size == size
                break
        assert failed
        if kind == "tmpfs":
            ballast.unlink()
        else:
            soft, hard = resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        stored = failed
        while stored < len(script.records):
            try:
                script.write_window(writer, stored, stored + 2)
            except OSError:  # the tmpfs is too small for all of it: close with what there is
                break
            stored += 3
        assert stored > failed
        writer.close()
        done = [script.samples[s] for s in range(stored // 3)]
        check(open_shards(out), done)
        assert verify(out).ok


def test_a_disk_too_full_for_the_footer_keeps_the_windows(tmp_path: Path) -> None:
    script = Script(make_info())
    for sid in range(300):
        script.whole(sid, 1)
    writer = DatasetWriter(tmp_path)
    script.write(writer, [])
    partial = only_shard(tmp_path)
    size = partial.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        with pytest.raises(OSError, match="may be repeated"):
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert partial.stat().st_size == size
    DatasetWriter(tmp_path).close()
    check(open_shards(tmp_path), script.samples.values())


# Directories


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path), pytest.raises(DatasetBusyError, match=f"process {os.getpid()} "):
        DatasetWriter(tmp_path)
    DatasetWriter(tmp_path).close()


@pytest.mark.parametrize(
    "change",
    [{"model": "model/b"}, {"layers": (1, 2)}, {"hidden": 32}, {"final": False}, {"rows": "all"}],
)
def test_another_model_is_refused_with_both_values(change: dict, tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 4)
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [])
    (name,) = change
    with DatasetWriter(tmp_path) as writer, pytest.raises(DatasetMismatchError) as e:
        writer.begin_run(make_info("other", **change))
    assert repr(getattr(script.info, name)) in str(e.value) and repr(change[name]) in str(e.value)


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="name another one"):
        DatasetWriter(tmp_path / "file")
    if os.getuid() == 0:
        pytest.skip("root may write anywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(PermissionError, match="may write to"):
        DatasetWriter(tmp_path / "locked")


def test_two_unfinished_shards_are_refused(died: Copy) -> None:
    directory = died()
    (partial,) = directory.glob("*.partial")
    shutil.copy(partial, directory / "shard-000009.zst.partial")
    with pytest.raises(ShardError, match="only the last shard can be unfinished"):
        DatasetWriter(directory)


def test_a_machine_durable_window_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(fd) or real(fd))
    script = Script(make_info())
    script.whole(1, 4)
    for durability, count in (("process", 0), ("machine", 2)):
        with DatasetWriter(tmp_path / durability, durability=durability) as writer:  # type: ignore[arg-type]
            script.write(writer, [])
            assert len(synced) == count
        synced.clear()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_the_disk_works_beside_the_writer_and_its_errors_end_it(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room in a sync is no full disk to wait for: what it was to write has left the ring."""
    script = long_script(12)
    monkeypatch.setattr(appender, "SYNC_BYTES", 1000)
    threads = []
    real = os.fdatasync

    def note(fd: int) -> None:
        threads.append(threading.current_thread())
        real(fd)

    monkeypatch.setattr(os, "fdatasync", note)
    with DatasetWriter(tmp_path / "good") as writer:
        script.write(writer, [5] * 100)
    assert threads and threading.main_thread() not in threads
    check(open_shards(tmp_path / "good"), script.samples.values())

    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fdatasync", fail)
    writer = DatasetWriter(tmp_path / "bad")
    with pytest.raises(ShardError, match=rf"did not reach the disk .*{os.strerror(code)}"):
        script.write(writer, [5] * 100)
        writer.finish_shard()
    monkeypatch.undo()  # the disk works again, and what it has forgotten stays forgotten
    with pytest.raises(ShardError, match="did not reach the disk"):
        writer.close()
    assert only_shard(tmp_path / "bad").suffix == ".partial"


def test_after_a_sync_that_failed_the_shard_gets_no_name_and_all_of_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of lost pages once: the next sync says that all is well."""
    script = long_script(12)
    real, failures = os.fsync, [errno.EIO]

    def fail_once(fd: int) -> None:
        if failures:
            raise OSError(failures.pop(), "Input/output error")
        real(fd)

    writer = DatasetWriter(tmp_path)
    script.write(writer, [5] * 100)
    partial = only_shard(tmp_path)
    monkeypatch.setattr(os, "fsync", fail_once)
    for end in (writer.finish_shard, writer.finish_shard, writer.close):
        with pytest.raises(ShardError, match=r"did not reach the disk .*Input/output"):
            end()
    assert not failures and only_shard(tmp_path) == partial
    # What the disk had forgotten is found by the next writer, on the same boot too.
    _, at, end = next(f for f in split_frames(partial.read_bytes()) if f[0] == b"data")
    flip(partial, (at + end) // 2)
    with DatasetWriter(tmp_path) as writer:
        assert writer.next_seq(script.info.run, 0) < len(script.records)
    finish(script, tmp_path)


def test_a_sync_that_fails_beside_a_window_is_not_forgotten_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk more is written during one sync than lies between two."""
    script = long_script(12)
    monkeypatch.setattr(appender, "SYNC_BYTES", 1000)
    begun, failing = threading.Event(), threading.Event()
    real, calls = os.fdatasync, []

    def fail_once(fd: int) -> None:
        calls.append(fd)
        if len(calls) > 1:
            return real(fd)
        begun.set()
        assert failing.wait(30)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail_once)
    writer = DatasetWriter(tmp_path)
    writer.begin_run(script.info)
    script.write_window(writer, 0, 19)
    assert begun.wait(30)

    def fail_now() -> None:
        failing.set()
        deadline = time.monotonic() + 30
        while not writer._shards.sync_error:
            assert time.monotonic() < deadline

    writer.begin_window(
        script.info.run, script.info.rank, 20, 29, script.records[20:30], check=fail_now
    )
    writer.finish_window()
    for end in (writer.finish_shard, writer.close):
        with pytest.raises(ShardError, match=r"did not reach the disk .*Input/output"):
            end()
    assert only_shard(tmp_path).suffix == ".partial"


def test_a_sync_that_fails_while_the_writer_is_closed_is_not_trusted_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = long_script(12)
    monkeypatch.setattr(appender, "SYNC_BYTES", 1000)
    failing = threading.Event()

    def fail(fd: int) -> None:
        assert failing.wait(30)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    writer = DatasetWriter(tmp_path)
    writer.begin_run(script.info)
    script.write_window(writer, 0, 19)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShardIndex, "apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            script.write_window(writer, 20, 29)
    threading.Timer(0.2, failing.set).start()
    writer.close()
    assert (tmp_path / ".lock").read_text().split()[1] == "?"
    monkeypatch.undo()
    finish(script, tmp_path)


def test_the_name_is_given_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync") or fsync(fd))
    monkeypatch.setattr(Path, "rename", lambda a, b: calls.append("rename") or rename(a, b))
    script = Script(make_info())
    script.whole(1, 4)
    writer = DatasetWriter(tmp_path)
    script.write(writer, [])
    assert only_shard(tmp_path).suffix == ".partial" and not calls
    writer.close()
    assert calls == ["fsync", "fsync", "rename", "fsync"]  # data, .next; then the directory


def test_a_shard_that_has_its_name_is_not_finished_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the disk failed after that: it would get another footer, behind its trailer."""
    script = Script(make_info())
    script.whole(1, 4)
    script.whole(2, 4)
    writer = DatasetWriter(tmp_path)
    writer.begin_run(script.info)
    script.write_window(writer, 0, 2)

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(directory, "sync", fail)
        with pytest.raises(OSError, match="Input/output"):
            writer.finish_shard()
    script.write(writer, [], first=3)
    writer.close()
    assert [p.name for p in sorted(tmp_path.glob("shard*"))] == [
        "shard-000000.zst",
        "shard-000001.zst",
    ]
    check(open_shards(tmp_path), script.samples.values())
    assert verify(tmp_path).ok


# Reading what is not finished


def test_a_partial_file_is_read_while_it_is_written(tmp_path: Path) -> None:
    script = long_script(samples=12)
    writer = DatasetWriter(tmp_path, shard_bytes=60_000)
    writer.begin_run(script.info)
    done: set[str] = set()
    for first in range(0, len(script.records), 5):
        last = min(first + 5, len(script.records)) - 1
        done |= {e.id for e in script.write_window(writer, first, last).ended}
        dataset = open_shards(tmp_path, partial=True)
        check(dataset, [s for s in script.samples.values() if s.id in done])
    before = open_shards(tmp_path, partial=True)
    writer.close()  # renames it under the reader
    check(before, script.samples.values())


def test_a_partial_file_is_not_ignored_in_silence(died: Copy) -> None:
    with pytest.warns(UserWarning, match=r"\.partial holds unfinished data.*recovers"):
        open_shards(died())


def test_a_partial_file_without_a_header_is_no_error(died: Copy) -> None:
    directory = died()
    (partial,) = directory.glob("*.partial")
    os.truncate(partial, 20)
    assert len(open_shards(directory, partial=True).shards) == 1


def test_a_shard_gone_missing_is_named(written: tuple[Script, Path], died: Copy) -> None:
    script, _ = written
    directory = died()
    finish(script, directory)
    first = min(directory.glob("shard-*"))
    first.unlink()
    dataset = open_shards(directory)
    with pytest.raises(FileNotFoundError, match="put it back"):
        for sample in dataset:
            assert np.any(sample.hidden_states) and len(sample.token_ids)
    findings = verify(directory).findings
    assert findings and all("put it back" in f.what for f in findings)


def test_one_file_finds_its_neighbours(written: tuple[Script, Path], died: Copy) -> None:
    script, _ = written
    directory = died()
    finish(script, directory)
    first, path = sorted(directory.glob("shard-*"))
    first.rename(directory / "shard-000099.zst")
    first.write_bytes(b"what else may lie there")
    dataset = open_shards(path)
    assert any(len({p.shard for p in s.stored}) > 1 for s in dataset)
    expected = {s.id: s for s in script.samples.values()}
    check(dataset, [expected[i] for i in dataset.ids])


def test_corrupt_in_the_middle_is_reported_by_the_reader(
    written: tuple[Script, Path], died: Copy
) -> None:
    directory = died()
    path = min(directory.glob("shard-*.zst"))
    _, at, end = next(f for f in split_frames(path.read_bytes()) if f[0] == b"data")
    flip(path, (at + end) // 2)
    dataset = open_shards(directory, states=None, partial=True)
    with pytest.raises(CorruptShardError, match=rf"{path.name} at byte \d+: .*restore"):
        for sample in dataset:
            for a, b in sample.ranges:
                sample.read(a, b)
