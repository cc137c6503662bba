"""Checks against what the checkpoint says: which layer is it, and before or after the norm?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .checkpoint import Checkpoint, Unknown
from .compare import F32, ROUGHLY, agreement
from .finding import FAIL, OK, SKIPPED, WARN, Finding
from .probe import Probe

LayerName = int | str
BEFORE_NORM = "the last layer, before the final norm"

_LOGPROB_TOLERANCE = 0.5
"""Logits are computed in bf16 by the server: those near 32 are off by up to 0.125 each."""
_SURE = -0.1
"""States of any scale give such a logprob: most are before the norm many times larger."""
_RMS_TOLERANCE = 0.02
_LOST = 0.9
"""Cosine below which a token of a dense model is not that token's state."""


def candidates(reference: Sequence[F32], norm: F32 | None) -> dict[LayerName, list[F32]]:
    """What a captured layer may turn out to be, by canonical id, of each sequence.

    ``reference``: ``[num_layers + 1, tokens, hidden]`` each, as :func:`load_states` gives them.
    """
    layers = len(reference[0]) - 1
    found: dict[LayerName, list[F32]] = {k: [r[k] for r in reference] for k in range(layers)}
    found["final"] = [r[layers] for r in reference]
    if norm is not None:
        # But for a factor for each token, which a cosine does not see.
        found[BEFORE_NORM] = [r[layers] / norm for r in reference]
    return found


def check_layer(
    layer: LayerName,
    mine: Sequence[F32],
    known: Mapping[LayerName, Sequence[F32]],
    mixture: bool,
) -> Finding:
    """One captured layer (``[tokens, hidden]`` of each sequence) against all of transformers'.

    ``mixture``: whether the model is a mixture of experts.
    """
    name = _label(layer)
    alike = {k: agreement(list(zip(mine, theirs, strict=True))) for k, theirs in known.items()}
    here = alike[layer]
    nearest = max(alike, key=lambda k: (alike[k].median, alike[k].share))
    best = alike[nearest]
    # Also where neighbours are alike: the right one is then much nearer still.
    if nearest != layer and best.median >= ROUGHLY and 1 - best.median < (1 - here.median) / 4:
        return Finding(
            name,
            FAIL,
            f"holds the states of {_label(nearest)} ({best}) and not its own ({here}): "
            + _shift_advice(layer, nearest),
        )
    if here.same or (mixture and here.mostly):
        return Finding(name, OK, f"is transformers': {here}")
    if here.median >= ROUGHLY and (mixture or here.lowest >= _LOST):
        return Finding(
            name,
            WARN,
            f"is nearest to transformers', but not the same: {here}. Expected if the server runs "
            "quantised weights or cache; otherwise see that --reference is what it serves",
        )
    other = "" if nearest == layer else f"; nearest is {_label(nearest)} ({best})"
    return Finding(
        name,
        FAIL,
        f"is not transformers': {here}{other}. See that --reference is the checkpoint that is "
        "served; if so, do not train on these samples, and report it",
    )


def _shift_advice(layer: LayerName, nearest: LayerName) -> str:
    if isinstance(layer, int) and isinstance(nearest, int):
        return (
            f"off by {nearest - layer:+d}: this SGLang counts layers in another way than "
            "hstransport knows; do not train on these samples, and report it with both versions"
        )
    return "do not train on these samples, and report it with both versions"


def check_lm_head(
    probes: Sequence[Probe], final: Mapping[str, F32], checkpoint: Checkpoint
) -> Finding:
    """lm_head makes the server's own next tokens out of ``final``, as of the post-norm state only.

    ``final``: ``[tokens, hidden]`` by sample id.
    """
    if not any(len(probe.output) for probe in probes):
        return Finding("lm_head", SKIPPED, "the server's answers have no output_ids")
    states, tokens, logprobs = _predicting(probes, final)
    try:
        off = _off(checkpoint.logits(states), tokens, logprobs)
        if not min(logprobs) < _SURE:
            sure = f"the server is sure of all {len(tokens)} tokens, or gives no logprobs: that "
            return Finding("lm_head", SKIPPED, f"{sure}tells nothing of the states' scale")
        if (off <= _LOGPROB_TOLERANCE).all():
            return Finding(
                "lm_head",
                OK,
                f"final @ lm_head.T gives the server's {len(tokens)} next tokens; their logprobs "
                f"are off by at most {off.max():.2f}",
            )
        normed = states / np.sqrt((states**2).mean(1, keepdims=True) + checkpoint.eps)
        after = min(
            (_off(checkpoint.logits(normed * w), tokens, logprobs) for w in _weights(checkpoint)),
            key=lambda o: float(o.max()),
        )
    except Unknown as e:
        return Finding("lm_head", SKIPPED, str(e))
    explained = (off <= _LOGPROB_TOLERANCE).sum()
    seen = (
        f"final @ lm_head.T gives {explained} of the server's {len(tokens)} next tokens (logprobs "
        f"off by up to {off.max():.1f})"
    )
    if (after <= _LOGPROB_TOLERANCE).all():
        return Finding(
            "lm_head",
            FAIL,
            f"{seen}, and all once the final norm is applied: final was taken BEFORE the norm; a "
            "drafter trained on it is useless: do not use these samples, and report it",
        )
    if explained > len(tokens) / 2:
        return Finding(
            "lm_head",
            FAIL,
            f"{seen}: the other rows are not their own tokens' final states; do not train on this "
            "server's samples, and report it",
        )
    return Finding(
        "lm_head",
        FAIL,
        f"{seen}, with the norm applied {(after <= _LOGPROB_TOLERANCE).sum()}: final is neither "
        f"side of the norm; see that {checkpoint.folder} is the checkpoint that is served",
    )


def check_norm(final: Mapping[str, F32], checkpoint: Checkpoint) -> Finding:
    """Over each token the rms of ``final / norm.weight`` is 1 after the norm, and only there."""
    try:
        weights = _weights(checkpoint)
    except Unknown as e:
        return Finding("norm", SKIPPED, str(e))
    states = np.concatenate(list(final.values()))
    if states.shape[1] != len(weights[0]):
        words = f"the final norm of {checkpoint.folder} is {len(weights[0])} wide, the states are "
        return Finding(
            "norm", FAIL, f"{words}{states.shape[1]}: it is not the model that is served"
        )
    by_weight = [np.sqrt(((states / w) ** 2).mean(1)) for w in weights]
    rms = min(by_weight, key=lambda r: abs(float(np.nanmedian(r)) - 1))
    mean, deviation = np.nanmean(rms), np.nanstd(rms)
    seen = f"rms of final / norm.weight is {mean:.3f} +- {deviation:.3f} over {len(rms)} tokens"
    if (np.abs(rms - 1) <= _RMS_TOLERANCE).all():
        return Finding("norm", OK, f"{seen}: after the final norm")
    if abs(float(np.nanmedian(rms)) - 1) <= _RMS_TOLERANCE:
        wrong = int((~(np.abs(rms - 1) <= _RMS_TOLERANCE)).sum())
        return Finding(
            "norm", FAIL, f"{seen}; {wrong} tokens are not 1: their rows are not final states"
        )
    return Finding(
        "norm",
        FAIL,
        f"{seen}, after the norm it is 1.000: final was taken BEFORE the norm, or "
        f"{checkpoint.folder} is not what is served; do not use these samples",
    )


def _weights(checkpoint: Checkpoint) -> list[F32]:
    """What the norm may multiply by: its weight, or one more than it (Gemma)."""
    weight = checkpoint.norm()
    plus_one = weight + 1
    return [weight, plus_one] if plus_one.all() else [weight]


def _predicting(
    probes: Sequence[Probe], final: Mapping[str, F32]
) -> tuple[F32, list[int], list[float]]:
    """The states that a generated token was sampled from, the tokens, the server's logprobs."""
    states, tokens, logprobs = [], [], []
    for probe in probes:
        rows = final[probe.id]
        for i, token in enumerate(probe.output.tolist()):
            at = len(probe.prompt) - 1 + i
            if at < len(rows):
                states.append(rows[at])
                tokens.append(token)
                logprobs.append(probe.logprobs[i] if i < len(probe.logprobs) else float("nan"))
    return np.stack(states), tokens, logprobs


def _off(logits: F32, tokens: Sequence[int], logprobs: Sequence[float]) -> F32:
    """How far each token is from being what ``logits`` predict, with the server's logprob."""
    rows = np.arange(len(tokens))
    top = logits.max(1)
    chosen = logits[rows, tokens]
    mine = chosen - top - np.log(np.exp(logits - top[:, None]).sum(1))
    apart = np.nan_to_num(np.abs(mine - np.asarray(logprobs, np.float32)), nan=0.0)
    off: F32 = np.nan_to_num(np.maximum(top - chosen, apart), nan=np.inf)
    return off


def _label(layer: LayerName) -> str:
    return f"layer {layer}" if isinstance(layer, int) else str(layer)
