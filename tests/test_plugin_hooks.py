"""The plugin's hooks, with a scheduler that is not SGLang's: what a late exporter's thread may do.

The exporter's thread reads requests after the server has moved on. It is stopped here while the
server runs requests to their end, and let go afterwards.
"""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from rig.producer import HIDDEN, Producer, read_samples

from hstransport.follower import Follower
from hstransport.ring import RingReader
from hstransport.settings import Settings
from hstransport.sglang_plugin import Plugin, _Request
from hstransport.tap import Tap


class Mode:
    def __init__(self, name):
        self._name = name

    def is_idle(self):
        return False

    def is_decode(self):
        return self._name == "decode"

    def is_extend(self):
        return self._name == "extend"

    def is_target_verify(self):
        return False


class Ended:
    def to_json(self):
        return {"type": "length"}


def request(rid, prompt, images=None):
    """As SGLang's Req, as far as the plugin looks."""
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=list(range(prompt)),
        output_ids=[],
        finished_len=None,
        finished_reason=None,
        is_retracted=False,
        sampling_params=SimpleNamespace(custom_params=None),
        multimodal_inputs=images,
    )


class Server:
    """Runs batches through the plugin's hooks, one pass ahead of the results or not."""

    def __init__(self, producer):
        self.producer = producer
        self.plugin = Plugin(Settings(rows="all"))
        follower = Follower(producer.info, producer.exporter.recorder, _Request, tagged_only=False)
        self.plugin._tap = Tap(producer.info, producer.exporter, follower)
        self.runner = self.plugin._runner = object()
        self.scheduler = SimpleNamespace(waiting_queue=[])

    def run(self, mode, batch, positions, counts):
        forward = SimpleNamespace(
            forward_mode=Mode(mode),
            batch_size=len(batch),
            extend_prefix_lens_cpu=positions,
            extend_seq_lens_cpu=counts,
            seq_lens_cpu=np.add(positions, counts),
            seq_lens_sum=int(np.add(positions, counts).sum()),
        )
        states = np.concatenate(
            [np.arange(p, p + n, dtype=np.uint16) for p, n in zip(positions, counts, strict=True)]
        )
        final = np.repeat(states[:, None], HIDDEN, axis=1)

        def model(runner, forward_batch):
            self.plugin.logits_forward(lambda *a: None, None, None, final, None, None, [final] * 2)
            return SimpleNamespace(can_run_graph=False)

        scheduler_batch = SimpleNamespace(reqs=batch)
        self.plugin.run_batch(
            lambda s, b: self.plugin.model_forward(model, self.runner, forward),
            self.scheduler,
            scheduler_batch,
        )

    def result(self, batch, over=()):
        def process(scheduler, b):
            for req in batch:
                req.output_ids.append(7)
            for req in over:
                req.finished_reason = Ended()
                req.multimodal_inputs = None  # SGLang lets go of them

        self.plugin.process_batch_result(process, self.scheduler, SimpleNamespace(reqs=batch))


@pytest.fixture
def held(ring_dir):
    """(server, let): nothing is done by the exporter's thread until ``let`` is called."""
    producer = Producer(ring_dir, ring_bytes=8 << 20)
    server = Server(producer)
    gate = threading.Event()
    producer.exporter.post(gate.wait)
    producer.exporter.submit()

    def let():
        gate.set()
        producer.exporter.flush()
        samples, open_ones = read_samples(RingReader.attach(producer.place.path), producer.info)
        assert not open_ones, "a sample was never ended"
        return [(s, e, {p: int(v[0, 0]) for p, v in rows.items()}) for s, e, rows in samples]

    yield server, let
    gate.set()
    producer.close()


def test_a_late_thread_cuts_no_sample_in_two(held):
    server, let = held
    others = [request(f"other-{i}", 3) for i in range(3)]
    for i in range(8):
        req = request(f"r{i}", 6)
        batch = [req, *others[: i % 3 + 1]]
        server.run("extend", [req], [0], [4])  # chunked prefill
        server.result([req])
        server.run("extend", [req], [4], [2])
        server.result([req])
        for step in range(5):
            server.run("decode", [req], [6 + step], [1])
            server.result([req], over=[req] if step == 4 else ())
        # Something that waits is aborted, which looks for what else has ended.
        server.scheduler.waiting_queue = [others[0]]
        server.plugin.abort_request(lambda s: s.waiting_queue.clear(), server.scheduler)
        assert batch
    samples = let()
    assert [start.id for start, _, _ in samples] == [f"r{i}" for i in range(8)]
    for _, end, rows in samples:
        assert rows == {p: p for p in range(11)}
        assert end.cached == 0


def test_images_are_noticed_though_the_request_is_over_by_then(held):
    server, let = held
    with_image, without = request("image", 4, images=object()), request("text", 4)
    server.run("extend", [with_image, without], [0, 0], [4, 4])
    server.result([with_image, without], over=[with_image, without])
    (_, first, _), (_, second, rows) = let()
    assert (first.reason, "multimodal_inputs" in first.detail) == ("aborted", True)
    assert (second.reason, rows) == ("length", {p: p for p in range(4)})


def test_the_surplus_pass_of_a_request_that_just_ended_begins_nothing(held):
    server, let = held
    a, b = request("a", 3), request("b", 3)
    server.run("extend", [a, b], [0, 0], [3, 3])
    server.run("decode", [a, b], [3, 3], [1, 1])  # launched before the result is known
    server.result([a, b], over=[a])
    server.run("decode", [a, b], [4, 4], [1, 1])  # a is over, and still in the batch
    server.result([b])
    server.result([b], over=[b])
    samples = {start.id: (end, rows) for start, end, rows in let()}
    assert samples.keys() == {"a", "b"}
    assert set(samples["b"][1]) == set(range(5))
