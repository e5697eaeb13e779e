"""What a scheduler sees of the state machine and asks of it: `tune.schedulers.scheduler.Trials`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.result import TRAINING_ITERATION, Result
from counterpoint.tune.runner.events import DeleteCheckpoint, Instruction, Warn
from counterpoint.tune.runner.kept_checkpoints import KeptCheckpoints
from counterpoint.tune.runner.progress import AttemptPhase, Exploit, TrialProgress
from counterpoint.tune.runner.search_side import SearchSide
from counterpoint.tune.runner.trial_table import TrialTable
from counterpoint.tune.schedulers.scheduler import TrialScheduler
from counterpoint.tune.trial import Trial


class RequestNotes:
    """The part of `ExperimentMachine` that notes requests; the machine carries them out when the trial rests."""

    scheduler: TrialScheduler
    table: TrialTable
    kept: KeptCheckpoints
    search: SearchSide
    may_start: bool
    waiting: dict[str, list[Trial]]
    retained: dict[str, Checkpoint]
    """Checkpoints that only the scheduler needs, by path."""
    _free: frozenset[str]
    promised: dict[str, str]
    """The checkpoints that were promised and are not durable yet, by path, with the id of the trial that saves them."""

    # --- Trials ---

    def get_trials(self) -> Sequence[Trial]:
        """See `Trials`."""
        return self.table.trials

    def get_trial(self, trial_id: str) -> Trial:
        """See `Trials`. Raises `KeyError`."""
        found = self.table.get(trial_id)
        if found is None:
            raise KeyError(f"there is no trial {trial_id!r}")
        return found[0]

    def with_status(self, status: str) -> Collection[Trial]:
        """See `Trials`."""
        return self.table.with_status(status)

    def has_resources_for_trial(self, trial: Trial) -> bool:
        """See `Trials`. True only while the scheduler is asked for a trial to start."""
        return self.table.progress(trial).needs in self._free

    def first_startable(self, status: str) -> Trial | None:
        """See `Trials`."""
        return self.table.first(status, self._free)

    def save_trial(self, trial: Trial, result: Result) -> Checkpoint:
        """See `Trials`."""
        progress = self.table.progress(trial)
        if progress.phase in (AttemptPhase.OUT, AttemptPhase.STOPPING):
            self._replace_for_scheduler(progress, trial.checkpoint)
            return trial.checkpoint or Checkpoint(trial.trial_id, progress.counted, "", result)
        promised = self._want_checkpoint(trial, progress, result)
        self._replace_for_scheduler(progress, promised)
        if progress.phase is AttemptPhase.WAITING:
            self._go_on(trial, progress)
        return promised

    def exploit(self, trial: Trial, source: Checkpoint, config: dict[str, Any], experiment_tag: str) -> None:
        """See `Trials`."""
        progress = self.table.progress(trial)
        if trial.is_finished() or progress.end == Trial.TERMINATED:
            return
        owner = self.table.get(source.trial_id)
        if owner is not None and (newest := owner[1].for_scheduler) is not None and newest.path == source.path:
            source = newest
        if not self._exists(source):
            self._emit(
                Warn(f"{trial} stays what it is: the checkpoint {source.path or 'it is to take over'} was never made")
            )
            return
        self._drop_exploit(progress)
        self.kept.hold(source)
        progress.exploit = Exploit(source, config, experiment_tag)
        if not self._is_durable(source):
            self.waiting.setdefault(source.path, []).append(trial)

    def pause_trial(self, trial: Trial) -> None:
        """See `Trials`."""
        progress = self.table.progress(trial)
        if trial.status == Trial.PENDING:
            self.table.move(trial, Trial.PAUSED)
        elif trial.status == Trial.RUNNING and progress.end is None:
            progress.end = Trial.PAUSED
            if progress.phase is AttemptPhase.RESTING:
                self._want_checkpoint(trial, progress, trial.last_result)
            elif progress.phase is AttemptPhase.WAITING:
                self._go_on(trial, progress)

    def unpause_trial(self, trial: Trial) -> None:
        """See `Trials`."""
        progress = self.table.progress(trial)
        if trial.status == Trial.PAUSED:
            self.table.move(trial, Trial.PENDING)
            self.may_start = True
        elif progress.end == Trial.PAUSED:
            progress.end = Trial.PENDING if progress.phase is AttemptPhase.STOPPING else None

    def stop_trial(self, trial: Trial) -> None:
        """See `Trials`."""
        progress = self.table.progress(trial)
        if trial.is_finished() or progress.end in (Trial.TERMINATED, Trial.ERROR):
            return
        if progress.phase is AttemptPhase.OUT:
            self.scheduler.on_trial_remove(self, trial)
            if not trial.is_finished():  # the scheduler may have asked once more
                self._emit(self.search.tell_complete(trial.trial_id, trial.last_result or None))
                self._settle(trial, progress, Trial.TERMINATED)
            return
        was_stopping = progress.phase is AttemptPhase.STOPPING
        progress.end = Trial.TERMINATED
        progress.held.clear()
        self._drop_exploit(progress)
        if trial.last_result:
            self.scheduler.on_trial_complete(self, trial, trial.last_result)
        else:
            self.scheduler.on_trial_remove(self, trial)
        self._emit(self.search.tell_complete(trial.trial_id, trial.last_result or None))
        if progress.phase not in (AttemptPhase.RESTING, AttemptPhase.STOPPING) and not was_stopping:
            self._stop_attempt(trial, progress)

    # --- what the machine shares ---

    def _want_checkpoint(self, trial: Trial, progress: TrialProgress, result: Result, kept: bool = False) -> Checkpoint:
        """Notes that the trial is to be saved when it rests; returns what will be durable then."""
        progress.wanted_kept |= kept
        if progress.wanted is None:
            progress.saves += 1
            path = str(Path(trial.logdir) / f"checkpoint_{progress.counted:06d}-{progress.saves}")
            progress.wanted = Checkpoint(trial.trial_id, progress.counted, path, result)
            self.promised[path] = trial.trial_id
        return progress.wanted

    def _replace_for_scheduler(self, progress: TrialProgress, checkpoint: Checkpoint | None) -> None:
        before, progress.for_scheduler = progress.for_scheduler, checkpoint
        self.kept.hold(checkpoint)
        self._delete(self.kept.release(before))

    def _delete(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Deletes what nobody needs any more; what the scheduler may still name is looked at again the next time."""
        for checkpoint in checkpoints:
            self.retained[checkpoint.path] = checkpoint
        for checkpoint in list(self.retained.values()):
            if self.kept.is_held(checkpoint.path):
                del self.retained[checkpoint.path]
            elif not self.scheduler.needs_checkpoint(checkpoint):
                del self.retained[checkpoint.path]
                self._emit(DeleteCheckpoint(checkpoint))

    def _drop_exploit(self, progress: TrialProgress) -> None:
        exploit, progress.exploit = progress.exploit, None
        if exploit is not None:
            self._delete(self.kept.release(exploit.source))

    def _exists(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is there, or was promised."""
        path = checkpoint.path
        return not checkpoint.trial_id or self.kept.is_held(path) or path in self.retained or path in self.promised

    def _is_durable(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.path not in self.promised

    def _with_newest_result(self, trial: Trial, progress: TrialProgress, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint as it will be when it is saved now."""
        begin = trial.checkpoint  # of an attempt that has not reported
        result = progress.latest or ({} if begin is None else begin.result)
        iteration = result.get(TRAINING_ITERATION, 0 if begin is None else begin.iteration)
        return self._note_saved(progress, replace(checkpoint, iteration=iteration, result=result))

    @staticmethod
    def _note_saved(progress: TrialProgress, saved: Checkpoint) -> Checkpoint:
        """Keeps what the scheduler asked for as it became."""
        if progress.for_scheduler is not None and progress.for_scheduler.path == saved.path:
            progress.for_scheduler = saved
        return saved

    # --- what the machine has ---

    def _emit(self, *instructions: Instruction) -> None:
        raise NotImplementedError

    def _go_on(self, trial: Trial, progress: TrialProgress) -> None:
        raise NotImplementedError

    def _stop_attempt(self, trial: Trial, progress: TrialProgress) -> None:
        raise NotImplementedError

    def _settle(self, trial: Trial, progress: TrialProgress, status: str) -> None:
        raise NotImplementedError
