"""The server does not notice: consumers that are absent, killed or slow, and rings that are full.

After each of these the server has answered every request, and every sample is whole or named as
not whole.
"""

import contextlib
import http.client
import json
import threading
import time
import urllib.request
from collections import Counter

import numpy as np
import pytest
import zmq
from rig.consumer import ConsumerProcess, all_samples
from rig.server import ServerDied, SGLangServer
from rig.states import ask, ask_all, cosines, floats, named, prompts, returned

from hstransport.ring import inspect_ring
from hstransport.session import find_rings

pytestmark = pytest.mark.sglang

SMALL = "1MiB"  # about 2,700 tokens of the tiny models


def ask_until_cut_off(server, sample_id, ids):
    """A long decode whose answer never comes."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        ask(server, sample_id, ids, max_new_tokens=1500)


def serve(servers, ring_dir, *args, **env):
    return servers.get(
        "llama",
        chunked_prefill=32,
        extra_args=["--enable-return-hidden-states", *args],
        env={
            "HSTRANSPORT": "1",
            "HSTRANSPORT_DIR": str(ring_dir),
            "HSTRANSPORT_REQUESTS": "tagged",
            **env,
        },
    )


def check(sample, answer, input_ids):
    """Whole, and the rows that SGLang returned (the last chunk's captured layers) are its last."""
    assert sample.state == "whole", (sample.state, sample.reason)
    assert sample.token_ids.tolist() == input_ids
    theirs = returned(answer)
    mine = sample.hidden_states[-len(theirs) :, :-1].reshape(len(theirs), -1)
    assert np.array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        pytest.param("drop", "0", id="drop"),
        pytest.param("block", "0.4", id="block", marks=pytest.mark.exhaustive),
    ],
)
def test_full_ring_without_consumer_costs_samples_and_names_them(
    servers, tmp_path, module_ring_dir, policy, seconds
):
    server = serve(
        servers,
        module_ring_dir,
        HSTRANSPORT_RING_BYTES=SMALL,
        HSTRANSPORT_POLICY=policy,
        HSTRANSPORT_BLOCK_S=seconds,
        HSTRANSPORT_SESSION=policy,
    )
    requests = named(f"{policy}-absent-", 120, seed=5)
    answers = ask_all(server, requests)
    assert len(answers) == len(requests)
    (ring,) = find_rings(module_ring_dir, policy)
    counters = inspect_ring(ring.path).counters
    assert counters.dropped_records > 0
    assert (counters.ring_stall_ns > 0) == (policy == "block")

    with ConsumerProcess(tmp_path / "s", module_ring_dir, "--session", policy) as consumer:
        samples = consumer.wait_for(requests)
        states = Counter(s.state for s in samples.values())
        assert set(states) == {"whole", "dropped"}, states
        for sample_id, sample in samples.items():
            if sample.state == "whole":
                check(sample, answers[sample_id], requests[sample_id])
        # With a consumer there is room again, and nothing of the bad time is left.
        later = named(f"{policy}-later-", 20, seed=6)
        answers = ask_all(server, later, threads=2)
        samples = consumer.wait_for(later)
        for sample_id, ids in later.items():
            check(samples[sample_id], answers[sample_id], ids)


@pytest.fixture
def roomy(servers, module_ring_dir):
    return serve(
        servers,
        module_ring_dir,
        "--enable-mixed-chunk",
        HSTRANSPORT_RING_BYTES="64MiB",
        HSTRANSPORT_ROWS="all",
        HSTRANSPORT_SESSION="roomy",
    )


def test_consumer_killed_and_restarted_loses_and_repeats_nothing(roomy, tmp_path, module_ring_dir):
    requests = named("kill-", 150, seed=7, low=5, high=60)
    consumer = ConsumerProcess(tmp_path / "s", module_ring_dir, "--session", "roomy")
    consumer.start()
    answers = {}
    client = threading.Thread(
        target=lambda: answers.update(ask_all(roomy, requests, max_new_tokens=8))
    )
    client.start()
    rng = np.random.default_rng(0)
    kills = 0
    while client.is_alive() and kills < 8:
        time.sleep(rng.uniform(0.1, 1.5))
        consumer.kill()
        kills += 1
        consumer.start()
    client.join()
    assert kills >= 2
    assert len(answers) == len(requests)
    samples = consumer.wait_for(requests)
    consumer.stop()
    dataset = all_samples(tmp_path / "s")
    assert sorted(dataset.ids) == sorted(requests)
    for sample_id, ids in requests.items():
        sample, answer = samples[sample_id], answers[sample_id]
        assert sample.state == "whole"
        assert sample.token_ids.tolist() == ids + answer["output_ids"][:-1]
        parts = answer["meta_info"]["hidden_states"]
        assert sample.tokens == len(ids) + len(parts) - 1


def test_subscriber_that_never_reads_and_strangers_do_no_harm(roomy, tmp_path, module_ring_dir):
    (ring,) = find_rings(module_ring_dir, "roomy")
    context = zmq.Context()
    deaf = context.socket(zmq.SUB)
    deaf.setsockopt(zmq.SUBSCRIBE, b"")
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.connect(ring.endpoint)
    requests = named("deaf-", 60, seed=8)
    with ConsumerProcess(tmp_path / "s", module_ring_dir, "--session", "roomy") as consumer:
        answers = ask_all(roomy, requests, max_new_tokens=16)
        samples = consumer.wait_for(requests)
        assert {s.state for s in samples.values()} == {"whole"}
    assert len(answers) == 60
    deaf.close(0)
    context.term()


def test_generated_tokens_join_the_prompt_as_one_whole_sample(roomy, tmp_path, module_ring_dir):
    (ids,) = prompts(1, seed=9, low=40, high=41)
    with ConsumerProcess(tmp_path / "s", module_ring_dir, "--session", "roomy") as consumer:
        answer = ask(roomy, "generated", ids, max_new_tokens=24)
        sample = consumer.wait_for(["generated"])["generated"]
        joined = ids + answer["output_ids"]
        assert sample.state == "whole"
        assert sample.token_ids.tolist() == joined[:-1]
        assert sample.next_token_id == joined[-1]
        assert sample.prompt_tokens == 40
        # The same tokens as a prompt: equal within what bf16 kernels of other shapes differ.
        ask(roomy, "prefilled", joined[:-1])
        again = consumer.wait_for(["prefilled"])["prefilled"]
    assert cosines(floats(sample.hidden_states), floats(again.hidden_states)).min() >= 0.999


def test_prefill_and_decode_mixed_in_one_batch_equal_requests_sent_alone(
    roomy, tmp_path, module_ring_dir
):
    requests = named("mixed-", 40, seed=14, low=30, high=90)
    with ConsumerProcess(tmp_path / "s", module_ring_dir, "--session", "roomy") as consumer:
        ask_all(roomy, requests, max_new_tokens=12)
        together = consumer.wait_for(requests)
        alone_ids = {f"alone-{i}": p for i, p in requests.items()}
        for sample_id, ids in alone_ids.items():
            ask(roomy, sample_id, ids, max_new_tokens=12)
        alone = consumer.wait_for(alone_ids)
    for sample_id, ids in requests.items():
        one, other = together[sample_id], alone[f"alone-{sample_id}"]
        assert (one.state, other.state) == ("whole", "whole")
        assert one.tokens == len(ids) + 11
        # A near tie may generate another token; up to there the states are the same.
        same = one.token_ids == other.token_ids
        n = len(same) if same.all() else int(np.argmin(same))
        assert n >= len(ids)
        cosine = cosines(floats(one.hidden_states[:n]), floats(other.hidden_states[:n]))
        assert cosine.min() >= 0.999, sample_id


def test_aborted_request_is_named(roomy, tmp_path, module_ring_dir):
    (ids,) = prompts(1, seed=10, low=40, high=41)
    with ConsumerProcess(tmp_path / "s", module_ring_dir, "--session", "roomy") as consumer:
        asking = threading.Thread(
            target=ask, args=(roomy, "cut", ids), kwargs={"max_new_tokens": 1900}
        )
        asking.start()
        time.sleep(1.5)
        abort = urllib.request.Request(
            f"{roomy.url}/abort_request",
            json.dumps({"rid": "rid-cut"}).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(abort, timeout=30).close()
        sample = consumer.wait_for(["cut"])["cut"]
        asking.join()
    assert sample.state == "aborted"


def test_server_killed_in_mid_work_leaves_named_samples_and_no_ring(
    roomy, servers, tmp_path, module_ring_dir
):
    requests = named("dead-", 40, seed=12)
    with ConsumerProcess(tmp_path / "s", module_ring_dir, "--session", "roomy") as consumer:
        ask_all(roomy, requests)
        consumer.wait_for(requests)
        (ids,) = prompts(1, seed=13, low=40, high=41)
        asking = threading.Thread(target=ask_until_cut_off, args=(roomy, "cut-off", ids))
        asking.start()
        time.sleep(1.5)
        (ring,) = find_rings(module_ring_dir, "roomy")
        roomy.stop(abrupt=True)
        asking.join()
        samples = consumer.wait_for([*requests, "cut-off"])
        assert samples["cut-off"].state == "unfinished"
        assert {samples[i].state for i in requests} == {"whole"}
        deadline = time.monotonic() + 10
        while ring.path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not ring.path.exists()


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"HSTRANSPORT_ROWS": "some"}, "HSTRANSPORT_ROWS='some': allowed are prompt and all"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ({"HSTRANSPORT_LAYERS": "2,6"}, "layer 6 of LlamaForCausalLM cannot be captured"),
                ({"ARGS": "--enable-torch-compile"}, "enable_torch_compile=True"),
                ({"ARGS": "--dtype float32"}, "add --dtype bfloat16"),
            ]
        ),
    ],
)
def test_what_cannot_be_captured_stops_the_server_at_start(model_dir, ring_dir, env, told):
    env = dict(env)
    args = env.pop("ARGS", "").split()
    env |= {"HSTRANSPORT": "1", "HSTRANSPORT_DIR": str(ring_dir)}
    server = SGLangServer(model_dir("llama"), env=env, extra_args=args)
    with pytest.raises(ServerDied) as died:
        server.start()
    assert told in str(died.value)
    assert not list(ring_dir.rglob("*.ring"))
