"""Tiny random models of the causal language models of the installed transformers.

A configuration is the class's own with small sizes in place of its own, of as many layers as it has kinds of them. Weights are
random and wide, so that whatever a layer does shows, and none is zero: what a model begins with at zero is trained later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from counterpoint.trainer.model.text_part import auto_class

VOCABULARY = 96

_WIDTH = 32
_DEVIATION = 0.1
"""Added to every weight."""
_SIZES: dict[int, tuple[str, ...]] = {
    0: ("pad_token_id", "num_nextn_predict_layers", "num_kv_shared_layers", "first_k_dense_replace", "num_dense_layers"),
    1: (
        "bos_token_id", "n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts",
        "moe_num_shared_experts", "mamba_n_groups", "mamba_ngroups", "n_groups", "moe_layer_start_index", "n_langs",
    ),
    2: (
        "eos_token_id", "num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers",
        "num_decoder_layers", "num_encoder_layers", "num_key_value_heads", "num_kv_heads", "num_experts_per_tok",
        "num_experts_per_token", "moe_topk", "moe_k", "linear_num_key_heads", "linear_num_value_heads",
        "linear_num_heads", "swa_num_key_value_heads", "num_layers_per_stack", "mask_token_id", "start_token_id",
        "decoder_start_token_id", "sep_token_id", "cls_token_id", "zero_expert_num", "n_mamba_heads", "o_groups",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
        "num_decoder_attention_heads", "num_encoder_attention_heads", "attention_heads", "num_experts",
        "num_local_experts", "n_routed_experts", "moe_num_experts", "index_n_heads", "mamba_n_heads",
        "mamba_num_heads", "swa_num_attention_heads", "num_query_groups",
    ),
    8: (
        "head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "d_head", "dim_head", "kv_channels",
        "index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "swa_head_dim",
        "attention_head_size", "global_head_dim", "state_size", "mamba_d_state", "ssm_state_size", "attention_head_dim",
        "hidden_size_per_layer_input", "laurel_rank", "rotary_dim", "time_step_rank", "mamba_dt_rank", "gated_norm_rank",
        "o_lora_rank", "adapter_rank", "d_rel", "altup_lora_rank", "hc_lowrank",
    ),
    16: (
        "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "shared_expert_intermediate_size", "mamba_d_head",
        "mamba_head_dim", "mamba_headdim", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
        "expert_ffn_hidden_size", "qk_head_dim", "router_hidden_size", "mamba_chunk_size", "chunk_size",
        "ple_embed_dim", "embedding_size_per_layer",
    ),
    _WIDTH: (
        "hidden_size", "d_model", "n_embd", "embedding_size", "embedding_dim", "word_embed_proj_dim",
        "input_embedding_size", "output_embedding_size", "attention_hidden_size", "lru_width", "mamba_d_ssm",
    ),
    48: (
        "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size_mlp", "ffn_hidden_size",
        "dim_ff", "dff", "d_inner", "feed_forward_size", "emb_dim", "dense_intermediate_size",
    ),
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input"),
    256: (
        "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length", "context_length",
        "max_target_positions", "max_source_positions",
    ),
}  # fmt: skip
_LAYERS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}
_KINDS = {"layer_types", "mlp_layer_types", "layers_block_type"}
_SMALL = {name: size for size, names in _SIZES.items() for name in names}


_THREE_POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}

_OWN: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_head": 8},
    "mamba2": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "zamba2": {"n_mamba_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16},
    "cohere_compass_text": {
        "head_dim": 64,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4} for name in ("sliding_attention", "full_attention")
        },
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "qwen4_exp_text": {
        "head_dim": 8,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm4v_moe_text", "glm_ocr_text"), _THREE_POSITIONS
    ),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}
"""What a kind needs besides."""


def _shrunk(cls: type[PretrainedConfig], **given: Any) -> PretrainedConfig:
    full = cls()
    known = full.to_dict()
    sizes = {
        name: size
        for name, size in _SMALL.items()
        if known.get(name) is not None or (name in known and "token" in name)
    }
    lists = {
        name: list(dict.fromkeys(value))
        for name, value in known.items()
        if name in _KINDS and isinstance(value, list | tuple) and value
    }
    if "kv_lora_rank" in known:  # each head has keys of its own
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"]}
    if known.get("is_decoder") is False:
        sizes["is_decoder"] = True
    layers = max([2, *map(len, lists.values())])
    for name in _LAYERS & sizes.keys():
        sizes[name] = layers
    sizes |= {name: (kinds * layers)[:layers] for name, kinds in lists.items()}
    parts = {
        name: _shrunk(type(part), **_OWN.get(part.model_type, {})).to_dict()
        for name in cls.sub_configs
        if (part := getattr(full, name, None))
    }
    return cls(**{**sizes, **parts, **given})


def save_model(kind: str, directory: Path, dtype: torch.dtype) -> None:
    """Writes a tiny model of a kind (`model_type`), with weights in this precision. Raises what its own code raises."""
    torch.manual_seed(4)
    config = _shrunk(CONFIG_MAPPING[kind], **_OWN.get(kind, {}))
    model: PreTrainedModel = auto_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += _DEVIATION * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(directory)
