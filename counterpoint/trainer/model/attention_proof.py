"""Tests by computation, when a model is loaded, whether it computes with our attention what it computes with transformers' own.

The model runs under transformers' own attention (`eager`, its definition), with each call of it given to ours as well, and with
the result of ours going on. In float32, on the same queries, keys and values, the two results of a call must be equal. All else
is then the same computation on the same numbers, so what the model returns must be equal in every bit to what it returns under
ours. So no bound is wide enough for another function, in any precision: rounding never adds up over layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from counterpoint.trainer.model import attention
from counterpoint.trainer.model.kernels.proof import KERNEL_BOUND
from counterpoint.trainer.model.load import log_probabilities
from counterpoint.trainer.model.text_part import text_config

LENGTHS = (5, 12, 1, 9, 3)
"""Lengths of the samples in tokens: shorter than any attention window, and all different."""

FUNCTION_BOUND = 1e-4
"""Allowed difference of the two attentions in float32, relative to their largest value: they sum in another order."""

_LARGEST_SCORE = 20.0
"""The largest score that the queries are scaled to, whatever the weights: otherwise tokens might attend to all others alike."""

_SEED = 20_240_229
_FUNCTION = "eager_attention_forward"
"""What transformers calls it in each model's file."""


def made_up_samples(model: nn.Module) -> list[Tensor]:
    """Returns random token ids of samples with these `LENGTHS`, on the model's device."""
    generator = torch.Generator().manual_seed(_SEED)
    vocabulary = text_config(model).vocab_size
    samples = [torch.randint(0, vocabulary, (length,), generator=generator) for length in LENGTHS]
    return [sample.to(next(model.parameters()).device) for sample in samples]


def row(model: nn.Module, samples: Sequence[Tensor], begins: Sequence[int] | None = None) -> list[Tensor]:
    """Computes samples in one row; returns the log-probabilities of each sample's tokens except the first.

    Positions of a sample begin at that of `begins`, or at 0.
    """
    lengths = [len(sample) for sample in samples]
    tokens_T = torch.cat(list(samples))
    places_T = torch.cat([torch.arange(length, device=tokens_T.device) for length in lengths])
    predicting_P = (places_T[1:] > 0).nonzero()[:, 0]
    starts = torch.tensor(begins or [0] * len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions_T = places_T + starts.to(places_T.device)
    targets_P = tokens_T[1:][predicting_P]
    values_P, _ = log_probabilities(model, tokens_T, positions_T, lengths, predicting_P, targets_P, 1.0)
    return list(values_P.split([length - 1 for length in lengths]))


def prove_attention(model: nn.Module, samples: Sequence[Tensor], alone: Sequence[Tensor]) -> None:
    """Tests a model from `load_model`, and leaves it as it was.

    `alone`: what `row` returns of each of the `samples` by itself.

    Raises:
        ValueError: the model computes another function under our attention than under transformers', or with our positions than
            with its own, or it is not causal.
    """
    ours = model.config._attn_implementation == attention.NAME
    if ours:
        model.set_attn_implementation("eager")
    try:
        with _compared(model) if ours else nullcontext(), _positions_of_its_own(model):
            under_stock = [row(model, [sample])[0] for sample in samples]
    finally:
        if ours:
            model.set_attn_implementation(attention.NAME)
    if not all(torch.equal(found, expected) for found, expected in zip(under_stock, alone, strict=True)):
        difference = float((torch.cat(under_stock) - torch.cat(list(alone))).abs().max())
        raise ValueError(
            "outside of attention it computes something else than in transformers, such as positions that do not begin at 0: "
            f"log-probabilities differ by {difference:.2g} nats; expected the same bits"
        )
    if not ours:
        longest = max(range(len(samples)), key=lambda index: len(samples[index]))
        _require_causal(model, samples[longest], alone[longest])


@contextmanager
def _positions_of_its_own(model: nn.Module) -> Iterator[None]:
    """Has the model count positions itself, inside, as it does for who gives it none."""

    def without(_model: nn.Module, inputs: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {name: value for name, value in keywords.items() if name != "position_ids"}

    handle = model.register_forward_pre_hook(without, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _require_causal(model: nn.Module, sample: Tensor, values: Tensor) -> None:
    """Raises `ValueError` if what a model with attention of its own says of a token depends on later ones."""
    middle = len(sample) // 2
    vocabulary = text_config(model).vocab_size
    found = row(model, [torch.cat((sample[:middle], (sample[middle:] + 1) % vocabulary))])[0]
    if not torch.equal(found[: middle - 1], values[: middle - 1]):
        raise ValueError(
            "what it says of a token depends on later tokens: it is no causal language model as configured"
        )


@contextmanager
def _compared(model: nn.Module) -> Iterator[None]:
    """Has every call of transformers' own attention, inside, compared with ours, whose result goes on."""
    files = {
        file
        for module in model.modules()
        for cls in type(module).__mro__  # FSDP derives classes in a file of its own
        if (file := sys.modules.get(cls.__module__)) is not None and hasattr(file, _FUNCTION)
    }
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(patch.object(file, _FUNCTION, _both(getattr(file, _FUNCTION))))
        yield


def _both(stock: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        scaling = more.get("scaling")
        largest = query.float().norm(dim=-1).amax() * key.float().norm(dim=-1).amax() * abs(scaling or 1.0)
        wide = query.float() * (_LARGEST_SCORE / largest.clamp(min=1e-6))
        mask = (
            None
            if attention_mask is None
            else attention_mask.to(torch.promote_types(attention_mask.dtype, torch.float32))
        )
        expected = stock(module, wide, key.float(), value.float(), mask, **more)[0]
        exact = attention.per_sample_attention(module, wide, key.float(), value.float(), None, **more)[0]
        _require_equal(module, exact, expected, FUNCTION_BOUND)
        rounded = wide.to(query.dtype)
        expected = stock(module, rounded.float(), key.float(), value.float(), mask, **more)[0]
        found = attention.per_sample_attention(module, rounded, key, value, None, **more)[0]
        _require_equal(module, found, expected, KERNEL_BOUND[query.dtype])
        return attention.per_sample_attention(module, query, key, value, None, **more)

    return attend


def _require_equal(module: nn.Module, found: Tensor, expected: Tensor, bound: float) -> None:
    difference = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    if not difference <= bound:
        raise ValueError(
            f"the attention of {type(module).__name__} computes something else than the trainer's, which is plain causal "
            f"attention: results differ by {difference:.2g} of the largest value ({found.dtype}; at most {bound:g})"
        )
