"""Real servers: right layers are seen to be right, and a model that captures wrongly is found."""

import importlib.metadata

import pytest
from rig.consumer import ConsumerProcess
from rig.reference import Reference
from rig.server import ServerDied, SGLangServer
from rig.states import ask, cosines, floats, prompts

pytestmark = pytest.mark.sglang


def serve(servers, model, ring_dir, layers, by="auto"):
    return servers.get(
        model,
        extra_args=["--enable-return-hidden-states"],
        env={
            "HSTRANSPORT": "1",
            "HSTRANSPORT_DIR": str(ring_dir),
            "HSTRANSPORT_RING_BYTES": "16MiB",
            "HSTRANSPORT_REQUESTS": "tagged",
            "HSTRANSPORT_LAYERS": layers,
            "HSTRANSPORT_LAYERS_BY": by,
        },
    )


# Captured by SGLang as a list and packed; dense, and MLA with experts.
@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["llama", "dsv3"])
def test_layers_from_the_first_to_the_last_are_compared_and_captured(
    servers, model, tmp_path, ring_dir
):
    server = serve(servers, model, ring_dir, "1,3,5,final")
    (ids,) = prompts(1, seed=20, low=20)
    with ConsumerProcess(tmp_path / "s", ring_dir) as consumer:
        ask(server, "one", ids)
        sample = consumer.wait_for(["one"])["one"]
    assert (sample.state, list(sample.layers)) == ("whole", [1, 3, 5, "final"])
    assert "layers 1,3,5 are those that the model computes with" in server.log_text()


def test_a_model_that_captures_without_the_residual_is_not_captured(servers, ring_dir):
    """SGLang's Gemma 3 (0.5.20, 0.5.23) hands out a state to which the residual is yet to come."""
    server = serve(servers, "gemma3", ring_dir, "3,final")
    (ids,) = prompts(1, seed=21, low=20)
    assert ask(server, "one", ids)["output_ids"]
    log = server.log_text()
    assert "capture stopped, serving goes on: layer 3: what Gemma3DecoderLayer 3" in log
    assert "layers 3 are those" not in log


@pytest.mark.parametrize(
    ("model", "by"),
    [
        ("granite", "auto"),  # no setter; residuals are handed on
        pytest.param("olmo2", "auto", marks=pytest.mark.exhaustive),  # they are not; norms behind
        # The setter leaves a residual out.
        pytest.param("gemma3", "hooks", marks=pytest.mark.exhaustive),
        pytest.param("llama", "hooks", marks=pytest.mark.exhaustive),
    ],
)
def test_hooks_take_the_layers_of_a_model_that_does_not_hand_them_out(
    servers, model, by, tmp_path, ring_dir, model_dir
):
    server = serve(servers, model, ring_dir, "1,3,5,final", by)
    assert "layers are taken by hooks on" in server.log_text()
    reference = Reference(model_dir)
    wanted = {str(i): ids for i, ids in enumerate(prompts(4, seed=24, low=20))}
    with ConsumerProcess(tmp_path / "s", ring_dir) as consumer:
        for name, ids in wanted.items():
            ask(server, name, ids)
        samples = consumer.wait_for(wanted)
    for name, ids in wanted.items():
        sample, (states, _) = samples[name], reference(model, ids)
        assert sample.state == "whole"
        for layer in sample.layers:
            k = -1 if layer == "final" else layer
            like = cosines(floats(sample[layer]), states[k])
            assert like.min() >= 0.999, (name, layer, like.min())
            neighbour = cosines(floats(sample[layer]), states[k - 1])
            assert (neighbour >= 0.999).mean() < 0.1, (name, layer)
    assert "layers 1,3,5 are those that the model computes with" in server.log_text()


@pytest.mark.exhaustive
def test_final_of_a_model_that_captures_other_layers_wrongly_is_captured(
    servers, tmp_path, ring_dir
):
    server = serve(servers, "gemma3", ring_dir, "final")
    (ids,) = prompts(1, seed=22, low=20)
    with ConsumerProcess(tmp_path / "s", ring_dir) as consumer:
        ask(server, "one", ids)
        sample = consumer.wait_for(["one"])["one"]
    assert (sample.state, list(sample.layers)) == ("whole", ["final"])


SGLANG = tuple(int(n) for n in importlib.metadata.version("sglang").split(".")[:3])
AUX = [
    *("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"),
    *("--return-aux-hidden-state-layer-ids", "1", "2"),  # canonical: 2 and 3
]


@pytest.mark.skipif(SGLANG < (0, 5, 23), reason="came with SGLang 0.5.23")
@pytest.mark.parametrize("layers", ["2,3,final", "2,4,final"])
def test_layers_that_sglang_sets_itself_are_the_same_or_the_server_stops(
    model_dir, tmp_path, ring_dir, layers
):
    env = {"HSTRANSPORT": "1", "HSTRANSPORT_DIR": str(ring_dir), "HSTRANSPORT_LAYERS": layers}
    env["HSTRANSPORT_REQUESTS"] = "tagged"
    server = SGLangServer(model_dir("llama"), env=env, extra_args=AUX)
    if layers != "2,3,final":
        with pytest.raises(ServerDied, match=r"capture \[2, 3\].*HSTRANSPORT_LAYERS=2,3,final"):
            server.start()
        return
    (ids,) = prompts(1, seed=23, low=20)
    with server, ConsumerProcess(tmp_path / "s", ring_dir) as consumer:
        tag = {"custom_params": {"hstransport_id": "one"}, "max_new_tokens": 1}
        server.generate(input_ids=ids, sampling_params=tag)
        sample = consumer.wait_for(["one"])["one"]
    assert (sample.state, list(sample.layers)) == ("whole", [2, 3, "final"])
