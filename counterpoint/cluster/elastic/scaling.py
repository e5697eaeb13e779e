"""How many workers elastic training should have, by its progress: policies, and when they are asked. Pure: no clock, no I/O.

`Scaler` measures a round over a window, asks the policy, and keeps within limits. `rounds` tells it what the workers report, and
carries its decisions out.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pydantic import Field, model_validator

from counterpoint.cluster.elastic.progress import Totals
from counterpoint.transport.config import Config

MARGIN = 0.05
"""Share of the target by which fewer workers must exceed it: else noise would add and remove the same worker."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What was measured over one window of one round."""

    workers: int
    rate: float
    """Units of work a second, of all workers together."""
    idle_share: float
    """Share of the ranks' time in which they waited, from 0 to 1."""
    seconds: float
    """How long it was measured."""


Policy = Callable[[Progress], tuple[int, str]]
"""Returns how many workers there should be, and why, for a person."""


class ScalingConfig(Config):
    """Scales an elastic role by its progress, between its `min_workers` and `max_workers`."""

    policy: str
    """`throughput`: as few workers as reach `target`. `idle_share`: one fewer above `high`, one more below `low`. Or the import
    path `package.module:function` of a function from `cluster.elastic.scaling.Progress` to a number of workers."""
    target: float = Field(default=0.0, ge=0)
    """`throughput` aims at this: units of work a second, of all workers together."""
    low: float = Field(default=0.1, ge=0, le=1)
    high: float = Field(default=0.5, ge=0, le=1)
    """The bounds of `idle_share`, as shares of the ranks' time."""
    window_seconds: float = Field(default=60.0, gt=0)
    """How long a round is measured before each decision. After a change it begins anew."""
    dry_run: bool = False
    """Whether decisions are only shown."""

    @model_validator(mode="after")
    def _consistent(self) -> ScalingConfig:
        if self.policy == "throughput" and self.target == 0:
            raise ValueError("policy = 'throughput' needs a target: units of work a second")
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} is not below high = {self.high:g}")
        if self.policy not in ("throughput", "idle_share") and ":" not in self.policy:
            raise ValueError(
                f"policy = {self.policy!r}: expected throughput, idle_share, or an import path package.module:function"
            )
        return self

    def make_policy(self) -> Policy:
        """Returns the policy. Raises `ImportError`, `AttributeError` or `TypeError` if the function is not there."""
        if self.policy == "throughput":
            return partial(by_throughput, target=self.target)
        if self.policy == "idle_share":
            return partial(by_idle_share, low=self.low, high=self.high)
        module, _, name = self.policy.partition(":")
        function = getattr(importlib.import_module(module), name)
        if not callable(function):
            raise TypeError(f"scaling.policy = {self.policy!r} is {function!r}; expected a function")
        return partial(_by_function, function=function, name=self.policy)


def by_throughput(progress: Progress, target: float) -> tuple[int, str]:
    """Returns the fewest workers that reach `target` units a second, if each does as much as one does now."""
    each = progress.rate / progress.workers
    said = f"{progress.rate:.3g}/s of {target:.3g}/s wanted"
    if each == 0:
        return progress.workers, f"{said}: nothing was done, so nobody knows what a worker does"
    wanted = max(math.ceil(min(target / each, 1e9)), 1)
    if wanted < progress.workers and wanted * each < target * (1 + MARGIN):
        wanted += 1
    return wanted, said


def by_idle_share(progress: Progress, low: float, high: float) -> tuple[int, str]:
    """Returns one worker fewer if ranks wait for more than `high` of their time, one more if for less than `low`."""
    said = f"idle {progress.idle_share:.0%}, wanted {low:.0%} to {high:.0%}"
    if progress.rate == 0:
        return progress.workers, f"{said}: nothing was done"
    change = -1 if progress.idle_share > high else 1 if progress.idle_share < low else 0
    return progress.workers + change, said


def _by_function(progress: Progress, function: Callable[[Progress], object], name: str) -> tuple[int, str]:
    """Asks a user's function; what it raises, or returns instead of a number, changes nothing, and is said."""
    try:
        wanted = function(progress)
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            raise TypeError(f"it returned {wanted!r}; expected a number of workers")
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything; the training goes on
        return progress.workers, f"{name} failed: {type(error).__name__}: {error}"
    return wanted, name


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What the policy decided, within the limits."""

    progress: Progress
    wanted: int
    """Workers, within the limits."""
    reason: str
    dry_run: bool

    @property
    def is_change(self) -> bool:
        """Whether it is to be carried out."""
        return self.wanted != self.progress.workers and not self.dry_run

    def __str__(self) -> str:
        """Returns the line in the status."""
        change = f"{self.progress.workers} -> {self.wanted} workers"
        return f"scaling{' (dry run)' if self.dry_run else ''}: {change}: {self.reason}"


class Scaler:
    """Measures rounds, and decides after each window."""

    def __init__(
        self, policy: Policy, fewest: int, most: int, window_seconds: float = 60.0, *, dry_run: bool = False
    ) -> None:
        """Decides for `fewest` to `most` workers."""
        self._policy, self._fewest, self._most = policy, fewest, most
        self.window_seconds, self._dry_run = window_seconds, dry_run
        self._mark: tuple[float, tuple[int, int, int], Totals] | None = None
        """When the window began, of which round, workers and ranks, and what these had done."""
        self.last: ScalingDecision | None = None
        """The last decision that was made."""

    def observe(self, at: float, round_number: int, workers: int, totals: Totals | None) -> ScalingDecision | None:
        """Takes what all `workers` of a round have done up to `at`; returns a decision once a window is over.

        Args:
            at: seconds of a monotonic clock.
            round_number: another one begins a window anew.
            workers: of the round.
            totals: None while not all of them train.
        """
        if totals is None:
            self._mark = None
            return None
        who, mark = (round_number, workers, totals.ranks), self._mark
        if mark is not None and mark[1] == who and at - mark[0] < self.window_seconds:
            return None
        self._mark = at, who, totals
        if mark is None or mark[1] != who:
            return None
        seconds = at - mark[0]
        rate = max(totals.done - mark[2].done, 0.0) / seconds
        idle = max(totals.idle_seconds - mark[2].idle_seconds, 0.0) / (seconds * max(totals.ranks, 1))
        progress = Progress(workers, rate, min(idle, 1.0), seconds)
        wanted, reason = self._policy(progress)
        within = min(max(wanted, self._fewest), self._most)
        if within != wanted:
            reason += f"; {wanted} is outside {self._fewest} to {self._most}"
        self.last = ScalingDecision(progress, within, reason, self._dry_run)
        return self.last
