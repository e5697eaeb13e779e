"""An executor without processes, for benchmarks of the runner: whatever is asked has happened at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from tune.checkpoint import Checkpoint
from tune.executors.executor import Event, EventExecutor, Reported, Saved, Started, Stopped
from tune.resources import Resources
from tune.result import DONE, TRAINING_ITERATION
from tune.search.search_alg import SearchAlg
from tune.trial import Trial


class ImmediateExecutor(EventExecutor):
    """Answers in turn; at most `batch` events at once."""

    def __init__(self, slots: int, results: int, batch: int = 8) -> None:
        """Takes how many trials run at once, and how many results each reports."""
        super().__init__()
        self._slots, self._results, self._batch = slots, results, batch
        self._attempts: dict[str, int] = {}
        self._iterations: dict[str, int] = {}
        self._due: deque[Event] = deque()

    def has_resources(self, resources: Resources) -> bool:
        """See the base."""
        return len(self._attempts) < self._slots

    def could_ever_run(self, trial: Trial) -> str | None:
        """See the base."""
        return None

    def begin(self, trial: Trial, attempt: int, checkpoint: Checkpoint | None = None) -> None:
        """See the base."""
        self._attempts[trial.trial_id] = attempt
        self._iterations[trial.trial_id] = 0 if checkpoint is None else checkpoint.iteration
        self._due.append(Started(trial.trial_id, attempt))

    def proceed(self, trial: Trial) -> None:
        """See the base."""
        iteration = self._iterations[trial.trial_id] = self._iterations[trial.trial_id] + 1
        result = {TRAINING_ITERATION: iteration, "loss": 1.0 / iteration, DONE: iteration >= self._results}
        self._due.append(Reported(trial.trial_id, self._attempts[trial.trial_id], result))

    def save_to(self, trial: Trial, checkpoint: Checkpoint) -> None:
        """See the base."""
        self._due.append(Saved(trial.trial_id, self._attempts[trial.trial_id], checkpoint))

    def end(self, trial: Trial, error: bool = False) -> None:
        """See the base."""
        self._due.append(Stopped(trial.trial_id, self._attempts.pop(trial.trial_id)))

    def suspend(self, trial: Trial) -> None:
        """See the base."""
        self.end(trial)

    async def next_events(self, timeout: float) -> Sequence[Event]:
        """See the base."""
        events = list(islice(self._due, self._batch))
        for _ in events:
            self._due.popleft()
        return events

    def resource_string(self) -> str:
        """See the base."""
        return f"{len(self._attempts)} of {self._slots}"

    async def close(self) -> None:
        """See the base."""


class PlainTrials(SearchAlg):
    """Proposes so many trials, and listens to nothing."""

    max_pending_trials = 64

    def __init__(self, count: int, directory: str, results: int) -> None:
        self._count, self._directory, self._results = count, directory, results
        self._made = 0

    def next_trial(self) -> Trial | None:
        """See the base."""
        if self._made == self._count:
            return None
        self._made += 1
        return Trial("bench:nothing", {"index": self._made}, f"t{self._made:06d}", self._directory)

    def is_finished(self) -> bool:
        """See the base."""
        return self._made == self._count

    def state(self) -> dict[str, Any]:
        """See the base."""
        return {"made": self._made}

    def restore_state(self, state: dict[str, Any]) -> None:
        """See the base."""
        self._made = state["made"]
