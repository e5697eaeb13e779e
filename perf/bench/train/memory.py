"""Measures the memory of a training pass at the shapes of a model of 0.6 billion parameters, exactly, on a CPU.

    python -m perf.bench.train.memory [--quick | --full]

The model has random weights, the width, heads and vocabulary of Qwen3-0.6B, and few layers; a second one has more, so that the
difference is what a layer keeps. It is frozen, with an adapter of rank 1, so that the bytes are activations. Beside it are whole
logits without activation checkpointing: what the trainer did before it had either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from perf.bench.command import Size, show
from perf.figures import Case, Figure
from perf.live_bytes import LiveBytes
from run.config import LoraConfig
from trainer.lora.multi_lora import adapter_spans, apply_lora_to_model
from trainer.model import attention, chunks
from trainer.model.load import log_probabilities
from trainer.model.recompute import checkpoint_layers

HIDDEN, VOCABULARY = 1024, 151_936
SAMPLE = 128

HEADS, GROUPS, HEAD = HIDDEN // 64, HIDDEN // 128, 128
_LINEAR = [(HIDDEN, HEADS * HEAD), (HIDDEN, GROUPS * HEAD), (HIDDEN, GROUPS * HEAD), (HEADS * HEAD, HIDDEN)]
_LINEAR += [(HIDDEN, 3 * HIDDEN), (HIDDEN, 3 * HIDDEN), (3 * HIDDEN, HIDDEN)]
ADAPTER_BYTES = 4 * sum(inputs + outputs for inputs, outputs in _LINEAR)
"""The gradients of a layer's adapter of rank 1."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to compute a pass."""

    layers: int
    tokens: int
    chunked: bool = True
    checkpointed: bool = True
    vocabulary: int = VOCABULARY


def measure(size: Size) -> list[Case]:
    """Measures the case `train-memory`."""
    tokens, few, more = size.pick((128, 1, 2), (1024, 2, 4), (2048, 4, 28))
    state = tokens * HIDDEN * 4
    chunks.CHUNK_BYTES = size.pick(
        2**23, 2**26, chunks.CHUNK_BYTES
    )  # far below the logits, also of half the vocabulary
    short = peak_bytes(Setting(few, tokens))
    long = peak_bytes(Setting(more, tokens))
    kept = peak_bytes(Setting(more, tokens, checkpointed=False))
    before = peak_bytes(Setting(more, tokens, chunked=False, checkpointed=False))
    narrow = peak_bytes(Setting(more, tokens, vocabulary=VOCABULARY // 2))
    logits = tokens * VOCABULARY * 4
    return [
        Case(
            "train-memory",
            [
                Figure(f"float32 logits of {tokens} tokens", logits / 1e6, "MB"),
                Figure(f"peak of {more} layers: whole logits, no checkpointing", before / 1e6, "MB"),
                Figure(f"peak of {more} layers: in chunks, no checkpointing", kept / 1e6, "MB"),
                Figure(f"peak of {more} layers: in chunks, checkpointing", long / 1e6, "MB"),
                Figure("the last over the first", long / before, "x", 0.6, slack=1.0, timed=False),
                Figure(
                    "a layer more, without its adapter's gradients, over its input",
                    (long - short - (more - few) * ADAPTER_BYTES) / (more - few) / state,
                    "x",
                    1.1,
                    slack=1.0,
                    timed=False,
                ),
                Figure(
                    "twice the vocabulary, over its float32 logits",
                    (long - narrow) / (logits / 2),
                    "x",
                    0.05,
                    slack=1.0,
                    timed=False,
                ),
            ],
        )
    ]


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


if __name__ == "__main__":
    show(measure)
