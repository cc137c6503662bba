"""Canonical layer ids, and how a live model is told of them.

Canonical id k is the residual stream after k decoder layers. SGLang's models keep a list
``layers_to_capture`` that means the same (layer k's input is captured before layer k runs), but
their setters disagree about what they add to the ids they are given: most add 1 always,
``deepseek_v2`` only if the first id is 1, ``gpt_oss`` unless the last layer is asked. So the setter
is called, and what it left in the model is read back and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import CaptureError


def enable_capture(model: Any, layers: Sequence[int], num_layers: int) -> None:
    """Make ``model`` hand the states of canonical ``layers`` (ascending) to its LogitsProcessor.

    Raises CaptureError when that cannot be done exactly.
    """
    if not layers:
        return
    name = type(model).__name__
    for k in layers:
        if not 1 <= k < num_layers:
            raise CaptureError(
                f"layer {k} of {name} cannot be captured: SGLang's models capture the states after "
                f"1 to {num_layers - 1} of this model's {num_layers} layers; for the state after "
                "the last layer and the final norm use 'final' (HSTRANSPORT_LAYERS)"
            )
    setter = getattr(model, "set_eagle3_layers_to_capture", None)
    if setter is None:
        raise CaptureError(
            f"{name} has no set_eagle3_layers_to_capture, so SGLang cannot capture its inner "
            "layers: set HSTRANSPORT_LAYERS=final, or serve a model that has it"
        )
    wanted = list(layers)
    left: list[int] | None = None
    for asked in ([k - 1 for k in wanted], wanted):
        setter(asked)
        left = _captured(model)
        if left == wanted:
            return
    raise CaptureError(
        f"{name} was asked for layers {wanted} and would capture {left}: choose other layers "
        "(HSTRANSPORT_LAYERS)"
    )


def _captured(model: Any) -> list[int] | None:
    """What the setter left in the model, or None when it is not where it is known to be."""
    for owner in (getattr(model, "model", None), model):
        ids = getattr(owner, "layers_to_capture", None)
        if ids is not None:
            return [int(k) for k in ids]
    return None
