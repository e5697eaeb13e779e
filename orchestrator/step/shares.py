"""Counts trained and too old rollouts by environment and by length, and finds environments that are short of their share.

A rollout's length is its time from the start of its group to its end, or to the moment when it was dropped: nobody knows the
tokens of a model call in progress. The counts are metrics, `trained/<environment>/<length>` and `stale/<environment>/<length>`,
such as `stale/math/64-128s`. The log reports a shortfall once. The page reports those of the newest steps.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

logger = logging.getLogger(__name__)

Fate = Literal["trained", "stale"]

UNKNOWN = "unknown"
"""The length of a rollout that ended before a resume."""

LONGEST = 14
"""The last length is from 2 to the power of this one less, in seconds."""

LEAST_ROLLOUTS = 50
"""Fewer rollouts get no report."""

LEAST_STEPS = 20
"""The log reports nothing before so many steps: by then the run has made up for rollouts that were too old at first, if it
can."""

SHORT = 0.8
"""An environment is short of its share if its trained share is less than this part of it."""

NOTABLE_SHARE = 0.2
"""The least share of an environment's rollouts, or of its long ones, that is too old for a report."""

LENGTH_MATTERS = 0.25
"""Least difference between the shares that are too old, of long rollouts and of others, for a report."""

REMEDY = (
    "let them be older (raise schedule.max_off_policy_steps), wait for them, and longer (schedule.stragglers, "
    "schedule.straggler_patience_steps), let a step take longer (raise schedule.rollouts_per_step), or make them faster (fewer "
    "tokens, more servers)"
)


class ShortfallLog:
    """Logs each shortfall once, since the process began or the ratios changed. Not for several threads."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._shares: dict[str, float] = {}
        self._steps = 0
        self._said: set[str] = set()

    def take(self, line: Mapping[str, Any]) -> None:
        """Takes up a step's metrics line."""
        shares = {
            name: value for name, value in line.items() if name.startswith("examples/") and name.endswith("/share")
        }
        if shares != self._shares:
            self._totals, self._shares, self._steps = Counter(), shares, 0
        self._steps += 1
        self._totals.update({name: value for name, value in line.items() if name.startswith(("trained/", "stale/"))})
        if self._steps < LEAST_STEPS:
            return
        for what, words in shortfalls([self._totals, shares]).items():
            if what not in self._said:
                self._said.add(what)
                logger.warning("%s. What helps: %s", words, REMEDY)


def length_of(seconds: float | None) -> str:
    """Returns the length as in the metrics' names, such as `8-16s`: its bounds are powers of two."""
    if seconds is None:
        return UNKNOWN
    exponent = min(max(math.frexp(seconds)[1], 0), LONGEST)
    return f"{2 ** (exponent - 1) if exponent else 0}-{2**exponent}s"


def metric_of(fate: Fate, environment: str, seconds: float | None) -> str:
    """Returns the name of the metric that counts such a rollout."""
    return f"{fate}/{environment}/{length_of(seconds)}"


def shortfalls(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns sentences about environments and lengths that are short of their share because rollouts were too old.

    `lines` are metrics lines, with `examples/<environment>/share` in the last.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    shares: dict[str, float] = {}
    for line in lines:
        for name, value in line.items():
            first, _, rest = name.partition("/")
            environment, _, last = rest.rpartition("/")
            if first in ("trained", "stale"):
                counts[first, environment, last] += int(value)
            elif first == "examples" and last == "share":
                shares[environment] = float(value)
    return dict(_short_environments(counts, shares)) | dict(_short_lengths(counts))


def _short_environments(
    counts: Mapping[tuple[str, str, str], int], shares: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    total = _sum(counts, "trained")
    for environment, share in shares.items():
        trained, stale = _sum(counts, "trained", environment), _sum(counts, "stale", environment)
        if len(shares) == 1 or trained + stale < LEAST_ROLLOUTS or not total:
            continue
        if trained / total < SHORT * share and stale >= NOTABLE_SHARE * (trained + stale):
            yield (
                environment,
                f"the environment {environment} is {trained / total:.0%} of what is trained, where its ratio says {share:.0%}: "
                f"{stale} of its {trained + stale} rollouts were too old",
            )


def _short_lengths(counts: Mapping[tuple[str, str, str], int]) -> Iterator[tuple[str, str]]:
    """Yields for each environment the length from which on rollouts are too old more often than shorter ones."""
    for environment in dict.fromkeys(environment for _, environment, _ in counts):
        bounds = {
            int(length.partition("-")[0])
            for _, each, length in counts
            if each == environment and length[:1].isdecimal()
        }
        found = [
            (long - short, bound, long, short)
            for bound in sorted(bounds)
            if (long := _stale_share(counts, environment, bound, above=True)) is not None
            and (short := _stale_share(counts, environment, bound, above=False)) is not None
        ]
        more, bound, long, short = max(found, default=(0.0, 0, 0.0, 0.0))
        if more >= LENGTH_MATTERS and long >= NOTABLE_SHARE:
            yield (
                f"{environment}/length",
                f"long rollouts of the environment {environment} are short of their share: {long:.0%} of those that took "
                f"{bound} s or longer were too old, {short:.0%} of the shorter ones",
            )


def _stale_share(
    counts: Mapping[tuple[str, str, str], int], environment: str, bound: int, *, above: bool
) -> float | None:
    """Returns the share of too old rollouts on one side of a length, or None for too few rollouts."""
    fates = Counter[str]()
    for (fate, each, length), count in counts.items():
        if each == environment and length[:1].isdecimal() and (int(length.partition("-")[0]) >= bound) == above:
            fates[fate] += count
    return fates["stale"] / fates.total() if fates.total() >= LEAST_ROLLOUTS else None


def _sum(counts: Mapping[tuple[str, str, str], int], fate: str, environment: str | None = None) -> int:
    return sum(
        count for (each, of, _), count in counts.items() if each == fate and (environment is None or of == environment)
    )
