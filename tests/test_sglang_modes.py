"""Ways in which people run a server: samples are right in each, or named as what they are."""

import concurrent.futures
import http.client
import json
import os
import socket
import time
import urllib.request

import numpy as np
import pytest
from hstransport_consumer.verify import verify
from rig.consumer import ConsumerProcess, all_samples
from rig.server import SGLangServer
from rig.states import cosines, floats, named, prompts

from hstransport.session import find_rings

pytestmark = pytest.mark.sglang


def environment(ring_dir, session, **more):
    return {
        "HSTRANSPORT": "1",
        "HSTRANSPORT_DIR": str(ring_dir),
        "HSTRANSPORT_SESSION": session,
        "HSTRANSPORT_RING_BYTES": "64MiB",
        "HSTRANSPORT_REQUESTS": "tagged",
        "HSTRANSPORT_ROWS": "all",
        **more,
    }


def generate(server, sample_id, input_ids, new_tokens, **payload):
    params = {
        "temperature": 0,
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "custom_params": {"hstransport_id": sample_id},
    }
    sampling = params | payload.pop("sampling_params", {})
    return server.generate(input_ids=input_ids, sampling_params=sampling, **payload)


def check_alike(samples, others):
    """The same tokens by another way have the same states, up to sums in another order."""
    for one, other in zip(samples, others, strict=True):
        assert (one.state, other.state) == ("whole", "whole"), (one, other)
        assert one.token_ids.tolist() == other.token_ids.tolist()
        same = cosines(floats(one.hidden_states), floats(other.hidden_states))
        assert same.min() > 0.999, (one.id, same.min())


def test_retracted_requests_are_computed_again_and_kept_once(model_dir, ring_dir, tmp_path):
    """SGLang's own switch for tests takes requests back every few passes."""
    env = environment(ring_dir, "retract", SGLANG_TEST_RETRACT="1")
    requests = named("r-", 12, seed=41, low=20, high=90)
    with (
        SGLangServer(model_dir("llama"), env=env, chunked_prefill=32) as server,
        ConsumerProcess(tmp_path / "s", ring_dir) as consumer,
    ):
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            asked = [
                pool.submit(generate, server, name, ids, 30, extra_key=name)
                for name, ids in requests.items()
            ]
            answers = [a.result() for a in asked]
        assert "retract" in server.log_text().lower()
        samples = consumer.wait_for(requests)
        alone = {}
        for (name, ids), answer in zip(requests.items(), answers, strict=True):
            # One token of it: there is nothing to retract.
            whole = ids + answer["output_ids"][:-1]
            alone[name] = whole
            generate(server, f"alone-{name}", whole, 1, extra_key=f"alone-{name}")
        others = consumer.wait_for([f"alone-{n}" for n in requests])
        assert consumer.stop() == 0
    assert {s.state for s in samples.values()} == {"whole"}
    check_alike([samples[n] for n in requests], [others[f"alone-{n}"] for n in requests])
    assert not verify(tmp_path / "s").findings


@pytest.mark.exhaustive  # a server of its own
def test_requests_that_sglang_times_out(ring_dir, tmp_path, model_dir):
    """One in decode ends as aborted; one that waits behind it was never computed."""
    env = environment(ring_dir, "timeouts") | {
        "SGLANG_REQ_RUNNING_TIMEOUT": "2",
        "SGLANG_REQ_WAITING_TIMEOUT": "0.5",
    }
    runs, waits = prompts(2, seed=55, low=40, high=60)
    with (
        SGLangServer(model_dir("llama"), env=env, max_running=1) as server,
        ConsumerProcess(tmp_path / "s", ring_dir) as consumer,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        asked = [pool.submit(generate, server, "runs", runs, 1900)]
        time.sleep(0.5)
        asked.append(pool.submit(generate, server, "waits", waits, 1))
        for one, words in zip(asked, ("running timeout", "waiting timeout"), strict=True):
            with pytest.raises(RuntimeError, match=words):
                one.result()
        generate(server, "after", waits, 1)
        samples = consumer.wait_for(["runs", "after"])
        assert consumer.stop() == 0
    assert samples["runs"].state == "aborted"
    assert "running timeout" in samples["runs"].detail
    assert samples["after"].state == "whole"
    assert sorted(s.id for s in all_samples(tmp_path / "s")) == ["after", "runs"]
    assert not verify(tmp_path / "s").findings


@pytest.fixture(scope="module")
def server(servers, module_ring_dir):
    return servers.get(
        "llama",
        chunked_prefill=32,
        extra_args=["--context-length", "2048"],
        env=environment(module_ring_dir, "modes"),
    )


@pytest.fixture
def consumer(server, tmp_path, module_ring_dir):
    with ConsumerProcess(tmp_path / "s", module_ring_dir, "--session", "modes") as process:
        yield process


def abort(server, rid):
    request = urllib.request.Request(
        f"{server.url}/abort_request",
        json.dumps({"rid": rid}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=30).close()


def test_several_generations_of_one_prompt(server, consumer):
    """Each of the n has an id of its own and refers to the prompt's rows, which are stored once."""
    (ids,) = prompts(1, seed=51, low=50, high=51)
    answers = generate(
        server, "n", ids, 8, sampling_params={"n": 3, "temperature": 1.0, "max_new_tokens": 8}
    )
    assert len(answers) == 3
    names = ["n", "n#1", "n#2", "n#3"]
    samples = consumer.wait_for(names)
    assert {s.state for s in samples.values()} == {"whole"}
    assert samples["n"].token_ids.tolist() == ids
    generated = sorted(samples[n].output_ids.tolist() for n in names[1:])
    assert generated == sorted(a["output_ids"] for a in answers)


def test_streaming_and_one_token_prompts(server, consumer):
    (ids,) = prompts(1, seed=52, low=40, high=41)
    body = {
        "input_ids": ids,
        "stream": True,
        "extra_key": "stream",
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": 12,
            "ignore_eos": True,
            "custom_params": {"hstransport_id": "stream"},
        },
    }
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        chunks = [line for line in answer if line.startswith(b"data: {")]
    assert len(chunks) > 3
    output = json.loads(chunks[-1][6:])["output_ids"]
    generate(server, "plain", ids, 12, extra_key="plain")
    generate(server, "one", [7], 1, extra_key="one")
    samples = consumer.wait_for(["stream", "plain", "one"])
    assert samples["stream"].output_ids.tolist()[-len(output) :] == output
    check_alike([samples["stream"]], [samples["plain"]])
    assert (samples["one"].state, samples["one"].token_ids.tolist()) == ("whole", [7])


def test_an_empty_prompt_is_sglangs_to_refuse(server, consumer):
    with pytest.raises(RuntimeError, match=r"(?i)empty|input|token"):
        generate(server, "empty", [], 1)
    generate(server, "after", [5, 6], 1)
    assert consumer.wait_for(["after"])["after"].state == "whole"


def test_clients_that_go_away_leave_named_samples(server, consumer):
    """In mid-prefill and in mid-decode; SGLang aborts their requests."""
    rng = np.random.default_rng(53)
    for name, length, new in (("prefill", 1900, 100), ("decode", 40, 1500)):
        body = json.dumps(
            {
                "input_ids": rng.integers(3, 500, length).tolist(),
                "stream": True,
                "extra_key": name,
                "sampling_params": {
                    "max_new_tokens": new,
                    "ignore_eos": True,
                    "custom_params": {"hstransport_id": name},
                },
            }
        )
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        if name == "decode":
            response = connection.getresponse()
            response.readline()  # its first token
        else:
            time.sleep(0.05)
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    generate(server, "meanwhile", rng.integers(3, 500, 60).tolist(), 5, extra_key="meanwhile")
    samples = consumer.wait_for(["decode", "meanwhile"])
    assert samples["meanwhile"].state == "whole"
    # SGLang 0.5.18 may not notice, and generate to the end.
    left = samples["decode"]
    assert left.state == "aborted" or len(left.output_ids) == 1500
    found = all_samples(consumer.out)
    assert "prefill" not in found or found["prefill"].state in ("aborted", "whole")


def test_aborts_of_requests_that_wait_run_and_have_ended(server, consumer):
    """Eight run at once, the others wait: what was never computed leaves no sample."""
    requests = named("a-", 24, seed=54, low=30, high=60)
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        asked = [
            pool.submit(generate, server, n, ids, 400, rid=f"rid-{n}", extra_key=n)
            for n, ids in requests.items()
        ]
        time.sleep(1.5)
        for n in list(requests)[::-1]:
            abort(server, f"rid-{n}")
        for a in asked:
            assert a.exception(60) is None or isinstance(a.exception(), RuntimeError)
    generate(server, "later", [9] * 30, 5, extra_key="later")
    assert consumer.wait_for(["later"])["later"].state == "whole"
    found = {s.id: s.state for s in all_samples(consumer.out) if s.id in requests}
    assert found, "none had been computed"
    assert set(found.values()) <= {"aborted", "whole"}
    assert "aborted" in found.values()


def test_a_thousand_requests_wait(server, consumer):
    requests = named("w-", 1000, seed=55, low=3, high=20)
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        list(pool.map(lambda r: generate(server, r[0], r[1], 2, extra_key=r[0]), requests.items()))
    samples = consumer.wait_for(requests, timeout_s=120)
    assert {s.state for s in samples.values()} == {"whole"}
    for name, ids in requests.items():
        assert samples[name].token_ids.tolist()[: len(ids)] == ids


@pytest.mark.exhaustive
def test_two_replicas_have_two_rings_and_one_dataset(model_dir, ring_dir, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    env = environment(ring_dir, "replicas", HSTRANSPORT_ROWS="prompt")
    # SGLang's own choice needs a NUMA node for each replica.
    env["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    requests = named("dp-", 60, seed=56)
    with (
        SGLangServer(model_dir("llama"), env=env, extra_args=["--dp-size", "2"]) as server,
        ConsumerProcess(tmp_path / "s", ring_dir) as consumer,
    ):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda r: generate(server, *r, 1, extra_key=r[0]), requests.items()))
        samples = consumer.wait_for(requests)
        assert len(find_rings(ring_dir, "replicas")) == 2
        assert {s.run.rank for s in samples.values()} == {0, 1}
        for name in list(requests)[:4]:
            generate(server, f"again-{name}", requests[name], 1, extra_key=f"again-{name}")
        again = consumer.wait_for([f"again-{n}" for n in list(requests)[:4]])
        assert consumer.stop() == 0
    assert {s.state for s in samples.values()} == {"whole"}
    first = list(requests)[:4]
    check_alike([samples[n] for n in first], [again[f"again-{n}"] for n in first])
    assert not verify(tmp_path / "s").findings
