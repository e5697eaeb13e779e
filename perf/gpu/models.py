"""Models of random weights for the rows that serve one: with the tiny tokenizer, so that whatever is sampled can be decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3MoeConfig

from counterpoint.models.tiny_tokenizer import END_OF_TURN, PADDING, write_tokenizer
from perf.step_speed import SHAPES

CONTEXT = 2048

MIXTURE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
"""64 experts, 8 of them used for a token, in 16 layers."""

SMALL_MIXTURE = MIXTURE | {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}

SMALL = SHAPES["small"] | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 32}


def write(directory: Path, device: str, *, mixture: bool = False) -> Path:
    """Writes a model, of a dense shape or a mixture of experts, and returns its directory."""
    directory.mkdir(parents=True)
    tokenizer = write_tokenizer(directory, CONTEXT)
    end, padding = tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(PADDING)
    on_gpu = device == "cuda"
    shape = (MIXTURE if on_gpu else SMALL_MIXTURE) if mixture else SHAPES["0.6b"] if on_gpu else SMALL
    more: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "pad_token_id": padding,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    config = (Qwen3MoeConfig if mixture else Qwen3Config)(**shape | more)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[end], pad_token_id=padding)
    model.save_pretrained(directory)
    return directory
