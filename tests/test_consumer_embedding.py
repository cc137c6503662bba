"""Embedding: samples straight off the ring, in a process that need not know torch or SGLang."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hstransport_consumer import Consumer
from rig.producer import HIDDEN, Producer, tokens

from hstransport.errors import DatasetMismatchError, LeaseError
from hstransport.protocol import ABORTED, FINISHED
from hstransport.ring import RingReader


@pytest.fixture
def producer(ring_dir):
    producer = Producer(ring_dir)
    yield producer
    producer.close()


def attach(root, **options):
    return Consumer.attach("s", root=root, wait_s=5, **options)


def test_sample_of_one_record_is_a_view_of_the_ring(producer, ring_dir):
    states = producer.sample("a", 10)
    with attach(ring_dir) as samples:
        loop = iter(samples)
        sample = next(loop)
        assert sample.zero_copy
        assert np.array_equal(sample.hidden_states, states.transpose(1, 0, 2))
        assert np.array_equal(sample["final"], states[-1])
        assert not sample["final"].flags.writeable
        assert (sample.id, sample.request_id, sample.state) == ("a", "r-a", "whole")
        assert sample.token_ids.tolist() == list(range(10))
        assert sample.loss_mask.tolist() == [0] + [1] * 9
        assert sample.labels == {"name": "a"}
        with pytest.raises(KeyError, match="final"):
            sample[7]


def test_lease_ends_with_the_loop_turn(producer, ring_dir):
    for name in "abc":
        producer.sample(name, 4)
    producer.close()
    kept, copies = [], []
    with attach(ring_dir) as samples:
        for sample in samples:
            kept.append(sample)
            copies.append(sample.copy())
    assert [c.id for c in copies] == ["a", "b", "c"]
    assert copies[0].hidden_states.shape == (4, 3, HIDDEN)
    with pytest.raises(LeaseError, match=r"copy\(\)"):
        kept[0].hidden_states  # noqa: B018


def test_ring_is_freed_as_the_loop_goes_and_removed_at_the_end(producer, ring_dir):
    path = producer.ring.path
    for name in "abc":
        producer.sample(name, 4)
    before = producer.ring.tail
    with attach(ring_dir) as samples:
        loop = iter(samples)
        next(loop)
        next(loop)
        assert producer.ring.tail > before
        producer.close()
        assert path.exists()
        assert [s.id for s in loop] == ["c"]
    assert not path.exists()


def test_interleaved_fragments_are_joined(producer, ring_dir):
    a = producer.exporter.start("a", "ra", tokens(6))
    b = producer.exporter.start("b", "rb", tokens(5))
    first = producer.rows((a, 0, 4), (b, 0, 2))
    second = producer.rows((b, 2, 3), (a, 4, 2))
    producer.exporter.end(b, FINISHED, 5, tokens(0))
    producer.exporter.end(a, FINISHED, 6, tokens(0))
    producer.close()
    with attach(ring_dir) as samples:
        got = {s.id: s.copy().hidden_states for s in samples}
    assert np.array_equal(
        got["a"], np.concatenate([first[:, :4], second[:, 3:]], axis=1).transpose(1, 0, 2)
    )
    assert np.array_equal(
        got["b"], np.concatenate([first[:, 4:], second[:, :3]], axis=1).transpose(1, 0, 2)
    )


def test_rows_that_come_twice_or_past_the_end_are_kept_once(producer, ring_dir):
    a = producer.exporter.start("a", "ra", tokens(4))
    first = producer.rows((a, 0, 3))
    producer.rows((a, 0, 2))  # a retracted request is prefilled again
    third = producer.rows((a, 2, 4))  # and decodes one step too many
    producer.exporter.end(a, FINISHED, 4, tokens(0))
    producer.close()
    with attach(ring_dir) as samples:
        (states,) = [s.copy().hidden_states for s in samples]
    assert np.array_equal(states, np.concatenate([first, third[:, 1:2]], axis=1).transpose(1, 0, 2))


def test_only_whole_samples_are_yielded_unless_asked(producer, ring_dir):
    producer.sample("good", 4)
    bad = producer.exporter.start("cut", "r", tokens(4))
    producer.rows((bad, 0, 2))
    producer.exporter.end(bad, ABORTED, 4, tokens(0))
    producer.exporter.start("open", "r", tokens(4))
    producer.close()
    with attach(ring_dir) as samples:
        assert [s.id for s in samples] == ["good"]
    assert samples.skipped == {"aborted": 1, "unfinished": 1}


def test_open_samples_are_named_when_all_are_asked_for(producer, ring_dir):
    producer.exporter.start("open", "r", tokens(4))
    producer.close()
    with attach(ring_dir, states=None) as samples:
        assert [(s.id, s.state, s.tokens) for s in samples] == [("open", "unfinished", 0)]


def test_long_samples_do_not_pin_the_ring(producer, ring_dir):
    """Far more rows than the ring holds, of samples that all stay open till the end."""
    with attach(ring_dir) as samples:
        got = {}
        reader = threading.Thread(
            target=lambda: got.update({s.id: s.copy().hidden_states for s in samples})
        )
        reader.start()
        names = ["a", "b", "c"]
        opened = {n: producer.exporter.start(n, n, tokens(2000)) for n in names}
        sent = {n: [] for n in names}
        for position in range(0, 2000, 50):
            while producer.ring.used_bytes > producer.ring.capacity_bytes * 3 // 4:
                time.sleep(0.001)
            states = producer.rows(*((opened[n], position, 50) for n in names))
            for i, n in enumerate(names):
                sent[n].append(states[:, 50 * i : 50 * i + 50])
        for n in names:
            producer.exporter.end(opened[n], FINISHED, 2000, tokens(0))
        producer.close()
        reader.join(30)
        assert not reader.is_alive()
    for n in names:
        assert np.array_equal(got[n], np.concatenate(sent[n], axis=1).transpose(1, 0, 2))


def test_memory_bound_costs_the_largest_sample_and_says_so(producer, ring_dir):
    opened = producer.exporter.start("big", "r", tokens(2000))
    with attach(ring_dir, states=None, memory_bytes=100_000) as samples:
        got = []
        reader = threading.Thread(target=lambda: got.extend((s.id, s.state) for s in samples))
        reader.start()
        for position in range(0, 2000, 50):
            while producer.ring.used_bytes > producer.ring.capacity_bytes * 3 // 4:
                time.sleep(0.001)
            producer.rows((opened, position, 50))
        producer.exporter.end(opened, FINISHED, 2000, tokens(0))
        producer.sample("small", 3)
        producer.close()
        reader.join(30)
    assert got == [("big", "incomplete"), ("small", "whole")]


def test_second_consumer_is_refused_and_absent_session_times_out(producer, ring_dir):
    with attach(ring_dir), pytest.raises(TimeoutError, match="another consumer is attached"):
        Consumer.attach("s", root=ring_dir, wait_s=0.1)
    with pytest.raises(TimeoutError, match="HSTRANSPORT=1"):
        Consumer.attach("other", root=ring_dir, wait_s=0.1)


def test_rings_of_two_replicas_are_one_stream(producer, ring_dir):
    other = Producer(ring_dir, rank=1)
    producer.sample("a", 3)
    other.sample("b", 3)
    producer.close()
    other.close()
    with attach(ring_dir) as samples:
        assert sorted(s.id for s in samples) == ["a", "b"]


def test_run_with_other_layers_is_refused(producer, ring_dir):
    other = Producer(ring_dir, run="cd" * 6, layers=(4,))
    with pytest.raises(DatasetMismatchError, match="layers"):
        attach(ring_dir)
    other.close()


def test_torch_tensor_shares_the_rings_memory(producer, ring_dir):
    torch = pytest.importorskip("torch", reason="tensors need torch")
    states = producer.sample("a", 10)
    with attach(ring_dir) as samples:
        loop = iter(samples)
        sample = next(loop)
        tensor = sample.torch()
        assert tensor.dtype == torch.bfloat16
        assert tuple(tensor.shape) == (10, 3, HIDDEN)
        assert tensor.data_ptr() == sample.hidden_states.ctypes.data
        bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits, states.transpose(1, 0, 2))


def test_importing_needs_neither_torch_nor_sglang():
    code = (
        "import sys\n"
        "for name in ('torch', 'sglang', 'transformers'): sys.modules[name] = None\n"
        "import hstransport_consumer.cli, hstransport_consumer.verify\n"
        "from hstransport_consumer import Consumer, open_shards, DatasetWriter\n"
        "assert 'hstransport.exporter' not in sys.modules\n"
        "assert 'hstransport.capture' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_next_consumer_finds_open_samples_from_their_beginning(producer, ring_dir):
    """The first one leaves while a sample is open: nothing of it was freed."""
    producer.sample("first", 3)
    half = producer.start("half", 4)
    a = producer.rows((half, 0, 2))
    with attach(ring_dir) as samples:
        for sample in samples:
            assert sample.id == "first"
            producer.sample("between", 3)
            break
    b = producer.rows((half, 2, 2))
    producer.exporter.end(half, FINISHED, 4, tokens(0))
    producer.close()
    with attach(ring_dir) as samples:
        got = {s.id: s.copy().hidden_states for s in samples}
        assert samples.skipped == {}
    assert np.array_equal(got["half"], np.concatenate([a, b], axis=1).transpose(1, 0, 2))


def test_sample_whose_beginning_is_gone_is_counted(producer, ring_dir):
    half = producer.start("half", 4)
    producer.rows((half, 0, 2))
    reader = RingReader.attach(producer.place.path)
    while (record := reader.read()) is not None:
        record.release()
    reader.close()
    producer.exporter.end(half, FINISHED, 4, tokens(0))
    producer.close()
    with attach(ring_dir, states=None) as samples:
        assert list(samples) == []
    assert samples.skipped == {"lost": 1}


def test_consumer_attaches_once_the_other_has_left(producer, ring_dir):
    producer.sample("a", 3)
    first = attach(ring_dir)
    leaving = threading.Timer(0.5, first.close)
    leaving.start()
    with attach(ring_dir) as samples:
        assert next(iter(samples)).id == "a"
    leaving.join()
