"""Filters catch rollouts that would train little or nothing good: gibberish, repetition, zero advantage.

Each only monitors (counts) or enforces (removes), as configured in `config.py`. All are vectorised: no Python runs per token.
`judge.py` applies them to one group, in a worker thread, after the advantages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from orchestrator.config import FilterConfig, GibberishFilter, RepetitionFilter, ZeroAdvantageFilter
from transport.records import Int32Array, Int64Array, Rollout

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd and without a pattern: 2**64 over the golden ratio."""

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


def is_gibberish(config: GibberishFilter, rollout: Rollout) -> bool:
    """Whether more than `share_above` of all the rollout's completion tokens are improbable to the model that wrote them."""
    if not rollout.turns:
        return False
    log_probabilities_T = np.concatenate([turn.log_probabilities for turn in rollout.turns])
    improbable = np.count_nonzero(log_probabilities_T < config.log_probability_below)
    return bool(improbable > config.share_above * len(log_probabilities_T))


def is_repetitive(config: RepetitionFilter, rollout: Rollout) -> bool:
    """Whether in any one turn more than `share_above` of the completion's n-grams have occurred before in it."""
    shortest = max(1, config.minimum) + config.ngram - 1
    completions = [turn.completion_ids for turn in rollout.turns if len(turn.completion_ids) >= shortest]
    if not completions:
        return False
    totals = np.array([len(completion) - config.ngram + 1 for completion in completions])
    repeated = totals - count_distinct_ngrams(completions, config.ngram)
    return bool((repeated > config.share_above * totals).any())


def count_distinct_ngrams(completions: Sequence[Int32Array], ngram: int) -> Int64Array:
    """`[completions]`: how many different n-grams occur in each; every one is at least one n-gram long.

    Sorts 64-bit digests of completion and n-gram and counts where neighbours differ. Two that differ agree in their digest
    with a probability of 2**-64. All completions at once, since a dozen numpy calls a turn cost more than what they compute.
    """
    token_ids_T = np.concatenate(completions).astype(np.uint64)
    starts = np.array([len(completion) - ngram + 1 for completion in completions])
    owner = np.repeat(np.arange(len(completions)), starts)
    position = np.arange(len(owner)) + owner * (ngram - 1)
    digests = owner.astype(np.uint64)
    for offset in range(ngram):
        digests = digests * _MULTIPLIER + token_ids_T[position + offset]
    order = np.argsort(digests)
    ordered = digests[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return np.bincount(owner[order], weights=first, minlength=len(completions)).astype(np.int64)


def has_zero_advantage(rollout: Rollout) -> bool:
    """Whether the rollout's advantage is zero, up to rounding."""
    return abs(rollout.advantage) <= ZERO
