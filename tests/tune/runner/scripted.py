"""An executor that does at once what a trial's script says: `config["script"]` is a list of steps, one a result."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.executors.executor import (
    Completed,
    Event,
    EventExecutor,
    Failed,
    Reported,
    Saved,
    SaveFailed,
    Started,
    Stopped,
)
from counterpoint.tune.resources import Resources
from counterpoint.tune.result import TRAINING_ITERATION, Result
from counterpoint.tune.runner.trial_runner import TrialRunner
from counterpoint.tune.search.search_alg import SearchAlg
from counterpoint.tune.trial import Trial


class ScriptedExecutor(EventExecutor):
    """Step n of a script makes result n: a number is a result with that value, `die` the death of the attempt."""

    def __init__(self, slots: int = 2, refuses: str | None = None) -> None:
        super().__init__()
        self.slots, self.refuses = slots, refuses
        self.attempts: dict[str, int] = {}
        self.iterations: dict[str, int] = {}
        self.due: deque[Event] = deque()
        self.started: list[tuple[str, int, str | None]] = []
        self.deleted: list[str] = []
        self.most = 0
        self.saves = True

    def has_resources(self, resources: Resources) -> bool:
        return len(self.attempts) < self.slots and self.refuses is None

    def could_ever_run(self, trial: Trial) -> str | None:
        return self.refuses

    def begin(self, trial: Trial, attempt: int, checkpoint: Checkpoint | None = None) -> None:
        assert trial.trial_id not in self.attempts
        self.attempts[trial.trial_id] = attempt
        self.most = max(self.most, len(self.attempts))
        self.iterations[trial.trial_id] = 0
        if checkpoint is not None:
            self.iterations[trial.trial_id] = int((Path(checkpoint.path) / "iteration").read_text())
        self.started.append((trial.trial_id, attempt, None if checkpoint is None else Path(checkpoint.path).name))
        self.due.append(Started(trial.trial_id, attempt))

    def proceed(self, trial: Trial) -> None:
        who = (trial.trial_id, self.attempts[trial.trial_id])
        iteration = self.iterations[trial.trial_id] = self.iterations[trial.trial_id] + 1
        script: list[Any] = trial.config["script"]
        if iteration > len(script):
            self.due.append(Completed(*who))
            return
        step = script[iteration - 1]
        if step == "die" or (step == "die once" and who[1] == 1):
            del self.attempts[trial.trial_id]
            self.due.append(Failed(*who, f"it died at {iteration}"))
            return
        result: Result = {TRAINING_ITERATION: iteration}
        if step == "odd":
            result["value"] = object()
        elif step != "nothing":
            result["value"] = {"nan": float("nan"), "die once": 0}.get(step, step)
        self.due.append(Reported(*who, result))

    def save_to(self, trial: Trial, checkpoint: Checkpoint) -> None:
        who = (trial.trial_id, self.attempts[trial.trial_id])
        if not self.saves:
            self.due.append(SaveFailed(*who, "the disk is full"))
            return
        Path(checkpoint.path).mkdir(parents=True)
        (Path(checkpoint.path) / "iteration").write_text(str(self.iterations[trial.trial_id]))
        self.due.append(Saved(*who, checkpoint))

    def end(self, trial: Trial, error: bool = False) -> None:
        self.due.append(Stopped(trial.trial_id, self.attempts.pop(trial.trial_id)))

    def suspend(self, trial: Trial) -> None:
        self.end(trial)

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        super().delete_checkpoint(checkpoint)
        self.deleted.append(Path(checkpoint.path).name)

    async def next_events(self, timeout: float) -> Sequence[Event]:
        end = time.monotonic() + timeout
        while not self.due and time.monotonic() < end:  # noqa: ASYNC110 - a step is to pass without an event only at the end
            await asyncio.sleep(0.002)
        return [self.due.popleft()] if self.due else []

    def resource_string(self) -> str:
        return f"{len(self.attempts)}/{self.slots}"

    async def close(self) -> None:
        self.attempts.clear()
        self.due.clear()


class ScriptedTrials(SearchAlg):
    """Proposes one trial for each script, and remembers what it heard."""

    max_pending_trials = 8

    def __init__(self, directory: Path, scripts: list[list[Any]], **fields: Any) -> None:
        self.directory, self.scripts, self.fields = directory, scripts, fields
        self.made = 0
        self.heard: list[list[Any]] = []

    def next_trial(self) -> Trial | None:
        if self.is_finished():
            return None
        self.made += 1
        config = {"script": self.scripts[self.made - 1]}
        return Trial("module:scripted", config, f"t{self.made}", str(self.directory), **self.fields)

    def is_finished(self) -> bool:
        return self.made == len(self.scripts)

    def on_trial_result(self, trial_id: str, result: Result) -> None:
        self.heard.append([trial_id, result[TRAINING_ITERATION]])

    def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
        self.heard.append([trial_id, "error" if error else "complete"])

    def state(self) -> dict[str, Any]:
        return {"made": self.made, "heard": [list(each) for each in self.heard]}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.made, self.heard = state["made"], [list(each) for each in state["heard"]]


MOST_STEPS = 3000


def run_to_the_end(runner: TrialRunner) -> dict[str, Trial]:
    """Steps until all has ended; returns the trials by id."""
    try:
        for _ in range(MOST_STEPS):
            if runner.is_finished():
                return {trial.trial_id: trial for trial in runner.get_trials()}
            runner.step()
        raise AssertionError(f"not finished after {MOST_STEPS} steps: {runner.get_trials()}")
    finally:
        runner.close()
