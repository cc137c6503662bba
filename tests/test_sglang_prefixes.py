"""The radix cache on, and used: what it holds is stored once, and every sample reads whole.

Pages of more than one token need a GPU (SGLang allocates them with a Triton kernel): their hits
are tests of test_prefixes.py and test_gpu_sglang.py.
"""

import json
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hstransport_consumer import open_shards
from hstransport_consumer.verify import verify
from rig.consumer import ConsumerProcess
from rig.states import cosines, floats

pytestmark = pytest.mark.sglang

RNG = np.random.default_rng(21)


def ids(n):
    return RNG.integers(3, 500, n).tolist()


@pytest.fixture(scope="module")
def server(servers, module_ring_dir):
    return servers.get(
        "llama",
        chunked_prefill=32,
        env={
            "HSTRANSPORT": "1",
            "HSTRANSPORT_DIR": str(module_ring_dir),
            "HSTRANSPORT_REQUESTS": "tagged",
            "HSTRANSPORT_ROWS": "all",
            "HSTRANSPORT_RING_BYTES": "64MiB",
            "HSTRANSPORT_SESSION": "prefixes",
        },
    )


@pytest.fixture
def consumer(server, tmp_path, module_ring_dir):
    with ConsumerProcess(tmp_path / "s", module_ring_dir, "--session", "prefixes") as process:
        yield process


def generate(server, sample_id, input_ids, new_tokens=1, **payload):
    """One request through the cache; its generated tokens."""
    answer = server.generate(
        input_ids=input_ids,
        sampling_params={
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
            "custom_params": {"hstransport_id": sample_id},
        },
        **payload,
    )
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def flush(server):
    urllib.request.urlopen(f"{server.url}/flush_cache", b"", timeout=30).close()


def test_branches_turns_and_restarts_read_whole_and_are_stored_once(server, consumer, tmp_path):
    flush(server)
    system = ids(70)
    sent, cached = {}, {}

    def send(name, prompt, new_tokens=1):
        output, cached[name] = generate(server, name, prompt, new_tokens)
        sent[name] = prompt + output[: new_tokens - 1]
        return output

    first = system + ids(30)
    output = send("first", first, 20)
    send("branch", system + ids(40), 5)
    send("nested", first[:85] + ids(25), 5)
    turn = first + output + ids(9)
    output = send("turn-2", turn, 20)
    send("turn-3", turn + output + ids(5), 3)
    consumer.wait_for(sent)
    consumer.kill()
    consumer.start()
    send("after-restart", turn[:80] + ids(9), 5)
    flush(server)
    send("after-flush", system + ids(8), 5)
    send("and-again", system + ids(33), 5)
    samples = consumer.wait_for(sent)
    assert cached["first"] == cached["after-flush"] == 0
    assert all(n >= 64 for name, n in cached.items() if name not in ("first", "after-flush"))
    assert cached["turn-3"] >= len(turn)  # generated tokens, too
    for name, tokens in sent.items():
        assert samples[name].state == "whole", (name, samples[name].state)
        assert samples[name].token_ids.tolist() == tokens
        assert sum(p.rows for p in samples[name].refs) == cached[name]

    # The same prompts past the cache are all computed, and so are their states.
    for name, tokens in sent.items():
        generate(server, f"alone-{name}", tokens, extra_key=f"alone-{name}")
    alone = consumer.wait_for([f"alone-{name}" for name in sent])
    for name in sent:
        assert not alone[f"alone-{name}"].refs
        pair = (samples, name), (alone, f"alone-{name}")
        same = cosines(*(floats(x[k].hidden_states) for x, k in pair))
        assert same.min() > 0.999, (name, same.min())
    assert consumer.stop() == 0
    dataset = open_shards(tmp_path / "s")
    rows = sum(int(s.tables.c["chunk.rows"].sum()) for s in dataset.shards)
    surplus = rows - (2 * sum(map(len, sent.values())) - sum(cached.values()))
    # The overlap scheduler computes one row too many for a request that ends.
    assert 0 <= surplus <= 2 * len(sent)
    assert not verify(tmp_path / "s").findings


def test_many_at_once_share_what_runs_beside_them(server, consumer, tmp_path):
    flush(server)
    system = ids(100)
    requests = {f"many-{i}": system[: 40 + 20 * (i % 4)] + ids(5 + i) for i in range(40)}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda r: generate(server, *r, 9), requests.items()))
    samples = consumer.wait_for(requests)
    assert sum(cached for _, cached in answers) > 1000
    assert {s.state for s in samples.values()} == {"whole"}
    assert consumer.stop() == 0
    assert not verify(tmp_path / "s").findings


def test_what_was_never_captured_is_named(server, consumer):
    """The cache was filled by a request that is not captured."""
    prompt = ids(80)
    server.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})
    _, cached = generate(server, "named", prompt + ids(4))
    assert cached >= 64
    assert consumer.wait_for(["named"])["named"].state == "prefix_missing"


def test_extract_asks_again_past_the_cache(server, consumer, tmp_path):
    prompt = ids(80)
    server.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})
    lines = [{"id": f"again-{i}", "input_ids": prompt + ids(5)} for i in range(3)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "hstransport.cli", "extract", "--server", server.url]
    command += ["--prompts", str(tmp_path / "p.jsonl"), "--out", str(consumer.out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["whole"], said["not_whole"]) == (3, [])
    assert 3 < said["requests"] <= 6
    samples = consumer.wait_for([line["id"] for line in lines])
    assert {s.state for s in samples.values()} == {"whole"}
