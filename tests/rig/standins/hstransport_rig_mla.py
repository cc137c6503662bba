"""SGLang plugin: DeepSeek's attention on the ``torch_native`` backend always uses absorbed MLA.

``torch_native`` registers no MLA handler, so SGLang takes triton's. For a prefill without a cached
prefix that one picks plain multi-head attention, and ``torch_native`` then reads K and V out of the
latent pool and fails on their shape. Absorbed MLA is right for every batch there.
"""

_REGISTRY = "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry"


def register():
    """Entry point of the group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_REGISTRY}.get_handler", _get_handler, HookType.AROUND)


def _get_handler(original, registry, backend_name):
    return _absorbed if backend_name == "torch_native" else original(registry, backend_name)


def _absorbed(attention, forward_batch):
    from sglang.srt.models.deepseek_common import attention_backend_handler

    return attention_backend_handler._dispatch_mla_subtype(attention, forward_batch)
