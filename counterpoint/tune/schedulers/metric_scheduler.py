"""What schedulers that compare a metric over time have in common: reading it from results, and numbers and draws as JSON.

Inside a scheduler a higher score is better, whatever the mode, and NaN is worse than every number.
"""

from __future__ import annotations

import logging
import math
import random
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.result import DONE, Result, lookup, what_it_has
from counterpoint.tune.schedulers.scheduler import Trials, TrialScheduler
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)


class MetricScheduler(TrialScheduler):
    """Reads time and score from results. Refuses trials while it has no metric or no mode."""

    def __init__(self, time_attr: str, metric: str | None, mode: str | None) -> None:
        if mode not in (None, "min", "max"):
            raise TuneError(f"{self.name}: mode is {mode!r}; expected 'min' or 'max'")
        self.time_attr = time_attr
        self.metric = metric
        self.mode = mode

    _warned = False
    """Whether it was said that results lack the time; not part of the state, so each process says it once."""

    @property
    def name(self) -> str:
        """The scheduler's name in messages."""
        return type(self).__name__

    def require(self, fact: bool, what: str) -> None:
        """Refuses an argument of the constructor, unless the fact holds that it must have."""
        if not fact:
            raise TuneError(f"{self.name}: {what}")

    def on_trial_add(self, trials: Trials, trial: Trial) -> None:
        """Refuses the first trial if metric or mode are not known by then."""
        if not self.metric or not self.mode:
            raise TuneError(
                f"{self.name} has metric {self.metric!r} and mode {self.mode!r}, and needs both: "
                "pass them to it or to run(metric=..., mode=...)"
            )

    def on_trial_error(self, trials: Trials, trial: Trial) -> None:
        """Does as for a trial that is removed."""
        self.on_trial_remove(trials, trial)

    def observed(self, result: Result) -> tuple[float, float] | None:
        """The time and the score of a result; None if it lacks one of them, or one is no number."""
        time, value = lookup(result, self.time_attr), lookup(result, self.metric or "")
        if time is None and not result.get(DONE) and not self._warned:
            self._warned = True
            has = what_it_has(result, self.time_attr)
            logger.warning("%s: results without %r (time_attr) are passed over; %s", self.name, self.time_attr, has)
        if not isinstance(time, int | float) or not isinstance(value, int | float):
            return None
        return time, float(value) if self.mode == "max" else -float(value)


def number_to_json(value: float) -> float | str:
    """JSON has no infinities and no NaN: they become their names."""
    return value if math.isfinite(value) else str(value)


def number_from_json(value: float | str) -> float:
    """Takes back what `number_to_json` returned."""
    return float(value) if isinstance(value, str) else value


def draws_to_json(generator: random.Random) -> list[Any]:
    """The state of a generator of random numbers."""
    version, numbers, gauss = generator.getstate()
    return [version, list(numbers), gauss]


def draws_from_json(generator: random.Random, state: list[Any]) -> None:
    """Takes back what `draws_to_json` returned."""
    version, numbers, gauss = state
    generator.setstate((version, tuple(numbers), gauss))
