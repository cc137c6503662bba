"""The states that transformers computes, to compare SGLang's with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


class Reference:
    """In fp32, so that what differs is SGLang's own rounding and not that of two engines.

    ``model_dir(name)``: folder of a model. One model is kept in memory.
    """

    def __init__(self, model_dir: Callable[[str], Path]) -> None:
        self._model_dir = model_dir
        self._loaded: dict[str, Any] = {}

    def __call__(self, model: str, ids: Sequence[int]) -> tuple[F32, F32]:
        """``hidden_states`` of all layers, ``[n + 1, tokens, hidden]``, and lm_head's weight."""
        import torch
        import transformers

        if model not in self._loaded:
            self._loaded.clear()
            self._loaded[model] = transformers.AutoModelForCausalLM.from_pretrained(
                self._model_dir(model), dtype=torch.float32
            )
        net = self._loaded[model]
        with torch.no_grad():
            out = net(torch.tensor([ids]), output_hidden_states=True)
        head = net.get_output_embeddings().weight.detach().float().numpy()
        return np.stack([h[0].float().numpy() for h in out.hidden_states]), head
