"""Stand-in for SGLang's CPU kernels: the build of sgl-kernel for CPUs is not on PyPI.

SGLang's CPU engine imports these names at module level; only speculative decoding and its own
allocator kernels call them. Calling one raises. ``torch.ops.sgl_kernel`` stays empty, so SGLang
finds no AMX support and runs its pure PyTorch code.
"""

_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def _absent(name):
    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: the test rig has no CPU kernels")

    return kernel


globals().update({name: _absent(name) for name in _NAMES})
