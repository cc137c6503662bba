"""The plugin's hooks, with a scheduler that is not SGLang's: what a late exporter's thread may do.

The exporter's thread reads requests after the server has moved on. It is stopped here while the
server runs requests to their end, and let go afterwards.
"""

import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from rig.fake_cuda import FakeArray, FakeStream, on_fake_cuda
from rig.producer import HIDDEN, Producer, read_samples

from hstransport.copyout import DeviceCopier
from hstransport.errors import CaptureError
from hstransport.follower import Follower
from hstransport.ring import RingReader
from hstransport.settings import Selection, Settings
from hstransport.sglang.plugin import Plugin
from hstransport.sglang.request import SGLangRequest
from hstransport.sglang.switch_on import switch_on
from hstransport.tap import Tap


class Mode:
    """One object for each mode, as the members of SGLang's enum are."""

    _known: ClassVar = {}

    def __new__(cls, name):
        return cls._known.setdefault(name, super().__new__(cls))

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
        recorder, selection = producer.exporter.recorder, Selection()
        follower = Follower(producer.info, recorder, SGLangRequest, selection=selection)
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


class Graphs:
    """Decode graphs of some sizes, replayed on a stream of a CUDA device that is none."""

    def __init__(self, plugin, stream, sizes):
        self.bs = 0
        self._stream = stream
        self._sources = []  # read when the stream comes to them
        self._static = {n: np.zeros((3, n, HIDDEN), np.uint16) for n in sizes}
        for n, (*layers, final) in self._static.items():
            # What logits_forward finds while SGLang captures the graph.
            plugin._graphs.captured(n, (FakeArray(final), [FakeArray(p) for p in layers]))

    def replay(self, size, values):
        self.bs = size
        source = np.zeros_like(self._static[size])
        source[:, : len(values)] = np.asarray(values, np.uint16)[None, :, None]
        self._sources.append(source)
        self._stream.write(self._static[size], source)


def gpu_server(ring_dir):
    copier = DeviceCopier(0, 1 << 20)
    producer = Producer(ring_dir, copier=copier, ring_bytes=16 << 20)
    server = Server(producer)
    stream = FakeStream()
    plugin = server.plugin
    plugin._device, plugin._current_stream = 0, lambda device: stream.handle
    graphs = Graphs(plugin, stream, (2, 4))
    server.runner = plugin._runner = SimpleNamespace(decode_cuda_graph_runner=graphs)
    return server, graphs


def step(server, graphs, batch, positions, *, eager=False, size=None):
    """One decode step; the state of a request's row is a number of its own and its position."""
    values = [1000 * req.number + p for req, p in zip(batch, positions, strict=True)]
    size = size or (2 if len(batch) <= 2 else 4)
    forward = SimpleNamespace(
        forward_mode=Mode("decode"),
        batch_size=len(batch),
        seq_lens_cpu=np.add(positions, 1),
        seq_lens_sum=sum(positions) + len(batch),
    )

    def model(runner, forward_batch):
        if not eager:
            graphs.replay(size, values)
            return SimpleNamespace(can_run_graph=True)
        final, *layers = (
            FakeArray(np.repeat(np.asarray(values, np.uint16)[:, None], HIDDEN, axis=1))
            for _ in range(3)
        )
        server.plugin.logits_forward(lambda *a: None, None, None, final, None, None, layers)
        return SimpleNamespace(can_run_graph=False)

    server.plugin.run_batch(
        lambda s, b: server.plugin.model_forward(model, server.runner, forward),
        server.scheduler,
        SimpleNamespace(reqs=batch),
    )


@on_fake_cuda()
def test_replays_eager_steps_and_other_graphs_in_any_order(ring_dir):
    """Each row is that of its own step: also where a step does not read what the last one read."""
    server, graphs = gpu_server(ring_dir)
    rng = np.random.default_rng(3)
    requests = [request(f"r{i}", 1) for i in range(4)]
    at = {}
    for number, req in enumerate(requests):
        req.number = number + 1
        at[req.rid] = 0
    again = []
    real = server.plugin._tap.again
    server.plugin._tap.again = lambda run, stream: (again.append(run), real(run, stream))
    batch = list(requests[:2])
    for _ in range(400):
        chance = rng.random()
        if chance < 0.05:
            batch = [requests[i] for i in rng.permutation(4)[: rng.integers(1, 5)]]
        eager = 0.05 < chance < 0.1
        size = 4 if 0.1 < chance < 0.15 else None
        if 0.15 < chance < 0.18:  # its positions jump: the server computes something again
            for req in batch:
                at[req.rid] += 3
        step(server, graphs, batch, [at[r.rid] for r in batch], eager=eager, size=size)
        for req in batch:
            at[req.rid] += 1
    assert len(again) > 200, "the short way was hardly taken"
    for req in requests:
        req.output_ids = [7] * at[req.rid]
        req.finished_reason = Ended()
    server.result(requests)
    server.producer.exporter.flush()
    server.producer.close()
    reader = RingReader.attach(server.producer.place.path)
    samples, _ = read_samples(reader, server.producer.info)
    found = {s.rid: rows for s, _, rows in samples}
    assert len(found) == 4
    for req in requests:
        rows = found[req.rid]
        assert len(rows) > 20
        for position, states in rows.items():
            assert (states == 1000 * req.number + position).all(), (req.rid, position)


@on_fake_cuda()
def test_a_stream_that_changes_in_mid_run_ends_capture(ring_dir):
    server, graphs = gpu_server(ring_dir)
    req = request("r", 1)
    req.number = 1
    for position in range(3):
        step(server, graphs, [req], [position])
    other = FakeStream()
    server.plugin._current_stream = lambda device: other.handle
    step(server, graphs, [req], [3])
    step(server, graphs, [req], [4])  # serving goes on
    server.plugin._tap._closing.join(20)
    samples, _ = read_samples(RingReader.attach(server.producer.place.path), server.producer.info)
    ((_, end, _),) = samples
    assert end.reason == "aborted" and "stream" in end.detail


class Check:
    """A LayerCheck that sees nothing in the first ``blind`` passes, then says what it found."""

    def __init__(self, blind=0, error=None):
        self._blind, self._error = blind, error
        self.asked = 0
        self.closed = False

    def holds(self, captured):
        self.asked += 1
        if self.asked <= self._blind:
            return False
        if self._error:
            raise self._error
        return True

    def close(self):
        self.closed = True


@pytest.mark.parametrize("error", [CaptureError("layer 2: other"), RuntimeError("layer 2: other")])
def test_states_of_other_layers_end_capture_before_a_row_of_them_is_kept(held, error):
    server, let = held
    check = server.plugin._check = Check(error=error)
    req = request("r", 4)
    server.run("extend", [req], [0], [4])
    server.result([req])
    ((_, end, rows),) = let()
    assert (end.reason, rows) == ("aborted", {})
    assert "layer 2: other" in end.detail
    assert check.closed


def test_layers_are_compared_until_one_pass_shows_them_and_then_no_more(held):
    server, let = held
    check = server.plugin._check = Check(blind=2)
    req = request("r", 2)
    server.run("extend", [req], [0], [2])
    server.result([req])
    for step in range(4):
        server.run("decode", [req], [2 + step], [1])
        server.result([req], over=[req] if step == 3 else ())
    ((_, end, rows),) = let()
    assert (check.asked, end.reason, len(rows)) == (3, "length", 6)


def test_states_of_other_layers_in_a_pass_that_nobody_wants_end_capture_too(held):
    server, let = held
    req = request("r", 4)
    server.run("extend", [req], [0], [4])
    server.plugin._check = Check(error=CaptureError("layer 2: other"))
    final = np.zeros((1, HIDDEN), np.uint16)
    server.plugin.logits_forward(lambda *a: None, None, None, final, None, None, [final] * 2)
    ((_, end, _),) = let()
    assert end.reason == "aborted" and "layer 2: other" in end.detail


def args_of(tp=1, prefill="disabled"):
    config = SimpleNamespace(prefill=SimpleNamespace(backend=prefill))
    return SimpleNamespace(tp_size=tp, cuda_graph_config=config)


def runner_of(args):
    torch = pytest.importorskip("torch")
    config = SimpleNamespace(num_hidden_layers=4)
    return SimpleNamespace(model=torch.nn.Identity(), model_config=config, server_args=args)


@pytest.mark.parametrize(
    ("args", "device", "words"),
    [
        (args_of(tp=2), None, "Identity has neither .* of 2 tensor-parallel ranks .* --tp-size 1"),
        (args_of(prefill="full"), 0, "Identity has neither .* add --disable-prefill-cuda-graph"),
        (args_of(prefill="full"), None, "Identity has 0 lists of 4 layers"),  # a CPU has no graphs
        (args_of(), 0, "Identity has 0 lists of 4 layers"),
    ],
)
@pytest.mark.parametrize("by", ["auto", "hooks"])
def test_layers_are_not_hooked_where_a_hook_would_miss_some_of_a_state(args, device, words, by):
    if by == "hooks":
        words = words.replace("Identity has neither .* ", "")
    with pytest.raises(CaptureError, match=words):
        switch_on(runner_of(args), (2,), by, device)


def test_ids_that_are_no_inner_layers_are_refused_before_hooks():
    with pytest.raises(CaptureError, match="layer 4 of Identity cannot be captured"):
        switch_on(runner_of(args_of(tp=2)), (4,), "hooks", None)
