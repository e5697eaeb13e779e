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
from transport.records import Int32Array, Rollout

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
    tokens = sum(len(turn.log_probabilities) for turn in rollout.turns)
    improbable = sum(
        int(np.count_nonzero(turn.log_probabilities < config.log_probability_below)) for turn in rollout.turns
    )
    return improbable > config.share_above * tokens


def is_repetitive(config: RepetitionFilter, rollout: Rollout) -> bool:
    """Whether in any one turn more than `share_above` of the completion's n-grams have occurred before in it."""
    for turn in rollout.turns:
        total = len(turn.completion_ids) - config.ngram + 1
        if total >= config.minimum:
            repeated = total - count_distinct_ngrams(turn.completion_ids, config.ngram)
            if repeated > config.share_above * total:
                return True
    return False


def count_distinct_ngrams(token_ids_T: Int32Array, ngram: int) -> int:
    """How many different n-grams occur in `token_ids_T`, exactly; 0 when it is shorter than one.

    Sorts the start positions by the n-gram found there (`lexsort`, one stable sort a column) and counts where neighbours differ:
    O(n T log T), without a hash that could collide.
    """
    total = len(token_ids_T) - ngram + 1
    if total < 1:
        return 0
    columns = np.lib.stride_tricks.sliding_window_view(token_ids_T, total)
    order = np.lexsort(columns)
    differs = np.zeros(total - 1, dtype=bool)
    for column in columns:
        ordered = column[order]
        differs |= ordered[1:] != ordered[:-1]
    return 1 + int(np.count_nonzero(differs))


def has_zero_advantage(rollout: Rollout) -> bool:
    """Whether the rollout's advantage is zero, up to rounding."""
    return abs(rollout.advantage) <= ZERO
