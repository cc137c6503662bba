"""The producer against a real ring: order, splitting, and what a full ring costs."""

import threading
import time

import numpy as np
import pytest
from rig.producer import HIDDEN, Producer, tokens

from hstransport import copyout
from hstransport import exporter as exporter_module
from hstransport import recorder as recorder_module
from hstransport.capture import plane, planes, split_packed
from hstransport.channel import Subscriber
from hstransport.errors import CaptureError, ConfigError
from hstransport.protocol import END, FINISHED, ROWS, START, unpack_event
from hstransport.recorder import RowSpan
from hstransport.ring import RingReader

ROW_BYTES = 3 * HIDDEN * 2


def take(reader, *, release=True):
    """All committed records as (kind, event, states)."""
    got = []
    while (record := reader.read()) is not None:
        event = unpack_event(record.kind, record.meta)
        states = None
        if record.kind == ROWS:
            states = record.payload.view(np.uint16).reshape(3, event.rows, HIDDEN).copy()
        got.append((record.kind, event, states))
        if release:
            record.release()
    return got


@pytest.fixture
def make(ring_dir):
    made = []

    def one(**options):
        made.append(Producer(ring_dir, **options))
        return made[-1], RingReader.attach(made[-1].place.path)

    yield one
    for producer in made:
        producer.close()


def test_a_sample_is_start_rows_end_in_order(make):
    producer, reader = make()
    states = producer.sample("a", 5)
    (k1, start, _), (k2, rows, stored), (k3, end, _) = take(reader)
    assert (k1, k2, k3) == (START, ROWS, END)
    assert (start.id, start.rid, start.prompt.tolist()) == ("a", "r-a", list(range(5)))
    assert start.labels == {"name": "a"}
    assert rows.segments == ((0, 0, 5),)
    assert np.array_equal(stored, states)
    assert (end.reason, end.tokens, end.dropped) == (FINISHED, 5, 0)


def test_only_the_planned_rows_are_gathered(make):
    producer, reader = make()
    a, b = producer.start("a", 4), producer.start("b", 9)
    states = producer.states(20)
    producer.put([RowSpan(a, 0, 2, 3), RowSpan(b, 7, 11, 2)], planes(states, HIDDEN))
    producer.exporter.flush()
    (_, rows, stored) = take(reader)[-1]
    assert rows.segments == ((0, 0, 3), (1, 7, 2))
    assert np.array_equal(stored, states[:, [2, 3, 4, 11, 12]])


def test_packed_layers_and_padded_planes_are_read_in_place(make):
    producer, reader = make()
    a = producer.start("a", 4)
    packed = producer.states(6)[0].repeat(2, axis=1)  # [6, 2 * hidden]
    final = producer.states(8)[0]
    arrays = [*split_packed(packed, 2, HIDDEN), final]
    producer.put([RowSpan(a, 0, 1, 4)], planes(arrays, HIDDEN))
    producer.exporter.flush()
    (_, _, stored) = take(reader)[-1]
    assert np.array_equal(stored[0], packed[1:5, :HIDDEN])
    assert np.array_equal(stored[1], packed[1:5, HIDDEN:])
    assert np.array_equal(stored[2], final[1:5])


def test_a_large_pass_is_split_into_records_that_fit(make):
    producer, reader = make(ring_bytes=1 << 20)
    a = producer.start("a", 1500)
    states = producer.states(1500)
    feed = threading.Thread(target=lambda: producer.rows((a, 0, 1500), states=states))
    got = take(reader)
    feed.start()
    deadline = time.monotonic() + 10
    while feed.is_alive() and time.monotonic() < deadline:
        got += take(reader)
    feed.join(1)
    got += take(reader)
    parts = [(e, s) for k, e, s in got if k == ROWS]
    assert len(parts) >= 2
    position = 0
    for rows, stored in parts:
        for _, at, n in rows.segments:
            assert at == position
            assert np.array_equal(stored, states[:, at : at + n])
            position += n
    assert position == 1500


@pytest.mark.parametrize(("policy", "block_s", "waits"), [("drop", 9, 0), ("block", 0.2, 1)])
def test_full_ring_drops_and_marks_samples_after_at_most_one_wait(make, policy, block_s, waits):
    producer, reader = make(policy=policy, block_s=block_s)
    started = time.monotonic()
    for i in range(60):
        producer.sample(f"s{i}", 100)
    counters = producer.ring.counters
    assert counters.ring_full > 0
    assert list(counters.drops) == ["ring_full"]
    assert counters.dropped_bytes == counters.ring_full * 100 * ROW_BYTES
    assert (counters.ring_stall_ns > 0) == bool(waits)
    assert counters.stage_stall_ns == 0
    # One expired wait, not one for each of the dozens of records that found no room.
    assert time.monotonic() - started < 10 * block_s
    ends = {}
    deadline = time.monotonic() + 10
    while len(ends) < 60 and time.monotonic() < deadline:
        ends |= {e.sid: e for k, e, _ in take(reader) if k == END}
    assert len(ends) == 60, "every sample is named"
    dropped = [sid for sid, e in ends.items() if e.dropped]
    assert dropped
    assert dropped == list(range(dropped[0], 60))
    assert all(ends[sid].dropped == 100 for sid in dropped)
    assert {e.detail for e in ends.values()} == {"", "rows dropped: the ring is full"}


def test_blocked_writer_goes_on_when_the_consumer_frees(make):
    producer, reader = make(policy="block", block_s=30)
    done = threading.Event()

    def fill():
        for i in range(40):
            producer.sample(f"s{i}", 100)
        done.set()

    threading.Thread(target=fill, daemon=True).start()
    time.sleep(0.2)
    assert not done.is_set()
    got = []
    while not done.is_set():
        got += take(reader)
    got += take(reader)
    assert producer.ring.counters.dropped_records == 0
    assert sum(e.rows for k, e, _ in got if k == ROWS) == 4000


def test_rows_of_a_sample_that_lost_some_are_not_sent_any_more(make):
    producer, reader = make()
    a = producer.start("a", 4000)
    for position in range(0, 4000, 100):
        producer.rows((a, position, 100))
    take(reader)
    before = producer.ring.counters.records
    producer.rows((a, 4000, 100))
    assert producer.ring.counters.records == before
    b = producer.start("b", 10)
    producer.rows((a, 4100, 5), (b, 0, 10))
    kind, rows, _ = take(reader)[-1]
    assert (kind, rows.segments) == (ROWS, ((1, 0, 10),))


def test_events_leave_an_idle_server_when_there_is_room_again(make):
    """Without another request the exporter's thread puts the waiting START and END in."""
    producer, reader = make()
    for i in range(2000):
        producer.sample(f"s{i}", 1)  # fills even the part that is kept for events
    assert producer.exporter.samples_lost == 0
    ends = []
    deadline = time.monotonic() + 10
    while len(ends) < 2000 and time.monotonic() < deadline:
        ends += [e for k, e, _ in take(reader) if k == END]
        time.sleep(0.01)
    assert [e.sid for e in ends] == list(range(2000))


def test_samples_beyond_the_queue_are_counted_as_lost(make, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_PENDING_BYTES", 10_000)
    producer, _ = make()
    for i in range(4000):
        producer.sample(f"s{i}", 1)
    counters = producer.ring.counters
    assert counters.samples_lost == producer.exporter.samples_lost > 0
    assert counters.queue_full > 0


def test_a_full_stage_is_told_from_a_full_ring(make, monkeypatch, caplog):
    """The exporter's thread is held up, and the server's waits for it, then goes on without."""
    monkeypatch.setattr(copyout, "MAX_HELD_BYTES", 10 * ROW_BYTES)
    monkeypatch.setattr(exporter_module, "_GRACE_S", 0.05)
    producer, reader = make()
    a, go_on = producer.start("a", 16), threading.Event()
    producer.exporter.post(go_on.wait)
    for position in (0, 8):
        states = planes(producer.states(8), HIDDEN)
        producer.put([RowSpan(a, position, 0, 8)], states)
    go_on.set()
    producer.end(a, 16, 0)
    counters = producer.ring.counters
    assert (counters.drops, counters.dropped_bytes) == ({"stage_full": 1}, 8 * ROW_BYTES)
    assert counters.stage_stall_ns >= 5e7 > counters.ring_stall_ns
    (_, rows, _), (_, end, _) = take(reader)[-2:]
    assert rows.segments == ((0, 0, 8),)
    assert (end.dropped, end.detail) == (8, "rows dropped: the stage is full")
    assert "the stage is full: 8 rows dropped" in caplog.text


def test_rows_under_way_when_capture_stops_are_counted_as_such(make):
    producer, reader = make()
    a = producer.start("a", 4)
    producer.exporter.post(int, "no number")
    producer.put([RowSpan(a, 0, 0, 4)], planes(producer.states(4), HIDDEN))
    producer.exporter.end(a, FINISHED, 4, tokens(0))
    with pytest.raises(ValueError, match="no number"):
        producer.exporter.flush()
    producer.close()
    assert producer.ring.counters.drops == {"stopped": 1}
    assert take(reader)[-1][1].detail == "rows dropped: capture stopped"


def test_samples_whose_end_never_found_room_are_counted_at_the_close(make):
    producer, _ = make()
    for i in range(2000):
        producer.sample(f"s{i}", 1)
    assert producer.ring.counters.samples_lost == 0
    producer.close()
    assert producer.ring.counters.samples_lost == producer.exporter.samples_lost > 0


def test_each_record_is_told_with_its_place(make):
    producer, reader = make(publish=True)
    subscriber = Subscriber()
    subscriber.connect(producer.place.endpoint)
    time.sleep(0.3)  # PUB drops what is sent before the subscription has arrived
    producer.sample("a", 5)
    told = []
    deadline = time.monotonic() + 5
    while len(told) < 3 and time.monotonic() < deadline:
        message = subscriber.receive()
        if message is not None:
            told.append(message)
    records = [reader.read() for _ in range(3)]
    assert [(m.seq, m.position, m.kind, m.meta) for m in told] == [
        (r.seq, r.position, r.kind, r.meta) for r in records
    ]
    assert {(m.run, m.rank) for m in told} == {("ab" * 6, 0)}
    subscriber.close()


def test_ring_too_small_for_one_token_is_refused(ring_dir):
    with pytest.raises(ConfigError, match="HSTRANSPORT_RING_BYTES"):
        Producer(ring_dir, ring_bytes=1 << 16, hidden=8192)


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.zeros((4, HIDDEN), np.float32), "--dtype bfloat16"),
        (np.zeros((4, 32), np.uint16), "shape"),
        (np.zeros((4, HIDDEN, 1), np.uint16), "shape"),
        (np.zeros((HIDDEN, 4), np.uint16).T, "contiguous"),
        (np.zeros((4, 2 * HIDDEN), np.uint16)[:, ::2], "contiguous"),
    ],
)
def test_gate_refuses_what_is_no_plane_of_states(array, told):
    with pytest.raises(CaptureError, match=told):
        plane(array, HIDDEN)


def test_gate_takes_torch_tensors_without_copying():
    torch = pytest.importorskip("torch", reason="the gate takes torch tensors where torch is")
    tensor = torch.randn(6, 3 * HIDDEN).to(torch.bfloat16)
    got = plane(tensor[2:, HIDDEN : 2 * HIDDEN], HIDDEN)
    assert got.address == tensor.data_ptr() + 2 * (2 * 3 * HIDDEN + HIDDEN)
    assert (got.rows, got.row_bytes, got.stride_bytes) == (4, 2 * HIDDEN, 6 * HIDDEN)
    with pytest.raises(CaptureError, match="float32"):
        plane(tensor.float(), 3 * HIDDEN)


def test_close_is_idempotent_and_leaves_what_is_unread(make):
    producer, reader = make()
    producer.exporter.start("a", "r", tokens(3))
    producer.close()
    producer.close()
    assert producer.place.path.exists()
    assert len(take(reader)) == 1


def test_prompt_too_long_for_the_ring_is_named_and_harms_nobody_else(make):
    """Its START could never be written, and must not wait for ever in front of the others."""
    producer, reader = make()
    long = producer.exporter.start("long", "r", tokens(400_000))
    producer.rows((long, 0, 10))
    producer.end(long, 400_000, 300_000)
    producer.sample("short", 10)
    got = take(reader)
    assert [e.id for k, e, _ in got if k == START] == ["long", "short"]
    ends = [e for k, e, _ in got if k == END]
    assert ends[0].dropped > 0
    assert ends[0].detail == "rows dropped: its prompt is too long for the ring"
    assert producer.ring.counters.drops == {"too_long": 1}
    assert ends[0].tokens == 400_000
    assert ends[1].dropped == 0
    assert [e.segments for k, e, _ in got if k == ROWS] == [((1, 0, 10),)]
