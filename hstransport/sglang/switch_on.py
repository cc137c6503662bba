"""How the inner layers of a model are had: it hands them out, or hooks on its layers take them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CaptureError
from .layers import CannotHandOut, enable_capture, refuse_out_of_range
from .modes import resolved

if TYPE_CHECKING:
    from .layer_hooks import Decoder

logger = logging.getLogger(__name__)


def switch_on(runner: Any, layers: Sequence[int], by: str, device: int | None) -> Decoder | None:
    """Have the model of SGLang's ModelRunner ``runner`` hand out canonical ``layers``; or return
    the decoder on which hooks are to take them.

    ``by``: ``auto`` (hooks where the model cannot) or ``hooks``. ``device``: ordinal of the CUDA
    device, None for a CPU. CaptureError when neither is exact.
    """
    model, num_layers = runner.model, int(runner.model_config.num_hidden_layers)
    refused = ""
    if by == "auto":
        try:
            enable_capture(model, layers, num_layers)
            return None
        except CannotHandOut as e:
            refused = f"{e}. "
    elif not layers:
        return None
    refuse_out_of_range(layers, type(model).__name__, num_layers)
    obstacle = _obstacle(runner.server_args, device)
    if obstacle:
        raise CaptureError(f"{refused}Hooks on its layers would be exact, but {obstacle}")
    from .layer_hooks import only_decoder

    decoder = only_decoder(model, num_layers)
    logger.info("hstransport: layers are taken by hooks on %s", type(decoder.module).__name__)
    return decoder


def _obstacle(server_args: Any, device: int | None) -> str:
    """Why hooks on layers would not see every state whole; empty when they do."""
    ranks = resolved(server_args, "tp_size") or 1
    if ranks != 1:
        return (
            f"of {ranks} tensor-parallel ranks a layer may be given only a part of a sum: serve "
            "with --tp-size 1"
        )
    graphs = getattr(resolved(server_args, "cuda_graph_config"), "prefill", None)
    if device is not None and getattr(graphs, "backend", "disabled") != "disabled":
        return (
            "they do not run when a prefill is replayed from a CUDA graph: add "
            "--disable-prefill-cuda-graph"
        )
    return ""
