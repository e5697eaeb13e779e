"""Tests by computation, when a model is loaded, whether the samples of a packed row influence each other.

Our attention (`counterpoint/trainer/model/attention.py`) stays within each sample, but a model may have other layers that look
back: convolutions, state spaces, linear attention. How far the values of packed samples are from those alone depends on the
weights, which training changes. So it is tested whether there is any influence at all (`_influence`): one sample of a row gets
other token ids, and its embeddings become NaN, which no arithmetic hides, not even a factor of zero. Then no bit of what the
model says of the other samples may change.

What does not depend on another sample's content may still depend on the place in the row, such as positions that the model counts
by itself. Such a sample differs from the same one alone by much more than rounding, as the first sample of a row shows it.
Where one of the tests fails, the model is trained with one sample a row.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.model import attention
from counterpoint.trainer.model.attention_proof import made_up_samples, prove_attention, row
from counterpoint.trainer.model.context import ContextGroup, shared_rows
from counterpoint.trainer.model.deterministic import advice_on
from counterpoint.trainer.model.head import prove_head
from counterpoint.trainer.model.load import log_probabilities
from counterpoint.trainer.model.shared_prompts import Family
from counterpoint.trainer.model.text_part import text_config

logger = logging.getLogger(__name__)

LEAST_BOUND = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Nats, root mean square: allowed difference by the place in the row, even if rounding is smaller."""

ROUNDING_FACTOR = 3.0
"""How many times more than the first sample of a row the others may differ."""


def prove_packing(model: nn.Module) -> None:
    """Tests a model from `load_model`, its output layer and attention first, and stores the result on it for `can_pack`.

    Raises:
        ValueError: the model computes another function here than in transformers, and must not be trained.
    """
    prove_head(model)
    try:
        with torch.no_grad(), _same_bits():
            samples = made_up_samples(model)
            alone = [row(model, [sample])[0] for sample in samples]
            if not bool(torch.cat(alone).isfinite().all()):
                raise ValueError("log-probabilities of made-up tokens are not finite")
            prove_attention(model, samples, alone)
    except Exception as error:
        if is_fatal(error):
            raise
        said = _said(error)
        if (
            not isinstance(error, ValueError)
            and not advice_on(error)
            and model.config._attn_implementation == attention.NAME
        ):
            said = f"its code fails under the trainer's attention, which has no mask: {said}"
        raise ValueError(f"{type(model).__name__} cannot be trained: {said}") from error
    model.shares_prompts = False
    reason = _explained(lambda: _apart(model, samples, alone))
    model.one_sample_a_row = bool(reason)
    if reason:
        logger.warning(
            "%s does not keep the samples of a row apart: %s. It is trained with one sample a row, which is correct but slower",
            type(model).__name__, reason,
        )  # fmt: skip
        return
    logger.info("packing proven: no sample of a row influences another one")
    if samples[0].device.type == "cpu":  # a GPU has a kernel for rows of whole samples
        reason = _explained(lambda: _shared_apart(model, samples))
        model.shares_prompts = not reason
        if reason:
            logger.info("%s does not share prompts: %s", type(model).__name__, reason)


def _explained(test: Callable[[], str]) -> str:
    """Returns the outcome of a test, or the error that it raised."""
    try:
        with torch.no_grad(), _same_bits():
            return test()
    except Exception as error:
        if is_fatal(error):
            raise
        return _said(error)


def _apart(model: nn.Module, samples: Sequence[Tensor], alone: Sequence[Tensor]) -> str:
    """Returns why samples cannot share a row; nothing if they can."""
    influence = _influence(model, samples)
    if influence:
        return influence
    rows = [row(model, [*samples[first:], *samples[:first]]) for first in range(len(samples))]
    rounding = _distance([each[0] for each in rows], alone)
    found = _distance(
        [values for each in rows for values in each[1:]],
        [values for first in range(len(samples)) for values in [*alone[first + 1 :], *alone[:first]]],
    )
    bound = max(LEAST_BOUND[next(model.parameters()).dtype], ROUNDING_FACTOR * rounding)
    if found <= bound:
        return ""
    return (
        f"its values depend on where in the row a sample is: they differ by {found:.2g} nats from those of the sample alone "
        f"(root mean square; at most {bound:.2g})"
    )


def _influence(model: nn.Module, samples: Sequence[Tensor], begins: Sequence[int] | None = None) -> str:
    """Returns how a sample of a row influences another one; nothing if none does. `begins`: first position of each, 0 if None."""
    given: list[Tensor] = []

    def kept(embeddings_1TH: Tensor) -> Tensor:
        given.append(embeddings_1TH)
        return embeddings_1TH

    with _embedded(model, sum(map(len, samples)), kept):
        expected = row(model, samples, begins)
    if not given:
        return "its embeddings are not those of a row's tokens, so what a sample influences cannot be tested"
    start = 0
    for index, sample in enumerate(samples):
        exchanged = [*samples[:index], _other_ids(model, sample), *samples[index + 1 :]]
        own = slice(start, start := start + len(sample))

        def poisoned(embeddings_1TH: Tensor, own: slice = own) -> Tensor:
            poisoned_1TH = embeddings_1TH.clone()
            poisoned_1TH[:, own] = torch.nan
            return poisoned_1TH

        others = torch.cat([*expected[:index], *expected[index + 1 :]])
        found = _values_without(model, exchanged, begins, index, poisoned)
        if torch.equal(found, others):
            continue
        if not bool(found.isfinite().all()):
            return f"what the model says of a sample depends on another one in its row, of {len(sample)} tokens"
        # A mixture's products take the tokens of an expert together, and are rounded by how many there are. With the same
        # numbers and other ids there are as many as before.
        if not torch.equal(_values_without(model, exchanged, begins, index, lambda _: given[0]), others):
            return f"what the model says of a sample depends on the token ids of another one in its row, of {len(sample)} tokens"
    return ""


def _values_without(
    model: nn.Module,
    samples: Sequence[Tensor],
    begins: Sequence[int] | None,
    index: int,
    change: Callable[[Tensor], Tensor],
) -> Tensor:
    """Returns the values of the samples of a row, without those of one, where `change` is made to the embeddings."""
    with _embedded(model, sum(map(len, samples)), change):
        values = row(model, samples, begins)
    return torch.cat([*values[:index], *values[index + 1 :]])


def _other_ids(model: nn.Module, sample: Tensor) -> Tensor:
    """Returns other token ids, as many."""
    return (sample + 1) % text_config(model).vocab_size


@contextmanager
def _embedded(model: nn.Module, tokens: int, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Changes the embeddings `[1, T, hidden]` of a row of `tokens`, in forward passes inside."""

    def changed(_module: nn.Module, _inputs: Any, embeddings: Any) -> Any:
        if isinstance(embeddings, Tensor) and embeddings.shape[:2] == (1, tokens):
            return change(embeddings)
        return embeddings

    handle = model.get_input_embeddings().register_forward_hook(changed)
    try:
        yield
    finally:
        handle.remove()


def _shared_apart(model: nn.Module, samples: Sequence[Tensor]) -> str:
    """Returns why samples, which may share a row, cannot share the tokens of their prompt; nothing if they can."""
    prompt, *rests = samples
    # A layer that keeps samples apart by where positions begin would not do so where the rest of a sample goes on.
    influence = _influence(model, samples, [0, *(len(prompt) for _ in rests)])
    if influence:
        return influence
    alone = [row(model, [torch.cat((prompt, rest))])[0][len(prompt) - 1 :] for rest in rests]
    ends = torch.tensor([len(rest) for rest in rests]).cumsum(0) + len(prompt)
    starts = [len(prompt), *ends.tolist()]
    positions = [torch.arange(len(prompt)), *(torch.arange(len(rest)) + len(prompt) for rest in rests)]
    predicting = [
        torch.tensor([len(prompt) - 1, *range(start, start + len(rest) - 1)])
        for start, rest in zip(starts, rests, strict=False)
    ]
    shared_P, _ = log_probabilities(
        model, torch.cat(list(samples)), torch.cat(positions), [len(prompt) + len(rest) for rest in rests],
        torch.cat(predicting), torch.cat(rests), 1.0, families=(Family(len(prompt), tuple(map(len, rests))),),
    )  # fmt: skip
    found, bound = _distance([shared_P], alone), LEAST_BOUND[next(model.parameters()).dtype]
    if found <= bound:
        return ""
    return f"log-probabilities then differ by {found:.2g} nats (root mean square; at most {bound:g})"


def prove_stretches(model: nn.Module, group: ContextGroup) -> None:
    """Tests a model after `prove_packing` whose rows the ranks of `group` share: on all of them, the same as on one.

    Raises:
        ValueError: a layer other than attention looks back over the tokens, and the stretches cannot be computed apart.
    """
    refused = f"{type(model).__name__} cannot be trained with context_parallel = {group.size}: "
    if not can_pack(model):
        raise ValueError(
            f"{refused}a layer other than attention looks back over the tokens, or counts them; use context_parallel = 1"
        )
    samples = made_up_samples(model)
    with torch.no_grad():
        whole = row(model, samples)
        with shared_rows(model, group):
            shared = row(model, samples)
    bound = LEAST_BOUND[next(model.parameters()).dtype]
    if not (found := _distance(shared, whole)) <= bound:
        raise ValueError(
            f"{refused}log-probabilities of a row that ranks share differ by {found:.2g} nats from those on one rank (root mean "
            f"square; at most {bound:g}); use context_parallel = 1"
        )


def can_pack(model: nn.Module) -> bool:
    """Returns whether several samples may share a row; otherwise each needs its own."""
    return not getattr(model, "one_sample_a_row", False)


def can_share_prompts(model: nn.Module) -> bool:
    """Returns whether samples in a row may share the tokens of their prompt."""
    return getattr(model, "shares_prompts", False)


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the root mean square of the differences; NaN where a value is NaN."""
    return float((torch.cat(list(found)) - torch.cat(list(expected))).square().mean().sqrt())


@contextmanager
def _same_bits() -> Iterator[None]:
    """Has a device compute the same bits each time, where it would add in any order."""
    if torch.are_deterministic_algorithms_enabled():  # as in training
        yield
        return
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def _said(error: Exception) -> str:
    """Returns what an error says, and where it was raised if it is not one of ours."""
    if isinstance(error, ValueError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}, in {place.name}"
    return f"{type(error).__name__}: {error} ({where}){advice_on(error)}"
