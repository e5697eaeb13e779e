"""An executor of processes, driven by the calls of `TrialExecutor`: each waits for the event that answers it.

For who drives trials by hand, without a `TrialRunner`. The calls share a private event loop, so they are made from one thread, in
which no event loop runs. One executor is driven by a runner or by calls, not by both.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.tune.callbacks.trial_loggers import TrialLoggers
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import AbortTrialExecution, TuneError
from counterpoint.tune.executors.attempt import Exported
from counterpoint.tune.executors.executor import Completed, Event, Failed, Reported, Saved, SaveFailed, Started, Stopped
from counterpoint.tune.executors.process_executor import ProcessTrialExecutor
from counterpoint.tune.executors.trial_executor import Source, as_checkpoint
from counterpoint.tune.result import DONE, Result
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)

T = TypeVar("T")
Kind = TypeVar("Kind", bound=Event)

WAIT_SECONDS = 1.0
"""How long one look for events waits. Whatever is waited for has a deadline of the executor's own, except a step."""


@dataclass
class _Called:
    """A trial that is driven by calls."""

    trial: Trial
    attempt: int = 0
    runs: bool = False
    works: bool = False
    """Whether a result of it is still to come."""
    changes: int = 0
    """How many times it was asked to start, to be restored or to be reset, without a `Started` so far."""
    saves: int = 0
    results: deque[Result] = field(default_factory=deque)
    """Not fetched yet; they are kept over a pause."""
    answers: list[Event] = field(default_factory=list)
    failed: Failed | None = None
    """Whether the call failed; true until the call has returned."""


class CalledExecutor(ProcessTrialExecutor):
    """Answers the calls of `TrialExecutor`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._private: asyncio.Runner | None = None
        self._driven: dict[str, _Called] = {}
        self._ready: deque[str] = deque()
        """The trials of results that `get_next_available_trial` has not returned, in order."""
        self._loggers = TrialLoggers()

    # --- the life of a trial ---

    def start_trial(self, trial: Trial, checkpoint: Source | None = None, train: bool = True) -> bool:
        """Does as `TrialExecutor.start_trial`; waits until it is set up. Without a checkpoint it begins from the trial's newest.

        A trial that was paused with a result in flight gives that first. Raises `TuneError` for a trial that runs.
        """
        called = self._driven.setdefault(trial.trial_id, _Called(trial))
        if called.runs:
            raise TuneError(f"{trial} runs already; stop or pause it first")
        if trial.status != Trial.PAUSED:
            called.results.clear()
            self._forget_ready(called)
        source = trial.checkpoint or trial.restore_path if checkpoint is None else checkpoint
        begin_from = None if source is None else as_checkpoint(source, trial)
        called.trial, called.attempt, called.failed = trial, called.attempt + 1, None
        try:
            Path(trial.logdir).mkdir(parents=True, exist_ok=True)
            self._inside(lambda: self.begin(trial, called.attempt, begin_from))
        except (TuneError, OSError) as error:
            self._fail(called, str(error))
            return False
        called.runs, called.changes = True, 1
        if not self._has_started(called):
            self._take_failure(called)
            return False
        self.set_status(trial, Trial.RUNNING)
        self._ready.extend([trial.trial_id] * len(called.results))
        if train and not called.results:
            self.continue_training(trial)
        return True

    def continue_training(self, trial: Trial) -> None:
        """See `TrialExecutor.continue_training`. A trial that works already goes on with that; one that has failed says so next.

        Raises `TuneError` for a trial that does not run.
        """
        called = self._driven.get(trial.trial_id)
        if called is not None and called.failed is not None:
            return
        called = self._running(trial, "continued")
        if not called.works:
            called.works = True
            self._inside(lambda: self.proceed(trial))

    def stop_trial(
        self, trial: Trial, error: bool = False, error_msg: str | None = None, stop_logger: bool = True
    ) -> None:
        """Does as `TrialExecutor.stop_trial`; waits for its end, at most for the executor's deadlines."""
        try:
            called = self._driven.get(trial.trial_id)
            if called is not None and called.runs:
                self._inside(lambda: self.end(trial, error))
                self._answer(called, Stopped)
            if called is not None:
                called.results.clear()
                self._forget_ready(called)
        except Exception as problem:
            logger.exception("%s could not be stopped in order", trial)
            error, error_msg = True, error_msg or f"it could not be stopped in order: {problem}"
        if error:
            self._note_error(trial, error_msg or trial.error_msg or "it was stopped with an error")
        if stop_logger:
            self._loggers.close(trial)
        self.set_status(trial, Trial.ERROR if error else Trial.TERMINATED)

    def pause_trial(self, trial: Trial) -> None:
        """See `TrialExecutor.pause_trial`. The result of a step in progress is kept, and fetched when the trial runs again."""
        called = self._running(trial, "paused")
        self.save(trial)
        self._inside(lambda: self.suspend(trial))
        if self._answer(called, Stopped) is None:
            self._take_failure(called)
            return
        self._forget_ready(called)
        self.set_status(trial, Trial.PAUSED)

    def reset_trial(
        self,
        trial: Trial,
        new_config: dict[str, Any],
        new_experiment_tag: str,
        logger_creator: Callable[[dict[str, Any]], Any] | None = None,
    ) -> bool:
        """See `TrialExecutor.reset_trial`. Raises `TuneError` for a `logger_creator`: results are logged by the caller."""
        if logger_creator is not None:
            raise TuneError(
                f"reset_trial({trial}, logger_creator=...): a trial's process has no logger; give the trial `loggers`"
            )
        called = self._running(trial, "reset")
        if not self._inside(lambda: self.change(trial, new_config, None, new_experiment_tag)):
            return False
        self._forget_results(called)
        if not self._has_started(called):
            self._take_failure(called)
            return False
        trial.config, trial.experiment_tag = new_config, new_experiment_tag
        return True

    def get_running_trials(self) -> list[Trial]:
        """The trials that have been started by calls and have not ended."""
        return [called.trial for called in self._driven.values() if called.runs]

    # --- results ---

    def get_next_available_trial(self) -> Trial | None:
        """See `TrialExecutor.get_next_available_trial`. Waits for as long as a step takes."""
        while True:
            if self._ready:
                return self._driven[self._ready.popleft()].trial
            if (failed := next(self._failures(), None)) is not None:
                return failed.trial
            if not any(called.works for called in self._driven.values()):
                return None
            self._look(WAIT_SECONDS)

    def get_next_failed_trial(self) -> Trial | None:
        """Does as `TrialExecutor.get_next_failed_trial`; of the trials that have no unfetched result, one that has failed."""
        self._look(0.0)
        called = next((each for each in self._failures() if not each.results), None)
        if called is None:
            return None
        self._take_failure(called)
        return called.trial

    def fetch_result(self, trial: Trial) -> Result:
        """Does as `TrialExecutor.fetch_result`; it is the trial's `last_result` then. Raises `TuneError` if it does not run."""
        called = self._driven.get(trial.trial_id) or _Called(trial)
        while not called.results:
            if called.failed is not None:
                raised = self._take_failure(called)
                raise raised if raised is not None else TuneError(f"{trial} failed:\n{trial.error_msg}")
            if not called.works:
                raise TuneError(f"{trial} has no result and works towards none; call start_trial or continue_training")
            self._look(WAIT_SECONDS)
        trial.last_result = called.results.popleft()
        if trial.trial_id in self._ready and not called.results:
            self._forget_ready(called)
        self._loggers.on_result(trial, trial.last_result)
        return trial.last_result

    # --- checkpoints ---

    def save(
        self, trial: Trial, storage: str = Checkpoint.PERSISTENT, result: Result | None = None
    ) -> Checkpoint | None:
        """Does as `TrialExecutor.save`; waits until it is durable. It is the trial's `checkpoint` then.

        Raises `TuneError` for a storage that is neither `persistent` nor `memory`, and for a trial that does not run.
        """
        if storage not in (Checkpoint.PERSISTENT, Checkpoint.MEMORY):
            raise TuneError(f"storage = {storage!r}: expected {Checkpoint.PERSISTENT!r} or {Checkpoint.MEMORY!r}")
        called = self._running(trial, "saved")
        known = trial.last_result if result is None else result
        iteration = int(known.get("training_iteration", 0))
        while (path := Path(trial.logdir) / f"checkpoint_{iteration:06d}-{called.saves + 1}").exists():
            called.saves += 1
        wanted = Checkpoint(trial.trial_id, iteration, str(path.absolute()), known)
        self._inside(lambda: self.save_to(trial, wanted))
        while (answer := self._answer(called, Saved, SaveFailed)) is not None:
            if isinstance(answer, SaveFailed):
                logger.warning("%s: no checkpoint at %s: %s", trial, path, answer.error)
                return None
            if isinstance(answer, Saved) and answer.checkpoint is not None and answer.checkpoint.path == wanted.path:
                trial.checkpoint = answer.checkpoint
                trial.checkpoints.append(trial.checkpoint)
                return trial.checkpoint
        self._take_failure(called)
        return None

    def restore(self, trial: Trial, checkpoint: Source | None = None, block: bool = False) -> bool:
        """See `TrialExecutor.restore`. Without any checkpoint the trial stays as it is.

        The result of a step in progress, and results that were not fetched, are of the state that is given up: they are dropped.

        Raises `RuntimeError` for a trial that does not run, and with `block` `AbortTrialExecution` for one that can never be
        restored, such as a function without `checkpoint_dir`.
        """
        source = trial.checkpoint or trial.restore_path if checkpoint is None else checkpoint
        called = self._driven.get(trial.trial_id)
        if called is None or not called.runs:
            raise RuntimeError(
                f"{trial} has no process to be restored; start it first, from that checkpoint if you like"
            )
        if source is None:
            return True
        self._inside(lambda: self._of(trial, lambda attempt: attempt.restore(as_checkpoint(source, trial))))
        self._forget_results(called)
        if not block:
            return True
        if not self._has_started(called):
            raised = self._take_failure(called)
            if isinstance(raised, AbortTrialExecution):
                raise raised
            return False
        return True

    def export_trial_if_needed(self, trial: Trial) -> dict[str, str]:
        """Does as `TrialExecutor.export_trial_if_needed`, of a trial that runs. Else what it exported when it was stopped."""
        called = self._driven.get(trial.trial_id)
        if called is None or not called.runs or not trial.export_formats:
            return self._exported.get(trial.trial_id, {})
        self._inside(lambda: self._of(trial, lambda attempt: attempt.export(trial.export_formats)))
        answer = self._answer(called, Exported)
        if answer is None:
            self._take_failure(called)
            return {}
        return answer.paths

    def cleanup(self, trial: Trial | None = None) -> None:
        """See `TrialExecutor.cleanup`."""
        if trial is not None:
            called = self._driven.pop(trial.trial_id, None)
            if called is not None and called.runs:
                self._driven[trial.trial_id] = called
                self.stop_trial(trial)
                del self._driven[trial.trial_id]
            if called is not None:
                self._forget_ready(called)
            return
        if self._private is None:
            self._private = asyncio.Runner()
        self._private.run(self.close())
        for called in self._driven.values():
            self._loggers.close(called.trial)
        self._driven.clear()
        self._private.close()
        self._private = None

    # --- inside ---

    def _inside(self, ask: Callable[[], T]) -> T:
        """Asks within the private loop, which the answers need."""

        async def asked() -> T:
            return ask()

        if self._private is None:
            self._private = asyncio.Runner()
        return self._private.run(asked())

    def _look(self, seconds: float) -> None:
        if self._private is None:
            return
        for event in self._private.run(_events(self, seconds)):
            self._note(event)

    def _note(self, event: Event) -> None:
        called = self._driven.get(event.trial_id)
        if called is None or called.attempt != event.attempt:
            return
        if isinstance(event, Started):
            called.changes = max(0, called.changes - 1)
        elif isinstance(event, Reported | Completed):
            if called.changes:
                return  # of what it was before
            called.works = False
            done = {**called.trial.last_result, DONE: True}
            called.results.append(event.result if isinstance(event, Reported) else done)
            self._ready.append(event.trial_id)
        elif isinstance(event, Failed):
            called.failed, called.runs, called.works = event, False, False
        else:
            called.runs = called.runs and not isinstance(event, Stopped)
            called.works = called.works and called.runs
            called.answers.append(event)

    def _answer(self, called: _Called, *kinds: type[Kind]) -> Kind | None:
        """Waits for an event of the trial; None if it has failed instead."""
        while True:
            found = next((event for event in called.answers if isinstance(event, kinds)), None)
            if found is not None:
                del called.answers[: called.answers.index(found) + 1]
                return found
            if called.failed is not None or not called.runs:
                return None
            self._look(WAIT_SECONDS)

    def _has_started(self, called: _Called) -> bool:
        """Waits until the trial has become what was last asked of it; False if it has failed instead."""
        while called.changes and called.failed is None and called.runs:
            self._look(WAIT_SECONDS)
        return called.failed is None and called.runs

    def _forget_results(self, called: _Called) -> None:
        """The trial becomes something else: nothing that it did before is delivered."""
        called.works = False
        called.changes += 1
        called.results.clear()
        self._forget_ready(called)

    def _failures(self) -> Iterator[_Called]:
        return (called for called in self._driven.values() if called.failed is not None)

    def _take_failure(self, called: _Called) -> BaseException | None:
        """Says that a trial has failed: it is in ERROR. Returns what it raised, if that is known here."""
        if called.failed is not None:
            self._fail(called, called.failed.error)
            called.failed = None
        return self.raised.get(called.trial.trial_id)

    def _fail(self, called: _Called, message: str) -> None:
        called.runs = called.works = False
        self._note_error(called.trial, message)
        self._loggers.close(called.trial)
        self.set_status(called.trial, Trial.ERROR)

    @staticmethod
    def _note_error(trial: Trial, message: str) -> None:
        trial.error_msg = message
        trial.num_failures += 1
        try:
            trial.write_error(trial.num_failures, message)
        except OSError as error:
            logger.warning("%s: its error file cannot be written: %s", trial, error)

    def _forget_ready(self, called: _Called) -> None:
        self._ready = deque(each for each in self._ready if each != called.trial.trial_id)

    def _running(self, trial: Trial, wanted: str) -> _Called:
        called = self._driven.get(trial.trial_id)
        if called is None or not called.runs:
            raise TuneError(f"{trial} is {trial.status} and has no process, so it cannot be {wanted}; start it first")
        return called


async def _events(executor: CalledExecutor, seconds: float) -> Sequence[Event]:
    return await executor.next_events(seconds)
