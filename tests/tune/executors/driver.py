"""Drives an executor as a runner does, and keeps what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.executors.executor import Completed, Event, Failed, Reported, Started, Stopped
from counterpoint.tune.executors.process_executor import ProcessTrialExecutor
from counterpoint.tune.resources import Resources
from counterpoint.tune.trial import Trial
from tests.support.polling import DEADLINE_SECONDS

Kind = TypeVar("Kind", bound=Event)

TRAINABLES = "tests.tune.executors.trainables"


class Driver:
    """An executor and the trials given to it."""

    def __init__(self, executor: ProcessTrialExecutor, directory: Path) -> None:
        self.executor = executor
        self.events: list[Event] = []
        self._directory = directory
        self._attempts = 0

    def trial(self, trainable: str, name: str = "", resources: Resources | None = None, **fields: Any) -> Trial:
        """A trial of one of the tests' trainables."""
        return Trial(
            f"{TRAINABLES}:{trainable}",
            fields.pop("config", {}),
            trial_id=name or trainable.replace("_", "-"),
            local_dir=str(self._directory),
            resources=resources or Resources(),
            **fields,
        )

    def start(self, trial: Trial, checkpoint: Checkpoint | None = None) -> int:
        """Starts a trial; returns the number of the attempt."""
        self._attempts += 1
        self.executor.begin(trial, self._attempts, checkpoint)
        return self._attempts

    async def next(self, kind: type[Kind], trial: Trial, count: int = 1) -> Kind:
        """The `count`-th next event of a kind that is the trial's; what comes before is left in `events`."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                found = [event for event in self.events if isinstance(event, kind) and event.trial_id == trial.trial_id]
                if len(found) >= count:
                    self.events.remove(found[count - 1])
                    return found[count - 1]
                over = [event for event in self.events if event.trial_id == trial.trial_id and _ends(event)]
                assert not over, f"waited for {kind.__name__}: {over}"
                self.events += await self.executor.next_events(1.0)

    async def begin(self, trial: Trial, checkpoint: Checkpoint | None = None) -> None:
        """Starts a trial, and waits until it has."""
        self.start(trial, checkpoint)
        await self.next(Started, trial)

    async def result(self, trial: Trial) -> dict[str, Any]:
        """Lets the trial work, and returns its result."""
        self.executor.proceed(trial)
        return (await self.next(Reported, trial)).result

    async def stop(self, trial: Trial, error: bool = False) -> None:
        """Stops a trial, and waits until it has ended."""
        self.executor.end(trial, error)
        await self.next(Stopped, trial)

    async def run(
        self, trials: list[Trial], at_most: Callable[[Trial], int] = lambda trial: 3
    ) -> dict[str, list[Event]]:
        """Runs trials to their ends, each for some results; returns all events by trial."""
        by_id = {trial.trial_id: trial for trial in trials}
        waiting, running = list(trials), set[str]()
        heard: dict[str, list[Event]] = {trial.trial_id: [] for trial in trials}
        async with asyncio.timeout(2 * DEADLINE_SECONDS):
            while waiting or running:
                for trial in [trial for trial in waiting if self.executor.has_resources(trial.resources)]:
                    if self.executor.has_resources(trial.resources):
                        self.start(trial)
                        waiting.remove(trial)
                        running.add(trial.trial_id)
                for event in await self.executor.next_events(1.0):
                    trial = by_id[event.trial_id]
                    heard[event.trial_id].append(event)
                    results = sum(isinstance(each, Reported) for each in heard[event.trial_id])
                    if isinstance(event, Completed) or (isinstance(event, Reported) and results >= at_most(trial)):
                        self.executor.end(trial)
                    elif isinstance(event, Started | Reported):
                        self.executor.proceed(trial)
                    elif _ends(event):
                        running.remove(event.trial_id)
        return heard

    def checkpoint(self, trial: Trial, iteration: int) -> Checkpoint:
        """Where the runner puts the checkpoint of an iteration."""
        return Checkpoint(trial.trial_id, iteration, str(Path(trial.logdir) / f"checkpoint_{iteration:06d}"))


def content(*path: str) -> str | None:
    """What is in a file; None if there is none."""
    file = Path(*path)
    return file.read_text() if file.exists() else None


def hidden(directory: str) -> list[Path]:
    """What is left of work in progress."""
    return list(Path(directory).glob(".*"))


def is_alive(pid: int) -> bool:
    """Whether a process is there, even as a zombie."""
    return Path(f"/proc/{pid}").exists()


def parent_of(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _ends(event: Event) -> bool:
    return isinstance(event, Failed | Stopped)
