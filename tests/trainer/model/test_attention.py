"""Which kernel attention takes on which device is torch's choice; what it is given must be what that kernel is made for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from trainer.model import attention
from trainer.model.attention import with_heads
from trainer.model.load import choose_dtype


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
    each, _ = attention._per_sample_attention(*attend, scaling=0.3, sample_lengths=lengths)
    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_has_packed_kernel", lambda query: True)
    together, _ = attention._per_sample_attention(*attend, scaling=0.3, sample_lengths=lengths)
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
