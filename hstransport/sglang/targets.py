"""Names of SGLang's functions that the plugin hooks, and what stands there."""

from __future__ import annotations

import pkgutil
from typing import Any

from ..errors import CaptureError

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# Up to 0.5.12 the scheduler itself updates weights.
WEIGHTS = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
    SCHEDULER,
)
SOURCES = ("disk", "distributed", "tensor", "ipc")
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
# Hooks that every first forward pass comes through.
RUN_BATCH = f"{SCHEDULER}.run_batch"
FORWARD = f"{RUNNER}.forward"
LOGITS_FORWARD = f"{LOGITS}.forward"
RESULT = f"{SCHEDULER}.process_batch_result"


def first_there(classes: tuple[str, ...], method: str) -> str:
    """The first of these classes that this SGLang has with that method, or the last of them."""
    for name in classes[:-1]:
        try:
            pkgutil.resolve_name(f"{name}.{method}")
            return name
        except (ImportError, AttributeError):
            continue
    return classes[-1]


def resolve(target: str) -> Any:
    """What stands at that name; CaptureError when this SGLang has nothing there."""
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as e:
        import sglang

        raise CaptureError(
            f"SGLang {sglang.__version__} has no {target} ({e}): this release of hstransport "
            "does not know it; use one of the releases listed in its docs/releases.md"
        ) from None
