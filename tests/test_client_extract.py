"""Asking: retries, refusals, bounded concurrency, resuming, and what is said of samples not whole.

The server is a stub that misbehaves on demand; what a consumer has stored is made up by the test.
Real servers and consumers are in test_cli_extract.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from rig.stub import StubServer, answer, slow

from hstransport.client import ask
from hstransport.client import extract as module
from hstransport.client.extract import Settings, extract
from hstransport.client.http import Refused, Server, Unreachable
from hstransport.client.progress import Progress
from hstransport.client.prompts import Prompt
from hstransport.client.stored import Found
from hstransport.errors import ConfigError


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(ask, "_BACKOFF_S", 0.01)


class Storage:
    """Stands for the directory: ``state(attempt)`` of each request that the stub has answered."""

    def __init__(self, stub, state=lambda attempt: "whole"):
        self._stub, self._state = stub, state
        self.before = {}

    def __call__(self, directory):
        return self

    def look(self, *, now=False):
        return not now

    def find(self, sample_id):
        asked = [r for r in self._stub.requests if tags(r)["hstransport_id"] == sample_id]
        if not asked or self._state is None:
            return self.before.get(sample_id)
        state = self._state(len(asked))
        return None if state is None else Found(state, asked[-1]["rid"], "because")


class Nowhere(Storage):
    """A directory that nobody writes."""

    def look(self, *, now=False):
        return False

    def find(self, sample_id):
        return None


def tags(request):
    return request["sampling_params"]["custom_params"]


def prompts(count):
    return [Prompt(i + 1, f"p{i}", np.arange(1, 4 + i, dtype=np.int32)) for i in range(count)]


def run(stub, storage, monkeypatch, tmp_path, count=3, timeout_s=5.0, **settings):
    monkeypatch.setattr(module, "Stored", storage)
    server = Server(stub.url, timeout_s=timeout_s)
    chosen = Settings(out=tmp_path, settle_timeout_s=0.3, **settings)
    return extract(server, prompts(count), chosen, Progress(quiet=True))


def test_request_carries_what_the_plugin_needs(monkeypatch, tmp_path):
    with StubServer() as stub:
        monkeypatch.setattr(module, "Stored", Storage(stub))
        tokens = np.array([5, 6], np.int32)
        prompt = Prompt(1, "mine", tokens, labels={"a": 1}, loss_mask=(1, 1))
        text = Prompt(2, "other", None, "some text")
        done = extract(
            Server(stub.url), [prompt, text], Settings(tmp_path, max_new_tokens=7), Progress()
        )
        assert (done.whole, done.not_whole, done.prompt_tokens) == (2, [], 4)
        first, second = sorted(stub.requests, key=lambda r: "text" in r)
    assert first["input_ids"] == [5, 6] and "text" not in first
    assert second["text"] == "some text" and "input_ids" not in second
    assert first["sampling_params"] == {
        "temperature": 0,
        "max_new_tokens": 7,
        "custom_params": {
            "hstransport_id": "mine",
            "hstransport_labels": {"a": 1},
            "hstransport_loss_mask": [1, 1],
        },
    }
    assert first["rid"] != second["rid"]


@pytest.mark.parametrize(
    "trouble", [(500, {"error": "x"}), (503, {}), (429, {}), "hang up", "hang"]
)
def test_request_that_failed_is_sent_again_under_a_fresh_rid(monkeypatch, tmp_path, trouble):
    with StubServer(lambda n, body: trouble if n == 1 else answer(n, body)) as stub:
        done = run(stub, Storage(stub), monkeypatch, tmp_path, count=1, timeout_s=0.5)
        assert (done.whole, done.requests) == (1, 2)
        assert len({r["rid"] for r in stub.requests}) == 2


def test_aborted_request_is_sent_again(monkeypatch, tmp_path):
    def behave(n, body):
        reason = {"type": "abort", "message": "out of memory"}
        return (200, {"meta_info": {"finish_reason": reason}}) if n == 1 else answer(n, body)

    with StubServer(behave) as stub:
        assert run(stub, Storage(stub), monkeypatch, tmp_path, count=1).requests == 2


def test_refusal_is_not_repeated_and_is_told_in_the_servers_words(monkeypatch, tmp_path):
    def behave(n, body):
        too_long = len(body["input_ids"]) > 3
        return (400, {"error": {"message": "too long"}}) if too_long else answer(n, body)

    with StubServer(behave) as stub:
        done = run(stub, Storage(stub), monkeypatch, tmp_path, count=2)
        assert (done.whole, done.requests) == (1, 2)
    (job,) = done.not_whole
    assert (job.prompt.id, job.state, job.detail) == ("p1", "refused", "HTTP 400: too long")
    assert done.server_lost is None


def test_concurrency_is_bounded(monkeypatch, tmp_path):
    with StubServer(slow(0.05)) as stub:
        run(stub, Storage(stub), monkeypatch, tmp_path, count=20, concurrency=4)
        assert stub.most_at_once == 4


def test_what_is_whole_already_is_not_asked(monkeypatch, tmp_path):
    with StubServer() as stub:
        storage = Storage(stub)
        storage.before = {"p0": Found("whole", "", ""), "p1": Found("dropped", "old", "")}
        done = run(stub, storage, monkeypatch, tmp_path)
        assert (done.already_whole, done.whole) == (1, 2)
        assert {tags(r)["hstransport_id"] for r in stub.requests} == {"p1", "p2"}


def test_sample_that_is_not_whole_is_asked_again(monkeypatch, tmp_path):
    with StubServer() as stub:
        storage = Storage(stub, lambda attempt: "dropped" if attempt == 1 else "whole")
        done = run(stub, storage, monkeypatch, tmp_path)
        assert (done.whole, done.requests, done.not_whole) == (3, 6, [])


def test_what_the_radix_cache_held_is_asked_again_past_it(monkeypatch, tmp_path):
    with StubServer() as stub:
        states = {1: "prefix_missing", 2: "dropped", 3: "whole"}
        done = run(stub, Storage(stub, states.get), monkeypatch, tmp_path, count=1)
        assert (done.whole, done.requests) == (1, 3)
        assert [r.get("extra_key") == r["rid"] for r in stub.requests] == [False, True, True]
        assert "extra_key" not in stub.requests[0]


def test_sample_that_never_becomes_whole_is_named_with_its_state(monkeypatch, tmp_path):
    with StubServer() as stub:
        storage = Storage(stub, lambda attempt: "prefix_missing")
        done = run(stub, storage, monkeypatch, tmp_path, count=1, retries=1)
    assert done.requests == 2
    (job,) = done.not_whole
    assert (job.state, job.detail) == ("prefix_missing", "because")
    assert done.as_dict()["states"] == {"prefix_missing": 1}


def test_old_broken_sample_is_not_taken_for_the_new_answer(monkeypatch, tmp_path):
    with StubServer() as stub:
        storage = Storage(stub, None)
        storage.before = {"p0": Found("dropped", "of an earlier run", "")}
        storage.look = lambda now=False: False
        done = run(stub, storage, monkeypatch, tmp_path, count=1)
    assert [job.state for job in done.not_whole] == ["not_stored"]


def test_silent_directory_means_that_no_consumer_runs(monkeypatch, tmp_path):
    with StubServer() as stub:
        done = run(stub, Nowhere(stub), monkeypatch, tmp_path)
        assert done.nothing_arrived
        assert [job.state for job in done.not_whole] == ["not_stored"] * 3
        assert len(stub.requests) == 3, "asking again helps nobody"


def test_server_that_dies_is_given_up_before_every_prompt_has_failed(monkeypatch, tmp_path):
    with StubServer() as stub:
        stub.behaviour = lambda n, body: answer(n, body) if n <= 5 else "hang up"
        done = run(stub, Storage(stub), monkeypatch, tmp_path, count=200, concurrency=4, retries=1)
        assert len(stub.requests) < 40
    assert done.server_lost
    assert done.whole == 5
    assert {job.state for job in done.not_whole} == {"failed", "not_asked"}


def test_first_interrupt_lets_requests_finish_and_sums_up(monkeypatch, tmp_path):
    def behave(n, body):
        if n == 1:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(0.4)
        return answer(n, body)

    handler = signal.getsignal(signal.SIGINT)
    with StubServer(behave) as stub:
        done = run(stub, Storage(stub), monkeypatch, tmp_path, count=50, concurrency=2)
    assert done.interrupted
    assert done.whole == len(stub.requests) == 2
    assert {job.state for job in done.not_whole} == {"not_asked"}
    assert signal.getsignal(signal.SIGINT) is handler


def test_model_info_of_something_else_is_refused():
    with StubServer(info={"hello": "world"}) as stub, pytest.raises(Refused, match="not as an SG"):
        Server(stub.url).model_info()


def test_nobody_at_home_is_unreachable():
    with StubServer() as stub:
        url = stub.url
    with pytest.raises(Unreachable, match="Connection refused"):
        Server(url).model_info()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://h:99999"])
def test_bad_url_is_refused(url):
    with pytest.raises(ConfigError, match="server"):
        Server(url)


def test_url_without_scheme_and_api_key_are_understood():
    with StubServer() as stub:
        server = Server(stub.url.removeprefix("http://"), api_key="secret")
        assert server.model_info().tokenizer == "/models/stub"
        server.generate({"text": "a b"})
        assert stub.headers[0]["Authorization"] == "Bearer secret"
