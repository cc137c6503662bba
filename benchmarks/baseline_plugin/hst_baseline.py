"""What people do by hand today, as an SGLang plugin: torch.save inside the forward pass.

Found through an entry point that benchmarks/ways.py writes. It switches the same layers on as
hstransport does, and writes while its folder exists: all captured layers and the final state,
copied to the CPU, one .pt file for each sequence of a prefill batch. On a CPU that is a copy too,
because a slice would be saved with all of its batch. With HST_BASELINE_DECODE=1 also one file for
each decode step: under a CUDA graph the model's own code does not run, so the tensors that the
graph writes into are kept from its capture and read after each replay.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

_FOLDER = Path(os.environ["HST_BASELINE_DIR"])
_DECODE = os.environ.get("HST_BASELINE_DECODE") == "1"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_numbers = itertools.count()
_graphs: dict[int, list[Any]] = {}
"""By padded batch size: what the decode graph writes into."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    logits = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
    HookRegistry.register(f"{_RUNNER}.load_model", _enable, HookType.AROUND)
    HookRegistry.register(logits, _seen, HookType.AROUND)
    if _DECODE:
        HookRegistry.register(f"{_RUNNER}.forward", _forward, HookType.AROUND)


def _enable(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(runner, *args, **kwargs)
    n = int(runner.model_config.num_hidden_layers)
    # hstransport's eagle3: the states after 2, n // 2 and n - 3 layers; this setter adds the 1.
    runner.model.set_eagle3_layers_to_capture(sorted({1, n // 2 - 1, n - 4}))
    return result


def _seen(
    original: Any,
    processor: Any,
    input_ids: Any,
    hidden_states: Any,
    lm_head: Any,
    logits_metadata: Any,
    aux_hidden_states: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    packed = hasattr(aux_hidden_states, "ndim")
    aux = [aux_hidden_states] if packed else list(aux_hidden_states or ())
    planes = [*aux, hidden_states]
    mode = logits_metadata.forward_mode
    if _capturing(hidden_states):
        if mode.is_decode():
            _graphs[len(hidden_states)] = planes
    elif mode.is_extend() and _FOLDER.exists():
        row = 0
        for count in logits_metadata.extend_seq_lens_cpu:
            _save(planes, row, count)
            row += count
    elif mode.is_decode() and _DECODE and _FOLDER.exists():
        _save(planes, 0, len(hidden_states))
    return original(
        processor,
        input_ids,
        hidden_states,
        lm_head,
        logits_metadata,
        aux_hidden_states,
        *args,
        **kwargs,
    )


def _forward(original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(runner, forward_batch, *args, **kwargs)
    if forward_batch.forward_mode.is_decode() and output.can_run_graph and _FOLDER.exists():
        planes = _graphs[runner.decode_cuda_graph_runner.bs]
        _save(planes, 0, int(forward_batch.batch_size))
    return output


def _capturing(tensor: Any) -> bool:
    import torch

    return bool(tensor.is_cuda) and torch.cuda.is_current_stream_capturing()


def _save(planes: list[Any], row: int, count: int) -> None:
    import torch

    rows = [p[row : row + count] for p in planes]
    rows = [r.cpu() if r.is_cuda else r.clone() for r in rows]
    torch.save(rows, _FOLDER / f"{next(_numbers):06d}.pt")
