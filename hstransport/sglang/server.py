"""What a scheduler process serves: its model, the device that it lies on, its ranks."""

from __future__ import annotations

import inspect
import secrets
import time
from typing import Any

from .. import __version__
from ..errors import CaptureError
from ..protocol import SessionInfo
from ..settings import Settings
from .modes import resolved


def session_info(
    settings: Settings, runner: Any, layers: tuple[int, ...], rank: int
) -> SessionInfo:
    """What is to be captured of the runner's model; CaptureError when it is not in bfloat16.

    ``layers``: canonical ids. ``rank``: of the data-parallel replica.
    """
    import sglang

    config = runner.model_config
    dtype = str(config.dtype)
    if dtype != "torch.bfloat16":
        raise CaptureError(
            f"the model runs in {dtype}, hstransport carries bfloat16: add --dtype bfloat16"
        )
    return SessionInfo(
        run=secrets.token_hex(6),
        session=settings.session,
        model=str(runner.server_args.model_path),
        sglang=sglang.__version__,
        layers=layers,
        final=settings.layers.final,
        hidden=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        rows=settings.rows,
        rank=rank,
        vocab_size=int(config.vocab_size),
        created=time.time(),
        producer=__version__,
    )


def cuda_device(runner: Any) -> int | None:
    """Ordinal of the model's CUDA device, None when it runs on the CPU.

    Raises CaptureError for any other device.
    """
    device = str(runner.device)
    if device.startswith("cpu"):
        return None
    if not device.startswith("cuda"):
        raise CaptureError(
            f"the model lies on {device}: hstransport captures on CUDA devices and CPUs; unset "
            "HSTRANSPORT to serve without capture"
        )
    import torch

    if torch.version.cuda is None:
        raise CaptureError(
            "this torch computes on another vendor's GPU, hstransport captures on NVIDIA's; unset "
            "HSTRANSPORT to serve without capture"
        )
    return int(torch.cuda.current_device())


def stage_bytes_for(server_args: Any, info: SessionInfo) -> int:
    """Room for the states of the largest prefill batch."""
    tokens = int(resolved(server_args, "chunked_prefill_size") or 0)
    if tokens <= 0:
        tokens = int(resolved(server_args, "max_prefill_tokens") or 16384)
    return min(max(tokens * info.row_bytes, 64 << 20), 1 << 30)


def current_stream_of() -> Any:
    """A function: ordinal of a CUDA device -> handle of torch's current stream there."""
    import torch

    # Without the object that torch.cuda.current_stream makes: 4 us less for each pass.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


def capturing() -> bool:
    """Whether the pass that runs is recorded into a CUDA graph."""
    import torch

    return bool(torch.cuda.is_current_stream_capturing())


def tp_rank() -> int:
    """Of this process in its tensor-parallel group."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def dp_rank(init: Any, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of this process's data-parallel replica, out of the arguments of Scheduler.__init__.

    From 0.5.21 on it stands in the runtime context.
    """
    given = inspect.signature(init).bind(scheduler, *args, **kwargs).arguments
    if "dp_rank" in given:
        return int(given["dp_rank"] or 0)
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().dp_rank or 0)
