"""The executor whose trials are LoRA runs of a live job: all share one trainer, one base model and one fleet of servers.

| the runner asks | the run |
|---|---|
| start | its orchestrator joins the job as a guest, from its newest commit if it was there before |
| save | its newest step is made durable and kept by the trainer |
| pause, stop | drains, commits, says BYE |
| reset with another trial's checkpoint | copies that run inside the trainer, and changes keys in place, at a step boundary |

A result is a step's line of `run_<id>/metrics.jsonl`, delivered once, in order. **A run does not wait for the tuner**: it goes
on with its next step while its result is looked at, and a decision takes effect at the next step boundary. So a run may be a step
or two ahead of the last result that the tuner has; what it has done beyond a STOP is not reported. Its `steps` bound it.

Resources are the trainer's slots. What a trial asks for besides (`cpu`, `gpu`) belongs to the job, and is not counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.job.configuration.load import merge
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import on_one_line
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.executor import Event, EventExecutor, Failed, SaveFailed
from counterpoint.tune.resources import Resources
from counterpoint.tune.runs.attempt import RunAttempt
from counterpoint.tune.runs.exploit import IN_PLACE, START, CopyNote, changed_keys, note_copy, overridden_keys
from counterpoint.tune.runs.host_job import HostJob
from counterpoint.tune.runs.saved import SavedStep, read_saved
from counterpoint.tune.runs.varied_run import VariedRun
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 0.1
"""How often the runs' processes and metrics are looked at while the runner waits."""

READY_SECONDS = 900.0
"""Time limit for the job's trainer and servers to be ready."""

CLEANUP_SECONDS = 60.0
"""How long runs may take to end in order when the experiment ends; then they are killed, and `tune resume` goes on."""


class RunTrialExecutor(EventExecutor):
    """Runs trials as guests of a job. Call it from the main thread: processes die with the thread that started them."""

    def __init__(self, job: HostJob, run: VariedRun, slots: int | None = None) -> None:
        """`slots` limits the trials at once further than the trainer does."""
        super().__init__()
        self.job, self.run = job, run
        self._slots = slots
        self._attempts: dict[str, RunAttempt] = {}
        self._events: list[Event] = []
        self._ours: set[str] = set()
        """The ids of all runs that were started here: they may count as living for a moment after their end."""
        self._declined: set[str] = set()
        """Trials that could not be reset in place: their next start makes the copy."""

    async def ready(self) -> None:
        """Starts the job, if it is the experiment's, and waits until runs can join. Raises `TuneError` if that fails."""
        self.job.start()
        deadline = time.monotonic() + READY_SECONDS
        while (obstacle := self._ask_job(self.job.obstacle)) is not None:
            if time.monotonic() > deadline:
                raise TuneError(f"the job was not ready within {READY_SECONDS:g} s: {obstacle}")
            await asyncio.sleep(POLL_SECONDS)

    def has_resources(self, resources: Resources) -> bool:
        """Whether the trainer has a free slot."""
        return self._used() < self._total()

    def could_ever_run(self, trial: Trial) -> str | None:
        """None, or that the trainer takes no guest at all."""
        total = self._ask_job(self.job.slots)
        return None if total >= 1 else f"a trial needs a slot of the trainer, which has trainer.max_runs = {total}"

    def begin(self, trial: Trial, attempt: int, checkpoint: Checkpoint | None = None) -> None:
        """Makes the trial's run join the job. `Started` follows once rollouts can begin.

        A run goes on from its newest commit, never from before it: its steps are trained once. So its own checkpoint says no
        more than that there is one. Another trial's is copied: into a new run before its first step, else in place of an update.
        """
        anew = trial.trial_id in self._declined
        self._declined.discard(trial.trial_id)
        try:
            config = self.run.config(trial, trial.config)
            settings = self.run.settings(trial.trial_id, trial.config)
            copy = self._copy_at_start(trial, config, checkpoint, anew)
            changes = overridden_keys(config)
        except (UserError, TuneError, ValueError, OSError) as error:
            self._events.append(Failed(trial.trial_id, attempt, on_one_line(str(error))))
            return
        source, note = copy or (None, None)
        begins_as_copy = note is not None and note.request_id == START
        if source is not None and begins_as_copy:
            start_from = {"run": source.run_id, "step": source.step}
            settings = merge(settings, {"training": {"start_from": start_from}})
        begun = RunAttempt(trial.trial_id, attempt, config, settings, self.job, trial.last_result)
        if source is not None and note is not None and begins_as_copy:
            begun.began_as_copy(source, note)
            source = note = None
        if source is not None or changes:
            begun.exploit_first(source, note, changes)
        self._attempts[trial.trial_id] = begun
        self._ours.add(config.run_id)

    def _copy_at_start(
        self, trial: Trial, config: RunConfig, checkpoint: Checkpoint | None, anew: bool
    ) -> tuple[SavedStep, CopyNote] | None:
        if checkpoint is None or checkpoint.trial_id == trial.trial_id:
            return None
        has_begun = (config.run_dir / "control").exists()
        note = note_copy(Path(trial.logdir), checkpoint, trial.config, anew, at_start=not has_begun)
        return read_saved(checkpoint.path), note

    def proceed(self, trial: Trial) -> None:
        """Lets the next result be delivered."""
        self._of(trial, RunAttempt.want)

    def save_to(self, trial: Trial, checkpoint: Checkpoint) -> None:
        """Asks for a checkpoint of the run's newest step; the run goes on meanwhile."""
        if (attempt := self._attempts.get(trial.trial_id)) is None:
            return
        try:
            attempt.save(checkpoint)
        except (UserError, OSError) as error:
            self._events.append(SaveFailed(trial.trial_id, attempt.number, str(error)))

    def change(
        self, trial: Trial, config: dict[str, Any], checkpoint: Checkpoint | None, experiment_tag: str = ""
    ) -> bool:
        """Copies a checkpoint into the run and changes its keys, at a step boundary.

        Returns:
            False for a key that cannot change while the run is trained.
        """
        if (attempt := self._attempts.get(trial.trial_id)) is None:
            return False
        try:
            new, settings = self.run.config(trial, config), self.run.settings(trial.trial_id, config)
            changes = changed_keys(attempt.config, new)
            if not all(map(IN_PLACE.fullmatch, changes)):
                self._declined.add(trial.trial_id)
                return False
            source = note = None
            if checkpoint is not None:
                source = read_saved(checkpoint.path)
                note = note_copy(Path(trial.logdir), checkpoint, config, anew=True)
            attempt.exploit(source, note, changes)
        except (UserError, TuneError, OSError) as error:
            logger.warning("trial %s cannot be reset in place: %s", trial.trial_id, error)
            self._declined.add(trial.trial_id)
            return False
        attempt.change(new, settings)
        return True

    def suspend(self, trial: Trial) -> None:
        """Makes the run leave the job; a later start goes on from its last commit."""
        self._of(trial, RunAttempt.leave)

    def end(self, trial: Trial, error: bool = False) -> None:
        """Ends the run in order."""
        self._of(trial, RunAttempt.leave)

    async def next_events(self, timeout: float) -> Sequence[Event]:
        """What has happened, in order. Raises `TuneError` if the job has ended: no trial can go on."""
        deadline = time.monotonic() + timeout
        # Processes and files have to be looked at; no event announces a line of metrics.
        while not self._poll() and (left := deadline - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(POLL_SECONDS, left))
        events, self._events = self._events, []
        return events

    def resource_string(self) -> str:
        """The slots in use, of how many."""
        return f"{self._used()}/{self._total()} slots of the trainer in {self.job.directory}"

    async def close(self) -> None:
        """Ends all runs, and the job if it is the experiment's."""
        for attempt in self._attempts.values():
            attempt.leave()
        deadline = time.monotonic() + CLEANUP_SECONDS
        while any(not attempt.ended for attempt in self._attempts.values()) and time.monotonic() < deadline:
            for attempt in self._attempts.values():
                attempt.poll()
            await asyncio.sleep(POLL_SECONDS)
        for attempt in self._attempts.values():
            if not attempt.ended:
                logger.warning("%s: its orchestrator did not end in order and is killed", attempt.config.run_id)
                attempt.kill()
        self._attempts.clear()
        await asyncio.to_thread(self.job.stop)

    def _poll(self) -> bool:
        """Collects events; returns whether there are any. Raises `TuneError`."""
        self._ask_job(self.job.check)
        for trial_id, attempt in list(self._attempts.items()):
            try:
                self._events += attempt.poll()
            except UserError as error:
                raise TuneError(str(error)) from None
            if attempt.ended:
                del self._attempts[trial_id]
        return bool(self._events)

    def _of(self, trial: Trial, ask: Callable[[RunAttempt], Any]) -> None:
        if (attempt := self._attempts.get(trial.trial_id)) is not None:
            ask(attempt)

    def _used(self) -> int:
        ours = sum(attempt.holds_slot for attempt in self._attempts.values())
        return ours + self._others()

    def _total(self) -> int:
        slots = self._ask_job(self.job.slots)
        return slots if self._slots is None else min(slots, self._slots + self._others())

    def _others(self) -> int:
        return self._ask_job(lambda: self.job.runs_of_others(self._ours))

    @staticmethod
    def _ask_job(ask: Callable[[], T]) -> T:
        try:
            return ask()
        except UserError as error:
            raise TuneError(str(error)) from None
