"""A real SGLang server of a real size on an NVIDIA GPU: the rig's server with other arguments.

CUDA graphs (decode and prefill), radix cache, chunked prefill and the overlap scheduler are on.
Written for SGLang 0.5.17. The weights are dummies unless ``extra_args`` say otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .server import ENVIRONMENT, SGLangServer

MODELS = Path(__file__).parents[2] / "benchmarks" / "gpu" / "models"

# The rig's own arguments are for CPUs; of two the later counts.
_ARGUMENTS = (
    *("--device", "cuda", "--load-format", "dummy", "--random-seed", "7"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--mm-feature-transport", "cpu"),
    *("--chunked-prefill-size", "8192", "--disable-flashinfer-autotune"),
    *("--cuda-graph-max-bs-decode", "64", "--cuda-graph-bs-prefill"),
    *("64", "128", "256", "512", "1024", "2048", "4096", "8192"),
    # Not what is taken (--max-total-tokens says that), but what may be taken of what is free:
    # several servers share the card and start at once.
    *("--mem-fraction-static", "0.9"),
)


class GpuServer(SGLangServer):
    """As :class:`SGLangServer`, on the first GPU."""

    def __init__(
        self,
        model_dir: Path | str,
        *,
        env: Mapping[str, str | None] | None = None,
        extra_args: Sequence[str] = (),
        **options: Any,
    ) -> None:
        variables: dict[str, str | None] = dict.fromkeys(ENVIRONMENT)
        variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        variables |= {k: v for k, v in os.environ.items() if k.startswith("SGLANG_")}
        arguments = [*_ARGUMENTS, *extra_args]
        super().__init__(
            model_dir, env=variables | dict(env or {}), extra_args=arguments, **options
        )
        self._command.remove("--disable-cuda-graph")
