"""One dataset in many processes and threads, as torch and numpy arrays, and with a million ids."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, Sample, open_shards, workers
from shard_kit import Script, make_info


@pytest.fixture(scope="module")
def dataset_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("workers")
    script = Script(make_info(hidden=64))
    for sid in range(40):
        script.whole(sid, 10 + sid)
    with DatasetWriter(out, shard_bytes=40_000) as writer:
        writer.begin_run(script.info)
        for first in range(0, len(script.records), 6):
            script.write_window(writer, first, first + 5)
    return out


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A dataset with a sample that is read by several threads, and its states."""
    out = tmp_path_factory.mktemp("large")
    script = Script(make_info(hidden=2048))
    script.whole(1, 2000)
    with DatasetWriter(out) as writer:
        script.write(writer, [])
    (sample,) = script.samples.values()
    return out, sample.states()


def test_large_samples_are_read_with_the_threads_that_can_be_had(
    large: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, states = large
    sample = open_shards(path, threads=5)[0]
    monkeypatch.setattr(workers, "_pools", {})
    started, real = [], threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(20):
        np.testing.assert_array_equal(sample.hidden_states, states)
    assert len(started) > 1


def test_nobody_reads_on_when_a_read_was_interrupted(large: tuple[Path, np.ndarray]) -> None:
    """What a thread would write into memory that is somebody else's by then."""
    code = f"""
import random, signal, sys, threading, time
import numpy as np
from hstransport_consumer import open_shards
def interrupt(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
sample = open_shards({str(large[0])!r}, threads=4)[0]
out, rng, hits = np.empty(sample.read().shape, np.uint16), random.Random(1), 0
while hits < 60:
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 0.008))
        sample.read(out=out)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        hits += 1
        out[:] = 7
        time.sleep(0.003)
        assert (out == 7).all(), hits
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def test_a_read_that_gets_no_memory_is_over() -> None:
    """And whoever waits until nobody is at work does not wait for ever."""
    code = """
import os, resource
import numpy as np
from hstransport import _core
bias, out = np.zeros(64, np.uint8), np.zeros((4, 64), np.uint16)
place = [os.open("/dev/zero", os.O_RDONLY), 0, 3 << 30, 3 << 30]
place += [bias.ctypes.data, out.ctypes.data, 4, 128]
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
reads = _core.PlaneReads(np.array([place], np.uint64), 64, False, [bias, out])
try:
    with reads:
        reads.work(1)
except MemoryError:
    print(reads.left())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.stdout == b"[0]\n", done.stderr.decode()[-3000:]


def test_reads_of_any_size_share_their_threads(
    large: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a process has started stay."""
    path, states = large
    monkeypatch.setattr(workers, "_pools", {})
    before = set(threading.enumerate())
    sample = open_shards(path, threads=7)[0]
    for stop in (500, 1000, 2000):
        for layers in (slice(1), slice(2), slice(None)):
            got = sample.read(0, stop, layers=sample.layers[layers])
            np.testing.assert_array_equal(got, states[:stop, layers])
    assert 0 < len(set(threading.enumerate()) - before) < 7


def test_a_fork_of_a_loader_reads_with_one_thread(dataset_path: Path) -> None:
    dataset = open_shards(dataset_path)
    assert dataset.threads == len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(getattr, (dataset, "threads")) == 1
    assert open_shards(dataset_path, threads=3).threads == 3


@pytest.mark.parametrize("lacks", ["constant", "call"])
def test_old_systems_read_large_samples_too(
    large: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """A Python built for a libc without preadv2."""

    def preadv(*_: object) -> int:
        raise NotImplementedError("preadv2 unavailable")

    if lacks == "constant":
        monkeypatch.delattr(os, "RWF_NOWAIT")
    else:
        monkeypatch.setattr(os, "preadv", preadv)
    np.testing.assert_array_equal(open_shards(large[0])[0].hidden_states, large[1])


@pytest.mark.parametrize("bend", ["backwards", "read-only", "of bytes"])
def test_memory_that_cannot_be_read_into_is_refused(
    large: tuple[Path, np.ndarray], bend: str
) -> None:
    out = np.empty(large[1].shape, np.uint16)
    if bend == "backwards":
        out = out[::-1]
    elif bend == "read-only":
        out.setflags(write=False)
    else:
        out = out.view(np.uint8)
    with pytest.raises(ValueError, match="out "):
        open_shards(large[0])[0].read(out=out)


def collate(samples: list[Sample]) -> list[tuple[str, object]]:
    return [(s.id, s.torch()) for s in samples]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_workers_read_the_same_bits(dataset_path: Path, method: str) -> None:
    torch = pytest.importorskip("torch")
    dataset = open_shards(dataset_path)
    dataset[0].read()  # the parent has used it
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=5,
        num_workers=2,
        collate_fn=collate,
        multiprocessing_context=method,
    )
    seen = [pair for batch in loader for pair in batch]
    assert [i for i, _ in seen] == list(dataset.ids)
    for sample_id, states in seen:
        assert states.dtype == torch.bfloat16
        bits = states.view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bits, dataset[sample_id].hidden_states)


def test_a_pickled_dataset_has_the_same_samples_by_number(tmp_path: Path) -> None:
    """Whatever was stored meanwhile; here what was missing of one."""
    script = Script(make_info())
    script.start(0, 9, id="again")
    script.end(0)
    script.whole(1, 5)
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [])
    dataset = open_shards(tmp_path, states=None)
    packed = pickle.dumps(dataset)
    script.whole(2, 9, id="again")
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [], first=5)
    assert open_shards(tmp_path, states=None).ids == ["sample-1", "again"]
    assert pickle.loads(packed).ids == dataset.ids == ["again", "sample-1"]
    (tmp_path / "shard-000000.zst").unlink()
    with pytest.raises(FileNotFoundError, match="put them back"):
        pickle.loads(packed)


def test_threads_read_the_same_bits(dataset_path: Path) -> None:
    dataset = open_shards(dataset_path)
    expected = [s.hidden_states for s in dataset]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for a, b in zip(expected, pool.map(lambda s: s.hidden_states, dataset), strict=True):
                np.testing.assert_array_equal(a, b)


def test_arrays_of_other_libraries_are_the_same_bits(dataset_path: Path) -> None:
    sample = open_shards(dataset_path)[3]
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert sample.bfloat16().dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(sample.bfloat16().view(np.uint16), sample.hidden_states)


def test_the_import_needs_neither_torch_nor_sglang() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["sglang"] = sys.modules["ml_dtypes"] = None
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer import verify, inspect
"""
    subprocess.run([sys.executable, "-c", code], check=True)
