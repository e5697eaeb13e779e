"""Filters for rollouts that should not be trained on: gibberish, repetition, zero advantage.

Each monitors (counts) or enforces (removes), as configured in `counterpoint/run/config.py`. All are vectorised: no Python runs
per token. `finalize.py` applies them to one group, in a worker thread, after the advantages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from counterpoint.orchestrator.rollouts.trajectories import join_floats
from counterpoint.run.config import FilterConfig, GibberishFilter, RepetitionFilter, ZeroAdvantageFilter
from counterpoint.transport.records import Float32Array, Int32Array, Int64Array, Rollout, Turn

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: odd and without a pattern."""

IMPROBABLE = 0.75
"""A token is improbable below this share of a uniform guess's log-probability."""

UNTRAINED = "untrained"
"""The name in `filtered_by` and the counts for a rollout without a token to train."""

FilterCounts = Counter[tuple[str, str]]
"""Number of rollouts that each filter caught, by `(filter kind, environment)`."""

_Values = TypeVar("_Values", Int32Array, Float32Array)

_Owned = tuple[int, Int32Array]
"""The position of a rollout in its group, and one of its completions, without untrained tokens."""

_TOKENS_AT_ONCE = 2**17
"""Tokens compared in one go, in a dozen arrays of 1 MB each. Each step of the comparison releases the GIL, which takes a switch
interval to get back beside a busy loop. So a group is compared in one go, and not each rollout."""

ZERO = 1e-9
"""An advantage this close to zero counts as zero: the rounding of a custom function is not a signal."""


def apply_filters(filters: Sequence[FilterConfig], rollouts: Sequence[Rollout]) -> FilterCounts:
    """Sets `filtered_by` of each rollout to the first enforcing filter that catches it, else None, and returns the counts.

    Every filter checks every rollout, so its count does not depend on the order or the modes of the filters. `UNTRAINED`
    filters a rollout that its environment left untrained as a whole, whatever is configured: no sample comes of it.
    """
    counts: FilterCounts = Counter()
    for rollout in rollouts:
        rollout.filtered_by = None
        if not any(turn.trained_tokens for turn in rollout.turns):
            rollout.filtered_by = UNTRAINED
            counts[UNTRAINED, rollout.environment] += 1
    for config in filters:
        for rollout, caught in zip(rollouts, _caught(config, rollouts), strict=True):
            if caught:
                counts[config.kind, rollout.environment] += 1
                if config.mode == "enforce" and rollout.filtered_by is None:
                    rollout.filtered_by = config.kind
    return counts


def _caught(config: FilterConfig, rollouts: Sequence[Rollout]) -> list[bool]:
    match config:
        case GibberishFilter():
            return are_gibberish(config, rollouts)
        case RepetitionFilter():
            return are_repetitive(config, rollouts)
        case ZeroAdvantageFilter():
            return [has_zero_advantage(rollout) for rollout in rollouts]


def with_vocabulary(filters: Sequence[FilterConfig], vocabulary: int) -> list[FilterConfig]:
    """Returns the filters with thresholds for a vocabulary of that size, in tokens. Thresholds that are set stay.

    A uniform guess gives every token the log-probability -ln(vocabulary). The threshold is `IMPROBABLE` of that, so that nearly
    random text is caught with any vocabulary: for 32,000 tokens it is -7.8.
    """
    threshold = -IMPROBABLE * math.log(max(2, vocabulary))
    return [
        config.model_copy(update={"log_probability_below": threshold})
        if isinstance(config, GibberishFilter) and config.log_probability_below is None
        else config
        for config in filters
    ]


def are_gibberish(config: GibberishFilter, rollouts: Sequence[Rollout]) -> list[bool]:
    """Returns for each rollout whether more than `share_above` of its trained tokens were improbable when sampled.

    The threshold must be set (`with_vocabulary`).
    """
    assert config.log_probability_below is not None
    parts = [[_trained(turn, turn.log_probabilities) for turn in rollout.turns] for rollout in rollouts]
    stops = np.cumsum([0] + [sum(map(len, of_rollout)) for of_rollout in parts])
    log_probabilities_T = join_floats(part for of_rollout in parts for part in of_rollout)
    improbable = np.flatnonzero(log_probabilities_T < config.log_probability_below)
    counts = np.diff(np.searchsorted(improbable, stops))
    caught: list[bool] = (counts > config.share_above * np.diff(stops)).tolist()
    return caught


def _trained(turn: Turn, values: _Values) -> _Values:
    """Returns the values of trained tokens, from one value for each completion token."""
    return values[np.frombuffer(turn.untrained, np.uint8) == 0] if turn.untrained else values


def are_repetitive(config: RepetitionFilter, rollouts: Sequence[Rollout]) -> list[bool]:
    """Returns for each rollout whether in a window of a turn too many n-grams repeat one from the half window before them.

    Too many are more than `share_above`. The window is `config.window` n-grams, and in a short turn two thirds of the turn, so
    that one repetition is not a loop. Only near repetitions count: an answer may repeat an earlier draft word for word.
    """
    shortest = max(1, config.minimum) + config.ngram - 1
    caught = [False] * len(rollouts)
    every = [
        (index, _trained(turn, turn.completion_ids))
        for index, rollout in enumerate(rollouts)
        for turn in rollout.turns
        if turn.trained_tokens >= shortest
    ]
    for some in _in_portions(every):
        for index in _repetitive_owners(config, some):
            caught[index] = True
    return caught


def _in_portions(completions: Sequence[_Owned]) -> Iterator[list[_Owned]]:
    """Yields the completions in lists of at most `_TOKENS_AT_ONCE`, longer ones alone."""
    portion: list[_Owned] = []
    tokens = 0
    for owned in completions:
        if portion and tokens + len(owned[1]) > _TOKENS_AT_ONCE:
            yield portion
            portion, tokens = [], 0
        portion.append(owned)
        tokens += len(owned[1])
    if portion:
        yield portion


def _repetitive_owners(config: RepetitionFilter, owned: Sequence[_Owned]) -> set[int]:
    """Returns the owners of repetitive completions."""
    completions = [completion for _, completion in owned]
    totals = np.array([len(completion) - config.ngram + 1 for completion in completions])
    windows = np.clip(totals * 2 // 3, 1, config.window)
    repeated = repeated_ngrams(completions, config.ngram, np.maximum(1, windows // 2))
    stops = np.cumsum(totals)
    # Only completions that have enough repetitions in all can have them in one window: in most texts none has.
    in_all = np.add.reduceat(repeated, stops - totals, dtype=np.int64)
    suspects = np.flatnonzero(in_all > config.share_above * windows)
    if not len(suspects):
        return set()
    repeated = np.concatenate([repeated[stops[index] - totals[index] : stops[index]] for index in suspects])
    totals, windows = totals[suspects], windows[suspects]
    so_far = np.concatenate([[0], np.cumsum(repeated)])
    # The repetitions in the window that ends at each position; no window begins before its turn.
    ends = np.arange(1, len(so_far))
    begins = ends - np.repeat(windows, totals)
    whole = begins >= np.repeat(np.cumsum(totals) - totals, totals)
    counts = so_far[ends[whole]] - so_far[begins[whole]]
    turn = np.repeat(np.arange(len(totals)), totals)[whole]
    caught = np.unique(turn[counts > config.share_above * windows[turn]])
    return {owned[index][0] for index in suspects[caught].tolist()}


def repeated_ngrams(completions: Sequence[Int32Array], ngram: int, reach: Int64Array) -> npt.NDArray[np.bool_]:
    """Returns for every n-gram whether the same one begins in the `reach` positions before it in its completion.

    The result is `[n-grams]`, one completion after the other, and `reach` is `[completions]`. Every completion has at least one
    n-gram. Sorts digests of completion and n-gram, 64 bits with the position in the last ones, and compares neighbours. Two
    that differ have the same digest with a probability of 2**-64. They hide a repetition if their first bits agree, 2**-40 or
    less. Handles all completions at once, since a dozen numpy calls per turn cost more than their work.
    """
    lengths = [len(completion) for completion in completions]
    owner = np.repeat(np.arange(len(completions), dtype=np.uint64), lengths)
    # Joined as bytes, since numpy would release the GIL for each completion.
    joined = b"".join(np.ascontiguousarray(completion, np.int32).data for completion in completions)
    token_ids_T = np.frombuffer(joined, np.int32).astype(np.uint64)
    token_ids_T |= owner << np.uint64(32)  # so no n-gram has the tokens of one in another completion
    digests = np.zeros(len(token_ids_T) - ngram + 1, dtype=np.uint64)
    for offset in range(ngram):
        digests += token_ids_T[offset : offset + len(digests)]
        digests *= _MULTIPLIER  # the last time, too: a difference in the last bits must reach the first
    positions = np.uint64(2 ** len(digests).bit_length() - 1)
    ordered = digests & ~positions
    ordered |= np.arange(len(digests), dtype=np.uint64)
    ordered.sort()  # equal n-grams are neighbours, in the order of the text
    alike = np.flatnonzero(ordered[1:] ^ ordered[:-1] <= positions)
    later, sooner = ((ordered[index] & positions).astype(np.int64) for index in (alike + 1, alike))
    near = (digests[later] == digests[sooner]) & (later - sooner <= reach[owner[later].astype(np.int64)])
    everywhere = np.zeros(len(token_ids_T), dtype=np.bool_)
    everywhere[later[near]] = True
    starts = np.cumsum(lengths) - lengths
    within = [
        everywhere[start : start + length - ngram + 1].data for start, length in zip(starts, lengths, strict=True)
    ]
    return np.frombuffer(b"".join(within), np.bool_)


def has_zero_advantage(rollout: Rollout) -> bool:
    """Whether the rollout's advantage is zero, up to rounding, or those of all turns of which a token is trained."""
    if rollout.turn_advantages is None:
        return abs(rollout.advantage) <= ZERO
    advantages = zip(rollout.turns, rollout.turn_advantages.tolist(), strict=True)
    return not any(abs(advantage) > ZERO and turn.trained_tokens for turn, advantage in advantages)
