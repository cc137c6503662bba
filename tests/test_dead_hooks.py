"""A hook that is not applied, or that no pass comes through: the server stops or says so."""

import logging

import pytest
from rig.server import ServerDied, SGLangServer

from hstransport.session import find_rings
from hstransport.sglang import hooks
from hstransport.sglang.hooks import wanted_hooks

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
SAMPLING = {"max_new_tokens": 8, "ignore_eos": True}
DEAD = [
    pytest.param("apply", f"{SCHEDULER}.run_batch", "did not apply", id="not-applied"),
    pytest.param("later", f"{LOGITS}.forward", "did not come through", id="no-states"),
    pytest.param("later", f"{SCHEDULER}.process_batch_result", "did not come", id="no-results"),
]


def exhaustive(case):
    return pytest.param(*case.values, id=case.id, marks=pytest.mark.exhaustive)


def serve(model_dir, ring_dir, when, target, **env):
    env |= {"HSTRANSPORT": "1", "HSTRANSPORT_DIR": str(ring_dir)}
    env |= {"RIG_DEAD_HOOK": target, "RIG_DEAD_WHEN": when}
    return SGLangServer(model_dir("llama"), env=env)


@pytest.mark.sglang
@pytest.mark.parametrize(("when", "target", "told"), [DEAD[0], *map(exhaustive, DEAD[1:])])
def test_a_dead_hook_stops_the_server_with_its_name(model_dir, ring_dir, when, target, told):
    server = serve(model_dir, ring_dir, when, target)
    with pytest.raises(ServerDied):
        server.start()
    lines = server.log_text().splitlines()
    (line,) = [text for text in lines if "CaptureError: " in text and "ON_DEAD_HOOK" in text]
    assert told in line
    assert target in line
    assert "HSTRANSPORT_ON_DEAD_HOOK=serve" in line


@pytest.mark.sglang
@pytest.mark.parametrize(("when", "target", "told"), [exhaustive(DEAD[0]), DEAD[1]])
def test_a_server_that_may_serve_without_it_says_so_once(model_dir, ring_dir, when, target, told):
    with serve(model_dir, ring_dir, when, target, HSTRANSPORT_ON_DEAD_HOOK="serve") as server:
        for _ in range(3):
            answer = server.generate(input_ids=[1, 2, 3], sampling_params=SAMPLING)
            assert len(answer["output_ids"]) == 8
        lines = [line for line in server.log_text().splitlines() if "NOTHING WILL BE" in line]
        assert len(lines) == 1, server.log_text()
        assert told in lines[0]
        assert target in lines[0]
        for ring in find_rings(ring_dir, "default"):  # what was begun is left for a consumer
            assert when == "later", ring


@pytest.fixture
def unknown_release(monkeypatch):
    monkeypatch.setattr(hooks, "RUNNER", "sglang.srt.elsewhere.ModelRunner")
    monkeypatch.setattr(hooks, "WEIGHTS", ("sglang.srt.elsewhere.Weights",))
    monkeypatch.setenv("HSTRANSPORT", "1")


@pytest.mark.sglang
def test_an_unknown_release_stops_the_server_with_the_name_that_it_lacks(unknown_release):
    with pytest.raises(SystemExit) as end:
        wanted_hooks()
    assert "has no sglang.srt.elsewhere.ModelRunner.load_model" in str(end.value)
    assert "HSTRANSPORT_ON_DEAD_HOOK" in str(end.value)


@pytest.mark.sglang
def test_an_unknown_release_serves_without_hooks_where_it_may(unknown_release, monkeypatch, caplog):
    monkeypatch.setenv("HSTRANSPORT_ON_DEAD_HOOK", "serve")
    with caplog.at_level(logging.ERROR):
        assert wanted_hooks() == {}
    assert "NOTHING WILL BE CAPTURED" in caplog.text
    assert "has no sglang.srt.elsewhere.ModelRunner.load_model" in caplog.text
