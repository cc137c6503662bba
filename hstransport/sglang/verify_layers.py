"""Compares captured states with what the decoder layers were given, once, on the live model.

That a model was told the right layers does not prove that it hands out their states: a model may
capture after a layer, before the residual is added, or before tensor-parallel ranks have summed
up. What layer k computes with is seen by hooks on its parts, in one pass that runs as Python: a
warm-up before CUDA graphs are captured, or the first pass of a server without graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..capture import split_packed
from ..errors import CaptureError
from .layer_hooks import Decoder
from .layers import decoder_of

ROWS = 64
"""Tokens that are compared: all that a check of layers needs, and little memory."""
TOLERANCE = 2**-6
"""Relative error of a row that rounding to bf16, before or after a norm, may make."""


class _Seen(NamedTuple):
    """What the part of a layer that ran first was given."""

    part: str
    is_norm: bool
    inputs: list[torch.Tensor]
    """Each ``[<= ROWS, hidden]``: of a norm, the state and the residual not yet added to it."""


class LayerCheck:
    """Watches the passes of a model that captures ``layers``, until :meth:`holds` is true.

    ``hidden``: width of a state. ``hooked``: its decoder, when states are what its layers are given
    rather than what it hands out. To compare them with a norm's inputs would prove little then (a
    norm, or a layer, may not use the residual that it is given), so they are compared with what the
    layer makes of them: what its first part that is no norm is given. Raises CaptureError when the
    model has no layers to watch.
    """

    def __init__(
        self, model: Any, layers: Sequence[int], hidden: int, hooked: Decoder | None = None
    ) -> None:
        decoder = hooked or _capturing(model)
        self._layers = tuple(layers)
        self._hidden = hidden
        self._hooked = hooked is not None
        hooks = "" if hooked else "have hooks take them (HSTRANSPORT_LAYERS_BY=hooks), "
        self._remedy = f"leave the layer out, {hooks}or set"
        self._blocks = [decoder.blocks[k] for k in layers]
        self._seen: dict[int, _Seen] = {}
        self._hooks = [decoder.module.register_forward_pre_hook(lambda *_: self._seen.clear())]
        for k, block in zip(self._layers, self._blocks, strict=True):
            for name, part in block.named_children():
                if self._hooked and _is_norm(name, part):
                    continue
                see = partial(self._see, k, name)
                self._hooks.append(part.register_forward_pre_hook(see, with_kwargs=True))

    def holds(self, captured: Any) -> bool:
        """Compare a pass's captured states, in the forms that :meth:`Tap.planes` takes.

        True: they are those of the layers. False: this pass showed nothing (it was replayed from
        a graph, or its states are zeros or not finite), so one that comes later is to be compared.
        Raises CaptureError that says what a layer was given and what was captured instead.
        """
        if captured is None or len(self._seen) < len(self._layers) or _unwatched():
            return False
        packed = isinstance(captured, torch.Tensor)
        count = len(self._layers)
        states = split_packed(captured, count, self._hidden) if packed else list(captured)
        if len(states) != count:
            raise CaptureError(f"the model captured {len(states)} layers, {count} were asked")
        seen = dict(self._seen)  # to call a norm, as is done here, is seen too
        for k, block, state in zip(self._layers, self._blocks, states, strict=True):
            error = _difference(block, seen[k], state, bare=self._hooked)
            if error is None:
                return False
            if not error <= TOLERANCE:
                raise CaptureError(
                    f"layer {k}: what {type(block).__name__} {k} was given ({seen[k].part}) and "
                    f"what the model captured differ by {error:.2g} of a row's norm, so what it "
                    f"captured is not what id {k} means: {self._remedy} HSTRANSPORT_LAYERS=final"
                )
        self.close()
        return True

    def close(self) -> None:
        """Take the hooks off; more than once does no harm."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seen.clear()

    def _see(
        self, k: int, name: str, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if k in self._seen or _unwatched():
            return
        inputs = [
            value[:ROWS].clone()  # norms add in place
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.ndim == 2
            and value.shape[1] == self._hidden
        ]
        self._seen[k] = _Seen(name, _is_norm(name, part), inputs)


def _capturing(model: Any) -> Decoder:
    module = decoder_of(model)
    if module is None:
        name = type(model).__name__
        raise CaptureError(f"{name} has no layers to compare captured states with")
    return Decoder(module, module.layers)


def _difference(block: Any, seen: _Seen, state: torch.Tensor, bare: bool) -> float | None:
    """Largest relative error of a row; None when the pass shows nothing. ``bare``: the layer may
    use the state itself, where its norms come last."""
    if not seen.inputs:
        return None
    state = state[:ROWS]
    if seen.is_norm:
        return _error(state, sum(seen.inputs[1:2], seen.inputs[0]))
    # The norm ran fused with something else: what follows it was given the state's norm.
    norms = [part for name, part in block.named_children() if _is_norm(name, part)]
    errors = [_error(_normed(norm, state), seen.inputs[0]) for norm in norms]
    errors += [_error(state, seen.inputs[0])] if bare else []
    known = [e for e in errors if e is not None]
    return min(known) if known else None


def _error(mine: torch.Tensor, theirs: torch.Tensor) -> float | None:
    if mine.shape != theirs.shape:
        return float("inf")
    a, b = mine.detach().float(), theirs.detach().float()
    size = b.norm(dim=1)
    telling = torch.isfinite(size) & (size > 0)
    if not telling.any():
        return None
    return float(((a - b).norm(dim=1) / size)[telling].max())


def _normed(norm: Any, state: torch.Tensor) -> torch.Tensor:
    result = norm(state.clone())
    normed: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return normed


def _is_norm(name: str, part: Any) -> bool:
    return "norm" in f"{name} {type(part).__name__}".lower()


def _unwatched() -> bool:
    """Whether the pass is compiled, or recorded into a CUDA graph, whose memory is not ours."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
