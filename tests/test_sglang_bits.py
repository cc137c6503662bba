"""What a reader returns is, bit for bit, what SGLang itself returns for the same request.

One request gives both: the answer's ``hidden_states`` (captured layers when some are captured, the
final state otherwise) and the sample that the consumer packed.
"""

import threading

import numpy as np
import pytest
from rig.consumer import ConsumerProcess

pytestmark = pytest.mark.sglang

MODELS = ("llama", "qwen3", "dsv3", "smollm2")
VOCABULARY = 500  # of the tiny models; ordinary words in SmolLM2
CONFIGS = {
    "alone": {},
    "chunked": {"chunked_prefill": 32},
    "tp2": {"tp": 2},
}


def bits(rows):
    """JSON's decimal numbers of bf16 values -> uint16; exact, and checked to be so."""
    wide = np.asarray(rows, np.float32).view(np.uint32)
    assert not (wide & 0xFFFF).any(), "a returned value is no bf16 number"
    return (wide >> 16).astype(np.uint16)


def prompts(count, seed, low=3, high=100):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, rng.integers(low, high)).tolist() for _ in range(count)]


def ask(server, sample_id, input_ids, **params):
    return server.generate(
        input_ids=input_ids,
        rid=f"rid-{sample_id}",
        extra_key=sample_id,
        return_hidden_states=True,
        sampling_params={
            "temperature": 0,
            "max_new_tokens": 1,
            "ignore_eos": True,
            "custom_params": {"hstransport_id": sample_id, "hstransport_labels": {"n": sample_id}},
            **params,
        },
    )


def ask_together(server, requests):
    answers = {}

    def one(sample_id, ids):
        answers[sample_id] = ask(server, sample_id, ids)

    threads = [threading.Thread(target=one, args=r) for r in requests.items()]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return answers


def start(servers, model, config, ring_dir, **env):
    return servers.get(
        model,
        extra_args=["--enable-return-hidden-states"],
        env={
            "HSTRANSPORT": "1",
            "HSTRANSPORT_DIR": str(ring_dir),
            "HSTRANSPORT_RING_BYTES": "64MiB",
            "HSTRANSPORT_REQUESTS": "tagged",
            **env,
        },
        **CONFIGS[config],
    )


def returned(answer):
    """``[tokens, width]`` bits that SGLang returned for the prompt."""
    parts = answer["meta_info"]["hidden_states"]
    rows = [r for part in parts for r in (part if isinstance(part[0], list) else [part])]
    return bits(rows)


def check(sample, answer, input_ids, planes):
    assert sample.state == "whole", (sample.state, sample.reason)
    assert sample.token_ids.tolist() == input_ids
    assert sample.next_token_id == answer["output_ids"][0]
    mine = sample.hidden_states[:, planes]
    theirs = returned(answer)[: len(input_ids)]
    assert mine.reshape(len(input_ids), -1).tolist() == theirs.tolist()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("layers", ["eagle3,final", "final"])
def test_states_equal_what_sglang_returns(servers, tmp_path, module_ring_dir, model, config, layers):
    server = start(servers, model, config, module_ring_dir, HSTRANSPORT_LAYERS=layers)
    alone = {f"a{i}": p for i, p in enumerate(prompts(3, seed=1))}
    batch = {f"b{i}": p for i, p in enumerate(prompts(8, seed=2))}
    with ConsumerProcess(tmp_path / "shards", module_ring_dir) as consumer:
        answers = {i: ask(server, i, p) for i, p in alone.items()}
        answers |= ask_together(server, batch)
        samples = consumer.wait_for(answers)
        # With inner layers captured SGLang returns those, otherwise the final state.
        planes = slice(0, -1) if layers != "final" else slice(-1, None)
        for sample_id, ids in (alone | batch).items():
            check(samples[sample_id], answers[sample_id], ids, planes)
