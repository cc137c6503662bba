"""The tap, with requests of a server that is not SGLang, over a real ring."""

import contextlib
import time

import numpy as np
import pytest
from rig.producer import HIDDEN, Producer, read_samples, tokens

from hstransport.follower import Noted, Pass
from hstransport.protocol import ABORTED, FINISHED
from hstransport.ring import RingReader
from hstransport.settings import Selection


class Fake:
    """A request, and at the same time the server's own object behind it."""

    def __init__(self, rid, prompt, *, tags=None, unfit="", probe=False):
        self.rid, self.prompt, self.probe = rid, np.asarray(prompt, np.int32), probe
        self.tags = {} if tags is None else tags
        self.output = tokens(0)
        self.copies, self.generates = 1, True
        self.over = self.retracted = False
        self._unfit = unfit

    def unfit(self):
        return self._unfit

    def reason(self):
        return (FINISHED, "") if self.over else (ABORTED, "aborted while waiting")


class Server:
    """Runs passes through a tap; the states of token t at any layer are all t."""

    def __init__(self, ring_dir, *, rows="all", tap=None, **options):
        self.producer = Producer(ring_dir, rows=rows, **options)
        self.tap = self.producer.tap(**(tap or {}))
        self.follower = self.tap.follower
        self.reader = RingReader.attach(self.producer.place.path)

    def run(self, *batch, padding=0):
        """One pass over ``(request, position, token ids)`` each."""
        counts = [len(ids) for _, _, ids in batch]
        step = Pass([position for _, position, _ in batch], counts)
        requests = [request for request, _, _ in batch]
        noted = Noted({id(r) for r in requests if r.over})
        work = self.tap.guarded(self.tap.plan, requests, step, noted)
        ids = np.concatenate([np.asarray(i, np.uint16) for _, _, i in batch])
        ids = np.pad(ids, (0, padding))
        final = np.repeat(ids[:, None], HIDDEN, axis=1)
        if work:
            self.tap.guarded(self.take, work, (final, [final, final]))

    def take(self, work, states):
        self.tap.take(work, lambda: self.tap.planes(states))

    def decode(self, batch, ids, positions=None):
        """One decode step: a row for each request."""
        tokens = None if positions is None else sum(positions) + len(positions)
        noted = Noted({id(r) for r in batch if r.over})
        run = self.tap.going_on(batch, tokens) or self.tap.guarded(
            self.tap.plan_decode, batch, Pass(positions, [1] * len(batch)), noted, tokens
        )
        final = np.repeat(np.asarray(ids, np.uint16)[:, None], HIDDEN, axis=1)
        if run:
            self.tap.guarded(self.take, run, (final, [final, final]))
        return run

    def finish(self, *requests):
        for request in requests:
            request.over = True
        self.tap.guarded(self.tap.post, self.follower.finish, requests)

    def samples(self):
        """``[(id, END, {position: value})]`` in the order of their ends."""
        with contextlib.suppress(Exception):  # where an error has ended it
            self.producer.exporter.flush(1)
        ended, _ = read_samples(self.reader, self.producer.info)
        return [(start, end, value_of(rows)) for start, end, rows in ended]


def value_of(rows):
    """``{position: value}`` of states that are all the same value."""
    return {position: int(states[0, 0]) for position, states in rows.items()}


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def server(ring_dir):
    server = Server(ring_dir)
    yield server
    server.producer.close()


def test_prefill_in_chunks_and_decode_become_one_sample(server):
    a = Fake("a", [10, 11, 12, 13])
    server.run((a, 0, [10, 11]), padding=6)
    server.run((a, 2, [12, 13]))
    server.run((a, 4, [50]))
    server.run((a, 5, [51]))  # the overlap scheduler's surplus pass
    a.output = np.array([50, 51], np.int32)
    server.finish(a)
    ((start, end, rows),) = server.samples()
    assert (start.id, end.reason, end.tokens) == ("a", FINISHED, 5)
    assert rows == {0: 10, 1: 11, 2: 12, 3: 13, 4: 50, 5: 51}


@pytest.mark.parametrize("told", [True, False], ids=["positions", "none"])
def test_decode_steps_go_on_where_the_last_ended(server, told):
    """Also when the server keeps the positions on its device, and a batch changes in between."""
    a, b = Fake("a", [10, 11]), Fake("b", [20, 21, 22])
    server.run((a, 0, [10, 11]), (b, 0, [20, 21, 22]))
    server.decode([a, b], [50, 60], [2, 3] if told else None)
    server.decode([a, b], [51, 61], [3, 4] if told else None)
    server.run((b, 5, [62, 63]))  # something else comes in between
    server.decode([b, a], [64, 52], [7, 4] if told else None)
    a.output, b.output = tokens(4, 50), tokens(6, 60)
    server.finish(a, b)
    (_, end_a, rows_a), (_, end_b, rows_b) = server.samples()
    assert rows_a == {0: 10, 1: 11, 2: 50, 3: 51, 4: 52}
    assert rows_b == {0: 20, 1: 21, 2: 22, 3: 60, 4: 61, 5: 62, 6: 63, 7: 64}
    assert (end_a.tokens, end_b.tokens) == (5, 8)


def test_positions_are_the_servers(server):
    a = Fake("a", [10, 11])
    server.run((a, 0, [10, 11]))
    server.decode([a], [50], [2])
    server.decode([a], [99], [7])
    server.finish(a)
    ((_, _, rows),) = server.samples()
    assert rows == {0: 10, 1: 11, 2: 50, 7: 99}


def test_prompt_mode_keeps_the_prompts_rows_only(ring_dir):
    server = Server(ring_dir, rows="prompt")
    a = Fake("a", [10, 11])
    server.run((a, 0, [10, 11, 50]))  # prefilled again with what it had generated
    a.output = np.array([50], np.int32)
    server.finish(a)
    ((_, end, rows),) = server.samples()
    assert end.tokens == 2
    assert rows == {0: 10, 1: 11}
    server.producer.close()


def test_two_live_requests_of_one_id_stay_two_samples(server):
    """SGLang checks ids in each tokenizer process only, so they may repeat."""
    a, b = Fake("dup", [10, 11, 12]), Fake("dup", [20, 21, 22])
    server.run((a, 2, [12]))  # its first tokens came out of the cache
    server.run((b, 0, [20, 21, 22]))
    server.finish(a, b)
    (_, end_a, rows_a), (_, end_b, rows_b) = server.samples()
    assert (end_a.cached, rows_a) == (2, {2: 12})
    assert (end_b.cached, rows_b) == (0, {0: 20, 1: 21, 2: 22})


def test_only_wanted_requests_are_captured_and_rows_keep_their_places(ring_dir):
    server = Server(ring_dir, tap={"selection": Selection("tagged")})
    named = Fake("r", [10, 11], tags={"hstransport_id": "mine"})
    other, probe = Fake("o", [20, 21, 22]), Fake("HEALTH_CHECK_1", [1], probe=True)
    server.run((other, 0, [20, 21, 22]), (named, 0, [10, 11]), (probe, 0, [1]))
    server.finish(named, other, probe)
    ((start, _, rows),) = server.samples()
    assert (start.id, start.rid, rows) == ("mine", "r", {0: 10, 1: 11})
    server.producer.close()


def test_a_request_whose_states_do_not_follow_from_its_tokens_is_named(server):
    bad = Fake("bad", [1, 1], unfit="the request has input_embeds")
    good = Fake("good", [10, 11])
    server.run((bad, 0, [1, 1]), (good, 0, [10, 11]))
    server.finish(bad, good)
    (start, end, rows), (_, other, _) = server.samples()
    assert (start.id, end.reason, rows) == ("bad", ABORTED, {})
    assert "input_embeds" in end.detail
    assert other.reason == FINISHED


def test_requests_that_vanish_are_ended_as_aborted(server):
    a, b = Fake("a", [10, 11]), Fake("b", [20, 21])
    server.run((a, 0, [10, 11]), (b, 0, [20, 21]))
    b.retracted = True
    server.producer.exporter.flush()
    assert server.follower.retracted() == [b]
    server.tap.guarded(server.tap.post, server.follower.finish, [b])
    server.finish(a)
    (_, end_b, _), (_, end_a, _) = server.samples()
    assert (end_b.reason, end_a.reason) == (ABORTED, FINISHED)


def test_a_batch_that_is_not_understood_costs_its_samples_only(server):
    a, b = Fake("a", [10, 11]), Fake("b", [20, 21])
    server.run((a, 0, [10, 11]))
    why = "a batch of 1 requests has 3 sequences"
    server.tap.guarded(server.tap.post, server.follower.give_up, [a], why)
    server.run((b, 0, [20, 21]))
    server.finish(a, b)
    (start, end, _), (_, other, rows) = server.samples()
    assert (start.id, end.reason) == ("a", ABORTED)
    assert "3 sequences" in end.detail
    assert (other.reason, rows) == (FINISHED, {0: 20, 1: 21})


def test_an_error_ends_capture_and_never_reaches_the_server(server):
    a, b = Fake("a", [10, 11]), Fake("b", [20, 21])
    server.run((a, 0, [10, 11]), (b, 0, [20, 21]))

    def broken(_):
        raise RuntimeError("output is broken")

    a.__class__ = type("Broken", (Fake,), {"output": property(broken)})
    server.finish(a, b)  # both the sweep and the way out meet the broken request
    ((start, end, _),) = server.samples()
    assert (start.id, end.reason) == ("b", ABORTED)
    assert "capture stopped" in end.detail
    server.run((Fake("c", [1]), 0, [1]))
    wait_until(lambda: server.reader.closed)
    assert server.samples() == []


def test_capture_stops_when_the_model_changes(server):
    a = Fake("a", [10, 11])
    server.run((a, 0, [10]))
    server.tap.stop("the model's weights were updated")
    server.run((a, 1, [11]))
    ((_, end, rows),) = server.samples()
    assert (end.reason, rows) == (ABORTED, {0: 10})
    assert "weights" in end.detail


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ((np.zeros((2, HIDDEN), np.uint16), None), "no captured layers"),
        ((np.zeros((2, HIDDEN), np.uint16), [np.zeros((2, HIDDEN), np.uint16)]), "1 layers"),
        ((np.zeros((1, HIDDEN), np.uint16),) * 2, "expected"),
        ((np.zeros((1, HIDDEN), np.uint16), [np.zeros((2, HIDDEN), np.uint16)] * 2), "1 rows"),
    ],
)
def test_states_that_do_not_fit_the_batch_end_capture(server, states, told, caplog):
    a = Fake("a", [10, 11])
    work = server.tap.plan([a], Pass([0], [2]), Noted())
    server.tap.guarded(server.take, work, states)
    ((_, end, rows),) = server.samples()
    assert (end.reason, rows) == (ABORTED, {})
    assert told in end.detail


def test_bad_labels_and_masks_become_a_label_that_says_so(server):
    for tags in (
        {"hstransport_labels": {"a": [1]}},
        {"hstransport_loss_mask": "x" * 3},
        {"hstransport_loss_mask": 5},
        {"hstransport_loss_mask": [1] * 1000},
    ):
        request = Fake("a", [10, 11], tags=tags)
        server.run((request, 0, [10, 11]))
        server.finish(request)
    got = server.samples()
    assert len(got) == 4
    assert all("hstransport_error" in start.labels for start, _, _ in got)


def test_a_spent_budget_begins_no_sample_and_ends_none(ring_dir, caplog):
    server = Server(ring_dir, tap={"budget_bytes": 5 * 3 * HIDDEN * 2})
    a, b = Fake("a", [10, 11, 12]), Fake("b", [20, 21, 22])
    server.run((a, 0, [10, 11, 12]))
    assert not server.follower.spent and not server.reader.counters.budget_spent
    server.run((b, 0, [20, 21]))
    wait_until(lambda: server.follower.spent)
    assert "HSTRANSPORT_BUDGET_BYTES is spent" in caplog.text
    assert server.reader.counters.budget_spent == 1
    late = Fake("late", [30])
    server.run((late, 0, [30]), (b, 2, [22]))
    server.decode([a], [13], [3])
    assert server.follower.captures(a) and server.follower.captures(b)
    a.output, b.output = tokens(2, 13), tokens(1, 23)
    server.finish(a, b, late)
    samples = {start.id: (end.tokens, rows) for start, end, rows in server.samples()}
    assert samples == {
        "a": (4, {0: 10, 1: 11, 2: 12, 3: 13}),
        "b": (3, {0: 20, 1: 21, 2: 22}),
    }
    assert not server.follower.captures(late)
    server.producer.close()


def test_each_of_several_generations_has_an_id_of_its_own(server):
    requests = [Fake(f"r{i}", [1, 2], tags={"hstransport_id": "x"}) for i in range(8)]
    for i, request in enumerate(requests):
        request.copies, request.generates = 3, i not in (0, 2)
        # The prompt alone and a generation, aborted; then the prompt and all three.
    requests = requests[:6]
    for request in requests:
        server.run((request, 0, [1, 2]))
    server.finish(*requests)
    ids = [start.id for start, _, _ in server.samples()]
    assert ids == ["x", "x#1", "x", "x#1", "x#2", "x#3"]
