"""How the runner carries instructions out: on the executor, the search algorithm's thread, the callbacks and the disk."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpoint.transport.files.atomic import remove_directory
from counterpoint.tune.callbacks.callback import Callbacks
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.executors import executor as executors
from counterpoint.tune.executors.executor import EventExecutor
from counterpoint.tune.runner import events
from counterpoint.tune.runner.events import Event, Instruction
from counterpoint.tune.runner.machine import ExperimentMachine
from counterpoint.tune.runner.resume import RemoteCopy, Sync
from counterpoint.tune.runner.search_thread import SearchThread
from counterpoint.tune.stoppers.stopper import Stopper
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)

_COPIED_AT = ("on_trial_save", "on_trial_complete", "on_trial_fail")
"""What of a trial is followed by a copy of its directory."""


class Acting:
    """The part of `TrialRunner` that acts; `TrialRunner` says when."""

    directory: Path | None
    iteration: int
    stopper: Stopper
    _executor: EventExecutor
    callbacks: Callbacks
    _machine: ExperimentMachine
    _search: SearchThread | None
    _remote: RemoteCopy | None
    _sync: Sync
    _background: set[asyncio.Task[None]]
    _files: threading.Lock
    """Held while checkpoints are deleted or copied."""

    def get_trials(self) -> list[Trial]:
        """Every trial, in the order of creation."""
        return self._machine.table.trials

    def _decide(self, event: Event) -> None:
        raise NotImplementedError

    def _set_up(self) -> None:
        raise NotImplementedError

    def _act(self, instruction: Instruction) -> None:
        """Carries one instruction out."""
        match instruction:
            case events.Notify(method, trial, info):
                self._notify(method, trial, info)
                is_copied = trial.remote_checkpoint_dir is not None or trial.sync_to_driver_fn is not None
                if is_copied and method in _COPIED_AT and (trial.sync_on_checkpoint or trial.is_finished()):
                    self._in_background(self._copy_trial, trial)
            case events.TellResult() | events.TellComplete():
                if self._search is not None:
                    self._search.tell(instruction)
            case events.AskSearch(count):
                if self._search is not None:
                    self._search.ask(count)
            case events.WriteError(trial, text, number):
                trial.write_error(number, text)
            case events.Warn(text):
                logger.warning("%s", text)
            case events.DeleteCheckpoint(checkpoint):
                self._in_background(self._delete_checkpoint, checkpoint)
            case events.AskExecutor():
                self._ask_executor(instruction)

    def _ask_executor(self, asked: events.AskExecutor) -> None:
        """Asks. What the executor refuses is a failure of the trial."""
        executor, trial = self._executor, asked.trial
        attempt = self._machine.table.progress(trial).attempt
        try:
            if asked.method == "begin":
                Path(trial.logdir).mkdir(parents=True, exist_ok=True)
            elif asked.method == "save_to":
                # Left by a machine that died before the journal was on its disk.
                remove_directory(Path(asked.arguments[0].path))
            answer = getattr(executor, asked.method)(trial, *asked.arguments)
            if asked.method == "change" and not answer:
                self._decide(events.ResetRefused(trial.trial_id, attempt))
        except Exception as error:
            logger.exception("%s: %s failed", trial, asked.method)
            executor.raised[trial.trial_id] = error
            kind = executors.SaveFailed if asked.method == "save_to" else executors.Failed
            reason = f"{asked.method} failed: {type(error).__name__}: {error}"
            self._decide(kind(trial.trial_id, attempt, reason))

    def _notify(self, method: str, trial: Trial, info: dict[str, Any]) -> None:
        self.callbacks.notify(method, iteration=self.iteration, trials=self.get_trials(), trial=trial, **info)

    def _replay(self, event: Event, instructions: list[Instruction]) -> None:
        """Tells again what nobody remembers having heard, after the snapshot; loggers know by number what they have written."""
        self._set_up()
        if isinstance(event, events.ResultReceived) and event.stop is not None:
            self.stopper(event.trial_id, event.result)
        for instruction in instructions:
            match instruction:
                case events.Notify(method, trial, info):
                    self._notify(method, trial, info)
                case events.WriteError(trial, text, number):
                    trial.write_error(number, text)

    def _in_background(self, work: Callable[..., None], *arguments: Any) -> None:
        task = asyncio.create_task(asyncio.to_thread(work, *arguments))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        try:
            with self._files:
                self._executor.delete_checkpoint(checkpoint)
        except OSError as error:
            logger.warning("%s: the checkpoint is not deleted: %s", checkpoint.path, error)

    def _copy_trial(self, trial: Trial) -> None:
        """Brings a trial's directory here up to date, and its copy elsewhere."""
        try:
            with self._files:
                if trial.sync_to_driver_fn is not None:
                    trial.sync_to_driver_fn(trial.logdir, trial.logdir)
                if trial.remote_checkpoint_dir is not None:
                    self._sync(trial.logdir, str(Path(trial.remote_checkpoint_dir) / Path(trial.logdir).name))
        except Exception as error:  # noqa: BLE001 - the functions are the user's
            logger.warning("the copies of %s are not up to date: %s", trial, error)

    def _send(self) -> None:
        """Brings the copy elsewhere up to date. Nothing is deleted meanwhile, so that it has all that its state names."""
        if self._remote is None:
            return
        try:
            with self._files:
                self._remote.send()
        except OSError as error:
            logger.warning("the copy of %s is not up to date: %s", self.directory, error)
