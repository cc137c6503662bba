"""Hooks for an SGLang without plugins: what the call site that ``patches/`` adds calls.

SGLang 0.5.9 and 0.5.10 have no registry of hooks, so they are put in place here, the way that
SGLang's own does it from 0.5.11 on.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from .sglang.hooks import wanted_hooks

logger = logging.getLogger(__name__)


def install() -> None:
    """Hook this process, before SGLang builds its scheduler; nothing unless HSTRANSPORT=1.

    Raises SystemExit with the reason when the settings are bad or SGLang lacks a hooked name.
    """
    hooks = wanted_hooks()
    for target, hook in hooks.items():
        owner, _, name = target.rpartition(".")
        around(pkgutil.resolve_name(owner), name, hook)
    if hooks:
        logger.info("hstransport: %d hooks in place", len(hooks))


def around(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Replace ``owner.name`` with a call of ``hook``, which gets the original before its arguments.

    The original stands in the ``__wrapped__`` of what replaces it.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, hooked)
