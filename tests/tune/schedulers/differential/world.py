"""Plays a stream against one side. What happens next depends only on the seed and on what the side decided so far."""

from __future__ import annotations

import random
from typing import Any, Protocol

from tests.tune.schedulers.differential.scenario import Scenario

RUNNING, PAUSED, PENDING, TERMINATED, ERROR = "RUNNING", "PAUSED", "PENDING", "TERMINATED", "ERROR"


class RayHangsError(Exception):
    """A deliberate difference: from here on Ray starts nothing any more, and we go on."""


class Side(Protocol):
    """A scheduler with what it needs around it. Trials are its own objects."""

    def new_trial(self, trial_id: str, config: dict[str, Any], tag: str) -> Any: ...
    def add(self, trial: Any) -> None: ...
    def result(self, trial: Any, result: dict[str, Any]) -> str: ...
    def complete(self, trial: Any, result: dict[str, Any]) -> None: ...
    def remove(self, trial: Any) -> None: ...
    def error(self, trial: Any) -> None: ...
    def choose(self) -> Any | None: ...
    def pause(self, trial: Any) -> None: ...
    def between_events(self, draws: random.Random) -> None: ...


class World:
    """Trials, their clocks, and the log of all that the scheduler decided."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.draws = random.Random(f"world {scenario.scheduler} {scenario.seed}")
        self.trials: list[Any] = []
        self.clock: dict[str, int] = {}
        self.quality: dict[str, float] = {}
        self.log: list[tuple[Any, ...]] = []
        self.requests: list[tuple[Any, ...]] = []
        """What the scheduler asked for during one call, in whatever order it does so."""
        self.exploited: set[str] = set()

    def play(self, side: Side) -> list[tuple[Any, ...]]:
        try:
            for _ in range(self.scenario.trials):
                self.add(side)
            late = self.scenario.late_trials
            for _ in range(self.scenario.events):
                self.start_some(side)
                if late and self.draws.random() < 0.05:
                    late -= 1
                    self.add(side)
                else:
                    self.event(side)
                side.between_events(self.draws)
        except RayHangsError:
            self.note("hang")
        return self.log

    def note(self, *entry: Any) -> None:
        self.log.append((*entry, tuple(sorted(self.requests, key=repr))))
        self.requests.clear()
        self.exploited.clear()

    def add(self, side: Side) -> None:
        number = len(self.trials)
        trial_id = f"t{number}"
        trial = side.new_trial(trial_id, self.config(), f"{number}_tag")
        self.trials.append(trial)
        self.clock[trial_id] = 0
        self.quality[trial_id] = self.draws.gauss(0, 2)
        side.add(trial)
        self.note("add", trial_id, repr(trial.config))

    def config(self) -> dict[str, Any]:
        """Some keys are left to the scheduler."""
        config: dict[str, Any] = {
            "lr": self.draws.choice([0.1, 0.01]),
            "layers": (float if self.scenario.plain else int)(self.draws.randint(1, 9)),
            "width": self.draws.choice([16, 32, 48]),
            "fixed": [1, {"deep": 2}],
        }
        if self.draws.random() < 0.7:
            config |= {"flag": self.draws.random() < 0.5, "nested": {"a": 3.0, "b": 1}}
        return config

    def start_some(self, side: Side) -> None:
        while sum(trial.status == RUNNING for trial in self.trials) < self.scenario.slots:
            chosen = side.choose()
            if chosen is None:
                return
            assert chosen.status in (PENDING, PAUSED)
            chosen.status = RUNNING
            self.note("run", chosen.trial_id)

    def event(self, side: Side) -> None:
        running = [trial for trial in self.trials if trial.status == RUNNING]
        waiting = [trial for trial in self.trials if trial.status in (PENDING, PAUSED)]
        kind = self.draws.random()
        leaves = self.scenario.plain and self.scenario.scheduler != "pbt"
        if waiting and kind < 0.01 and not leaves:
            self.remove(side, self.draws.choice(waiting))
        elif running:
            trial = self.draws.choice(running)
            if kind < 0.03 and not leaves:
                trial.status = ERROR
                side.error(trial)
                self.note("error", trial.trial_id)
            else:
                self.report(side, trial, ends=kind < 0.05 and not leaves)

    def remove(self, side: Side, trial: Any) -> None:
        """As a user's stop: the scheduler is told before the status changes."""
        side.remove(trial)
        trial.status = TERMINATED
        self.note("remove", trial.trial_id)

    def report(self, side: Side, trial: Any, ends: bool) -> None:
        result = self.next_result(trial)
        if ends:
            trial.last_result = result
            side.complete(trial, result)
            trial.status = TERMINATED
            self.note("done", trial.trial_id)
            return
        shown = repr(result)  # before Ray adds to it
        decision = side.result(trial, result)
        trial.last_result = result
        if trial.trial_id in self.exploited:
            decision = "EXPLOITED"
        self.note("result", trial.trial_id, shown, decision)
        if decision == "STOP":
            side.complete(trial, result)
            trial.status = TERMINATED
            self.note("stopped", trial.trial_id)
        elif decision == "PAUSE":
            side.pause(trial)

    def next_result(self, trial: Any) -> dict[str, Any]:
        step = 1
        rough = not self.scenario.plain
        if rough and self.draws.random() < 0.1:
            step = self.draws.choice([-3, -1, 2, 3, 8])  # It lost work, or several results were one.
        self.clock[trial.trial_id] = time = max(1, self.clock[trial.trial_id] + step)
        score = self.quality[trial.trial_id] + time / 8 + self.draws.gauss(0, 1)
        score = round(score * 4) / 4 if self.scenario.ties else score
        if rough and self.draws.random() < 0.03:
            score = float("nan")
        result = {"training_iteration": time, "score": score}
        if rough and self.draws.random() < 0.03:
            del result[self.draws.choice(["training_iteration", "score"])]
        return result

    # --- what the sides tell ---

    def saved(self, trial_id: str) -> None:
        self.requests.append(("save", trial_id))

    def took_over(self, trial_id: str, source_id: str, time: int, config: dict[str, Any], tag: str) -> None:
        self.requests.append(("exploit", trial_id, source_id, time, repr(config), tag))
        self.exploited.add(trial_id)
        self.clock[trial_id] = time

    def stopped(self, trial_id: str) -> None:
        self.requests.append(("stop", trial_id))

    def unpaused(self, trial_id: str) -> None:
        self.requests.append(("unpause", trial_id))
