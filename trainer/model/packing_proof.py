"""Tests by computation, when a model is loaded, whether the samples of a packed row influence each other.

Our attention (`trainer/model/attention.py`) stays within each sample, but a model may have other layers that look back:
convolutions, state spaces, linear attention. So a few random samples are computed three times: by transformers' own forward
pass, one sample at a time; by ours, one at a time; and by ours in packed rows, each sample once at the beginning of a row.
If the first two differ, the model computes another function under our attention and must not be trained. The first sample of
a row cannot see another sample, so it differs from the same sample alone only by rounding, on this device and at this
precision. If the other samples differ by much more, the model is trained with one sample a row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.faults import is_fatal
from trainer.model import attention
from trainer.model.context import ContextGroup, shared_rows
from trainer.model.head import prove_head
from trainer.model.load import log_probabilities
from trainer.model.shared_prompts import Family

logger = logging.getLogger(__name__)

LENGTHS = (5, 12, 1, 9, 3)
"""Lengths of the samples in tokens: shorter than any attention window, and all different."""

LEAST_BOUND = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Nats, root mean square: allowed difference of packed samples from the same samples alone, even if rounding is smaller."""

ROUNDING_FACTOR = 3.0
"""How many times more than the first sample of a row the others may differ."""

STOCK_BOUND = {torch.float32: 1e-3, torch.bfloat16: 3e-1}
"""Nats, root mean square: allowed difference of transformers' attention from ours, which sums in another order."""

_SEED = 20_240_229


def prove_packing(model: nn.Module) -> None:
    """Tests a model from `load_model`, its output layer first (`prove_head`), and stores the result on it for `can_pack`.

    Raises:
        ValueError: the model computes another function here than in transformers, and must not be trained.
    """
    prove_head(model)
    generator = torch.Generator().manual_seed(_SEED)
    samples = [torch.randint(0, model.config.vocab_size, (length,), generator=generator) for length in LENGTHS]
    samples = [sample.to(next(model.parameters()).device) for sample in samples]
    dtype = next(model.parameters()).dtype
    try:
        with torch.no_grad():
            alone = [_row(model, [sample])[0] for sample in samples]
            stock = _stock(model, samples)
            rows = [_row(model, [*samples[first:], *samples[:first]]) for first in range(len(samples))]
    except Exception as error:
        if is_fatal(error):
            raise
        raise ValueError(f"{type(model).__name__} cannot be trained: {error}") from error
    if not (other := _distance(alone, stock)) <= STOCK_BOUND[dtype]:
        raise ValueError(
            f"{type(model).__name__} cannot be trained: under the trainer's attention, log-probabilities of a sample differ "
            f"from those of transformers by {other:.2g} nats (root mean square; at most {STOCK_BOUND[dtype]:g} in {dtype})"
        )
    rounding = _distance([row[0] for row in rows], alone)
    found = _distance(
        [values for row in rows for values in row[1:]],
        [values for first in range(len(samples)) for values in [*alone[first + 1 :], *alone[:first]]],
    )
    bound = max(LEAST_BOUND[dtype], ROUNDING_FACTOR * rounding)
    model.one_sample_a_row = not found <= bound
    if model.one_sample_a_row:
        logger.warning(
            "%s does not keep the samples of a row apart: packed, their log-probabilities differ by %.2g nats from those alone "
            "(root mean square; at most %.2g). It is trained with one sample a row, which is correct but slower",
            type(model).__name__, found, bound,
        )  # fmt: skip
    else:
        logger.info("packing proven: samples in a row and alone differ by %.2g nats (at most %.2g)", found, bound)
        _prove_sharing(model, samples, bound)


def _prove_sharing(model: nn.Module, samples: Sequence[Tensor], bound: float) -> None:
    """Tests whether samples may share the tokens of their prompt, and stores the result for `can_share_prompts`.

    Tried on a CPU only: a GPU has a kernel for rows of whole samples.
    """
    model.shares_prompts = False
    if samples[0].device.type != "cpu":
        return
    prompt, *rests = samples
    try:
        with torch.no_grad():
            alone = [_row(model, [torch.cat((prompt, rest))])[0][len(prompt) - 1 :] for rest in rests]
            tokens_T = torch.cat(samples)
            ends = torch.tensor([len(rest) for rest in rests]).cumsum(0) + len(prompt)
            starts = [len(prompt), *ends.tolist()]
            positions = [torch.arange(len(prompt)), *(torch.arange(len(rest)) + len(prompt) for rest in rests)]
            predicting = [
                torch.tensor([len(prompt) - 1, *range(start, start + len(rest) - 1)])
                for start, rest in zip(starts, rests, strict=False)
            ]
            shared_P, _ = log_probabilities(
                model, tokens_T, torch.cat(positions), [len(prompt) + len(rest) for rest in rests], torch.cat(predicting),
                torch.cat(rests), 1.0, families=(Family(len(prompt), tuple(map(len, rests))),),
            )  # fmt: skip
    except Exception as error:
        if is_fatal(error):
            raise
        logger.info("%s does not share prompts: %s", type(model).__name__, error)
        return
    found = _distance([shared_P], [torch.cat(alone)])
    model.shares_prompts = found <= bound
    if not model.shares_prompts:
        logger.info(
            "%s does not share prompts: log-probabilities then differ by %.2g nats (at most %.2g)",
            type(model).__name__, found, bound,
        )  # fmt: skip


def prove_stretches(model: nn.Module, group: ContextGroup) -> None:
    """Tests a model from `load_model` whose rows the ranks of `group` share: on all of them, the same as on one.

    Raises:
        ValueError: a layer other than attention looks back over the tokens, and the stretches cannot be computed apart.
    """
    generator = torch.Generator().manual_seed(_SEED)
    samples = [torch.randint(0, model.config.vocab_size, (length,), generator=generator) for length in LENGTHS]
    samples = [sample.to(next(model.parameters()).device) for sample in samples]
    with torch.no_grad():
        whole = _row(model, samples)
        with shared_rows(model, group):
            shared = _row(model, samples)
    bound = LEAST_BOUND[next(model.parameters()).dtype]
    if not (found := _distance(shared, whole)) <= bound:
        raise ValueError(
            f"{type(model).__name__} cannot be trained with context_parallel = {group.size}: log-probabilities of a row "
            f"that ranks share differ by {found:.2g} nats from those on one rank (root mean square; at most {bound:g}); "
            "use context_parallel = 1"
        )


def can_pack(model: nn.Module) -> bool:
    """Returns whether several samples may share a row; otherwise each needs its own."""
    return not getattr(model, "one_sample_a_row", False)


def can_share_prompts(model: nn.Module) -> bool:
    """Returns whether samples in a row may share the tokens of their prompt."""
    return getattr(model, "shares_prompts", False)


def _row(model: nn.Module, samples: Sequence[Tensor]) -> list[Tensor]:
    """Computes samples in one row; returns the log-probabilities of each sample's tokens except the first."""
    lengths = [len(sample) for sample in samples]
    tokens_T = torch.cat(list(samples))
    positions_T = torch.cat([torch.arange(length, device=tokens_T.device) for length in lengths])
    predicting_P = (positions_T[1:] > 0).nonzero()[:, 0]
    targets_P = tokens_T[1:][predicting_P]
    values_P, _ = log_probabilities(model, tokens_T, positions_T, lengths, predicting_P, targets_P, 1.0)
    return list(values_P.split([length - 1 for length in lengths]))


def _stock(model: nn.Module, samples: Sequence[Tensor]) -> list[Tensor]:
    """Computes samples one by one by transformers' own attention, and restores the model.

    Raises:
        ValueError: its attention cannot be exchanged, so it does not use ours.
    """
    try:
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:
            model.set_attn_implementation("eager")
        if model.config._attn_implementation == attention.NAME:
            raise ValueError("it does not use transformers' attention interface")
        logits = [model(input_ids=sample[None], use_cache=False).logits[0].float() for sample in samples]
    finally:
        model.set_attn_implementation(attention.NAME)
    return [
        each[:-1].log_softmax(-1).gather(-1, sample[1:, None])[:, 0]
        for each, sample in zip(logits, samples, strict=True)
    ]


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the root mean square of the differences; NaN where a value is NaN."""
    return float((torch.cat(list(found)) - torch.cat(list(expected))).square().mean().sqrt())
