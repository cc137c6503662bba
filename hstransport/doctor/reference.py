"""The states as transformers computes them, in float32 on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import HsTransportError
from ..protocol import TokenIds
from .checkpoint import Checkpoint, Unknown
from .compare import F32

GIB = 1 << 30


def load_states(
    checkpoint: Checkpoint, sequences: Iterable[TokenIds], *, trust_remote_code: bool = False
) -> list[F32]:
    """``[num_layers + 1, tokens, hidden]`` for each sequence.

    Index k < n is the state after k decoder layers, as canonical ids are; the last is the state
    after the final norm. Raises Unknown when the model cannot be loaded here.
    """
    try:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        import torch
        import transformers
    except ImportError as e:
        raise Unknown(f"{e.name} is needed here: pip install 'hstransport[doctor]'") from None
    library: Any = transformers  # much of it has no types
    library.logging.disable_progress_bar()
    needed, free = _needed_bytes(checkpoint), _available_bytes()
    if needed > free:
        raise Unknown(
            f"{checkpoint.folder} takes {needed / GIB:.0f} GiB of memory in float32, "
            f"{free / GIB:.0f} are available: run doctor against a smaller model of this family, "
            "served by the same SGLang"
        )
    try:
        model = library.AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except Exception as e:  # transformers raises many types for what it cannot load
        first = (str(e).splitlines() or [type(e).__name__])[0][:200]
        raise Unknown(f"transformers cannot load {checkpoint.folder}: {first}") from None
    found = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
            hidden = model(ids, output_hidden_states=True).hidden_states
            found.append(np.stack([h[0].float().numpy() for h in hidden]))
    return found


def _needed_bytes(checkpoint: Checkpoint) -> int:
    """Weights of two bytes become weights of four."""
    return 2 * checkpoint.bytes


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise HsTransportError("/proc/meminfo has no MemAvailable: doctor runs on Linux")
