"""Finds tokens of a step that stand out from the others: those of a server, a load of weights, a position. Pure.

Healthy kernels disturb each logit by about as much, wherever the token is. The log-probability of a token of probability p,
sampled at temperature T, then moves by that noise times (1 - p) / T, or up to 1.42 times as much: one that is nearly certain
hardly moves. So tokens are compared by their part of the mismatch KL over ((1 - p) / T) squared, half the square of the noise.
Groups are compared by the median of their tokens: a few with large differences, as where another expert was chosen, do not move
it. Where such tokens are about half of all, it is in the one half or the other by chance, so pairs of tokens are compared, too.
A token that a load of weights has answered several times in the same context counts once, since its noise is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Codes = npt.NDArray[np.integer[Any]]

SERVERS = ("server", "load")
KEYS = (*SERVERS, "version", "position", "temperature", "environment", "rollout")
"""What tokens are grouped by, in the order in which they are named. A position is that in its turn's completion."""

FACTOR = 10.0
"""How many times the median of a group has to exceed those of the groups below it to stand out."""

OF_CONTENT = 100.0
"""The same by a key that goes with what was written: the noise of bfloat16 grows with the logits. Up to 14 times was seen among
environments and 8 among positions of the demo, in bfloat16 and healthy."""

LEAST_TOKENS = 48
"""Tokens of a group at least. Of two groups of the same noise, be it normal or with the tails of Student's t with two degrees of
freedom, one then exceeds `FACTOR` times the other in less than one of 20,000 steps (`tests/trainer/again/test_outliers.py`)."""

PAIRS = 0.8
"""The least share of pairs of a token of the group and another one in which the former has more noise. It is 0.8 for normal noise
whose square is `FACTOR` times as large."""

SHARE = 0.25
"""Of what neither staleness nor precision explains, the least part of a group that stands out."""

FAINT = 1e-7
"""Nats. Below this mean no group stands out: rounding in float32 may do it."""

UNCERTAIN = 0.01
"""Tokens say something if either side gives all others at least this probability together."""


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """The groups that each trained token of a step belongs to."""

    codes: Mapping[str, Codes]
    """The number of each token's group by each of `KEYS`, `[P]`, below 0 where the records do not say. Also its `lag`, and its
    `context`: a hash of the tokens of its sample up to itself."""
    names: Mapping[str, Sequence[str]]
    """The names of the groups by their numbers. Those of a key without are the numbers."""

    def named(self, key: str, codes: Codes) -> str:
        """Returns the names of groups, in words."""
        names = self.names.get(key)
        return ", ".join(sorted(str(code) if names is None else names[code] for code in codes.tolist()))


def noise(rest_P: Values, exact_P: Values, inference_P: Values, temperature_P: Values, groups: TokenGroups) -> Values:
    """Returns half the square of the noise of each token's logits.

    It is not a number where nothing is known, where a token is nearly certain, and where the same one counts already.

    Args:
        rest_P: each token's part of the mismatch KL that staleness and precision leave.
        exact_P: its log-probability by the trainer, with the weights that sampled, in float32.
        inference_P: that by the server.
        temperature_P: at which it was sampled.
        groups: of which load, version and context are read.
    """
    others_P = -np.expm1(np.minimum(exact_P, inference_P))
    same_P = np.zeros(len(rest_P), np.int64)
    for name in ("context", "load", "version"):
        found, index_P = np.unique(groups.codes[name], return_inverse=True)
        same_P = same_P * len(found) + index_P
    counts_P = np.zeros(len(rest_P), np.bool_)
    counts_P[np.unique(same_P, return_index=True)[1]] = True
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts_P & (others_P >= UNCERTAIN), rest_P * (temperature_P / others_P) ** 2, np.nan)


def stands_out(
    rest_P: Values, noise_P: Values, groups: TokenGroups, keys: Sequence[str]
) -> tuple[str, str, npt.NDArray[np.bool_]] | None:
    """Returns key, name and tokens of the group, or of up to half of the groups, that stand out; None if none does."""
    known_P, whole, rank_P = np.isfinite(rest_P), float(np.nansum(rest_P)), _ranks(noise_P)
    for key in sorted(keys, key=lambda key: key != "load"):  # a server's median would hide one of its loads
        code_P = groups.codes[key]
        known_noise_P = np.where(code_P < 0, np.nan, noise_P)
        factor = FACTOR if key in (*SERVERS, "version") else OF_CONTENT
        for later, group_P in _candidates(known_noise_P, code_P, factor, key == "position"):
            own, tokens = float(np.nansum(rest_P[group_P])), int(np.count_nonzero(known_P & group_P))
            if own >= SHARE * whole and own > FAINT * tokens and _higher(rank_P, group_P) >= PAIRS:
                return (key, f"{later} and later", group_P) if later else (*_named(group_P, groups, keys), group_P)
    return None


def comparable(noise_P: Values, groups: TokenGroups, keys: Sequence[str]) -> list[str]:
    """Returns the keys by which at least two groups have enough tokens to be compared."""
    found = []
    for key in keys:
        numbers, index_P = np.unique(groups.codes[key], return_inverse=True)
        medians_G = _medians(noise_P, index_P, len(numbers))
        if np.count_nonzero(np.isfinite(medians_G[numbers >= 0])) > 1:
            found.append(key)
    return found


def _candidates(
    noise_P: Values, code_P: Codes, factor: float, is_ordered: bool
) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Yields 0 and the tokens of the groups above the widest gap; of an ordered key first a power of two and those from it on."""
    if is_ordered:
        cuts = 2 ** np.arange(int(code_P.max(initial=0)).bit_length())
        times = [(_times(*_medians(noise_P, (code_P < cut).astype(np.int64), 2)), int(cut)) for cut in cuts]
        if times and max(times)[0] >= factor:
            yield max(times)[1], code_P >= max(times)[1]
    groups, index_P = np.unique(code_P, return_inverse=True)
    medians_G = _medians(noise_P, index_P, len(groups))
    ranked = [int(group) for group in np.argsort(-medians_G) if np.isfinite(medians_G[group])]
    highest = range(1, len(ranked) // 2 + 1)
    gaps = [(_times(medians_G[ranked[count - 1]], medians_G[ranked[count]]), count) for count in highest]
    if gaps and max(gaps)[0] >= factor:
        yield 0, np.isin(index_P, ranked[: max(gaps)[1]])


def _named(group_P: npt.NDArray[np.bool_], groups: TokenGroups, keys: Sequence[str]) -> tuple[str, str]:
    """Returns the key that has these tokens in the fewest groups, which have no others, and the groups."""
    inside = {key: np.unique(groups.codes[key][group_P]) for key in keys}
    whole = [key for key in keys if inside[key][0] >= 0 and not np.isin(groups.codes[key][~group_P], inside[key]).any()]
    key = min(whole, key=lambda each: len(inside[each]))
    return key, groups.named(key, inside[key])


def _medians(noise_P: Values, index_P: npt.NDArray[np.int64], groups: int) -> Values:
    """Returns the median of each group, `[G]`; not a number of one with fewer than `LEAST_TOKENS`."""
    usable_P = np.isfinite(noise_P)
    values, index = noise_P[usable_P], index_P[usable_P]
    counts_G = np.bincount(index, minlength=groups)
    ordered = values[np.lexsort((values, index))]
    middles_G = np.cumsum(counts_G) - counts_G + counts_G // 2
    large_G = counts_G >= LEAST_TOKENS
    return (
        np.where(large_G, ordered[np.where(large_G, middles_G, 0)], np.nan) if len(ordered) else np.full(groups, np.nan)
    )


def _ranks(noise_P: Values) -> Values:
    """Returns the place of each token by its noise, from 0; not a number of one without."""
    usable = np.flatnonzero(np.isfinite(noise_P))
    rank_P = np.full(len(noise_P), np.nan)
    rank_P[usable[np.argsort(noise_P[usable])]] = np.arange(len(usable))
    return rank_P


def _higher(rank_P: Values, group_P: npt.NDArray[np.bool_]) -> float:
    """Returns the share of pairs of a token of the group and another one in which the former has the higher rank."""
    own, others = rank_P[group_P & np.isfinite(rank_P)], rank_P[~group_P & np.isfinite(rank_P)]
    return (float(own.sum()) - len(own) * (len(own) - 1) / 2) / max(1, len(own) * len(others))


def _times(high: float, low: float) -> float:
    """Returns how many times the lower of two medians the higher one is; 0 where one is not known."""
    if not np.isfinite(high) or not np.isfinite(low) or high <= 0:
        return 0.0
    return high / low if low > 0 else np.inf
