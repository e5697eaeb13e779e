"""Filters catch rollouts that would train little or nothing good: gibberish, repetition, zero advantage.

Each only monitors (counts) or enforces (removes), as configured in `config.py`. All are vectorised: no Python runs per token.
`finalize.py` applies them to one group, in a worker thread, after the advantages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from run.config import FilterConfig, GibberishFilter, RepetitionFilter, ZeroAdvantageFilter
from transport.records import Int32Array, Int64Array, Rollout

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd and without a pattern: 2**64 over the golden ratio."""

IMPROBABLE = 0.75
"""A token is improbable at this share of a uniform guess's log-probability."""

FilterCounts = Counter[tuple[str, str]]
"""How many rollouts each filter caught: `(filter kind, environment)` to count."""

ZERO = 1e-9
"""An advantage this close to zero trains nothing: a custom function's rounding is not a signal."""


def apply_filters(filters: Sequence[FilterConfig], rollouts: Sequence[Rollout]) -> FilterCounts:
    """Sets `filtered_by` of each rollout to the first enforcing filter that catches it, else None; answers what was caught.

    Every filter sees every rollout, so that its count, in either mode, does not depend on the order of the filters.
    """
    counts: FilterCounts = Counter()
    for rollout in rollouts:
        rollout.filtered_by = None
    for config in filters:
        catches = _predicate(config)
        for rollout in rollouts:
            if catches(rollout):
                counts[config.kind, rollout.environment] += 1
                if config.mode == "enforce" and rollout.filtered_by is None:
                    rollout.filtered_by = config.kind
    return counts


def _predicate(config: FilterConfig) -> Callable[[Rollout], bool]:
    match config:
        case GibberishFilter():
            return partial(is_gibberish, config)
        case RepetitionFilter():
            return partial(is_repetitive, config)
        case ZeroAdvantageFilter():
            return has_zero_advantage


def with_vocabulary(filters: Sequence[FilterConfig], vocabulary: int) -> list[FilterConfig]:
    """The filters, with the thresholds that depend on the number of tokens a model chooses from.

    A model that guesses uniformly gives every token -ln(vocabulary). The threshold is `IMPROBABLE` of that, so that such text is
    caught whatever the vocabulary, and so is text that is nearly as random. Thresholds that are set stay.
    """
    threshold = -IMPROBABLE * math.log(max(2, vocabulary))
    return [
        config.model_copy(update={"log_probability_below": threshold})
        if isinstance(config, GibberishFilter) and config.log_probability_below is None
        else config
        for config in filters
    ]


def is_gibberish(config: GibberishFilter, rollout: Rollout) -> bool:
    """Whether more than `share_above` of all the rollout's completion tokens are improbable to the model that wrote them. The
    threshold must be set (`with_vocabulary`)."""
    assert config.log_probability_below is not None
    if not rollout.turns:
        return False
    log_probabilities_T = np.concatenate([turn.log_probabilities for turn in rollout.turns])
    improbable = np.count_nonzero(log_probabilities_T < config.log_probability_below)
    return bool(improbable > config.share_above * len(log_probabilities_T))


def is_repetitive(config: RepetitionFilter, rollout: Rollout) -> bool:
    """Whether in some window of a turn more than `share_above` of the completion's n-grams have occurred within the half window
    before. The window is `config.window` n-grams, in a short turn two thirds of the turn, so that what is said twice is no loop.

    An n-gram counts as repeated only where it is near: an answer may repeat a draft from far above, word for word.
    """
    shortest = max(1, config.minimum) + config.ngram - 1
    completions = [turn.completion_ids for turn in rollout.turns if len(turn.completion_ids) >= shortest]
    if not completions:
        return False
    totals = np.array([len(completion) - config.ngram + 1 for completion in completions])
    windows = np.clip(totals * 2 // 3, 1, config.window)
    repeated = repeated_ngrams(completions, config.ngram, np.maximum(1, windows // 2))
    so_far = np.concatenate([[0], np.cumsum(repeated)])
    # Of each position, what its turn's window that ends there holds; no window begins before its turn does.
    ends = np.arange(1, len(so_far))
    begins = ends - np.repeat(windows, totals)
    whole = begins >= np.repeat(np.cumsum(totals) - totals, totals)
    counts = so_far[ends[whole]] - so_far[begins[whole]]
    return bool((counts > config.share_above * np.repeat(windows, totals)[whole]).any())


def repeated_ngrams(completions: Sequence[Int32Array], ngram: int, reach: Int64Array) -> npt.NDArray[np.bool_]:
    """Of every n-gram of every completion, one completion after the other: whether the same one begins in the `reach` (of that
    completion) positions before it. Every completion is at least one n-gram long.

    Sorts 64-bit digests of completion and n-gram, and looks at neighbours that are equal. Two that differ agree in their digest
    with a probability of 2**-64. All completions at once, since a dozen numpy calls a turn cost more than what they compute.
    """
    token_ids_T = np.concatenate(completions).astype(np.uint64)
    starts = np.array([len(completion) - ngram + 1 for completion in completions])
    owner = np.repeat(np.arange(len(completions)), starts)
    position = np.arange(len(owner)) + owner * (ngram - 1)
    digests = owner.astype(np.uint64)
    for offset in range(ngram):
        digests = digests * _MULTIPLIER + token_ids_T[position + offset]
    order = np.argsort(digests, kind="stable")  # stable, so that neighbours are in the order of the text
    later, sooner = order[1:], order[:-1]
    repeated = np.zeros(len(order), dtype=bool)
    repeated[later] = (digests[later] == digests[sooner]) & (later - sooner <= reach[owner[later]])
    return repeated


def has_zero_advantage(rollout: Rollout) -> bool:
    """Whether the rollout's advantage is zero, up to rounding."""
    return abs(rollout.advantage) <= ZERO
