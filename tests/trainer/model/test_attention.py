"""Which kernel attention takes on which device is torch's choice; what it is given must be what that kernel is made for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

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
