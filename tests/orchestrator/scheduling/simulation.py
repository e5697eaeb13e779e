"""Simulates the scheduler beside servers and a trainer with drawn times: does the trainer get the examples that were asked for?

The unit of time is a step of the trainer. Nothing of the scheduler is replaced: `Simulation` only answers its instructions with
events. With `kills` the orchestrator dies and resumes from its last commit; with `losses` half of the servers are gone for some
steps, and the rollouts on them fail.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

from scipy.stats import chisquare

from counterpoint.environments.config import CurriculumConfig, EnvironmentConfig
from counterpoint.environments.mix import ExampleMix
from counterpoint.orchestrator.scheduling.events import (
    AwaitStragglers,
    BatchCommitted,
    BoundRaised,
    CancelGroup,
    CapacityChanged,
    EvaluationRequested,
    EvaluationRolloutEnded,
    Event,
    FinalizeGroup,
    GroupFinalized,
    GroupsBegun,
    Instruction,
    LastStepCommitted,
    MoreToStart,
    PatienceEnded,
    PolicyUpdated,
    PolicyUpdateStarting,
    RolloutEnded,
    ShipBatch,
    StartEvaluationRollouts,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.outcomes import DropReason, RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.orchestrator.step.patience import BatchPatience
from counterpoint.run.config import ScheduleConfig

Example = tuple[str, int]
"""The name of an environment and the index of an example there."""

Duration = Callable[[random.Random, str, int], float]
"""Draws how long a rollout of an environment's example lasts, in steps of the trainer."""


Limit = int | Literal["auto"]
"""What `max_off_policy_steps` may be."""


class _Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def end(self) -> None:
        if self._call is not None:
            self._call()


@dataclass
class Simulation:
    """One run: `durations` are drawn for each rollout, in steps of the trainer, as `training` and the other times are."""

    schedule: ScheduleConfig
    steps: int
    duration: Duration
    environments: Sequence[str] = ("words",)
    examples: int = 1000
    """The examples of each environment."""
    training: float = 1.0
    loading: float = 0.0
    """How long servers load new weights; what they generate waits meanwhile."""
    reward: Callable[[int, float], float] = lambda example, duration: 1.0
    """The reward of a rollout by its example and its duration."""
    curriculum: CurriculumConfig | None = None
    evaluations: Sequence[float] = ()
    """Times at which 64 rollouts of an evaluation are asked for, with half of the capacity."""
    kills: Sequence[float] = ()
    losses: Sequence[float] = ()
    seed: int = 0
    trained: list[Example] = field(default_factory=list)
    """The example of each group that was trained."""
    lasted: list[float] = field(default_factory=list)
    """The duration of each rollout that was trained."""
    staleness: list[int] = field(default_factory=list)
    """That of each group that was trained, in steps."""
    idle: float = 0.0
    """How long the trainer has waited for batches."""
    evaluated: int = 0
    """Rollouts of evaluations that have ended."""
    stale: list[Example] = field(default_factory=list)
    """The example of each group that was dropped as too stale."""
    bounds: list[int] = field(default_factory=list)
    """The values that `max_off_policy_steps = "auto"` has taken."""
    started: Counter[str] = field(default_factory=Counter)
    """Starts of groups, by environment."""
    now: float = 0.0

    def run(self) -> Simulation:
        """Plays the whole run. `now` is then its wall time."""
        self._chance = random.Random(self.seed)
        self._number = self._life = self._version = 0
        self._trainer_free = 0.0
        self._due: list[tuple[float, int, int | None, Event | Callable[[], None]]] = []
        """Time, number, and the life of the orchestrator that it is for, unless it is for any."""
        self._begin()
        self._saved = self.scheduler.state(ready=False)
        disturbances = ((self._kill, self.kills), (self._lose, self.losses), (self._evaluate, self.evaluations))
        for disturb, times in disturbances:
            for time in times:
                self._after(time, disturb, for_any_life=True)
        self._after(0, PolicyUpdated(0), for_any_life=True)
        while self._due:
            self.now, _, life, event = heapq.heappop(self._due)
            if life not in (None, self._life):
                continue
            if callable(event):
                event()
                continue
            if isinstance(event, RolloutEnded):
                if self._in_flight.get(event.rollout_id) is not event:
                    continue  # it has ended in another way
                if late := self._late.pop(event.rollout_id, 0.0):
                    self._after(late, event)
                    continue
                del self._in_flight[event.rollout_id]
                if event.outcome is RolloutOutcome.COMPLETED:
                    self._completed[event.group_id].append(self._lasts[event.rollout_id])
            elif isinstance(event, PolicyUpdateStarting):
                for rollout_id in self._in_flight:
                    self._late[rollout_id] += self.loading
            elif isinstance(event, PolicyUpdated):
                self._version = event.version
                self._patience.loaded(event.version)
            self.evaluated += isinstance(event, EvaluationRolloutEnded)
            for instruction in self.scheduler.handle(event):
                self._execute(instruction)
        return self

    def _begin(self) -> None:
        self._groups: dict[int, Example] = {}
        self._versions: dict[int, int] = {}
        """The version that each group began with."""
        self._completed: defaultdict[int, list[float]] = defaultdict(list)
        self._lasts: dict[str, float] = {}
        self._late: defaultdict[str, float] = defaultdict(float)
        """Returns how long loads have delayed a rollout's end."""
        self._in_flight: dict[str, RolloutEnded] = {}
        """The event that will end each rollout."""
        self.scheduler = RolloutScheduler(self.schedule, self.steps, self._mix())
        self._patience = BatchPatience(
            lambda step, seconds: self._after(0, PatienceEnded(step)), lambda: self.now, self._call_later
        )

    def _mix(self) -> ExampleMix:
        configs = [
            EnvironmentConfig(name=name, kind="reverse-text", curriculum=self.curriculum) for name in self.environments
        ]
        return ExampleMix(configs, dict.fromkeys(self.environments, self.examples), self.seed)

    def asked(self, is_slow: Callable[[int], bool]) -> float:
        """Returns the share that `share` would have in a run where each group is trained that is drawn."""
        mix = self._mix()
        return sum(is_slow(mix.next()[1]) for _ in self.trained) / len(self.trained)

    def _kill(self) -> None:
        """Kills the orchestrator and resumes it from its last commit."""
        self._life += 1
        self._begin()
        self.scheduler.restore(self._saved)
        self._after(0, PolicyUpdated(self._version))

    def _lose(self) -> None:
        """Loses half of the servers, with half of what is in flight, for some steps."""
        for rollout_id, event in list(self._in_flight.items()):
            if self._chance.random() < 0.5:
                self._end(event.group_id, rollout_id, RolloutOutcome.INFERENCE_FAILED, 0)
        most = self.schedule.most_in_flight
        self._after(0, CapacityChanged(most // 2))
        self._after(3 * self.training, CapacityChanged(most))

    def _evaluate(self) -> None:
        self._after(0, EvaluationRequested(self.evaluated, 64, 0.5))

    def _end(self, group_id: int, rollout_id: str, outcome: RolloutOutcome, time: float) -> None:
        self._in_flight[rollout_id] = RolloutEnded(group_id, rollout_id, outcome, None)
        self._after(time, self._in_flight[rollout_id])

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case StartGroup(group_id, environment, example, size):
                self._groups[group_id] = (environment, example)
                self._versions[group_id] = self._version
                self.started[environment] += 1
                for index in range(size):
                    time = self.duration(self._chance, environment, example)
                    self._lasts[f"{group_id}-{index}"] = time
                    self._end(group_id, f"{group_id}-{index}", RolloutOutcome.COMPLETED, time)
            case FinalizeGroup(group_id):
                example, kept = self._groups[group_id][1], self._completed[group_id]
                rewards = tuple(self.reward(example, duration) for duration in kept)
                dropped = None if kept else DropReason.INFERENCE_FAILED
                self._after(0, GroupFinalized(group_id, len(kept), 0, dropped, rewards=rewards))
            case CancelGroup(group_id, reason):
                if reason is DropReason.STALE:
                    self.stale.append(self._groups[group_id])
                for rollout_id, event in list(self._in_flight.items()):
                    if event.group_id == group_id:
                        self._end(group_id, rollout_id, RolloutOutcome.CANCELLED, 0)
            case MoreToStart():
                self._after(0, GroupsBegun())
            case ShipBatch(step, group_ids):
                self._patience.shipped(step)
                self.trained += [self._groups[group_id] for group_id in group_ids]
                self.lasted += [each for group_id in group_ids for each in self._completed[group_id]]
                self.staleness += [step - self._versions[group_id] for group_id in group_ids]
                self.idle += max(0.0, self.now - self._trainer_free)
                self._saved = self.scheduler.state(ready=False)
                self._after(0, BatchCommitted(step))
                self._trainer_free = max(self.now, self._trainer_free) + self.training
                trained = self._trainer_free - self.now
                if self.loading:
                    self._after(trained, PolicyUpdateStarting(step), for_any_life=True)
                self._after(trained + self.loading, PolicyUpdated(step), for_any_life=True)
            case StartEvaluationRollouts(evaluation_id, first, count):
                for index in range(first, first + count):
                    self._after(about(1.0, self._chance), EvaluationRolloutEnded(evaluation_id, index))
            case BoundRaised(steps):
                self.bounds.append(steps)
            case AwaitStragglers(step):
                self._patience.wait(step, self.schedule.straggler_patience_steps)
            case LastStepCommitted():
                self._due.clear()

    def _call_later(self, time: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(call)
        self._after(time, timer.end)
        return timer

    def _after(self, time: float, event: Event | Callable[[], None], *, for_any_life: bool = False) -> None:
        self._number += 1
        heapq.heappush(self._due, (self.now + time, self._number, None if for_any_life else self._life, event))

    def share(self, is_slow: Callable[[int], bool]) -> float:
        """Returns the share of the trained groups that are of such examples."""
        return sum(is_slow(example) for _, example in self.trained) / len(self.trained)

    def p_value(self) -> float:
        """Returns that of Pearson's chi-squared test that each tenth of the examples is trained as often as any other."""
        tenths = Counter(example * 10 // self.examples for _, example in self.trained)
        return float(chisquare([tenths[tenth] for tenth in range(10)]).pvalue)


def about(mean: float, rng: random.Random) -> float:
    """Returns a duration of about `mean`: 20 % shorter to 20 % longer."""
    return mean * rng.uniform(0.8, 1.2)


def bimodal(slow: float) -> Duration:
    """Returns the first 100 examples' `slow` steps of such a run (1.25 of the trainer's), and 0.2 of the trainer's for others."""
    return lambda rng, environment, example: about(1.25 * slow if example < 100 else 0.2, rng)


def log_normal(rng: random.Random, environment: str, example: int) -> float:
    """Draws by a log-normal: the median lasts 0.6 steps, sigma is 1.2; a higher index of 1,000 lasts longer."""
    return about(0.6 * math.exp(1.2 * NormalDist().inv_cdf((example % 1000 + 0.5) / 1000)), rng)


def heavy_tailed(rng: random.Random, environment: str, example: int) -> float:
    """Draws by Pareto, exponent 1.5: the median lasts 0.6 steps, the longest of 1,000 lasts 60; a higher index lasts longer."""
    return about(0.6 * (2 * (1 - (example % 1000 + 0.5) / 1000)) ** (-1 / 1.5), rng)


def schedule_of(limit: Limit, **changes: object) -> ScheduleConfig:
    """Returns the schedule of the table in `docs/scheduling.md`: lead 2, 64 in flight, 8 groups of 4 a step.

    "auto" is up to 16.
    """
    values: dict[str, object] = {"group_size": 4, "rollouts_per_step": 32, "max_inflight_rollouts": 64}
    most = {"off_policy_limit": 16} if limit == "auto" else {}
    return ScheduleConfig.model_validate(values | {"max_off_policy_steps": limit} | most | changes)


_LIMITS: tuple[tuple[float, Limit], ...] = ((2, 4), (3, 4), (3, 5), (6, 4), (6, 8), (6, "auto"))
_TAILS: tuple[Limit, ...] = (4, 8, "auto")

ROWS: tuple[tuple[str, Duration, Limit, Callable[[int], bool]], ...] = (
    *((f"10 %: {slow} steps", bimodal(slow), limit, lambda example: example < 100) for slow, limit in _LIMITS),
    *(("log-normal: slowest 5 %", log_normal, limit, lambda example: example >= 950) for limit in _TAILS),
    *(("heavy tail: slowest 5 %", heavy_tailed, limit, lambda example: example >= 950) for limit in _TAILS),
)
"""What is slow, how long rollouts last, `max_off_policy_steps`, and which examples are slow."""


def disturbances(steps: int) -> dict[str, dict[str, Any]]:
    """Returns what may happen beside a run of so many steps: arguments of `Simulation`, by what they are."""
    apart: dict[str, dict[str, Any]] = {
        "kills": {"kills": (0.12 * steps, 0.36 * steps, 0.67 * steps)},
        "servers lost": {"losses": (0.09 * steps, 0.31 * steps, 0.55 * steps)},
        "loads": {"loading": 0.5},
        "evaluations": {"evaluations": (0.15 * steps, 0.4 * steps, 0.7 * steps)},
    }
    return apart | {"all of these": {name: value for each in apart.values() for name, value in each.items()}}
