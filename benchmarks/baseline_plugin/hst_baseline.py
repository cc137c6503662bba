"""What people do by hand today, as an SGLang plugin: torch.save inside the forward pass.

Found through an entry point that benchmarks/ways.py writes. It switches the same layers on as
hstransport does, and writes while its folder exists: one .pt file for each sequence of a batch, all
captured layers and the final state, copied to the CPU, which on a CPU is a copy too because a slice
would be saved with all of its batch.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

_numbers = itertools.count()


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    logits = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
    HookRegistry.register(runner, _enable, HookType.AROUND)
    HookRegistry.register(logits, _save, HookType.AROUND)


def _enable(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(runner, *args, **kwargs)
    n = int(runner.model_config.num_hidden_layers)
    # hstransport's eagle3: the states after 2, n // 2 and n - 3 layers; this setter adds the 1.
    runner.model.set_eagle3_layers_to_capture(sorted({1, n // 2 - 1, n - 4}))
    return result


def _save(
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
    folder = Path(os.environ["HST_BASELINE_DIR"])
    if folder.exists() and logits_metadata.forward_mode.is_extend():
        import torch

        packed = hasattr(aux_hidden_states, "ndim")
        aux = [aux_hidden_states] if packed else list(aux_hidden_states or ())
        row = 0
        for count in logits_metadata.extend_seq_lens_cpu:
            planes = [p[row : row + count].cpu().clone() for p in (*aux, hidden_states)]
            torch.save(planes, folder / f"{next(_numbers):06d}.pt")
            row += count
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
