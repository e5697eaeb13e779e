"""Attention within each sample of a packed row, registered with transformers under the name `per_sample`.

A packed row `[1, T]` holds many samples end to end. A block-diagonal mask over T x T would give the same result at a cost that
grows with T squared: for 64 samples of 50 tokens it is 60 times the work, and on a CPU most of a training step. So attention is
computed for each sample alone, causally and without a mask. The lengths are the keyword `sample_lengths` of the model's call.

Samples that share a prompt may share its computation, too (`counterpoint/trainer/model/shared_prompts.py`).

On a GPU, in half precision, one kernel takes all samples of a row (torch's `varlen_attn`, FlashAttention 2), or a faster one the
long ones (`counterpoint/trainer/model/kernels/row.py`). Elsewhere each sample is a call of its own: on a CPU, padded samples in
one call took 1.0 to 1.9 times the time of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from counterpoint.trainer.model.context import Stretch
from counterpoint.trainer.model.kernels.kept import computed_once
from counterpoint.trainer.model.kernels.row import packed_attention
from counterpoint.trainer.model.shared_prompts import Families, family_attention
from counterpoint.trainer.model.without_waiting import on_device

NAME = "per_sample"
"""The `attn_implementation` to load a model with."""


_OF_THE_CALL = ("position_ids", "logits_to_keep")
"""What models may pass on of the arguments of their call, and attention has no use for."""


@dataclass(slots=True)
class SampleLengths:
    """The lengths of a row's samples, and this rank's stretch of it, inside a compiled layer.

    Passed by themselves, they would make the compiler begin anew for each list of another length, and for each stretch.
    """

    lengths: list[int]
    stretch: Stretch | None


@torch.compiler.disable
def _uncompiled_attention(
    module: torch.nn.Module, *args: Any, sample_lengths: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    if isinstance(sample_lengths, SampleLengths):
        kwargs["stretch"] = sample_lengths.stretch
        sample_lengths = sample_lengths.lengths
    return per_sample_attention(module, *args, sample_lengths=sample_lengths, **kwargs)


def per_sample_attention(
    module: torch.nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sample_lengths: list[int] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    stretch: Stretch | None = None,
    families: Families | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention of `[1, heads, T, head_dim]` queries over their own sample.

    Returns `[1, T, heads, head_dim]`, contiguous, and no weights. Without `sample_lengths`, which some models do not pass on, the
    row is one sample.

    Key and value may have fewer heads than the query (grouped-query attention). With a `stretch`, T is its tokens, and
    `sample_lengths` are those of the whole row, on all its ranks. With `families`, T has a prompt that samples share once, and
    `sample_lengths` are those of the whole samples.

    Raises:
        ValueError: the model needs soft-capped scores, attention sinks, a mask or a bias of its own, or a window shorter than a
            sample, which this does not compute, or other rotary frequencies in a row with longer samples; the trained function
            would differ from that of inference.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} uses soft-capped scores or attention sinks, which cannot be trained yet"
        )
    given = {"attention_mask": attention_mask, **others}
    own = [name for name, value in given.items() if isinstance(value, Tensor) and name not in _OF_THE_CALL]
    if own:
        raise ValueError(
            f"{type(module).__name__} changes the scores of attention by {', '.join(own)} of its own, which cannot be trained yet"
        )
    if sample_lengths is None:
        sample_lengths = [query_1HTD.shape[2]]
    window = sliding_window or _window_of_mask(module)
    if window is not None and max(sample_lengths) > window:
        raise ValueError(
            f"a sample of {max(sample_lengths)} tokens is longer than the attention window of {window} tokens "
            f"of {type(module).__name__}; lower max_model_len of inference to the window"
        )
    scale = _rotary_length(module)
    if scale is not None and max(sample_lengths) > scale:
        raise ValueError(
            f"a sample of {max(sample_lengths)} tokens is longer than the {scale} tokens beyond which {type(module).__name__} "
            "has other rotary frequencies, for all samples of its row; lower max_model_len of inference to that"
        )
    if families is not None:
        return family_attention(query_1HTD, key_1HTD, value_1HTD, families, scaling), None
    if stretch is None and _has_packed_kernel(query_1HTD):
        return _packed_attention(query_1HTD, key_1HTD, value_1HTD, sample_lengths, scaling), None
    if query_1HTD.is_cuda and query_1HTD.dtype == torch.float32:
        # The one kernel for it whose memory is not quadratic in a sample has no grouped queries.
        key_1HTD, value_1HTD = (with_heads(tensor, query_1HTD.shape[1]) for tensor in (key_1HTD, value_1HTD))
    if stretch is not None:
        return _stretch_attention(query_1HTD, key_1HTD, value_1HTD, sample_lengths, stretch, scaling), None
    attended = [
        computed_once(
            functional.scaled_dot_product_attention,
            length,
            query,
            key,
            value,
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        ).transpose(1, 2)
        for length, query, key, value in zip(
            sample_lengths,
            query_1HTD.split(sample_lengths, 2),
            key_1HTD.split(sample_lengths, 2),
            value_1HTD.split(sample_lengths, 2),
            strict=True,
        )
    ]
    return torch.cat(attended, 1), None


def _window_of_mask(module: torch.nn.Module) -> int | None:
    """Returns the window of a layer whose model has it in its mask alone, which this attention does not get."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds: Any = getattr(config, "layer_types", None)
    kind = "sliding_attention" if kinds is None or index is None else kinds[index]
    name = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind)
    return None if name is None else getattr(config, name, None) or None


def _rotary_length(module: torch.nn.Module) -> int | None:
    """Returns the longest row position, plus 1, with which transformers keeps the rotary frequencies; None if it always does.

    It takes them from the largest position of all samples that are computed together.
    """
    config: Any = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    lengths: list[int] = []
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = str(each.get("rope_type", ""))
        if "dynamic" in kind:
            lengths.append(config.max_position_embeddings)
        elif kind == "longrope":
            lengths.append(each["original_max_position_embeddings"])
    return min(lengths, default=None)


def _has_packed_kernel(query_1HTD: Tensor) -> bool:
    """Whether `varlen_attn` computes this: FlashAttention 2 takes half precision, heads of up to 256, and Ampere or newer."""
    return (
        query_1HTD.is_cuda
        and query_1HTD.dtype in (torch.bfloat16, torch.float16)
        and query_1HTD.shape[-1] <= 256
        and query_1HTD.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query_1HTD.device) >= (8, 0)
    )


def _packed_attention(
    query_1HTD: Tensor, key_1HTD: Tensor, value_1HTD: Tensor, sample_lengths: list[int], scaling: float | None
) -> Tensor:
    """Computes all samples by the kernels that are proven on this card. Returns `[1, T, heads, head_dim]`."""
    query_THD, key_THD, value_THD = (tensor[0].transpose(0, 1) for tensor in (query_1HTD, key_1HTD, value_1HTD))
    return packed_attention(query_THD, key_THD, value_THD, sample_lengths, scaling, _together)[None]


def _together(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, sample_lengths: Sequence[int], scaling: float | None
) -> Tensor:
    """Computes all samples in one call of torch's kernel. Returns `[T, heads, head_dim]`."""
    boundaries = _boundaries(tuple(sample_lengths), query_THD.device)
    longest = max(sample_lengths)
    causal = (-1, 0)
    attended: Tensor = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=causal,
        enable_gqa=key_THD.shape[1] != query_THD.shape[1],
    )
    return attended


# The layers of a row ask for the same, and each new one waits for a copy to the device. All parts of a row have to fit: if one
# goes before its layer is computed again, torch refuses operations that the first pass did not have.
@lru_cache(maxsize=256)
def _boundaries(sample_lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns where each sample of a row starts, and where the last ends: int32 `[samples + 1]`."""
    lengths = torch.tensor((0, *sample_lengths), dtype=torch.int32)
    return on_device(lengths.cumsum(0, dtype=torch.int32), device)


def _stretch_attention(
    query_1HtD: Tensor,
    key_1HtD: Tensor,
    value_1HtD: Tensor,
    sample_lengths: list[int],
    stretch: Stretch,
    scaling: float | None,
) -> Tensor:
    """Computes the same of a stretch of the row, whose keys and values it gathers. Returns `[1, tokens, heads, head_dim]`."""
    key_1HTD, value_1HTD = stretch.whole(key_1HtD), stretch.whole(value_1HtD)
    attended, first = [], 0
    for length in sample_lengths:
        start, stop = max(first, stretch.start), min(first + length, stretch.stop)
        if start < stop:
            # The queries are the last ones of the sample so far.
            attended.append(
                computed_once(
                    functional.scaled_dot_product_attention,
                    stop - first,
                    query_1HtD[:, :, start - stretch.start : stop - stretch.start],
                    key_1HTD[:, :, first:stop],
                    value_1HTD[:, :, first:stop],
                    attn_mask=causal_lower_right(stop - start, stop - first),
                    scale=scaling,
                    enable_gqa=True,
                ).transpose(1, 2)
            )
        first += length
    return torch.cat(attended, 1)


def with_heads(grouped_1HTD: Tensor, heads: int) -> Tensor:
    """Copies keys or values `[1, groups, T, head_dim]` to `heads` query heads, `[1, heads, T, head_dim]`."""
    groups = grouped_1HTD.shape[1]
    return grouped_1HTD if groups == heads else grouped_1HTD.repeat_interleave(heads // groups, 1)


AttentionInterface.register(NAME, _uncompiled_attention)
