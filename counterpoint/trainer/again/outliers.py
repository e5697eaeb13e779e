"""Finds tokens of a step that stand out from the others: those of a server, a load of weights, a position. Pure.

Healthy kernels disturb each logit by about as much, wherever the token is. The log-probability of a token of probability p,
sampled at temperature T, then moves by that noise times (1 - p) / T, or up to 1.42 times as much: one that is nearly certain
hardly moves. So tokens are compared by their part of the mismatch KL over ((1 - p) / T) squared, half the square of the noise.
Groups are compared by the median of their tokens: a few with large differences, as where another expert was chosen, do not move
it. Where such tokens are about half of all, it is in the one half or the other by chance, so pairs of tokens are compared, too.
A token that a load of weights has answered several times in the same context counts once, since its noise is the same.

A rollout keeps to one server, and a group begins at one, so a server may have other noise by what it wrote alone. It is
accused only beyond what content does, or if it differs within content that others wrote, too.
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
"""The same where what was written may be the reason: the noise of bfloat16 grows with the logits. Up to 14 times was
seen among environments and 8 among positions of the demo, in bfloat16 and healthy."""

BEYOND_CHANCE = 4.0
"""Standard deviations of a sum of ranks. Where noise goes with content alone, and servers are dealt by chance, a given
server is beyond it in less than one of 20,000 steps. Twelve rollouts reach it if each has more noise than any of
twelve others."""

MOST_NAMED = 4
"""Rollouts that are named at most, of those that a group cannot be told from."""

LEAST_TOKENS = 48
"""Tokens of a group at least. Of two groups of the same noise, be it normal or with the tails of Student's t with two degrees of
freedom, one then exceeds `FACTOR` times the other in less than one of 20,000 steps (`tests/trainer/again/test_outliers.py`)."""

PAIRS = 0.8
"""The least share of pairs of a token of the group and another one in which the former has more noise. It is 0.8 for normal noise
whose square is `FACTOR` times as large."""

SHARE = 0.25
"""A group that stands out has at least this part of all that neither staleness nor precision explains."""

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

    def examples(self) -> Codes:
        """Returns the number of each token's example, `[P]`: that of its rollout `GROUP-INDEX` without the index."""
        of_rollouts = [name.rpartition("-")[0] or name for name in self.names["rollout"]]
        return np.unique(of_rollouts, return_inverse=True)[1][self.codes["rollout"]]


@dataclass(frozen=True, slots=True)
class Outlier:
    """A group of tokens, or up to half of the groups, with more noise than all others."""

    key: str
    group: str
    tokens_P: npt.NDArray[np.bool_]
    content: str = ""
    """The environments or rollouts that may be the reason as well, in words; empty if the group is accused."""


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


def _keys(truncated: bool | None) -> Sequence[str]:
    """Returns by what tokens are compared: what sampling truncates differs by environment and temperature."""
    return KEYS if truncated is False else SERVERS


def stands_out(rest_P: Values, noise_P: Values, groups: TokenGroups, truncated: bool | None = False) -> Outlier | None:
    """Returns what stands out, if anything does: first what is accused, then what cannot be told from its content.

    With truncated sampling, or where it may be, content alone can make any difference.
    """
    known_P, whole, keys = np.isfinite(rest_P), float(np.nansum(rest_P)), _keys(truncated)
    untold = None
    for key in sorted(keys, key=lambda key: key != "load"):  # a server's median would hide one of its loads
        code_P = groups.codes[key]
        known_noise_P = np.where(code_P < 0, np.nan, noise_P)
        factor = FACTOR if key in (*SERVERS, "version") else OF_CONTENT
        for later, times, group_P in _candidates(known_noise_P, code_P, factor, key == "position"):
            own, tokens = float(np.nansum(rest_P[group_P])), int(np.count_nonzero(known_P & group_P))
            if own >= SHARE * whole and own > FAINT * tokens and _higher(noise_P, group_P) >= PAIRS:
                name = (key, f"{later} and later") if later else _named(group_P, groups, keys)
                is_beyond_content = truncated is False and times >= OF_CONTENT
                if is_beyond_content or differs_within_content(known_noise_P, group_P, groups):
                    return Outlier(*name, group_P)
                untold = untold or Outlier(*name, group_P, _content(group_P, groups))
    return untold


def differs_within_content(noise_P: Values, group_P: npt.NDArray[np.bool_], groups: TokenGroups) -> bool:
    """Returns whether a group has `FACTOR` times the noise of others within content that both wrote, and not by chance.

    Rollouts are compared with those of the same example, and examples with those of the same environment. They are
    ranked, and not their tokens, since those of one rollout are alike.
    """
    environment_P, example_P = groups.codes["environment"], groups.examples()
    within_P = example_P * (int(environment_P.max(initial=0)) + 2) + environment_P
    for content_P, unit_P in ((within_P, groups.codes["rollout"]), (environment_P, example_P)):
        excess, variance, times = 0.0, 0.0, []
        for content in np.unique(content_P[group_P]):
            here_P = np.isfinite(noise_P) & (content_P == content)
            own, others = (_of_units(noise_P[each], unit_P[each]) for each in (here_P & group_P, here_P & ~group_P))
            if pairs := len(own) * len(others):
                excess += _wins(own, others) - pairs / 2
                variance += pairs * (len(own) + len(others) + 1) / 12
                times.append(noise_P[here_P & group_P] / max(float(np.median(noise_P[here_P & ~group_P])), 1e-300))
        if times and np.median(np.concatenate(times)) >= FACTOR and excess >= BEYOND_CHANCE * variance**0.5:
            return True
    return False


def comparable(noise_P: Values, groups: TokenGroups, truncated: bool | None) -> list[str]:
    """Returns the keys by which at least two groups have enough tokens to be compared."""
    found = []
    for key in _keys(truncated):
        numbers, index_P = np.unique(groups.codes[key], return_inverse=True)
        medians_G = _medians(noise_P, index_P, len(numbers))
        if np.count_nonzero(np.isfinite(medians_G[numbers >= 0])) > 1:
            found.append(key)
    return found


def _candidates(
    noise_P: Values, code_P: Codes, factor: float, is_ordered: bool
) -> Iterator[tuple[int, float, npt.NDArray[np.bool_]]]:
    """Yields 0, the widest gap, and the tokens of the groups above it.

    Of an ordered key it first yields a power of two, its gap, and the tokens from it on.
    """
    if is_ordered:
        cuts = 2 ** np.arange(int(code_P.max(initial=0)).bit_length())
        times = [(_times(*_medians(noise_P, (code_P < cut).astype(np.int64), 2)), int(cut)) for cut in cuts]
        if times and max(times)[0] >= factor:
            yield max(times)[1], max(times)[0], code_P >= max(times)[1]
    groups, index_P = np.unique(code_P, return_inverse=True)
    medians_G = _medians(noise_P, index_P, len(groups))
    ranked = [int(group) for group in np.argsort(-medians_G) if np.isfinite(medians_G[group])]
    highest = range(1, len(ranked) // 2 + 1)
    gaps = [(_times(medians_G[ranked[count - 1]], medians_G[ranked[count]]), count) for count in highest]
    if gaps and max(gaps)[0] >= factor:
        yield 0, max(gaps)[0], np.isin(index_P, ranked[: max(gaps)[1]])


def _named(group_P: npt.NDArray[np.bool_], groups: TokenGroups, keys: Sequence[str]) -> tuple[str, str]:
    """Returns the key that has these tokens in the fewest groups, which have no others, and the groups."""
    inside = {key: np.unique(groups.codes[key][group_P]) for key in keys}
    whole = [key for key in keys if inside[key][0] >= 0 and not np.isin(groups.codes[key][~group_P], inside[key]).any()]
    key = min(whole, key=lambda each: len(inside[each]))
    return key, groups.named(key, inside[key])


def _content(group_P: npt.NDArray[np.bool_], groups: TokenGroups) -> str:
    """Returns the environments of these tokens, if no others are of them, or else their rollouts, in words."""
    environment_P, rollouts = groups.codes["environment"], np.unique(groups.codes["rollout"][group_P])
    own = np.unique(environment_P[group_P])
    if own[0] >= 0 and not np.isin(environment_P[~group_P], own).any():
        return f"environment {groups.named('environment', own)}"
    if len(rollouts) > MOST_NAMED:
        return f"its {len(rollouts)} rollouts"
    return f"rollout{'s' if len(rollouts) > 1 else ''} {groups.named('rollout', rollouts)}"


def _of_units(noise: Values, unit: Codes) -> Values:
    """Returns the median of each unit's tokens."""
    return np.array([np.median(noise[unit == each]) for each in np.unique(unit)])


def _medians(noise_P: Values, index_P: npt.NDArray[np.int64], groups: int) -> Values:
    """Returns the median of each group, `[G]`; not a number of one with fewer than `LEAST_TOKENS`."""
    usable = np.flatnonzero(np.isfinite(noise_P))
    ordered = usable[np.lexsort((noise_P[usable], index_P[usable]))]
    of_groups = np.split(noise_P[ordered], np.cumsum(np.bincount(index_P[usable], minlength=groups))[:-1])
    return np.array([own[len(own) // 2] if len(own) >= LEAST_TOKENS else np.nan for own in of_groups])


def _higher(noise_P: Values, group_P: npt.NDArray[np.bool_]) -> float:
    """Returns the share of pairs of a token of the group and another one in which the former has more noise."""
    usable_P = np.isfinite(noise_P)
    own, others = noise_P[usable_P & group_P], noise_P[usable_P & ~group_P]
    return _wins(own, others) / max(1, len(own) * len(others))


def _wins(own: Values, others: Values) -> float:
    """Returns the pairs of one of `own` and one of `others` in which the former is higher; a tie counts half."""
    ordered = np.sort(others)
    return float(sum(np.searchsorted(ordered, own, side).sum() for side in ("left", "right"))) / 2


def _times(high: float, low: float) -> float:
    """Returns how many times the lower of two medians the higher one is; 0 where one is not known."""
    if not np.isfinite(high) or not np.isfinite(low) or high <= 0:
        return 0.0
    return high / low if low > 0 else np.inf
