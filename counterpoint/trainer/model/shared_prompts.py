"""Attention of rows in which the samples of a group share one computation of their prompt.

The rollouts of an example begin with the same tokens, which are computed once in a row: a family is a prompt, then what follows
it in each of its samples. A token attends to the prompt and to its own sample. Families of few tokens share one call with a mask,
since a call for each sample costs more than its arithmetic. Those of two runs never do: a mask keeps the values of one from the
other, but not what is no number. A mask is quadratic, so a family has at most `FAMILY_TOKENS`; larger
ones are divided, and a longer sample is alone. Used on a CPU only: a GPU has a kernel for whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from counterpoint.trainer.model.kernels.kept import computed_once

FAMILY_TOKENS = 512
"""Most tokens of a family of several samples."""

BLOCK_TOKENS = 128
"""Most tokens of several families in one call."""


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of a row with the same prompt, which is in the row once, before the rest of each sample."""

    prompt: int
    """Tokens of the prompt."""
    rests: tuple[int, ...]
    """Tokens of each sample after the prompt."""
    part: int = 0
    """Number of its batch in the row: those of two runs have different numbers."""

    @property
    def tokens(self) -> int:
        """Tokens in the row."""
        return self.prompt + sum(self.rests)


Families = tuple[Family, ...]
"""All of a row, in its order."""


def family_attention(
    query_1HTD: Tensor, key_1HTD: Tensor, value_1HTD: Tensor, families: Families, scaling: float | None
) -> Tensor:
    """Computes causal attention within each sample. Returns `[1, T, heads, head_dim]`, contiguous."""
    attended: list[Tensor] = []
    first = 0
    for tokens, mask in _blocks(families, query_1HTD.dtype):
        own = slice(first, first := first + tokens)
        attended.append(
            computed_once(
                functional.scaled_dot_product_attention,
                tokens,
                query_1HTD[:, :, own],
                key_1HTD[:, :, own],
                value_1HTD[:, :, own],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=True,
            ).transpose(1, 2)
        )
    return torch.cat(attended, 1)


@lru_cache(maxsize=4)  # the layers of a row ask for the same
def _blocks(families: Families, dtype: torch.dtype) -> list[tuple[int, Tensor | None]]:
    """Returns the tokens and the mask of each call, in order; no mask for one sample."""
    blocks: list[list[Family]] = []
    room = 0
    for family in families:
        if family.tokens > room or (blocks and blocks[-1][-1].part != family.part):
            blocks.append([])
            room = BLOCK_TOKENS
        blocks[-1].append(family)
        room -= family.tokens
    return [
        (
            sum(family.tokens for family in block),
            _mask(block, dtype) if len(block) > 1 or len(block[0].rests) > 1 else None,
        )
        for block in blocks
    ]


def _mask(block: Sequence[Family], dtype: torch.dtype) -> Tensor:
    """Returns what is added to the scores, `[T, T]`: 0 where a token attends to another one, else minus infinity.

    In the precision of the states: of any other mask, every layer would keep a copy for its backward pass.
    """
    prompt = -1
    segments = [
        (number, sample, size)
        for number, family in enumerate(block)
        for sample, size in enumerate((family.prompt, *family.rests), prompt)
    ]
    numbers, samples, sizes = (torch.tensor(column) for column in zip(*segments, strict=True))
    family_T, sample_T = numbers.repeat_interleave(sizes), samples.repeat_interleave(sizes)
    attends = (family_T[:, None] == family_T) & ((sample_T[:, None] == sample_T) | (sample_T == prompt))
    return torch.zeros(attends.shape, dtype=dtype).masked_fill_(~attends.tril(), -torch.inf)
