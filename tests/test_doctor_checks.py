"""What doctor concludes from states and checkpoints, on small ones made here."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hstransport.doctor import truth
from hstransport.doctor.checkpoint import Checkpoint, Unknown
from hstransport.doctor.checks import check_values
from hstransport.doctor.compare import agreement, cosines
from hstransport.doctor.probe import Probe

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

HIDDEN, VOCAB, TOKENS = 32, 200, 40


def rng():
    return np.random.default_rng(0)


def normal(*shape):
    return rng().standard_normal(shape).astype(np.float32)


def checkpoint(folder, tensors, files=1, **config):
    """A folder with these tensors, spread over so many files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    index = {}
    for i in range(files):
        name = f"model-{i}.safetensors"
        part = dict(list(tensors.items())[i::files])
        safetensors.save_file(
            {k: torch.from_numpy(v.copy()) for k, v in part.items()}, folder / name
        )
        index |= dict.fromkeys(part, name)
    if files > 1:
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": index}))
    return Checkpoint(folder)


NORM = 1 + 0.1 * normal(HIDDEN)
HEAD = normal(VOCAB, HIDDEN) / 12
PLAIN = {
    "model.norm.weight": NORM,
    "lm_head.weight": HEAD,
    "model.embed_tokens.weight": HEAD + 1,
    "model.layers.0.input_layernorm.weight": NORM + 1,
    "model.layers.1.shared_head.norm.weight": NORM + 2,
}


def rms_normed(states, weight):
    return states / np.sqrt((states**2).mean(1, keepdims=True)) * weight


@pytest.mark.parametrize("files", [1, 3])
def test_last_norm_and_head_are_found_in_one_file_or_several(tmp_path, files):
    found = checkpoint(tmp_path, PLAIN, files)
    assert np.array_equal(found.norm(), NORM)
    states = normal(5, HIDDEN)
    assert np.allclose(found.logits(states), states @ HEAD.T, atol=1e-5)


def test_tied_head_is_the_embedding(tmp_path):
    states = normal(5, HIDDEN)
    want = states @ (HEAD + 1).T
    tied = checkpoint(tmp_path / "told", PLAIN, tie_word_embeddings=True)
    assert np.allclose(tied.logits(states), want, atol=1e-5)
    without = {k: v for k, v in PLAIN.items() if k != "lm_head.weight"}
    assert np.allclose(checkpoint(tmp_path / "seen", without).logits(states), want, atol=1e-5)
    with pytest.raises(Unknown, match="which tensor is the lm_head"):
        checkpoint(tmp_path / "lost", without, tie_word_embeddings=False).logits(states)


def test_logits_are_scaled_and_capped_as_the_config_says(tmp_path):
    states = normal(5, HIDDEN)
    found = checkpoint(tmp_path, PLAIN, logit_scale=0.5, final_logit_softcapping=2.0)
    assert np.allclose(found.logits(states), 2 * np.tanh(states @ HEAD.T / 4), atol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model.norm.weight": NORM, "model.norm.bias": NORM}, "has a bias"),
        ({"model.norm.weight": NORM * 0}, "has zeros"),
        ({"model.norm.weight": NORM, "other.norm.weight": NORM}, "which tensor is the final norm"),
        ({"x": NORM}, "Found: none"),
    ],
)
def test_norm_that_cannot_be_told_is_unknown(tmp_path, tensors, words):
    with pytest.raises(Unknown, match=words):
        checkpoint(tmp_path, tensors).norm()


@pytest.mark.parametrize("added", [0.0, 1.0], ids=["weight", "one more than the weight"])
def test_rms_tells_after_the_norm_from_before(tmp_path, added):
    states = 20 * normal(TOKENS, HIDDEN)
    found = checkpoint(tmp_path, PLAIN | {"model.norm.weight": NORM - added})
    after = truth.check_norm({"a": rms_normed(states, NORM)}, found)
    assert (after.status, "1.000 +- 0.000" in after.text) == ("ok", True)
    before = truth.check_norm({"a": states}, found)
    assert (before.status, "BEFORE the norm" in before.text) == ("fail", True)
    spoilt = rms_normed(states, NORM)
    spoilt[3] = np.nan
    assert "1 tokens are not 1" in truth.check_norm({"a": spoilt}, found).text


def probe_of(states):
    """A probe whose one generated token the states predict."""
    logits = states @ HEAD.T
    top = logits[-1].argmax()
    logprob = logits[-1, top] - np.log(np.exp(logits[-1]).sum())
    prompt = np.arange(len(states), dtype=np.int32)
    output = np.array([top], np.int32)
    return Probe("a", prompt, output, (float(logprob),), len(states), 0)


def test_lm_head_tells_after_the_norm_from_before_and_from_neither(tmp_path):
    found = checkpoint(tmp_path, PLAIN)
    before = 20 * normal(TOKENS, HIDDEN)
    after = rms_normed(before, NORM)
    probes = [probe_of(after)]
    assert truth.check_lm_head(probes, {"a": after}, found).status == "ok"
    assert "BEFORE the norm" in truth.check_lm_head(probes, {"a": before}, found).text
    assert "neither" in truth.check_lm_head(probes, {"a": after[::-1]}, found).text
    # The token may be right by chance: its probability is not.
    assert truth.check_lm_head(probes, {"a": after * 3}, found).status == "fail"
    # Unless the server was sure of it.
    sure = truth.check_lm_head([probe_of(after * 30)], {"a": after * 30}, found)
    assert (sure.status, "tells nothing" in sure.text) == ("skipped", True)


def layers_like(steps):
    """``[layers + 1, tokens, hidden]``: a residual stream to which each layer adds ``steps``."""
    parts = rng().standard_normal((7, TOKENS, HIDDEN)).astype(np.float32)
    stream = np.cumsum(parts * np.array([1.0, *[steps] * 6])[:, None, None], axis=0)
    return stream.astype(np.float32)


@pytest.mark.parametrize("steps", [1.0, 0.02], ids=["layers differ", "layers hardly differ"])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_a_layer_is_told_from_its_neighbours(steps, shift):
    reference = layers_like(steps)
    known = truth.candidates([reference], NORM)
    mine = (reference[3 + shift] * (1 + 2e-3 * normal(TOKENS, HIDDEN))).astype(np.float32)
    found = truth.check_layer(3, [mine], known, mixture=False)
    assert found.status == ("fail" if shift else "ok"), found
    assert (f"off by {shift:+d}" in found.text) == bool(shift)


def test_some_tokens_astray_are_right_of_a_mixture_of_experts_only():
    reference = layers_like(1.0)
    known = truth.candidates([reference], None)
    mine = reference[3].copy()
    mine[:8] = normal(8, HIDDEN)
    assert truth.check_layer(3, [mine], known, mixture=True).status == "ok"
    assert truth.check_layer(3, [mine], known, mixture=False).status == "fail"


def test_quantised_weights_are_a_warning():
    reference = layers_like(1.0)
    noise = 0.1 * np.linalg.norm(reference[3], axis=1, keepdims=True) / HIDDEN**0.5
    mine = reference[3] + noise * rng().standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    found = truth.check_layer(3, [mine], truth.candidates([reference], None), mixture=False)
    assert (found.status, "quantised" in found.text) == ("warn", True)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0x0000, "only zeros"),
        (0x8000, "only zeros"),
        (0x3F80, "one value only"),
        (0x7F80, "one value only"),
    ],
)
def test_rows_of_one_value_are_named(value, words):
    bits = rng().integers(0x3F00, 0x4000, (TOKENS, 2, HIDDEN)).astype(np.uint16)
    assert check_values((2, "final"), {"a": bits}).status == "ok"
    bits[5:7, 1] = value
    found = check_values((2, "final"), {"a": bits})
    assert found.status == "fail"
    assert f"{words}: layer final of a (2 of {TOKENS} tokens, the first 5)" in found.text


def test_nan_and_repeated_rows_are_named():
    bits = rng().integers(0x3F00, 0x4000, (TOKENS, 2, HIDDEN)).astype(np.uint16)
    bits[4, 0, 7] = 0x7FC0
    bits[9, 1] = bits[3, 1]
    text = check_values((2, "final"), {"a": bits}).text
    assert f"Inf or NaN: layer 2 of a (1 of {TOKENS} tokens, the first 4)" in text
    assert "the state of another token of the sample: layer final of a (2 of" in text


def test_a_small_layer_is_not_hidden_by_a_large_one():
    states = normal(TOKENS, 2, HIDDEN) * np.array([1, 1000], np.float32)[:, None]
    wrong = states.copy()
    wrong[3, 0] = 0
    assert cosines(states, wrong)[3] == 0
    found = agreement([(states, wrong)])
    assert (found.lowest, found.same, found.mostly) == (0.0, False, True)
