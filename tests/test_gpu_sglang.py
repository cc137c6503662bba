"""A real SGLang on a real GPU, with everything on: its states, bit for bit, also under CUDA graphs.

Prompts are prefilled in chunks through a prefill graph or eagerly, generations are decoded through
graphs of padded sizes and, above the largest, eagerly; the overlap scheduler runs ahead.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from rig.consumer import ConsumerProcess, all_samples
from rig.gpu_server import GpuServer
from rig.server import ServerDied
from rig.states import ask, ask_all, cosines, floats, returned

from hstransport.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.sglang]

CHUNK, LARGEST_GRAPH, NEW = 256, 8, 24
SAME = 0.999
"""Cosine of a decoded token's states with those of a prefill of the same tokens: other kernels sum
in another order, in bf16. Measured on an H200: 0.99977 and more (benchmarks/README.md)."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=4096,
        initializer_range=0.03,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    net = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    net.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    # As older releases wrote it, which SGLang's transformers reads as well.
    raw |= {"torch_dtype": "bfloat16", "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, net.lm_head.weight.detach().float().numpy()


@pytest.fixture(scope="module")
def server(model, module_ring_dir):
    arguments = [
        *("--load-format", "auto", "--enable-return-hidden-states"),
        *("--chunked-prefill-size", str(CHUNK), "--mem-fraction-static", "0.2"),
        *("--page-size", "16"),
        *("--cuda-graph-max-bs-decode", str(LARGEST_GRAPH)),
        *("--cuda-graph-bs-prefill", "64", "128", "256"),
    ]
    env = {
        "HSTRANSPORT": "1",
        "HSTRANSPORT_DIR": str(module_ring_dir),
        "HSTRANSPORT_RING_BYTES": "256MiB",
        "HSTRANSPORT_REQUESTS": "tagged",
        "HSTRANSPORT_ROWS": "all",
    }
    with GpuServer(
        model[0], max_running=16, max_total_tokens=32768, extra_args=arguments, env=env
    ) as server:
        yield server


@pytest.fixture
def consumer(server, tmp_path, module_ring_dir):
    with ConsumerProcess(tmp_path / "shards", module_ring_dir) as process:
        yield process


def prompts(prefix, count, seed, low=3, high=700):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(low, high, count)
    return {f"{prefix}{i}": rng.integers(3, 8000, n).tolist() for i, n in enumerate(lengths)}


def decoded(answer):
    """bf16 bits ``[tokens, width]`` that SGLang returned of the tokens that it decoded."""
    rows = [np.asarray(r, np.float32).reshape(-1) for r in answer["meta_info"]["hidden_states"][1:]]
    return (np.stack(rows).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("together", [1, 3, 12], ids="{}-at-once".format)
def test_states_equal_what_sglang_returns_of_prompts_and_generations(
    server, consumer, model, together
):
    requests = prompts(f"at{together}-", 2 * together + 4, seed=together)
    answers = ask_all(server, requests, threads=together, max_new_tokens=NEW)
    samples = consumer.wait_for(answers)
    agree = total = 0
    for name, ids in requests.items():
        sample, answer = samples[name], answers[name]
        output = answer["output_ids"]
        assert sample.state == "whole", (sample.state, sample.reason)
        assert sample.token_ids.tolist() == ids + output[:-1]
        assert sample.next_token_id == output[-1]
        mine = sample.hidden_states[:, :-1].reshape(sample.tokens, -1)
        prompt_rows = returned(answer)  # of the last chunk
        assert np.array_equal(mine[len(ids) - len(prompt_rows) : len(ids)], prompt_rows), name
        theirs = decoded(answer)
        assert np.array_equal(mine[len(ids) :], theirs[: NEW - 1]), name
        # Only the state after the final norm gives the server's own tokens through lm_head.
        logits = floats(sample["final"])[len(ids) - 1 :] @ model[1].T
        agree += int((logits.argmax(1) == output).sum())
        total += len(output)
    assert agree / total > 0.97, f"{agree} of {total} tokens"


def test_decode_ran_through_graphs(server):
    """Otherwise the tests above would have shown less than they say."""
    log = server.log_text()
    assert "cuda graph: True" in log
    assert "cuda graph: False" in log  # above the largest


def test_a_generation_equals_a_prefill_of_the_same_tokens(server, consumer, record_property):
    requests = prompts("gen-", 6, seed=77, low=20, high=400)
    answers = ask_all(server, requests, threads=6, max_new_tokens=64)
    again = {f"again-{n}": ids + answers[n]["output_ids"][:-1] for n, ids in requests.items()}
    for name, ids in again.items():
        ask(server, name, ids)
    samples = consumer.wait_for([*requests, *again])
    worst = {}
    for name in requests:
        one, other = samples[name], samples[f"again-{name}"]
        assert one.token_ids.tolist() == other.token_ids[: one.tokens].tolist()
        for layer in one.layers:
            same = cosines(floats(one[layer]), floats(other[layer])[: one.tokens])
            worst[layer] = min(worst.get(layer, 1.0), float(same.min()))
    record_property("worst_cosine", json.dumps({str(k): round(v, 6) for k, v in worst.items()}))
    assert min(worst.values()) >= SAME


def test_prefixes_out_of_the_radix_cache_are_stored_once(server, consumer):
    """In pages of 16 tokens: a hit is cut down to whole ones. Turns of chats, at once."""
    rng = np.random.default_rng(31)
    system = rng.integers(3, 8000, 500).tolist()

    def chat(i):
        history, sent = system[: 300 + 20 * (i % 8)], {}
        for turn in range(3):
            history = history + rng.integers(3, 8000, 10 + i).tolist()
            params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
            name = f"chat-{i}-{turn}"
            params["custom_params"] = {"hstransport_id": name}
            answer = server.generate(input_ids=history, sampling_params=params)
            history = history + answer["output_ids"]
            sent[name] = history[:-1], answer["meta_info"]["cached_tokens"]
        return sent

    with ThreadPoolExecutor(6) as pool:
        sent = {k: v for chats in pool.map(chat, range(12)) for k, v in chats.items()}
    samples = consumer.wait_for(sent)
    assert sum(cached for _, cached in sent.values()) > 8000
    for name, (tokens, cached) in sent.items():
        sample = samples[name]
        assert cached % 16 == 0
        assert (sample.state, sum(p.rows for p in sample.refs)) == ("whole", cached)
        assert sample.token_ids.tolist() == tokens
    for name in list(sent)[::6]:
        tokens, _ = sent[name]
        ask(server, f"alone-{name}", tokens)
        alone = consumer.wait_for([f"alone-{name}"])[f"alone-{name}"]
        same = cosines(floats(samples[name].hidden_states), floats(alone.hidden_states))
        assert same.min() >= SAME


def test_doctor_finds_nothing_wrong(server, model, module_ring_dir, capsys):
    where = ("--server", server.url, "--dir", module_ring_dir, "--reference", model[0])
    status = main(["doctor", *map(str, where), "--json"])
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert {f["status"] for f in findings.values()} == {"ok"}, findings
    assert {"layers", "batch", "prefix", "lm_head", "norm"} - findings.keys() == {"layers"}
    assert sum(name.startswith("layer ") for name in findings) == 3
    assert status == 0


def test_an_engine_of_its_own_gives_the_servers_samples(
    server, consumer, model, ring_dir, tmp_path, monkeypatch
):
    """``extract --model`` with the server's arguments, one request at a time: bit for bit."""
    requests = prompts("own-", 5, seed=9)
    path, out = tmp_path / "prompts.jsonl", tmp_path / "own"
    path.write_text(
        "".join(json.dumps({"id": i, "input_ids": p}) + "\n" for i, p in requests.items())
    )
    monkeypatch.setenv("HSTRANSPORT_DIR", str(ring_dir))
    monkeypatch.setenv("HSTRANSPORT_RING_BYTES", "256MiB")
    extract = ["extract", "--prompts", path, "--concurrency", "1", "--max-new-tokens", str(NEW)]
    extract += ["--model", model[0], "--out", out, "--rows", "all", "--", *server.arguments]
    assert main(list(map(str, extract))) == 0
    for name, ids in requests.items():
        ask(server, name, ids, max_new_tokens=NEW)
    theirs, mine = consumer.wait_for(requests), {s.id: s for s in all_samples(out)}
    assert mine.keys() == requests.keys()
    for name, sample in mine.items():
        assert sample.token_ids.tolist() == theirs[name].token_ids.tolist()
        assert np.array_equal(sample.hidden_states, theirs[name].hidden_states), name
    assert not list(ring_dir.iterdir())


def test_hooks_on_layers_take_what_the_model_hands_out(server, consumer, model, ring_dir, tmp_path):
    """Also in decode graphs, where the sum of state and residual is recorded with the rest."""
    requests = prompts("hooks-", 4, seed=14, low=20, high=250)
    env = {
        "HSTRANSPORT": "1",
        "HSTRANSPORT_DIR": str(ring_dir),
        "HSTRANSPORT_RING_BYTES": "256MiB",
        "HSTRANSPORT_ROWS": "all",
        "HSTRANSPORT_LAYERS_BY": "hooks",
    }
    arguments = [
        *("--load-format", "auto", "--enable-return-hidden-states"),
        *("--chunked-prefill-size", str(CHUNK)),
        *("--mem-fraction-static", "0.2", "--cuda-graph-max-bs-decode", str(LARGEST_GRAPH)),
    ]
    options = {"max_running": 16, "max_total_tokens": 32768, "env": env}
    with pytest.raises(ServerDied, match="--disable-prefill-cuda-graph"):
        GpuServer(
            model[0], extra_args=[*arguments, "--cuda-graph-bs-prefill", "64"], **options
        ).start()
    arguments.append("--disable-prefill-cuda-graph")
    hooked = GpuServer(model[0], extra_args=arguments, **options)
    with hooked, ConsumerProcess(tmp_path / "hooked", ring_dir) as other:
        for name, ids in requests.items():
            ask(server, name, ids, max_new_tokens=NEW)
            ask(hooked, name, ids, max_new_tokens=NEW)
        mine, theirs = other.wait_for(requests), consumer.wait_for(requests)
        assert "cuda graph: True" in hooked.log_text()
    for name in requests:
        one, two = mine[name], theirs[name]
        assert (one.state, one.layers) == ("whole", two.layers)
        # Greedy decoding may part ways where two tokens are as good.
        same = int((np.cumprod(one.token_ids == two.token_ids)).sum())
        assert same >= len(requests[name])
        for layer in one.layers:
            like = cosines(floats(one[layer])[:same], floats(two[layer])[:same])
            assert like.min() >= SAME, (name, layer, like.min())


def test_a_prompt_of_32k_tokens_in_chunks_of_2048(model, ring_dir, tmp_path):
    """The same rows when all chunks begin elsewhere: behind 700 tokens out of the cache."""
    env = {
        "HSTRANSPORT": "1",
        "HSTRANSPORT_DIR": str(ring_dir),
        "HSTRANSPORT_RING_BYTES": "256MiB",
        "HSTRANSPORT_REQUESTS": "tagged",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    ids = np.random.default_rng(61).integers(3, 8000, 32_768).tolist()
    arguments = [
        *("--load-format", "auto", "--mem-fraction-static", "0.3"),
        *("--chunked-prefill-size", "2048", "--context-length", "32800"),
        *("--cuda-graph-max-bs-decode", "1", "--cuda-graph-bs-prefill", "256"),
    ]
    options = {"max_running": 2, "max_total_tokens": 70_000, "extra_args": arguments}
    with (
        GpuServer(model[0], env=env, **options) as long_server,
        ConsumerProcess(tmp_path / "s", ring_dir) as consumer,
    ):
        for name, tokens in (("head", ids[:700]), ("long", ids), ("alone", ids)):
            payload = {"extra_key": name} if name == "alone" else {}
            tag = {"custom_params": {"hstransport_id": name}}
            params = {"temperature": 0, "max_new_tokens": 1, **tag}
            long_server.generate(input_ids=tokens, sampling_params=params, **payload)
        samples = consumer.wait_for(["head", "long", "alone"], timeout_s=120)
    assert sum(p.rows for p in samples["long"].refs) == 700
    for name in ("long", "alone"):
        assert (samples[name].state, samples[name].token_ids.tolist()) == ("whole", ids)
    same = cosines(*(floats(samples[n].hidden_states) for n in ("long", "alone")))
    assert same.min() >= SAME


def test_a_server_shut_down_in_the_middle_of_copies_ends_cleanly(server, consumer):
    """Last: it ends the server that the others share."""
    requests = prompts("cut-", 12, seed=5, low=300)
    asking = threading.Thread(target=lambda: _until_it_fails(server, requests), daemon=True)
    asking.start()
    time.sleep(2.0)
    server.stop()  # waits until all its processes have ended
    deadline = time.monotonic() + 30
    while "ring removed" not in consumer.log_text():
        assert time.monotonic() < deadline, consumer.log_text()
        time.sleep(0.1)
    samples = all_samples(consumer.out)
    assert 1 <= len(samples) <= len(requests)  # the others had not begun
    assert {s.state for s in samples} <= {"whole", "unfinished", "aborted"}
    assert "malformed" not in consumer.log_text()


def _until_it_fails(server, requests):
    try:
        ask_all(server, requests, threads=12, max_new_tokens=3000)
    except OSError:
        pass
    except RuntimeError:
        pass
