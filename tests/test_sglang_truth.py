"""The states are the right ones: each layer against transformers on the same checkpoint.

``hidden_states[k]`` of transformers is canonical layer k for k < n, and ``hidden_states[n]`` is the
state after the final norm. bf16 kernels differ between the two engines, so the measure is the
cosine of each token's state.
"""

import numpy as np
import pytest
from rig.consumer import ConsumerProcess
from test_sglang_bits import MODELS, ask, prompts, start

pytestmark = pytest.mark.sglang

SAME = 0.999


@pytest.fixture(scope="module")
def reference(model_dir):
    """``reference(model, ids)``: fp32 states ``[n + 1, tokens, hidden]`` and the lm_head."""
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    transformers = pytest.importorskip("transformers")
    loaded = {}

    def states(model, ids):
        if model not in loaded:
            loaded.clear()
            loaded[model] = transformers.AutoModelForCausalLM.from_pretrained(
                model_dir(model), dtype=torch.bfloat16
            )
        net = loaded[model]
        with torch.no_grad():
            out = net(torch.tensor([ids]), output_hidden_states=True)
        head = net.get_output_embeddings().weight.float().numpy()
        return np.stack([h[0].float().numpy() for h in out.hidden_states]), head

    return states


def floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def cosines(a, b):
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(axis=1) / norms


@pytest.mark.parametrize("model", MODELS)
def test_layers_and_final_are_those_of_transformers(
    servers, tmp_path, module_ring_dir, model, reference
):
    server = start(servers, model, "alone", module_ring_dir)
    requests = {f"t{i}": p for i, p in enumerate(prompts(4, seed=3, low=20))}
    with ConsumerProcess(tmp_path / "shards", module_ring_dir) as consumer:
        answers = {i: ask(server, i, p) for i, p in requests.items()}
        samples = consumer.wait_for(requests)
        for sample_id, ids in requests.items():
            sample = samples[sample_id]
            states, head = reference(model, ids)
            for layer in sample.layers:
                mine = floats(sample[layer])
                if layer == "final":
                    theirs, neighbours = states[-1], states[-2:-1]
                else:
                    theirs, neighbours = states[layer], states[[layer - 1, layer + 1]]
                assert cosines(mine, theirs).min() >= SAME, (sample_id, layer)
                # The measure tells neighbours apart: off by one, or pre-norm, would not pass.
                for other in neighbours:
                    assert cosines(mine, other).min() < SAME, (sample_id, layer)
            token = int(np.argmax(floats(sample["final"])[-1] @ head.T))
            assert token == answers[sample_id]["output_ids"][0]
