"""What becomes of checkpoints: they are promised, become durable or do not, and are taken over by other trials."""

from __future__ import annotations

import math
from dataclasses import replace

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.result import TRAINING_ITERATION, Result, what_it_has
from counterpoint.tune.runner.events import AskExecutor, DeleteCheckpoint, Notify, Warn
from counterpoint.tune.runner.kept_checkpoints import score
from counterpoint.tune.runner.progress import AttemptPhase, TrialProgress
from counterpoint.tune.runner.requests import RequestNotes
from counterpoint.tune.trial import Trial


class Transfers(RequestNotes):
    """The part of `ExperimentMachine` that follows checkpoints."""

    def _saved(self, trial: Trial, progress: TrialProgress, checkpoint: Checkpoint | None) -> None:
        wanted, kept = progress.wanted, progress.wanted_kept
        if wanted is not None and (checkpoint is None or checkpoint.path == wanted.path):
            progress.wanted, progress.wanted_kept = None, False
            if checkpoint is not None and checkpoint.iteration != wanted.iteration:  # a run goes on while it is saved
                wanted = self._note_saved(progress, replace(wanted, iteration=checkpoint.iteration))
            self._is_saved(trial, wanted, kept)
            if progress.phase is AttemptPhase.SAVING:
                self._go_on(trial, progress)
        elif checkpoint is not None:  # a function made it by itself
            self._is_saved(trial, checkpoint, kept=True)

    def _save_failed(self, trial: Trial, progress: TrialProgress, error: str) -> None:
        if progress.phase is not AttemptPhase.SAVING or progress.wanted is None:
            return
        self._emit(Warn(f"{trial}: no checkpoint at {progress.wanted.path}: {error}"))
        self._forget_wanted(progress)
        self._go_on(trial, progress)

    def _is_saved(self, trial: Trial, checkpoint: Checkpoint, kept: bool) -> None:
        self.promised.pop(checkpoint.path, None)
        self._delete(self.kept.replace_newest(trial, checkpoint))
        if kept:
            self._warn_of_rank(trial, checkpoint)
            self._delete(self.kept.add_to_best(trial, checkpoint))
        self._emit(Notify("on_trial_save", trial, {"checkpoint": checkpoint}))
        self._wake(checkpoint.path, checkpoint)

    def _warn_of_rank(self, trial: Trial, checkpoint: Checkpoint) -> None:
        """Says so, at the first of a trial, if checkpoints are to be ranked by what results do not have."""
        attribute = trial.checkpoint_score_attr
        if trial.keep_checkpoints_num is None or trial.checkpoints or not checkpoint.result:
            return
        if math.isinf(score(checkpoint, attribute)[0]):
            has = what_it_has(checkpoint.result, attribute.removeprefix("min-"))
            self._emit(
                Warn(f"{trial}: checkpoint_score_attr is {attribute!r}, which its result has not as a number; {has}")
            )

    def _forget_wanted(self, progress: TrialProgress) -> None:
        """A promised checkpoint will never be durable."""
        wanted, progress.wanted, progress.wanted_kept = progress.wanted, None, False
        if wanted is not None:
            self.promised.pop(wanted.path, None)
            if progress.for_scheduler is not None and progress.for_scheduler.path == wanted.path:
                self._replace_for_scheduler(progress, None)
                self.scheduler.on_save_failed(self, wanted)
            self._wake(wanted.path, None)
            if self.retained.pop(wanted.path, None) is not None:
                self._emit(DeleteCheckpoint(wanted))

    def _wake(self, path: str, saved: Checkpoint | None) -> None:
        """Tells those that are to take a checkpoint over; without it they stay what they are."""
        for trial in self.waiting.pop(path, ()):
            progress = self.table.progress(trial)
            if progress.exploit is None or progress.exploit.source.path != path:
                continue  # it has been told otherwise since
            if saved is None:
                self._emit(Warn(f"{trial} stays what it is: the checkpoint {path} was never made"))
                self._drop_exploit(progress)
            else:
                progress.exploit = progress.exploit._replace(source=saved)
            if progress.phase is AttemptPhase.WAITING:
                self._go_on(trial, progress)

    def _go_on_with_exploit(self, trial: Trial, progress: TrialProgress) -> None:
        exploit = progress.exploit
        assert exploit is not None
        if self._is_durable(exploit.source):
            progress.phase = AttemptPhase.RESETTING
            self._emit(AskExecutor("change", trial, (exploit.config, exploit.source, exploit.experiment_tag)))
        else:
            progress.phase = AttemptPhase.WAITING

    def _take_over(self, trial: Trial, progress: TrialProgress) -> None:
        """The trial is another's copy from now on."""
        exploit = progress.exploit
        assert exploit is not None
        progress.exploit = None
        progress.held.clear()
        progress.counted, progress.latest = exploit.source.iteration, {}
        trial.config, trial.experiment_tag = exploit.config, exploit.experiment_tag
        self._delete(self.kept.replace_newest(trial, exploit.source))
        self._delete(self.kept.release(exploit.source))

    def _save_repetition(self, trial: Trial, progress: TrialProgress, result: Result) -> None:
        """A result that counted long ago may lack its checkpoint still: else kills in between could hold a trial up for ever."""
        every = trial.checkpoint_freq
        iteration = result[TRAINING_ITERATION]
        saved = 0 if trial.checkpoint is None else trial.checkpoint.iteration
        if every and iteration % every == 0 and iteration > saved:
            self._want_checkpoint(trial, progress, result, kept=True)
