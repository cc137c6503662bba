"""Out of a real GPU: what is committed is there, what is static is not torn, what fails is told.

``-k long`` are the tests of a million records; compute-sanitizer takes the others.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rig.producer import HIDDEN, Producer

from hstransport import _core
from hstransport.capture import planes
from hstransport.copyout import DeviceCopier
from hstransport.exporter import MAX_DECODE_STEPS, DecodeRun
from hstransport.protocol import ROWS, unpack_event
from hstransport.recorder import RowSpan
from hstransport.ring import RingReader, RingWriter

pytestmark = pytest.mark.gpu

PLANES = 3
ROW_BYTES = PLANES * HIDDEN * 2
SOURCE_WORDS = 8 << 20


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy", reason="cupy makes the arrays of these tests")


def take(reader, records, hidden=HIDDEN, planes=PLANES):
    got = []
    deadline = time.monotonic() + 30
    while len(got) < records:
        assert time.monotonic() < deadline, f"{len(got)} of {records} records came"
        record = reader.read()
        if record is None:
            continue
        if record.kind == ROWS:
            event = unpack_event(record.kind, record.meta)
            states = record.payload.view(np.uint16).reshape(planes, event.rows, hidden)
            got.append(states.copy())
        else:
            got.append(None)
        record.release()
    return got


def test_the_kernel_is_built_in_where_nvcc_is():
    copier = DeviceCopier(0, 1 << 20)
    assert copier.has_kernel
    copier.close()


@pytest.mark.parametrize("hidden", [64, 4096, 7168, 6, 1000])
@pytest.mark.parametrize("layers", [1, 3, 40])
def test_gathered_rows_are_exact(cp, ring_dir, hidden, layers):
    """Also rows that are no multiple of 16 bytes, more planes and ranges than one launch takes."""
    size = 400 * (layers + 1) * hidden * 2  # the whole pass is gathered, the wanted rows leave
    producer = Producer(
        ring_dir,
        copier=DeviceCopier(0, size),
        ring_bytes=-(-10 * size // 4096) * 4096 + (1 << 20),  # a quarter takes them in one record
        layers=tuple(range(1, layers + 1)),
        hidden=hidden,
    )
    reader = RingReader.attach(producer.place.path)
    sample = producer.start("a", 4)
    host = producer.states(400)
    packed = cp.asarray(np.ascontiguousarray(host.transpose(1, 0, 2)).reshape(400, -1))
    views = [packed[:, k * hidden : (k + 1) * hidden] for k in range(layers + 1)]
    separate = [cp.asarray(p) for p in host]
    rows = np.sort(np.random.default_rng(hidden).choice(400, 170, replace=False))
    take(reader, 1)
    for arrays in (views, separate):
        spans = [RowSpan(sample, i, int(r), 1) for i, r in enumerate(rows)]
        producer.put(spans, planes(arrays, hidden))
        (got,) = take(reader, 1, hidden, layers + 1)
        assert np.array_equal(got, host[:, rows])
    producer.close()


def test_torch_and_cupy_go_through_the_same_gate(cp, ring_dir):
    torch = pytest.importorskip("torch")
    producer = Producer(ring_dir, copier=DeviceCopier(0, 1 << 20), ring_bytes=4 << 20)
    reader = RingReader.attach(producer.place.path)
    sample = producer.start("a", 4)
    host = producer.states(20)
    take(reader, 1)
    tensors = [torch.from_numpy(p.view(np.int16)).cuda().view(torch.bfloat16) for p in host]
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        taken = planes(tensors, HIDDEN)
        assert taken.stream == own.cuda_stream
        producer.put([RowSpan(sample, 0, 3, 9)], taken)
    assert np.array_equal(take(reader, 1)[0], host[:, 3:12])
    with cp.cuda.Stream(non_blocking=True) as stream:
        taken = planes([cp.asarray(p) for p in host], HIDDEN)
        assert taken.stream == stream.ptr
        producer.put([RowSpan(sample, 0, 3, 9)], taken)
    assert np.array_equal(take(reader, 1)[0], host[:, 3:12])
    producer.close()


def test_decode_steps_are_gathered_into_one_record(cp, ring_dir):
    producer = Producer(ring_dir, copier=DeviceCopier(0, 1 << 20), ring_bytes=8 << 20)
    reader = RingReader.attach(producer.place.path)
    samples = [producer.start(str(i), 4) for i in range(5)]
    take(reader, 5)
    for steps in (MAX_DECODE_STEPS, 3):
        run = DecodeRun.of([RowSpan(s, 4, i, 1) for i, s in enumerate(samples)])
        static = [cp.zeros((8, HIDDEN), cp.uint16) for _ in range(PLANES)]
        taken = planes(static, HIDDEN)
        hosts = []
        for _ in range(steps):
            hosts.append(producer.states(8))
            for buffer, plane in zip(static, hosts[-1], strict=True):
                buffer.set(plane)
            producer.step(run, taken)
        producer.put([RowSpan(samples[0], 0, 0, 8)], taken)
        got, _ = take(reader, 2)
        expected = np.stack(hosts, axis=2)[:, :5]  # [planes, rows, steps, hidden]
        assert np.array_equal(got.reshape(expected.shape), expected)
    producer.close()


KERNELS = r"""
extern "C" __global__ void replay(unsigned short* value, unsigned short* out, int words) {
  // Every word of plane k becomes 4 * (replays so far) + k.
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < 3 * words; i += gridDim.x * blockDim.x)
    out[i] = (*value + 1) * 4 + i / words;
}
extern "C" __global__ void count(unsigned short* value) { ++*value; }
extern "C" __global__ void spin(long long ticks) {
  const long long start = clock64();
  while (clock64() - start < ticks) {}
}
"""


def replays(ring_dir, cp, *, ordered):
    """Replays of a CUDA graph, back to back, while the copy stream is kept busy; torn ones."""
    hidden, rows, count = 4096, 256, 60
    copier = DeviceCopier(0, 32 << 20)
    producer = Producer(ring_dir, copier=copier, ring_bytes=1 << 30, hidden=hidden)
    reader = RingReader.attach(producer.place.path)
    sample = producer.start("a", 4)
    kernels = cp.RawModule(code=KERNELS)
    replay, step, spin = (kernels.get_function(name) for name in ("replay", "count", "spin"))
    spin((1,), (1,), (np.int64(1),))  # loads the module, which must not happen while capturing
    value = cp.zeros(1, cp.uint16)
    static = cp.zeros((PLANES, rows, hidden), cp.uint16)
    words = np.int32(rows * hidden)
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        replay((132,), (256,), (value, static, words))
        step((1,), (1,), (value,))
        graph = stream.end_capture()
    slow = cp.cuda.ExternalStream(copier.core.stream)
    cp.cuda.Device().synchronize()
    for _ in range(count):
        graph.launch(stream)
        spin((1,), (1,), (np.int64(1_000_000),), stream=slow)  # half a millisecond
        source = planes(list(static), hidden, stream.ptr if ordered else slow.ptr)
        producer.put([RowSpan(sample, 0, 0, rows)], source)
    wrong = 0
    for i, states in enumerate(take(reader, count + 1, hidden)[1:]):
        expected = ((i + 1) * 4 + np.arange(PLANES)).astype(np.uint16)
        wrong += not (states == expected[:, None, None]).all()
    producer.close()
    return wrong


def test_static_buffers_are_read_before_the_next_replay_writes_them(cp, ring_dir):
    assert replays(ring_dir, cp, ordered=True) == 0


def test_without_the_callers_stream_the_same_replays_are_torn(cp, ring_dir):
    assert replays(ring_dir, cp, ordered=False) > 0


def test_the_ring_is_pinned_while_the_copier_is_open(cp, ring_dir):
    ring = RingWriter.create(ring_dir / "a.ring", 1 << 20, b"")
    slot = ring.reserve(1, b"", 4096)
    kind = lambda: cp.cuda.runtime.pointerGetAttributes(slot.address).type  # noqa: E731
    assert kind() == 0  # memory that CUDA does not know
    copier = DeviceCopier(0, 1 << 20)
    copier.pin(ring)
    assert kind() == 1  # pinned host memory
    copier.close()
    assert kind() == 0
    ring.close()


# A million records of random sizes, back to back, each checked by another process.


def words_of(cp):
    """The same random words here, on the device, and in the reader."""
    return cp.asarray(np.random.default_rng(7).integers(0, 1 << 16, SOURCE_WORDS, np.uint16))


def write_records(cp, path, sizes, send):
    """Send records of these sizes in words; the reader waits for each and checks all of it.

    It is never more than two records behind: only who waits for a record can find it unready.
    """
    ring = RingWriter.create(path, 8 << 20, b"")
    reader = subprocess.Popen(
        [sys.executable, "-m", "rig.gpu_reader", str(path), str(len(sizes)), str(SOURCE_WORDS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout.readline() == "attached\n"
    source = words_of(cp)
    starts = np.random.default_rng(9).random(len(sizes)) * (SOURCE_WORDS - sizes)
    before = last = 0
    for size, start in zip(sizes.tolist(), starts.astype(np.int64).tolist(), strict=True):
        deadline = time.monotonic() + 60
        while ring.tail < before:
            assert time.monotonic() < deadline, "the reader stopped"
        slot = ring.reserve(1, start.to_bytes(8, "little"), 2 * size)
        before, last = last, slot.position + slot.record_bytes
        send(ring, slot, source.data.ptr + 2 * start, size)
    out, _ = reader.communicate(timeout=300)
    assert reader.returncode == 0
    return int(out.split()[-1]), ring


def random_sizes(count, smallest, largest):
    """In words; small ones more often."""
    exponents = np.random.default_rng(8).uniform(np.log2(smallest), np.log2(largest), count)
    return np.exp2(exponents).astype(np.int64)


def test_long_a_million_records_are_ready_only_when_they_are_there(cp, ring_dir):
    copier = DeviceCopier(0, 16 << 20)
    core = copier.core
    pinned = []

    def send(ring, slot, address, size):
        if not pinned:
            copier.pin(ring)
            pinned.append(ring)
        claim = core.take(_core.Planes([(address, 2 * size)], 1, 2 * size, 0, 0, None), 0, 1)
        core.send(claim, slot, [(0, 0, 2 * size)], 2 * size, 2 * size, 1)

    bad, ring = write_records(cp, ring_dir / "a.ring", random_sizes(1_000_000, 1, 1 << 18), send)
    copier.close()
    ring.close()
    assert bad == 0


def test_the_same_check_sees_records_that_are_committed_too_early(cp, ring_dir):
    copier = DeviceCopier(0, 1 << 20)
    pinned = []
    one = cp.ones(1, cp.uint32)
    stream = cp.cuda.Stream(non_blocking=True)
    spin = cp.RawModule(code=KERNELS).get_function("spin")

    def send(ring, slot, address, size):
        if not pinned:
            copier.pin(ring)
            pinned.append(ring)
        to_host = cp.cuda.runtime.memcpyDeviceToHost
        cp.cuda.runtime.memcpyAsync(slot.ready_address, one.data.ptr, 4, to_host, stream.ptr)
        # Without it the bytes are there within microseconds, and it is luck whether one looks.
        spin((1,), (1,), (np.int64(200_000),), stream=stream)
        cp.cuda.runtime.memcpyAsync(slot.address, address, 2 * size, to_host, stream.ptr)

    bad, ring = write_records(cp, ring_dir / "a.ring", random_sizes(300, 1 << 14, 1 << 19), send)
    stream.synchronize()
    copier.close()
    ring.close()
    print(f"{bad} of 300 records were bad")
    assert bad > 0


BROKEN = """
import logging, sys, time
logging.basicConfig(format="%(levelname)s %(message)s")
from pathlib import Path
import cupy as cp
from test_copier import Request, Producer, DeviceCopier, Pass, Noted, HIDDEN, planes
trap = cp.RawKernel('extern "C" __global__ void trap() { asm("trap;"); }', "trap")
producer = Producer(Path(sys.argv[1]), copier=DeviceCopier(0, 1 << 20), ring_bytes=4 << 20)
tap = producer.tap()
request = Request("a", 8)
for step in range(10):
    work = tap.guarded(tap.plan, [request], Pass([8 * step], [8]), Noted())
    if step == 3:
        trap((1,), (1,), ())  # from here on the context is lost
    if work:
        arrays = good if step > 3 else [cp.zeros((8, HIDDEN), cp.uint16) for _ in range(3)]
        good = arrays
        tap.guarded(tap.take, work, lambda: planes(arrays, HIDDEN))
    time.sleep(0.05)
print("serving goes on", flush=True)
"""


@pytest.mark.skipif(
    "compute-sanitizer" in os.environ.get("HST_TOOL", ""), reason="it is meant to fail"
)
def test_an_error_of_the_device_is_told_once_by_name_and_the_process_lives_on(ring_dir):
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, str(ring_dir)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "serving goes on" in done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    assert len(errors) == 1, done.stderr
    assert re.search("CUDA_ERROR_(LAUNCH_FAILED|ILLEGAL_INSTRUCTION)", errors[0])
