"""Out of a GPU into the ring, on a CUDA driver without a GPU: order, lifetime, ends.

What a real device does with it is test_gpu_copier.py's.
"""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from rig.fake_cuda import FakeArray, FakeStream, load, on_fake_cuda
from rig.producer import HIDDEN, Producer, read_samples, tokens

from hstransport import _core
from hstransport.capture import plane, planes
from hstransport.copyout import DeviceCopier
from hstransport.errors import CaptureError, ConfigError, CudaError, LeaseError
from hstransport.exporter import MAX_DECODE_STEPS, DecodeRun
from hstransport.follower import Noted, Pass
from hstransport.protocol import END, FINISHED, ROWS, unpack_event
from hstransport.recorder import RowSpan
from hstransport.ring import RingReader, inspect_ring

PLANES = 3
ROW_BYTES = PLANES * HIDDEN * 2


def device_planes(states, stream=0):
    return planes([FakeArray(p, stream) for p in states], HIDDEN)


def read_all(reader, records, *, seconds=20.0):
    """``(event, states copied)`` of that many records, each as soon as it is committed."""
    got = []
    deadline = time.monotonic() + seconds
    while len(got) < records:
        assert time.monotonic() < deadline, f"{len(got)} of {records} records came"
        record = reader.read()
        if record is None:
            time.sleep(20e-6)
            continue
        event = unpack_event(record.kind, record.meta)
        states = None
        if record.kind == ROWS and not record.abandoned:
            states = record.payload.view(np.uint16).reshape(PLANES, event.rows, HIDDEN).copy()
        got.append((event, states))
        record.release()
    return got


def open_pair(ring_dir, *, stage_rows=512, **options):
    copier = DeviceCopier(0, stage_rows * ROW_BYTES)
    producer = Producer(ring_dir, copier=copier, **options)
    return producer, RingReader.attach(producer.place.path)


@on_fake_cuda()
def test_a_record_is_ready_only_when_its_bytes_are_there(ring_dir):
    producer, reader = open_pair(ring_dir, policy="block", block_s=20)
    rng = np.random.default_rng(1)
    sample = producer.start("a", 4)
    read_all(reader, 1)
    for n in rng.integers(1, 33, 100):
        states = producer.states(int(n))
        producer.put([RowSpan(sample, 0, 0, int(n))], device_planes(states))
        ((event, got),) = read_all(reader, 1)
        assert event.rows == n
        assert np.array_equal(got, states)
    producer.close()


@on_fake_cuda()
def test_only_the_planned_rows_are_gathered_also_of_packed_planes(ring_dir):
    producer, reader = open_pair(ring_dir)
    a, b = producer.start("a", 4), producer.start("b", 9)
    packed = producer.states(20)
    wide = np.ascontiguousarray(packed.transpose(1, 0, 2)).reshape(20, PLANES * HIDDEN)
    arrays = [wide[:, k * HIDDEN : (k + 1) * HIDDEN] for k in range(PLANES)]
    spans = [RowSpan(a, 0, 2, 3), RowSpan(b, 7, 11, 2), RowSpan(b, 9, 13, 1)]
    producer.put(spans, device_planes(arrays))
    event, got = read_all(reader, 3)[-1]
    assert event.segments == ((0, 0, 3), (1, 7, 2), (1, 9, 1))
    assert np.array_equal(got, packed[:, [2, 3, 4, 11, 12, 13]])
    producer.close()


def replays(ring_dir, *, ordered):
    """Static buffers that every replay overwrites, each replay's rows exported in between."""
    producer, reader = open_pair(ring_dir, ring_bytes=4 << 20)
    stream = FakeStream()
    static = producer.states(8)
    sources = [producer.states(8) for _ in range(60)]
    sample = producer.start("a", 4)
    read_all(reader, 1)
    copy_stream = producer.exporter._copier.core.stream
    for source in sources:
        stream.write(static, source)  # the replay
        exported = device_planes(static, stream.handle if ordered else copy_stream)
        producer.put([RowSpan(sample, 0, 0, 8)], exported)
    wrong = sum(
        not np.array_equal(got, source)
        for (_, got), source in zip(read_all(reader, len(sources)), sources, strict=True)
    )
    producer.close()
    return wrong


@on_fake_cuda()
def test_static_buffers_are_read_before_the_next_replay_writes_them(ring_dir):
    assert replays(ring_dir, ordered=True) == 0


@on_fake_cuda()
def test_without_the_callers_stream_the_same_replays_are_torn(ring_dir):
    assert replays(ring_dir, ordered=False) > 0


@on_fake_cuda(FAKE_CUDA_DELAY_US=1000)
def test_a_full_stage_makes_the_stream_wait_and_loses_nothing(ring_dir):
    """The stage holds two passes; the copies out of it are slower than the passes come."""
    producer, reader = open_pair(ring_dir, stage_rows=17, ring_bytes=4 << 20)
    stream = FakeStream()
    sample = producer.start("a", 4)
    read_all(reader, 1)
    sent = [producer.states(8) for _ in range(40)]
    for states in sent:
        producer.put([RowSpan(sample, 0, 0, 8)], device_planes(states, stream.handle))
    for (_, got), states in zip(read_all(reader, len(sent)), sent, strict=True):
        assert np.array_equal(got, states)
    producer.close()


@on_fake_cuda()
def test_a_pass_larger_than_the_stage_goes_in_pieces(ring_dir):
    producer, reader = open_pair(ring_dir, stage_rows=16, ring_bytes=4 << 20)
    sample = producer.start("a", 4)
    states = producer.states(100)
    producer.put([RowSpan(sample, 0, 0, 100)], device_planes(states))
    pieces = read_all(reader, 1 + 7)[1:]
    assert [e.rows for e, _ in pieces] == [16] * 6 + [4]
    assert np.array_equal(np.concatenate([s for _, s in pieces], axis=1), states)
    producer.close()


@on_fake_cuda()
def test_a_long_record_leaves_in_pieces_of_the_copy_engine(ring_dir):
    rows = (20 << 20) // ROW_BYTES
    producer, reader = open_pair(ring_dir, stage_rows=rows, ring_bytes=192 << 20)
    sample = producer.start("a", 4)
    states = producer.states(rows)
    producer.put([RowSpan(sample, 0, 0, rows)], device_planes(states))
    (event, got) = read_all(reader, 2)[1]
    assert event.rows == rows
    assert np.array_equal(got, states)
    producer.close()


def decode(producer, run, steps, stream=0):
    """That many steps of the run; returns ``[steps][planes, rows, hidden]``."""
    all_states = []
    for _ in range(steps):
        states = producer.states(run.rows)
        producer.step(run, device_planes(states, stream))
        all_states.append(states)
    return all_states


@on_fake_cuda()
def test_decode_steps_are_gathered_into_one_record(ring_dir):
    producer, reader = open_pair(ring_dir, stage_rows=8 * MAX_DECODE_STEPS, ring_bytes=8 << 20)
    a, b, c = (producer.start(name, 4) for name in "abc")
    read_all(reader, 3)
    run = DecodeRun.of([RowSpan(a, 4, 0, 1), RowSpan(b, 9, 2, 1), RowSpan(c, 5, 3, 1)])
    states = decode(producer, run, MAX_DECODE_STEPS)
    assert not run.open
    ((event, got),) = read_all(reader, 1)
    assert event.segments == ((0, 4, 32), (1, 9, 32), (2, 5, 32))
    for k, row in enumerate([0, 2, 3]):
        expected = np.stack([s[:, row] for s in states], axis=1)
        assert np.array_equal(got[:, 32 * k : 32 * k + 32], expected)
    producer.close()


@on_fake_cuda()
def test_a_run_of_decode_steps_ends_early_when_something_else_comes(ring_dir):
    producer, reader = open_pair(ring_dir, ring_bytes=8 << 20)
    a, b = producer.start("a", 4), producer.start("b", 4)
    read_all(reader, 2)
    run = DecodeRun.of([RowSpan(a, 4, 0, 1), RowSpan(b, 9, 1, 1)])
    first = decode(producer, run, 3)
    prefill = producer.states(5)
    producer.put([RowSpan(b, 20, 0, 5)], device_planes(prefill))
    assert not run.open
    again = DecodeRun.of([RowSpan(a, 7, 1, 1)])
    last = decode(producer, again, 2)
    producer.end(a, 9, 6)
    (e1, s1), (e2, s2), (e3, s3), (e4, _) = read_all(reader, 4)
    assert e1.segments == ((0, 4, 3), (1, 9, 3))
    assert np.array_equal(s1[:, :3], np.stack([s[:, 0] for s in first], axis=1))
    assert np.array_equal(s1[:, 3:], np.stack([s[:, 1] for s in first], axis=1))
    assert e2.segments == ((1, 20, 5),) and np.array_equal(s2, prefill)
    assert e3.segments == ((0, 7, 2),)
    assert np.array_equal(s3, np.stack([s[:, 1] for s in last], axis=1))
    assert (e4.sid, e4.tokens, e4.dropped) == (0, 9, 0)
    producer.close()


@on_fake_cuda()
def test_gathered_steps_are_dropped_and_counted_when_the_ring_is_full(ring_dir):
    producer, reader = open_pair(ring_dir, ring_bytes=1 << 20, policy="drop")
    a, filler = producer.start("a", 4), producer.start("f", 4)
    while True:  # until the ring is full
        producer.put([RowSpan(filler, 0, 0, 60)], device_planes(producer.states(60)))
        if filler.dropped:
            break
    run = DecodeRun.of([RowSpan(a, 4, 0, 1)])
    decode(producer, run, MAX_DECODE_STEPS)
    with pytest.raises(CaptureError, match="begin another"):
        decode(producer, run, 1)
    decode(producer, DecodeRun.of([RowSpan(a, 36, 0, 1)]), 10)  # of a sample that is spoilt by now
    producer.end(a, 46, 43)
    assert a.dropped == MAX_DECODE_STEPS + 10
    records = inspect_ring(producer.place.path).records
    ends = [e for e, _ in read_all(reader, records) if not hasattr(e, "prompt")]
    assert ends[-1].dropped == MAX_DECODE_STEPS + 10
    # The stage is free again, and what comes next is right.
    b = producer.start("b", 4)
    states = producer.states(40)
    producer.put([RowSpan(b, 0, 0, 40)], device_planes(states))
    assert np.array_equal(read_all(reader, 2)[-1][1], states)
    producer.close()


def let_go(alive):
    gc.collect()
    deadline = time.monotonic() + 20
    while any(ref() is not None for ref in alive):
        assert time.monotonic() < deadline, "the sources were never let go"
        time.sleep(0.01)


@on_fake_cuda()
def test_sources_are_held_until_they_are_gathered(ring_dir):
    producer, reader = open_pair(ring_dir, ring_bytes=4 << 20)
    stream = FakeStream()
    flag = stream.hold()
    sample = producer.start("a", 4)
    states = producer.states(8)
    expected = states.copy()
    arrays = [FakeArray(p, stream.handle) for p in states]
    alive = [weakref.ref(a) for a in arrays]
    producer.put([RowSpan(sample, 0, 0, 8)], planes(arrays, HIDDEN))
    del arrays, states
    producer.exporter.flush()
    gc.collect()
    assert all(ref() is not None for ref in alive), "a source was let go before it was gathered"
    flag.value = 1
    assert np.array_equal(read_all(reader, 2)[-1][1], expected)
    let_go(alive)
    producer.close()


@on_fake_cuda()
def test_sources_of_decode_steps_are_held_until_they_are_gathered(ring_dir):
    producer, reader = open_pair(ring_dir, ring_bytes=4 << 20)
    stream = FakeStream()
    flag = stream.hold()
    sample = producer.start("a", 4)
    run = DecodeRun.of([RowSpan(sample, 4, 0, 1)])
    expected, alive = [], []
    for _ in range(3):
        states = producer.states(1)
        expected.append(states.copy())
        arrays = [FakeArray(p, stream.handle) for p in states]
        alive.append(weakref.ref(arrays[0]))
        producer.step(run, planes(arrays, HIDDEN))
        del arrays, states
    producer.end(sample, 7, 4)
    gc.collect()
    assert all(ref() is not None for ref in alive), "a source was let go before it was gathered"
    flag.value = 1
    got = read_all(reader, 3)[1][1]
    assert np.array_equal(got, np.concatenate(expected, axis=1))
    let_go(alive)
    producer.close()


@on_fake_cuda(FAKE_CUDA_LOG="registered")
def test_a_stop_in_the_middle_of_a_run_gives_everything_back(ring_dir):
    os.chdir(ring_dir)
    producer, reader = open_pair(ring_dir, ring_bytes=4 << 20)
    tap = producer.tap()
    a = Request("a", 4)
    tap.guarded(
        tap.take, tap.plan([a], Pass([0], [4]), Noted()), lambda: device_planes(producer.states(4))
    )
    run = tap.plan_decode([a], Pass([4], [1]), Noted(), None)
    tap.guarded(tap.take, run, lambda: device_planes(producer.states(1)))

    def broken():
        raise CaptureError("several decode graphs of batch size 1")

    tap.guarded(tap.take, tap.going_on([a], None), broken)
    deadline = time.monotonic() + 10
    while not reader.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Path("registered").read_text().split()[::2] == ["register", "unregister"]
    ends = [e for e, _ in read_all(reader, 3) if hasattr(e, "reason")]
    assert [(e.reason, "several decode graphs" in e.detail) for e in ends] == [("aborted", True)]


@on_fake_cuda(FAKE_CUDA_DELAY_US=20_000, FAKE_CUDA_LOG="registered")
def test_an_orderly_end_waits_for_copies_and_unpins_before_it_unmaps(ring_dir):
    os.chdir(ring_dir)
    producer, reader = open_pair(ring_dir, ring_bytes=4 << 20)
    sample = producer.start("a", 4)
    sent = [producer.states(8) for _ in range(5)]
    for states in sent:
        producer.put([RowSpan(sample, 0, 0, 8)], device_planes(states))
    ring = producer.ring
    producer.close()  # in the middle of the copies
    (registered, address), (unregistered, same) = (
        line.split() for line in Path("registered").read_text().splitlines()
    )
    assert (registered, unregistered, address) == ("register", "unregister", same)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split("-")[0] for line in maps]
    assert f"{int(address, 16):x}" in [m.lstrip("0") for m in mapped], "unmapped before unpinned"
    for (_, got), states in zip(read_all(reader, 6)[1:], sent, strict=True):
        assert np.array_equal(got, states)
    assert reader.closed and not ring.core.is_open


@on_fake_cuda(FAKE_CUDA_DELAY_US=0)
def test_the_gate_takes_device_arrays_of_any_library(ring_dir):
    states = np.arange(6 * HIDDEN, dtype=np.uint16).reshape(6, HIDDEN)
    taken = planes([FakeArray(states, stream=77)], HIDDEN)
    assert (taken.device, taken.stream, taken.rows) == (0, 77, 6)
    assert taken.places[0] == (states.ctypes.data, 2 * HIDDEN)
    with pytest.raises(CaptureError, match="several devices"):
        planes([FakeArray(states), states], HIDDEN)
    producer, _ = open_pair(ring_dir)
    with pytest.raises(CudaError, match="host memory"):
        producer.put([RowSpan(producer.start("a", 6), 0, 0, 6)], planes([states], HIDDEN))


def test_tensors_of_a_model_are_looked_into_without_detours(monkeypatch):
    """DLPack's C interface and the general way find the same in what both take."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no DLPack C exchange interface")
    wide = torch.randn(6, 3 * HIDDEN).to(torch.bfloat16)
    good = [wide[:, :HIDDEN], wide[1:5, HIDDEN : 2 * HIDDEN], wide[:, 2 * HIDDEN :].contiguous()]
    one_row = [wide[2:3, HIDDEN : 2 * HIDDEN], torch.nn.Parameter(wide[0:1, :HIDDEN])[:, :]]
    for arrays in (good, one_row):
        fast = _core.look_into(arrays, HIDDEN)
        assert fast is not None
        with monkeypatch.context() as patched:
            patched.setattr(_core, "look_into", lambda *a: None)
            slow = planes(arrays, HIDDEN)
        addresses = [t.data_ptr() for t in arrays]
        assert [a for a, _ in fast.places] == [a for a, _ in slow.places] == addresses
        assert (fast.rows, fast.row_bytes, fast.device) == (slow.rows, slow.row_bytes, None)
        if fast.rows > 1:
            assert [s for _, s in fast.places] == [t.stride(0) * 2 for t in arrays]
    transposed = torch.randn(HIDDEN, 6).to(torch.bfloat16).T
    for bad in (wide.float(), wide[0], transposed, wide, wide[:, ::3], np.zeros((6, HIDDEN), "u2")):
        assert _core.look_into([good[0], bad], HIDDEN) is None
    assert _core.look_into([], HIDDEN) is None
    for bad, why in ((wide.float()[:, :HIDDEN], "float32"), (wide[:, ::3], "contiguous")):
        with pytest.raises(CaptureError, match=why):
            planes([bad], HIDDEN)


def test_planes_keep_their_sources():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    alive = weakref.ref(tensor)
    taken = planes([tensor], HIDDEN)
    del tensor
    gc.collect()
    assert alive() is not None
    del taken
    gc.collect()
    assert alive() is None


def test_the_gate_takes_dlpack():
    class Foreign:
        """Speaks DLPack and nothing else."""

        def __init__(self, array):
            self._array = array

        def __dlpack__(self, **options):
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    states = np.arange(6 * HIDDEN, dtype=np.uint16).reshape(6, HIDDEN)
    got = plane(Foreign(states[1:]), HIDDEN)
    assert (got.address, got.rows, got.device) == (states[1:].ctypes.data, 5, None)
    torch = pytest.importorskip("torch")
    tensor = torch.randn(6, 2 * HIDDEN).to(torch.bfloat16)
    got = plane(Foreign(tensor[:, HIDDEN:]), HIDDEN)
    assert got.address == tensor.data_ptr() + 2 * HIDDEN
    assert got.stride_bytes == 4 * HIDDEN
    with pytest.raises(CaptureError, match="bfloat16"):
        plane(Foreign(tensor.float()), 2 * HIDDEN)


@on_fake_cuda(FAKE_CUDA_FAIL="cuMemHostRegister_v2:1:2")
def test_a_ring_that_cannot_be_pinned_says_what_to_do(ring_dir):
    with pytest.raises(CudaError, match=r"OUT_OF_MEMORY.*HSTRANSPORT_RING_BYTES.*memlock"):
        open_pair(ring_dir)


@on_fake_cuda(FAKE_CUDA_FAIL="cuMemAlloc_v2:1:2")
def test_a_gpu_without_room_for_the_stage_says_what_to_do(ring_dir):
    with pytest.raises(CudaError, match=r"HSTRANSPORT_STAGE_BYTES.*mem-fraction-static"):
        open_pair(ring_dir)


@on_fake_cuda()
def test_claims_and_shapes_are_checked(ring_dir):
    copier = DeviceCopier(0, 1 << 20)
    core = copier.core
    rows = (1 << 20) // (2 * HIDDEN)
    planes = device_planes(np.zeros((1, rows + 1, HIDDEN), np.uint16))
    with pytest.raises(ConfigError, match="the stage has 1048576"):
        core.take(planes, 0, rows + 1)
    with pytest.raises(ConfigError, match=f"the planes have {rows + 1}"):
        core.take(planes, 2, rows)
    steps = core.begin_steps(planes, 2, 4)
    assert core.take(planes, 0, rows - 1) is None, "an unsent claim was given away"
    assert [steps.add(planes), *(steps.again() for _ in range(3))] == [1, 2, 3, 4]
    with pytest.raises(LeaseError, match="step 5 of at most 4"):
        steps.again()
    claim = steps.seal(0)
    with pytest.raises(LeaseError, match="sealed"):
        steps.seal(0)
    core.drop(claim)
    with pytest.raises(LeaseError, match="sent or dropped"):
        core.drop(claim)
    core.drop(core.take(planes, 1, rows))
    with pytest.raises(ConfigError, match="there are 1 CUDA devices"):
        DeviceCopier(1, 1 << 20)
    copier.close()
    with pytest.raises(LeaseError, match="closed"):
        core.take(planes, 0, 1)


class Request:
    """A server's request, for a tap."""

    probe, tags, retracted, over, copies, generates = False, {}, False, False, 1, True

    def __init__(self, rid, prompt):
        self.rid, self.prompt, self.output = rid, tokens(prompt), tokens(0)

    def unfit(self):
        return ""

    def reason(self):
        return FINISHED, ""


@on_fake_cuda()
def test_a_taps_decode_steps_run_on_while_the_batch_stays_the_same(ring_dir):
    """With positions from the server, and with those that it keeps on its device."""
    copier = DeviceCopier(0, 512 * ROW_BYTES)
    producer = Producer(ring_dir, copier=copier, ring_bytes=4 << 20)
    reader = RingReader.attach(producer.place.path)
    tap = producer.tap()
    a, b, c = Request("a", 3), Request("b", 5), Request("c", 2)
    expected = {}

    def take(work, rows):
        states = producer.states(len(rows))
        for k, (request, position) in enumerate(rows):
            expected[request.rid, position] = states[:, k].copy()
        tap.take(work, lambda: device_planes(states))

    def decode(batch, positions, *, told=True, jump=0):
        tokens = sum(positions) + len(positions) if told else None
        at = Pass(positions if told else None, [1] * len(batch))
        run = tap.going_on(batch, tokens) or tap.plan_decode(batch, at, Noted(), tokens)
        take(run, list(zip(batch, positions, strict=True)))
        return run

    take(
        tap.plan([a, b, c], Pass([0, 0, 0], [3, 5, 2]), Noted()),
        [(a, p) for p in range(3)] + [(b, p) for p in range(5)] + [(c, p) for p in range(2)],
    )
    first = decode([a, b], [3, 5])
    batch = [a, b]
    for step in range(1, 5):
        assert decode(batch, [3 + step, 5 + step]) is first
    batch.append(c)  # the server changes its own list
    second = decode(batch, [8, 10, 2])
    assert second is not first
    for step in range(1, 40):  # more than one record takes
        decode(batch, [8 + step, 10 + step, 2 + step], told=False)
    assert not second.open
    last = decode([c], [42])
    assert decode([c], [60]) is not last, "its positions jumped"
    c.output = tokens(60)
    tap.post(tap.follower.finish, [c])
    decode([a, b], [48, 50])
    for request in (a, b):
        request.output = tokens(47)
    tap.post(tap.follower.finish, [a, b])
    producer.exporter.flush()
    producer.close()
    samples, _ = read_samples(reader, producer.info)
    found = {(s.rid, p): states for s, _, rows in samples for p, states in rows.items()}
    order = [start.rid for start, _, _ in samples]
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)
    assert order == ["c", "a", "b"]


FAILING = (
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuEventRecord",
    "cuStreamWriteValue32_v2",
    "cuStreamWaitEvent",
    "cuEventQuery",
)


def an_error_ends_capture_once(ring_dir):
    import logging

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger("hstransport").addHandler(handler)
    producer, reader = open_pair(ring_dir, ring_bytes=4 << 20)
    tap = producer.tap()
    requests = [Request("a", 8), Request("b", 8)]
    for step in range(12):
        states = producer.states(16)
        if step % 2 == 0:
            work = tap.guarded(tap.plan, requests, Pass([8 * step] * 2, [8, 8]), Noted())
        else:
            at = Pass([8 * step] * 2, [1] * 2)
            work = tap.guarded(tap.plan_decode, requests, at, Noted(), None)
        if work:
            tap.guarded(tap.take, work, lambda s=states: device_planes(s))
        time.sleep(0.002)
    deadline = time.monotonic() + 15
    while not reader.closed:
        assert time.monotonic() < deadline, "the ring was never closed"
        time.sleep(0.01)
    errors = [text for level, text in lines if level == "ERROR"]
    assert len(errors) == 1, lines
    assert "CUDA_ERROR_LAUNCH_FAILED" in errors[0] and "serving goes on" in errors[0]
    ends, torn = [], 0
    while reader.cursor != reader.head:
        record = reader.read()
        assert record is not None, "a record is pending in a closed ring"
        torn += record.abandoned
        if record.kind == END:
            ends.append(unpack_event(END, record.meta))
        record.release()
    told = [(e.reason, "LAUNCH_FAILED" in e.detail) for e in ends]
    assert told == [("aborted", True)] * 2, (ends, torn, reader.counters)


def _make_failure_test(call):
    @on_fake_cuda(FAKE_CUDA_FAIL=f"{call}:3:719")
    def test(ring_dir):
        an_error_ends_capture_once(ring_dir)

    test.__name__ = test.__wrapped__.__name__ = f"test_an_error_of_{call}_ends_capture_once"
    return test


for _call in FAILING:
    globals()[f"test_an_error_of_{_call}_ends_capture_once"] = _make_failure_test(_call)


SERVER = """
import sys
from pathlib import Path
from rig.fake_cuda import load
load()
import test_copier as t
producer, _ = t.Producer(Path(sys.argv[1]), copier=t.DeviceCopier(0, 1 << 20)), None
sample = producer.start("a", 4)
while True:
    states = producer.states(20)
    states[:] = states[:, :1]  # every row the same
    producer.put([t.RowSpan(sample, 0, 0, 20)], t.device_planes(states))
    print("sent", flush=True)
"""


@on_fake_cuda(FAKE_CUDA_DELAY_US=500)
def test_a_server_killed_in_the_middle_of_copies_leaves_whole_records_only(ring_dir):
    for _ in range(5):
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(ring_dir)], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout.readline()
        (path,) = (ring_dir / "s").glob("*.ring")
        deadline = time.monotonic() + 60
        while inspect_ring(path).committed < 5:
            assert time.monotonic() < deadline and server.poll() is None
        server.send_signal(signal.SIGKILL)
        server.wait()
        with RingReader.attach(path) as reader:
            whole = 0
            while reader.cursor != reader.head:
                record = reader.read()
                if record is None:
                    assert reader.skip_pending() is not None
                    continue
                if record.kind == ROWS:
                    states = record.payload.view(np.uint16).reshape(PLANES, -1, HIDDEN)
                    assert (states == states[:, :1]).all()
                    whole += 1
                record.release()
            assert whole
            assert reader.unlink_if_orphaned()


def test_a_machine_without_a_driver_says_so():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(CudaError, match="no CUDA driver"):
            DeviceCopier(0, 1 << 20)
    else:
        pytest.skip("there is a CUDA driver here")


_ = load  # for the processes that import this module's names
