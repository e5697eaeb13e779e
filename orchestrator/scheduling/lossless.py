"""Computes the smallest `max_off_policy_steps` that loses no rollout, and today's loss, from measured durations.

A group for step t may start under version t - lead. If its last rollout ends d seconds later, and a step lasts `wall`, at most
ceil(d / wall) other batches have shipped meanwhile: its oldest turn is then at most lead + ceil(d / wall) steps old. So that
many `max_off_policy_steps` suffice. For example, with a lead of 1, steps of 60 s and a rollout of 150 s, 4 do. If generation is
the bottleneck, the lead is not used in full, and one less may do. `wall` is that of a step without waits for stragglers, which
a run with that many never makes. After such waits batches are full at once, so a step is at least as long as the trainer's, and
as its rollouts take with all in flight that may be (Little's law). `tests/orchestrator/scheduling/test_lossless.py` compares
this with the scheduler.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from counterpoint.run.config import ScheduleConfig

STEPS = 20
"""The newest steps that count."""

LEAST_STEPS, LEAST_ROLLOUTS = 5, 50
"""The fewest steps and rollouts from which something is computed."""

BOUND, LEAD, LOST, LOST_MEAN = (
    "staleness/lossless",
    "staleness/lossless_lead",
    "staleness/lost_share",
    "staleness/lost_mean",
)
"""The metrics: the fields of `Need`."""

ALLOWED = "staleness/allowed"
"""The metric of the present `max_off_policy_steps`, which `"auto"` raises."""

_WALL, _WAIT = "wall_seconds", "phase/wait_stragglers"
"""Metrics of `step/phases.py`."""

SAID_SHARE = 0.01
"""The least share of lost rollouts for a log line."""

SAID_WAIT = 0.1
"""The least share of a step's time in waits for stragglers for a log line."""


@dataclass(frozen=True, slots=True)
class Need:
    """The needs of a schedule, and its losses."""

    bound: int
    """The smallest `max_off_policy_steps` that loses nothing. While rollouts are lost, a lower bound, since nobody knows how
    long a cancelled rollout would have lasted."""
    lead: int
    """The largest `max_lead_steps` with which today's `max_off_policy_steps` loses nothing, or 0 if none does."""
    lost: float
    """The share of the rollouts that are too old today, of 1."""
    lost_staleness: float
    """The least mean staleness that these would have, in steps, or 0 if none are lost."""


def bound_of(seconds: float, wall: float, lead: int) -> int:
    """Returns the `max_off_policy_steps` with which a rollout of `seconds` is trained, if a step lasts `wall` seconds."""
    return lead + math.ceil(seconds / wall)


def need_of(kept: Sequence[float], lost: Sequence[float], wall: float, lead: int, limit: int) -> Need:
    """Returns the needs of `kept` and `lost` rollouts, each with its seconds to its end or until it was dropped.

    A step lasts `wall` seconds, above 0. `lead` and `limit` are today's `max_lead_steps` and `max_off_policy_steps`. There is
    at least one rollout.
    """
    longest = max([*kept, *lost])
    too_old = [max(limit + 1, bound_of(seconds, wall, lead)) for seconds in lost]
    bound = max([bound_of(longest, wall, lead), *too_old])
    return Need(
        bound=bound,
        lead=max(0, limit - (bound - lead)),
        lost=len(lost) / (len(kept) + len(lost)),
        lost_staleness=statistics.fmean(too_old) if lost else 0.0,
    )


@dataclass(slots=True)
class _Step:
    kept: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    wall: float = 0.0


class LosslessBound:
    """Computes the metrics of the newest steps of one process. Not for several threads."""

    def __init__(self) -> None:
        self._steps = deque([_Step()], maxlen=STEPS)

    def add(self, seconds: Iterable[float | None], *, lost: bool) -> None:
        """Takes up the rollouts of a group, which was kept or lost. None stands for an unknown time."""
        step = self._steps[-1]
        (step.lost if lost else step.kept).extend(each for each in seconds if each is not None)

    def take(self, phases: Mapping[str, float], trainer: float, schedule: ScheduleConfig) -> dict[str, float]:
        """Returns the metrics at the end of a step, and begins the next. Returns none for too few rollouts.

        `phases` are those of the step (`step/phases.py`). The trainer takes `trainer` seconds for one.
        """
        self._steps[-1].wall = phases.get(_WALL, 0.0) - phases.get(_WAIT, 0.0)
        steps = list(self._steps)
        self._steps.append(_Step())
        kept, lost = [each for step in steps for each in step.kept], [each for step in steps for each in step.lost]
        in_flight = min(schedule.most_in_flight, schedule.most_within_lead)
        played = sum([*kept, *lost]) / (len(steps) * in_flight)
        typical = max(statistics.median(step.wall for step in steps), trainer, played)
        if len(steps) < LEAST_STEPS or len(kept) + len(lost) < LEAST_ROLLOUTS or typical <= 0:
            return {}
        need = need_of(kept, lost, typical, schedule.max_lead_steps, schedule.staleness_limit)
        return {BOUND: need.bound, LEAD: need.lead, LOST: need.lost, LOST_MEAN: need.lost_staleness}


def in_words(line: Mapping[str, Any]) -> str:
    """Returns a sentence on a step's lost rollouts or waits, and their remedy, or an empty text for small ones."""
    if any(name not in line for name in (BOUND, LEAD, LOST, LOST_MEAN, "staleness/mean")):
        return ""
    lost, now, waited = line[LOST], line["staleness/mean"], line.get(_WAIT, 0.0)
    lead = f", or max_lead_steps = {line[LEAD]}" if line[LEAD] else ""
    remedy = f'schedule.max_off_policy_steps = {line[BOUND]} or more (if it is "auto", off_policy_limit){lead}'
    if lost >= SAID_SHARE:
        return (
            f"{lost:.1%} of the rollouts of the newest {STEPS} steps were too old to be trained: none would be with {remedy}; "
            f"the mean staleness would be {(1 - lost) * now + lost * line[LOST_MEAN]:.2f} or more instead of {now:.2f}"
        )
    if waited > SAID_WAIT * line.get(_WALL, math.inf):
        return f"the step waited {waited:.1f} of its {line[_WALL]:.1f} s for stragglers: no step would with {remedy}"
    return ""


class SaidOfStaleness:
    """The last bound in a run's log. A new line follows once the bound is higher."""

    def __init__(self) -> None:
        self._bound = 0

    def news(self, line: Mapping[str, Any]) -> str:
        """Returns the new sentence for a step's line, or an empty text."""
        if not (words := in_words(line)) or line[BOUND] <= self._bound:
            return ""
        self._bound = line[BOUND]
        return words
