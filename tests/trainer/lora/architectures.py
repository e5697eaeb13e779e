"""Tiny random models of the causal language models of the installed transformers whose adapters are exported.

A configuration is the class's own with small sizes in place of its own. A mixture has a dense layer and shared experts where its
kind can have them, since those have the names of the experts' projections.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

MIXTURES = (
    "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe",
    "glm4_moe_lite", "hunyuan_v1_moe", "hy_v3", "jamba", "laguna", "lfm2_moe", "mellum", "minimax", "minimax_m2", "mixtral",
    "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
"""With experts that can have adapters."""

OTHERS = (
    "apertus", "arcee", "aria_text", "bamba", "biogpt", "bitnet", "cohere", "cohere2", "cwm", "diffllama", "ernie4_5", "exaone4",
    "falcon_h1", "falcon_mamba", "gemma", "gemma3_text", "glm", "glm4", "gpt_neox", "granite", "granitemoe", "granitemoehybrid",
    "helium", "hunyuan_v1_dense", "hyperclovax", "jais2", "lfm2", "llama", "llama4_text", "mamba", "ministral3", "mistral",
    "modernbert-decoder", "nanochat", "nemotron_h", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3",
    "qwen3_5_text", "seed_oss", "smollm3", "starcoder2", "xglm", "zaya",
)  # fmt: skip

_WIDTH = 64
_SIZES: dict[int, str] = {
    0: "pad_token_id",
    1: "bos_token_id n_shared_experts n_group topk_group mamba_n_groups mamba_expand first_k_dense_replace num_dense_layers "
    "shared_expert_intermediate_rate",
    2: "eos_token_id num_hidden_layers n_layer num_layers num_key_value_heads num_experts_per_tok num_experts_per_token moe_k "
    "moe_topk linear_num_key_heads",
    4: "num_attention_heads n_head num_heads num_experts num_local_experts n_routed_experts moe_num_experts mamba_n_heads "
    "linear_num_value_heads",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim state_size mamba_d_state time_step_rank mamba_dt_rank",
    16: "head_dim q_lora_rank kv_lora_rank v_head_dim mamba_d_head linear_key_head_dim linear_value_head_dim kv_channels",
    32: "moe_intermediate_size shared_expert_intermediate_size sliding_window shared_intermediate_size",
    48: "intermediate_size ffn_dim n_inner ffn_hidden_size intermediate_size_mlp",
    _WIDTH: "vocab_size hidden_size n_embd d_model word_embed_proj_dim embedding_size",
    128: "max_position_embeddings n_positions",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": _WIDTH},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}
_FOUR_LAYERS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h"}
"""Their four layers are of several kinds, of which the last has attention."""


def make_tiny(kind: str, directory: Path) -> Path:
    """Writes a model of `kind`, `model_type` of transformers, into `directory`, with weights so wide that all of them matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(kind))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    return directory


def _config(kind: str) -> PretrainedConfig:
    cls = CONFIG_MAPPING[kind]
    known = {name for each in cls.__mro__ for name in getattr(each, "__annotations__", {})}
    sizes = {name: size for name, size in _SMALL.items() if name in known}
    if "qk_rope_head_dim" in known:  # each head has keys of its own
        sizes |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in known else {})
    if kind in _FOUR_LAYERS:
        sizes["num_hidden_layers"] = 4
    return cls(**(sizes | _OWN.get(kind, {})))
