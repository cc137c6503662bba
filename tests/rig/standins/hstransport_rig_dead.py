"""Kills one of hstransport's hooks in a server of the tests: RIG_DEAD_HOOK names its target.

RIG_DEAD_WHEN=apply: SGLang fails to apply it. RIG_DEAD_WHEN=later: it was applied, and something
takes its place once the scheduler is built.
"""

import os
import pkgutil


def register():
    target = os.environ.get("RIG_DEAD_HOOK")
    if not target:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ["RIG_DEAD_WHEN"] == "apply":
        apply = HookRegistry._apply_target.__func__

        def fail(cls, name, hooks):
            if name == target:
                raise RuntimeError("the test wants this hook dead")
            apply(cls, name, hooks)

        HookRegistry._apply_target = classmethod(fail)
        return

    owner, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original = getattr(owner, name)

    def kill(result, *args, **kwargs):
        setattr(owner, name, lambda *a, **kw: original(*a, **kw))

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", kill, HookType.AFTER)
