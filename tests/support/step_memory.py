"""Counts the memory of a training pass, exactly, on a CPU: `peak_bytes`.

The model has random weights and the heads of Qwen3-0.6B. It is frozen, with an adapter of rank 1, so that the bytes are
activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.lora.multi_lora import adapter_spans, apply_lora_to_model
from counterpoint.trainer.model import attention
from counterpoint.trainer.model.load import log_probabilities
from counterpoint.trainer.model.recompute import checkpoint_layers
from tests.support.live_bytes import LiveBytes

HIDDEN, VOCABULARY = 1024, 151_936
SAMPLE = 128

HEADS, GROUPS, HEAD = HIDDEN // 64, HIDDEN // 128, 128


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to compute a pass."""

    layers: int
    tokens: int
    chunked: bool = True
    checkpointed: bool = True
    vocabulary: int = VOCABULARY


def peak_bytes(setting: Setting) -> int:
    """Returns the most bytes that lived at once in a forward and a backward pass, weights left out."""
    torch.manual_seed(0)
    model = _model(setting)
    lengths = [SAMPLE] * (setting.tokens // SAMPLE)
    generator = torch.Generator().manual_seed(0)
    for layer in apply_lora_to_model(model, 1, LoraConfig()).values():
        layer.admit(0, 1, 1.0, generator)
    if setting.checkpointed:
        checkpoint_layers(model, None)
    model.logits_scale = 1.0 if setting.chunked else None
    tokens_T = torch.randint(0, setting.vocabulary, (setting.tokens,), generator=generator)
    positions_T = torch.arange(SAMPLE).repeat(len(lengths))
    with LiveBytes([*model.parameters(), *model.buffers()]) as live, adapter_spans(model, [(0, setting.tokens)]):
        every = torch.arange(setting.tokens)
        values_P, _ = log_probabilities(model, tokens_T, positions_T, lengths, every, tokens_T.roll(-1), 1.0)
        values_P.sum().backward()
    return live.peak


def _model(setting: Setting) -> nn.Module:
    config = Qwen3Config(
        vocab_size=setting.vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=setting.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        tie_word_embeddings=True,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    return model.eval()
