"""Which kernel attention takes on which device is torch's choice; what it is given must be what that kernel is made for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from counterpoint.trainer.model import attention
from counterpoint.trainer.model.attention import with_heads
from counterpoint.trainer.model.load import choose_dtype, load_model, log_probabilities

_SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
WINDOWED = {
    "llama4": Llama4TextConfig(
        **_SHAPE, intermediate_size_mlp=64, head_dim=16, num_local_experts=2, attention_chunk_size=16, no_rope_layers=[1, 0]
    ),
    "phimoe": PhimoeConfig(**_SHAPE, num_local_experts=4, sliding_window=16),
    "qwen2_moe": Qwen2MoeConfig(
        **_SHAPE, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        use_sliding_window=True, sliding_window=16, max_window_layers=2,
    ),
}  # fmt: skip
"""Models that have their window of 16 tokens in the mask alone."""
ROTARY = {
    "longrope": Phi3Config(
        **_SHAPE,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **_FACTORS
        },
    ),
    "dynamic": LlamaConfig(
        **_SHAPE, max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
}  # fmt: skip
"""Models that have other rotary frequencies beyond 16 tokens, for everything that is computed together."""


def _loaded(config: PretrainedConfig, directory: Path) -> nn.Module:
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return load_model(directory, "float32", torch.device("cpu"))


def _compute(model: nn.Module, lengths: list[int]) -> None:
    tokens = torch.randint(3, 64, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    log_probabilities(model, tokens, positions, lengths, torch.tensor([0]), tokens[1:2], 1.0)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_only_the_mask_has_is_refused_for_longer_samples(name: str, tmp_path: Path) -> None:
    model = _loaded(WINDOWED[name], tmp_path)
    _compute(model, [16, 9])
    with pytest.raises(ValueError, match="17 tokens is longer than the attention window of 16 "):
        _compute(model, [9, 17])


@pytest.mark.parametrize("name", ROTARY)
def test_samples_for_which_a_row_would_change_its_rotary_frequencies_are_refused(name: str, tmp_path: Path) -> None:
    model = _loaded(ROTARY[name], tmp_path)
    _compute(model, [16, 9])
    with pytest.raises(ValueError, match="17 tokens is longer than the 16 tokens beyond"):
        _compute(model, [9, 17])


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_heads_of_their_own_are_what_grouped_queries_are(groups: int) -> None:
    """For float32 on a GPU, where no kernel that takes them does without memory quadratic in a sample."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 9, 8, generator=generator)
    key, value = (torch.randn(1, groups, 9, 8, generator=generator) for _ in range(2))
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = functional.scaled_dot_product_attention(query, with_heads(key, 6), with_heads(value, 6), is_causal=True)
    torch.testing.assert_close(found, expected)


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What torch documents of its function of this name, which needs a GPU: written out, a query at a time."""
    assert window_size == (-1, 0)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert cu_seq_q[-1] == len(query)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    rows = []
    for start, stop in zip(cu_seq_q.tolist(), cu_seq_q[1:].tolist(), strict=False):
        for position in range(start, stop):
            seen = slice(start, position + 1)
            heads = []
            for head in range(query.shape[1]):
                group = head * key.shape[1] // query.shape[1]
                weights = torch.softmax(key[seen, group] @ query[position, head] * scale, 0)
                heads.append(weights @ value[seen, group])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("groups", [2, 6])
def test_one_kernel_for_all_samples_gives_what_one_call_a_sample_gives(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 5]
    query = torch.randn(1, 6, 9, 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(1, groups, 9, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    attend = torch.nn.Identity(), query, key, value, None
    each, _ = attention.per_sample_attention(*attend, scaling=0.3, sample_lengths=lengths)
    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "packed_attention", lambda *given: given[-1](*given[:-1]))
    monkeypatch.setattr(attention, "_has_packed_kernel", lambda query: True)
    together, _ = attention.per_sample_attention(*attend, scaling=0.3, sample_lengths=lengths)
    torch.testing.assert_close(together, each)


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("auto", "cuda", torch.bfloat16),
        ("auto", "cpu", torch.float32),
        ("float32", "cuda", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_the_device_chooses_the_precision_unless_it_is_given(name: str, device: str, dtype: torch.dtype) -> None:
    assert choose_dtype(name, torch.device(device)) == dtype
