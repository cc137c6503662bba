"""Takes the states of a model that cannot be asked for them, by hooks on its decoder layers.

What layer k is given, the residual added, is the state of canonical id k. Hooks run where the
model's Python does: not when a CUDA graph of a prefill is replayed, which :meth:`LayerHooks.take`
says. (In a decode graph the sum is recorded with the rest, and stays where it was captured.) With
several tensor-parallel ranks a layer may be given a part of a sum, so there it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..errors import CaptureError

_STATE, _RESIDUAL = "hidden_states", "residual"


class Decoder(NamedTuple):
    """What runs the decoder layers of a model."""

    module: Any
    blocks: Any
    """Its layers by their number from 0."""


def only_decoder(model: Any, num_layers: int) -> Decoder:
    """The one module that keeps ``num_layers`` layers; CaptureError if that is not just one."""
    found = [
        Decoder(module, part)
        for module in model.modules()
        for part in module.children()
        if isinstance(part, torch.nn.ModuleList)
        and len(part) == num_layers
        and all(_STATE in _parameters(block) for block in part)
    ]
    if len(found) != 1:
        raise CaptureError(
            f"{type(model).__name__} has {len(found)} lists of {num_layers} layers that take "
            f"{_STATE}, so its inner layers cannot be captured: set HSTRANSPORT_LAYERS=final"
        )
    return found[0]


class LayerHooks:
    """Hooks that keep, in each forward pass, what the chosen layers of ``decoder`` are given.

    ``layers``: canonical ids. ``hidden``: width of a state.
    """

    def __init__(self, decoder: Decoder, layers: Sequence[int], hidden: int) -> None:
        self._layers = tuple(layers)
        self._hidden = hidden
        self._states: dict[int, torch.Tensor] = {}
        self._failure: str | None = None
        for k in layers:
            block = decoder.blocks[k]
            signature = inspect.signature(block.forward)
            block.register_forward_pre_hook(partial(self._see, k, signature), with_kwargs=True)

    def take(self) -> list[torch.Tensor]:
        """The states of the pass that comes to its end, each ``[rows, hidden]``, by id.

        CaptureError when they are not known exactly.
        """
        states, self._states = self._states, {}
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CaptureError(f"{failure}: set HSTRANSPORT_LAYERS=final")
        if len(states) != len(self._layers):
            raise CaptureError(
                f"{len(states)} of {len(self._layers)} hooks on layers ran in a pass; a prefill "
                "that is replayed from a CUDA graph runs none: start the server with "
                "--disable-prefill-cuda-graph, or set HSTRANSPORT_LAYERS=final"
            )
        return [states[k] for k in self._layers]

    def _see(
        self,
        k: int,
        signature: inspect.Signature,
        block: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        # An error here would be the forward pass's.
        try:
            state = self._state(k, signature.bind(*args, **kwargs).arguments)
        except Exception as e:
            self._failure = self._failure or f"layer {k}, {type(block).__name__}: {e}"
            return
        self._states[k] = state

    def _state(self, k: int, given: dict[str, Any]) -> torch.Tensor:
        if k in self._states:
            raise CaptureError("it runs more than once in a pass")
        state, residual = given[_STATE], given.get(_RESIDUAL)
        for name, value in given.items():
            if value is state or value is residual or value is None:
                continue
            if isinstance(value, torch.nn.Module) or self._is_state(value):
                raise CaptureError(f"what it is to do with its {name} is not known")
        # Later the layer adds to its input in place.
        taken: torch.Tensor = state.clone() if residual is None else state + residual
        return taken

    def _is_state(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.ndim > 1
            and value.shape[-1] == self._hidden
        )


def _parameters(block: Any) -> Sequence[str]:
    return list(inspect.signature(block.forward).parameters)
