"""The built-in models, untrained: a Qwen3 and a Qwen3-MoE, as transformers and vLLM define them.

They have half a million and 1.1 million parameters, about the least with which the tasks of the demos are learned in seconds,
within the limits of vLLM's CPU kernels: heads of 32, widths in multiples of 32. The vocabulary is exactly the tokenizer's, so
every sampled id decodes; the head is not tied to the embedding, since some kernels do not reload a tied one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoint.models.tiny_tokenizer import END_OF_TURN, PADDING, write_tokenizer

CONTEXT = 2048
"""Longest sequence, in tokens: at least a server's default `max_model_len`."""

_SHARED = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    # Three times the usual: at this width attention would otherwise start too flat to find its pattern within the warm-up.
    "initializer_range": 0.06,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "tiny-moe": {
        **_SHARED,
        "intermediate_size": 192,
        "moe_intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        # Twice the usual: with 0.01 an expert is never chosen where the processor rounds in another way.
        "router_aux_loss_coef": 0.02,
    },
    "tiny-dense": {**_SHARED, "intermediate_size": 384},
    "tiny-math": {**_SHARED, "intermediate_size": 384},
}
"""The architectures by name, with the arguments of the model's Hugging Face configuration: a Qwen3-MoE where there are
experts, else a Qwen3."""


def write_untrained(name: str, directory: Path, seed: int) -> Any:
    """Writes the tokenizer and the configurations of a built-in model into `directory`, and returns the model.

    The model has random weights, float32 on the CPU, which the caller saves. torch's global random state does not change.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3MoeConfig

    tokenizer = write_tokenizer(directory, CONTEXT)
    end, padding = tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(PADDING)
    shape = ARCHITECTURES[name]
    configuration = (Qwen3MoeConfig if "num_experts" in shape else Qwen3Config)(
        vocab_size=tokenizer.get_vocab_size(), bos_token_id=None, eos_token_id=end, pad_token_id=padding, **shape
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[end], pad_token_id=padding)
    model.generation_config.save_pretrained(directory)
    return model
