"""Where the plugin's hooks go.

``register`` is found through the entry-point group ``sglang.srt.plugins`` in every process of
SGLang (0.5.11 and later) and does nothing unless HSTRANSPORT=1. Each hook stands beside a comment
that says why there.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ..errors import CaptureError, HsTransportError
from ..settings import from_environment
from .plugin import Plugin
from .targets import (
    FORWARD,
    LOGITS_FORWARD,
    RESULT,
    RUN_BATCH,
    RUNNER,
    SCHEDULER,
    SOURCES,
    WEIGHTS,
    first_there,
    resolve,
)


def register() -> None:
    """Entry point. Bad settings and an SGLang that lacks a hooked name stop the server at once."""
    hooks = wanted_hooks()
    if not hooks:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def wanted_hooks() -> dict[str, Any]:
    """What is to be put around SGLang's functions in this process: name -> hook; often nothing."""
    try:
        settings = from_environment(os.environ)
        if settings is None:
            return {}
        plugin = Plugin(settings)
        try:
            hooks = hooks_of(plugin)
            # What stands there now is no hook of ours.
            plugin.unhooked = {target: resolve(target) for target in hooks}
        except CaptureError as e:
            plugin.dead_hook(e)
            return {}
    except HsTransportError as e:
        # SGLang logs and forgets an Exception of a plugin: only SystemExit stops the server.
        sys.exit(f"hstransport: {e}")
    return hooks


def hooks_of(plugin: Plugin) -> dict[str, Any]:
    """Where each of its hooks goes in this SGLang: name of a function of SGLang's -> hook."""
    weights = first_there(WEIGHTS, f"update_weights_from_{SOURCES[0]}")
    return {
        # The model exists, graphs are not captured and memory is not divided yet: the place to
        # switch layers on and to take memory on the GPU.
        f"{RUNNER}.load_model": plugin.load_model,
        # All is known: the place to begin, or refuse.
        f"{SCHEDULER}.__init__": plugin.scheduler_init,
        # Which requests the coming forward pass belongs to.
        RUN_BATCH: plugin.run_batch,
        # The one call that has every token's final state and all captured layers together. It is
        # not called when a decode graph is replayed, but when that graph is captured.
        LOGITS_FORWARD: plugin.logits_forward,
        # Positions are known here, and warm-up and graph capture never come through here.
        FORWARD: plugin.model_forward,
        # Requests finish in here and, when aborted while they wait, only in abort_request.
        RESULT: plugin.process_batch_result,
        f"{SCHEDULER}.abort_request": plugin.abort_request,
        # From here on the states would be another model's.
        **{f"{weights}.update_weights_from_{source}": plugin.update_weights for source in SOURCES},
    }
