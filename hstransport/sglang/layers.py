"""Canonical layer ids, and how a live model is told of them.

Canonical id k is the residual stream after k decoder layers. Most of SGLang's models keep a list
``layers_to_capture`` that means the same (layer k's input is captured before layer k runs), but
their setters disagree about what they add to the ids they are given: most add 1 always,
``deepseek_v2`` only if the first id is 1, ``gpt_oss`` unless the last layer is asked. So a setter
is called, and what it left in the model is read back and compared; ``verify_layers`` then compares
the states themselves. docs/layers.md has a table of the models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CaptureError

_EAGLE3, _DFLASH = "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"
_FLAG = "_is_layer_to_capture"


class CannotHandOut(CaptureError):
    """The model cannot be made to hand out just these layers."""


def enable_capture(model: Any, layers: Sequence[int], num_layers: int) -> None:
    """Make ``model`` hand the states of canonical ``layers`` (ascending) to its LogitsProcessor.

    ``model``: a torch module of SGLang's, also a wrapper around a language model. Raises
    CaptureError for ids that mean nothing, CannotHandOut when that cannot be done exactly.
    """
    if not layers:
        return
    name = type(model).__name__
    refuse_out_of_range(layers, name, num_layers)
    wanted = list(layers)
    before = [k - 1 for k in wanted]
    # Ids of DFLASH count layers, so k-1 must leave k. A setter that keeps what it is given either
    # captures after the layer or breaks that rule, and what it leaves does not say which.
    tries = [(_EAGLE3, before), (_EAGLE3, wanted), (_DFLASH, before)]
    tries = [(setter, asked) for setter, asked in tries if hasattr(model, setter)]
    if not tries:
        raise CannotHandOut(
            f"{name} has neither {_EAGLE3} nor {_DFLASH}, so SGLang cannot capture its inner "
            "layers: set HSTRANSPORT_LAYERS=final, or serve a model that docs/layers.md lists"
        )
    outcomes = []
    for setter, asked in tries:
        outcome = _call(model, setter, asked)
        if outcome == wanted:
            return
        outcomes.append(f"{setter}({asked}) left {outcome}")
    raise CannotHandOut(
        f"{name} was asked for layers {wanted} and would capture others: {'; '.join(outcomes)}. "
        "Choose other layers (HSTRANSPORT_LAYERS), or final alone"
    )


def require_captured(model: Any, layers: Sequence[int]) -> None:
    """Raise CaptureError unless ``model`` still captures canonical ``layers``.

    SGLang itself calls the setter after the model was loaded when it is started with
    ``--enable-return-aux-hidden-states``.
    """
    left = _captured(model)
    if layers and left != list(layers):
        remedy = "leave --enable-return-aux-hidden-states out"
        if isinstance(left, list):
            remedy += f", or set HSTRANSPORT_LAYERS={','.join(map(str, left))},final"
        raise CaptureError(
            f"layers {list(layers)} are to be captured, but SGLang has since set the model to "
            f"capture {left}: {remedy}"
        )


def decoder_of(model: Any) -> Any | None:
    """The module in ``model`` that runs the decoder layers and captures; None if not just one."""
    found = [m for m in model.modules() if _ids(m) and hasattr(m, "layers")]
    return found[0] if len(found) == 1 else None


def refuse_out_of_range(layers: Sequence[int], name: str, num_layers: int) -> None:
    """CaptureError for the first of ``layers`` that is no inner layer of the model ``name``."""
    k = next((k for k in layers if not 1 <= k < num_layers), None)
    if k is None:
        return
    if k == 0:
        why = "it is the embedding of the token ids, which samples carry: look it up in the weights"
    elif k == num_layers:
        why = "it is the last layer's output before the final norm: use 'final', after that norm"
    else:
        why = f"the model has {num_layers} layers; for the last state use 'final'"
    raise CaptureError(
        f"layer {k} of {name} cannot be captured: {why} (HSTRANSPORT_LAYERS takes 1 to "
        f"{num_layers - 1} and 'final')"
    )


def _call(model: Any, setter: str, asked: list[int]) -> list[int] | str:
    """What a setter leaves when asked for ``asked``."""
    for module in model.modules():
        if getattr(module, _FLAG, False):
            setattr(module, _FLAG, False)  # setters only ever raise flags
    try:
        getattr(model, setter)(asked)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return _captured(model)


def _captured(model: Any) -> list[int] | str:
    """Canonical ids of the layers that the model captures, or why that is not known."""
    decoder = decoder_of(model)
    if decoder is None:
        return "no layers_to_capture in one module with layers"
    ids = _ids(decoder)
    flagged = [i for i, layer in enumerate(decoder.layers) if getattr(layer, _FLAG, False)]
    if flagged and flagged != sorted(ids):
        return f"{ids}, and flags on the layers {flagged}"
    return ids


def _ids(module: Any) -> list[int]:
    ids = getattr(module, "layers_to_capture", None) or ()
    return [int(k) for k in (sorted(ids) if isinstance(ids, set | frozenset) else ids)]
