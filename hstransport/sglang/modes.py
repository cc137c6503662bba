"""Serving modes that are refused, by the name of the server argument (docs/modes.md)."""

from __future__ import annotations

from typing import Any

from ..errors import CaptureError

# Modes in which rows, positions or requests would not be what they seem. What is not proven right
# is refused by name: (server argument, value at which it is harmless, what to do).
REFUSED = (
    ("pp_size", 1, "run without pipeline parallelism"),
    ("enable_dp_attention", False, "run without --enable-dp-attention"),
    ("attn_dp_size", 1, "run without data-parallel attention"),
    ("attn_cp_size", 1, "run without context parallelism"),
    ("dcp_size", 1, "run without context parallelism"),
    ("enable_prefill_cp", False, "run without context parallelism"),
    ("enable_prefill_context_parallel", False, "run without context parallelism"),
    ("enable_lora", False, "run without LoRA adapters"),
    ("lora_paths", None, "run without LoRA adapters"),
    ("enable_torch_compile", False, "run without --enable-torch-compile"),
    ("speculative_algorithm", None, "run without speculative decoding"),
    ("disaggregation_mode", "null", "run without prefill-decode disaggregation"),
    ("enable_two_batch_overlap", False, "run without --enable-two-batch-overlap"),
    ("enable_pdmux", False, "run without --enable-pdmux"),
    ("is_embedding", False, "serve a generation model"),
    ("dllm_algorithm", None, "serve an autoregressive model"),
)


def refuse_unproven(server_args: Any) -> None:
    """Raise CaptureError that names the first argument of :data:`REFUSED` that is in use."""
    for name, harmless, remedy in REFUSED:
        # With --enable-return-aux-hidden-states (0.5.23) an algorithm is written down and not used.
        value = resolved(server_args, name)
        if value and value != harmless:
            raise CaptureError(
                f"hstransport cannot capture exactly with {name}={value!r}: {remedy}, "
                "or unset HSTRANSPORT to serve without capture"
            )


def resolved(server_args: Any, name: str) -> Any:
    """What SGLang has decided for an argument, None for one that it does not know.

    From 0.5.20 on the object itself keeps what was written on the command line.
    """
    try:
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:
        return getattr(server_args, name, None)
    if not hasattr(server_args, name):
        return None
    return resolution_result(server_args, name)


def refuse_resolved_widths() -> None:
    """Where SGLang works parallel widths out of several arguments (0.5.20 on), see the result."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        return
    parallel = get_parallel()
    for name in ("attn_dp_size", "attn_cp_size", "pp_size"):
        width = getattr(parallel, name, 1)
        if width != 1:
            raise CaptureError(
                f"hstransport cannot capture exactly with {name}={width}: serve with tensor or "
                "plain data parallelism only, or unset HSTRANSPORT"
            )
