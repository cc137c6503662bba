"""Tiny checkpoints with random weights, in Hugging Face's layout and names.

The weights come from one seeded generator per model, so each model is the same bytes every time
and does not depend on which others are made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, LAYERS, INTERMEDIATE = 512, 64, 6, 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INTERMEDIATE,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}


class _Weights(dict[str, torch.Tensor]):
    """A state dict that fills itself with reproducible numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = torch.Generator().manual_seed(seed)

    def linear(self, name: str, out: int, into: int) -> None:
        """A matrix that keeps a unit-variance input at unit variance."""
        self._normal(name, (out, into), into**-0.5)

    def norm(self, name: str, width: int) -> None:
        """Near one but not one, so that a forgotten norm weight shows."""
        noise = torch.randn(width, generator=self._rng)
        self[f"{name}.weight"] = (1 + 0.1 * noise).to(torch.bfloat16)

    def _normal(self, name: str, shape: tuple[int, ...], scale: float) -> None:
        values = torch.randn(*shape, generator=self._rng) * scale
        self[f"{name}.weight"] = values.to(torch.bfloat16)

    def frame(self) -> None:
        """What surrounds the layers."""
        self._normal("model.embed_tokens", (VOCAB, HIDDEN), 1.0)
        self.norm("model.norm", HIDDEN)
        self.linear("lm_head", VOCAB, HIDDEN)

    def layer_norms(self, layer: str) -> None:
        self.norm(f"{layer}.input_layernorm", HIDDEN)
        self.norm(f"{layer}.post_attention_layernorm", HIDDEN)

    def mlp(self, name: str, width: int) -> None:
        self.linear(f"{name}.gate_proj", width, HIDDEN)
        self.linear(f"{name}.up_proj", width, HIDDEN)
        self.linear(f"{name}.down_proj", HIDDEN, width)

    def expert_bias(self, name: str, experts: int) -> None:
        self[name] = torch.randn(experts, generator=self._rng) * 0.01


def save(architecture: str, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` of one of the architectures."""
    config, weights = _ARCHITECTURES[architecture]()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | config, indent=1) + "\n")
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})


def _grouped_query(architecture: str, model_type: str, qk_norm: bool) -> tuple[dict[str, Any], Any]:
    heads, kv_heads, head_dim = 4, 2, 16
    w = _Weights(seed=len(model_type))
    w.frame()
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        w.linear(f"{layer}.self_attn.q_proj", heads * head_dim, HIDDEN)
        w.linear(f"{layer}.self_attn.k_proj", kv_heads * head_dim, HIDDEN)
        w.linear(f"{layer}.self_attn.v_proj", kv_heads * head_dim, HIDDEN)
        w.linear(f"{layer}.self_attn.o_proj", HIDDEN, heads * head_dim)
        if qk_norm:
            w.norm(f"{layer}.self_attn.q_norm", head_dim)
            w.norm(f"{layer}.self_attn.k_norm", head_dim)
        w.mlp(f"{layer}.mlp", INTERMEDIATE)
        w.layer_norms(layer)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return config, w


def _llama() -> tuple[dict[str, Any], Any]:
    config, weights = _grouped_query("LlamaForCausalLM", "llama", qk_norm=False)
    return config | {"mlp_bias": False, "pretraining_tp": 1}, weights


def _qwen3() -> tuple[dict[str, Any], Any]:
    config, weights = _grouped_query("Qwen3ForCausalLM", "qwen3", qk_norm=True)
    return config | {"use_sliding_window": False}, weights


def _deepseek_v3() -> tuple[dict[str, Any], Any]:
    """Low-rank attention and mixture-of-experts layers after a dense first one."""
    heads, nope, rope, value, kv_rank, q_rank = 4, 16, 8, 16, 32, 48
    experts, expert_width = 8, 32
    w = _Weights(seed=3)
    w.frame()
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        w.linear(f"{attention}.q_a_proj", q_rank, HIDDEN)
        w.norm(f"{attention}.q_a_layernorm", q_rank)
        w.linear(f"{attention}.q_b_proj", heads * (nope + rope), q_rank)
        w.linear(f"{attention}.kv_a_proj_with_mqa", kv_rank + rope, HIDDEN)
        w.norm(f"{attention}.kv_a_layernorm", kv_rank)
        w.linear(f"{attention}.kv_b_proj", heads * (nope + value), kv_rank)
        w.linear(f"{attention}.o_proj", HIDDEN, heads * value)
        w.layer_norms(layer)
        if i == 0:
            w.mlp(f"{layer}.mlp", INTERMEDIATE)
            continue
        w.linear(f"{layer}.mlp.gate", experts, HIDDEN)
        w.expert_bias(f"{layer}.mlp.gate.e_score_correction_bias", experts)
        for e in range(experts):
            w.mlp(f"{layer}.mlp.experts.{e}", expert_width)
        w.mlp(f"{layer}.mlp.shared_experts", expert_width)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": expert_width,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "ep_size": 1,
        "pretraining_tp": 1,
        # SGLang's DeepSeek reads the yarn fields whatever the context length is.
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    return config, w


def _gemma3() -> tuple[dict[str, Any], Any]:
    """Norms behind attention and MLP as well, and tied embeddings."""
    config, w = _grouped_query("Gemma3ForCausalLM", "gemma3_text", qk_norm=True)
    del w["lm_head.weight"]
    for i in range(LAYERS):
        w.norm(f"model.layers.{i}.pre_feedforward_layernorm", HIDDEN)
        w.norm(f"model.layers.{i}.post_feedforward_layernorm", HIDDEN)
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 512,
        "layer_types": ["full_attention"] * LAYERS,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    }, w


def _granite() -> tuple[dict[str, Any], Any]:
    """SGLang's has no setter for its inner layers."""
    config, w = _grouped_query("GraniteForCausalLM", "granite", qk_norm=False)
    scales = {"attention": 0.25, "embedding": 3.0, "residual": 0.5}
    return config | {f"{name}_multiplier": x for name, x in scales.items()} | {
        "logits_scaling": 2.0,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    }, w


def _olmo2() -> tuple[dict[str, Any], Any]:
    """Norms behind attention and MLP only, no residual handed on, no setter."""
    config, w = _grouped_query("Olmo2ForCausalLM", "olmo2", qk_norm=False)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        del w[f"{layer}.input_layernorm.weight"]
        w.norm(f"{layer}.post_feedforward_layernorm", HIDDEN)
        w.norm(f"{layer}.self_attn.q_norm", 4 * 16)
        w.norm(f"{layer}.self_attn.k_norm", 2 * 16)
    return config, w


_ARCHITECTURES = {
    "llama": _llama,
    "qwen3": _qwen3,
    "deepseek_v3": _deepseek_v3,
    "gemma3": _gemma3,
    "granite": _granite,
    "olmo2": _olmo2,
}
