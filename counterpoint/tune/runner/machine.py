"""The experiment's state machine: pure, `handle(event) -> instructions`, no clock and no I/O; the same events give the same.

The vocabulary is `events.py`; `trial_runner.py` journals each event and carries the instructions out. The scheduler is called
inside, and must be as pure; search algorithm, stoppers and callbacks are told by instructions. `docs/tune.md` has the states.

The rules, for each trial:

- **Rest.** After `Started`, a result, a checkpoint or a reset an attempt rests until it is told to go on. What is wanted of it
  is done then, in this order: save, stop or pause, deliver results, take over another's state, train on.
- **Counting.** A result counts if its `training_iteration` is above that of every result that counted before. Any other, after
  a restore from a checkpoint, is a repetition and is delivered to nobody. After an exploit, counting begins at the source's
  iteration.
- **Pausing.** A trial that is paused from outside while it trains pauses after its next result, which is held, and delivered
  when the trial runs again.
- **Failures.** A failure counts against `max_failures`. Within them the trial is PENDING again and resumes from its newest
  durable checkpoint; beyond them it is in ERROR. A result that lacks a metric on which someone must decide is a failure after
  which the trial does not start again, since it would report the same; if all first results lack it, everything ends in ERROR.
- **Stopping.** Whoever stops a trial has told the scheduler and the search algorithm at once; its status follows when its
  attempt has ended, which also frees its resources. A failure meanwhile changes nothing.
- **Starting.** One trial a `ResourcesFree`, chosen by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.executors import executor
from counterpoint.tune.executors.executor import Completed, Failed, Saved, SaveFailed, Started, Stopped
from counterpoint.tune.result import DONE, SHOULD_CHECKPOINT, TRAINING_ITERATION, Result, lookup, what_it_has
from counterpoint.tune.runner import events
from counterpoint.tune.runner.events import Event, Instruction
from counterpoint.tune.runner.kept_checkpoints import KeptCheckpoints
from counterpoint.tune.runner.progress import AttemptPhase, HeldResult, TrialProgress
from counterpoint.tune.runner.search_side import SearchSide
from counterpoint.tune.runner.transfers import Transfers
from counterpoint.tune.runner.trial_table import TrialTable
from counterpoint.tune.schedulers.scheduler import TrialScheduler
from counterpoint.tune.trial import Trial


class ExperimentMachine(Transfers):
    """Decides by the rules above."""

    def __init__(
        self,
        scheduler: TrialScheduler,
        required_metrics: Sequence[str] = (),
        fail_fast: bool = False,
        max_pending: int = 1,
        max_running: int = 0,
    ) -> None:
        """Takes the metrics that each result must have, and how many trials may be PENDING in advance.

        At most `max_running` trials have a process, one that is being stopped included; 0 for any number.
        """
        self.scheduler = scheduler
        self.required_metrics = tuple(required_metrics)
        self.fail_fast = fail_fast
        self.max_running = max_running
        self.table = TrialTable()
        self.kept = KeptCheckpoints()
        self.search = SearchSide(max_pending)
        self.stopping: str | None = None
        """Why everything ends; None while it does not."""
        self.may_start = False
        """Whether something has changed since the scheduler last chose no trial."""
        self._free = frozenset()
        self.waiting = {}
        """Trials that are to take over a checkpoint that is not durable yet, by its path."""
        self.promised = {}
        self.retained = {}
        self._out: list[Instruction] = []

    # --- for the shell ---

    def handle(self, event: Event) -> list[Instruction]:
        """Returns the instructions, to be carried out in order."""
        self._out = []
        self._decide(event)
        if self.stopping is None:
            self._emit(*self.search.ask(self.table.count(Trial.PENDING)))
        return self._out

    def accepts(self, event: Event) -> bool:
        """Whether the event concerns what runs now; any other changes nothing and need not be journalled."""
        if isinstance(event, events.SearchIdle):
            waits = not (self.table.count(Trial.RUNNING) or self.may_start)
            return waits and self.search.may_propose and event.heard == self.search.told
        if not isinstance(event, executor.Event):
            return True
        found = self.table.get(event.trial_id)
        return found is not None and found[1].attempt == event.attempt and found[1].phase is not AttemptPhase.OUT

    def counts(self, event: events.ResultReceived) -> bool:
        """Whether the result of an accepted event is new, so that the stopper is to see it."""
        _, progress = self._found(event.trial_id)
        iteration = event.result.get(TRAINING_ITERATION, progress.counted + 1)
        return progress.phase is not AttemptPhase.STOPPING and iteration > progress.counted

    def startable(self) -> dict[str, Trial]:
        """An example for each need of a trial that could start, if its resources were free."""
        return self.table.examples() if self.stopping is None else {}

    def is_finished(self) -> bool:
        """Whether nothing runs and nothing is to come."""
        return self.table.unfinished == 0 and (self.search.finished or self.stopping is not None)

    def is_stuck(self) -> bool:
        """Whether only PAUSED trials are left and the scheduler, asked with free resources, has chosen none."""
        return self._only_paused() and not (self.search.asked and not self.search.finished)

    def waits_for_search_alone(self) -> bool:
        """Does as `is_stuck`, but for a search algorithm that has nothing to propose now, and is not at its end."""
        return self._only_paused() and self.search.asked and not (self.search.finished or self.search.may_propose)

    def _only_paused(self) -> bool:
        count = self.table.count
        return bool(count(Trial.PAUSED)) and not (self.may_start or count(Trial.RUNNING) or count(Trial.PENDING))

    # --- events ---

    def _decide(self, event: Event) -> None:
        if isinstance(event, executor.Event):
            if self.accepts(event):
                self._attempt_event(*self._found(event.trial_id), event)
            return
        match event:
            case events.TrialsProposed():
                self.search.proposed(event)
                self.may_start = True
                for trial in event.trials:
                    self._add(trial)
            case events.TrialAdded():
                self._add(event.trial)
            case events.SearchIdle():
                self.search.idle_after = event.heard
                self.may_start = True
            case events.SearchSaved():
                self.search.saved(event.search_state, event.heard)
            case events.ResourcesFree():
                self._start_one(event.needs)
            case events.CannotRun():
                self._cannot_run(event)
            case events.TrialStopRequested():
                if (found := self.table.get(event.trial_id)) is not None:
                    self.stop_trial(found[0])
            case events.StopRequested():
                self._stop_everything(event.reason)
            case events.Opened():
                self._open(event.errored)

    def _attempt_event(self, trial: Trial, progress: TrialProgress, event: Any) -> None:
        match event:
            case Started():
                self._started(trial, progress)
            case events.ResultReceived():
                self._result(trial, progress, event)
            case Completed():
                progress.returned = True
                if progress.phase is AttemptPhase.TRAINING:
                    self._go_on(trial, progress)
            case events.ResultRefused() if progress.phase is AttemptPhase.TRAINING:
                progress.phase = AttemptPhase.RESTING
                self._count_failure(trial, progress, event.reason)
                self._go_on(trial, progress)
            case Saved():
                self._saved(trial, progress, event.checkpoint)
            case SaveFailed():
                self._save_failed(trial, progress, event.error)
            case Failed():
                self._attempt_over(trial, progress)
                if progress.end not in (Trial.TERMINATED, Trial.ERROR):
                    self._count_failure(trial, progress, event.error, event.may_recover)
                self._settle(trial, progress, progress.end or Trial.PENDING)
            case Stopped():
                end = progress.end
                self._attempt_over(trial, progress)
                self._settle(trial, progress, end or Trial.PENDING)
            case events.ResetRefused() if progress.phase is AttemptPhase.RESETTING:
                progress.end = progress.end or Trial.PENDING  # it takes the other's state over when it starts again
                self._stop_attempt(trial, progress)

    def _add(self, trial: Trial) -> None:
        progress = self.table.add(trial)
        self.may_start = True
        if trial.restore_path is not None:
            trial.checkpoint = Checkpoint("", 0, trial.restore_path)
        self.scheduler.on_trial_add(self, trial)
        if self.stopping is not None and progress.phase is AttemptPhase.OUT:
            trials = self.table.trials
            if any(self.table.progress(each).lacks_metric for each in trials) and not any(
                each.num_results for each in trials
            ):
                # It was proposed before the experiment ended for want of the metric, and can run again as the others can.
                self._count_failure(trial, progress, self.stopping, may_recover=False)
                self._settle(trial, progress, Trial.ERROR)
            else:
                self.stop_trial(trial)

    def _start_one(self, needs: Sequence[str]) -> None:
        self.may_start = False
        if self.stopping is not None or 0 < self.max_running <= self.table.count(Trial.RUNNING):
            return
        self._free = frozenset(needs)
        trial = self.scheduler.choose_trial_to_run(self)
        if trial is not None and trial.status in (Trial.PENDING, Trial.PAUSED) and self.has_resources_for_trial(trial):
            progress = self.table.progress(trial)
            if progress.exploit is not None and self._is_durable(progress.exploit.source):
                self._take_over(trial, progress)
            progress.attempt += 1
            progress.returned, progress.latest = False, {}
            progress.phase = AttemptPhase.STARTING
            self.table.move(trial, Trial.RUNNING)
            self._emit(events.AskExecutor("begin", trial, (progress.attempt, trial.checkpoint)))
            self.may_start = True
        self._free = frozenset()

    def _cannot_run(self, event: events.CannotRun) -> None:
        trial, progress = self._found(event.trial_id)
        if progress.phase is AttemptPhase.OUT and not trial.is_finished():
            trial.num_failures += 1
            trial.error_msg = event.reason
            self._emit(events.WriteError(trial, event.reason, trial.num_failures))
            self._settle(trial, progress, Trial.ERROR)

    def _started(self, trial: Trial, progress: TrialProgress) -> None:
        if progress.phase is AttemptPhase.RESETTING:
            self._take_over(trial, progress)
            self._emit(events.Notify("on_trial_restore", trial))
        elif progress.phase is AttemptPhase.STARTING:
            self._emit(events.Notify("on_trial_start", trial))
            if trial.checkpoint is not None:
                self._emit(events.Notify("on_trial_restore", trial))
        else:
            return
        self._go_on(trial, progress)

    def _result(self, trial: Trial, progress: TrialProgress, event: events.ResultReceived) -> None:
        if progress.phase is AttemptPhase.STOPPING:
            return
        result = event.result
        is_new = result.setdefault(TRAINING_ITERATION, progress.counted + 1) > progress.counted
        if is_new:
            progress.counted = result[TRAINING_ITERATION]
            progress.held.append(HeldResult(result, bool(event.stop)))
        else:
            self._warn_of_repetition(trial, progress, result[TRAINING_ITERATION])
            progress.returned = progress.returned or bool(result.get(DONE))
            self._save_repetition(trial, progress, result)
        progress.latest = result
        if progress.phase is not AttemptPhase.TRAINING:
            return  # an executor whose trials do not wait while they are saved
        progress.phase = AttemptPhase.RESTING
        if progress.end == Trial.PAUSED and progress.exploit is None:
            self._want_checkpoint(trial, progress, result)
        self._go_on(trial, progress)

    def _warn_of_repetition(self, trial: Trial, progress: TrialProgress, iteration: int) -> None:
        """Says so once if iterations do not grow within an attempt: unlike after a restore, those results are new, and lost."""
        before = progress.latest.get(TRAINING_ITERATION)
        if before is not None and iteration <= before and not progress.repeats:
            progress.repeats = True
            self._emit(
                events.Warn(
                    f"{trial}: a result has training_iteration {iteration}, and one before it {before}; such results count for "
                    "nothing. Let it grow with each result, or leave it out to have results counted"
                )
            )

    def _deliver(self, trial: Trial, progress: TrialProgress, result: Result, stop: bool) -> None:
        """Lets everyone know of a new result, and notes what is decided."""
        if (missing := self._missing(trial, result)) is not None:
            progress.counted = result[TRAINING_ITERATION] - 1  # nobody has seen it
            progress.lacks_metric = True
            progress.held.clear()
            ends = self._all_lack_metric(trial)
            error = f"{missing}. No trial has reported it so far, so the experiment ends" if ends else missing
            self._count_failure(trial, progress, error, may_recover=False)
            if ends:
                self._end_in_error(error)
            return
        trial.last_result = result
        trial.num_results += 1
        if stop or result.get(DONE) or self._reaches_criterion(trial, result):
            result[DONE] = True
            self._complete(trial, progress, result)
        else:
            decision = self.scheduler.on_trial_result(self, trial, result)
            self._emit(self.search.tell_result(trial.trial_id, result))
            if decision == TrialScheduler.STOP:
                result[DONE] = True
                self._complete(trial, progress, result)
            elif decision == TrialScheduler.PAUSE and progress.end is None:
                progress.end = Trial.PAUSED
                if progress.exploit is None:
                    self._want_checkpoint(trial, progress, result)
        self._emit(events.Notify("on_trial_result", trial, {"result": result, "number": trial.num_results}))
        self.may_start = True
        every = trial.checkpoint_freq
        due = bool(every) and result[TRAINING_ITERATION] % every == 0
        if due or result.get(SHOULD_CHECKPOINT):
            self._want_checkpoint(trial, progress, result, kept=True)

    def _complete(self, trial: Trial, progress: TrialProgress, result: Result) -> None:
        """The trial has reached its end: by itself, by a criterion or by the scheduler's decision."""
        if progress.end in (Trial.TERMINATED, Trial.ERROR):
            return
        progress.end = Trial.TERMINATED
        progress.held.clear()
        self._drop_exploit(progress)
        if trial.checkpoint_at_end:
            self._want_checkpoint(trial, progress, result, kept=True)
        self.scheduler.on_trial_complete(self, trial, result)
        self._emit(self.search.tell_complete(trial.trial_id, result or None))

    def _stop_everything(self, reason: str) -> None:
        if self.stopping is None:
            self.stopping = reason
            if self.table.unfinished:
                for trial in self.table.trials:
                    self.stop_trial(trial)

    def _all_lack_metric(self, trial: Trial) -> bool:
        """Whether the metric's name is most likely wrong: all first results lack it, of as many trials as run, and not of one.

        Trials of another trainable could report something else.
        """
        trials = self.table.trials
        if any(each.num_results or each.trainable_name != trial.trainable_name for each in trials):
            return False
        lacking = sum(self.table.progress(each).lacks_metric for each in trials)
        return lacking >= max(2, self.table.count(Trial.RUNNING))

    def _end_in_error(self, error: str) -> None:
        """Ends everything for a reason that can be mended: the trials are in ERROR, so that they can run again."""
        self.stopping = error
        for trial in self.table.trials:
            progress = self.table.progress(trial)
            if trial.is_finished() or progress.end in (Trial.TERMINATED, Trial.ERROR):
                continue
            self._count_failure(trial, progress, error, may_recover=False)
            progress.held.clear()
            self._drop_exploit(progress)
            if progress.phase is AttemptPhase.OUT:
                self._settle(trial, progress, Trial.ERROR)
            elif progress.phase not in (AttemptPhase.RESTING, AttemptPhase.STOPPING):
                self._stop_attempt(trial, progress)

    def _open(self, errored: bool) -> None:
        self.search.asked, self.search.idle_after = False, None
        self.may_start = True
        for trial in self.table.trials:
            progress = self.table.progress(trial)
            if progress.phase is not AttemptPhase.OUT:
                end = progress.end
                self._attempt_over(trial, progress)
                self._settle(trial, progress, end or Trial.PENDING)
            elif errored and trial.status == Trial.ERROR:
                self.stopping = None
                trial.num_failures, trial.error_msg, progress.end = 0, None, None
                progress.lacks_metric = False
                self.table.move(trial, Trial.PENDING)
                self.scheduler.on_trial_add(self, trial)

    # --- what an attempt does next ---

    def _go_on(self, trial: Trial, progress: TrialProgress) -> None:
        """Lets a resting attempt do what is wanted of it."""
        progress.phase = AttemptPhase.RESTING
        if progress.wanted is not None:
            progress.phase = AttemptPhase.SAVING
            progress.wanted = self._with_newest_result(trial, progress, progress.wanted)
            self._emit(events.AskExecutor("save_to", trial, (progress.wanted,)))
        elif progress.end is not None:
            self._stop_attempt(trial, progress)
        elif progress.held:
            held = progress.held.pop(0)
            self._deliver(trial, progress, held.result, held.stop)
            self._go_on(trial, progress)
        elif progress.exploit is not None:
            self._go_on_with_exploit(trial, progress)
        elif progress.returned:
            self._complete(trial, progress, trial.last_result)
            self._go_on(trial, progress)
        else:
            progress.phase = AttemptPhase.TRAINING
            self._emit(events.AskExecutor("proceed", trial))

    def _stop_attempt(self, trial: Trial, progress: TrialProgress) -> None:
        progress.phase = AttemptPhase.STOPPING
        if progress.end == Trial.PAUSED:
            self._emit(events.AskExecutor("suspend", trial))
        else:
            self._emit(events.AskExecutor("end", trial, (progress.end == Trial.ERROR,)))

    def _attempt_over(self, trial: Trial, progress: TrialProgress) -> None:
        """There is no process any more; its resources are free."""
        progress.phase = AttemptPhase.OUT
        self._forget_wanted(progress)
        self.may_start = True

    def _settle(self, trial: Trial, progress: TrialProgress, status: str) -> None:
        """Gives a trial without an attempt the status that was decided."""
        progress.end = None
        if self.stopping is not None and status in (Trial.PENDING, Trial.PAUSED):
            self.table.move(trial, status)
            self.stop_trial(trial)
            return
        if trial.status != Trial.RUNNING and status in (Trial.TERMINATED, Trial.ERROR) and progress.attempt:
            self._emit(events.AskExecutor("end_paused", trial, (status == Trial.ERROR,)))
        self.table.move(trial, status)
        if status == Trial.TERMINATED:
            self._emit(events.Notify("on_trial_complete", trial))
        elif status == Trial.ERROR:
            self.scheduler.on_trial_error(self, trial)
            self._emit(self.search.tell_complete(trial.trial_id, trial.last_result or None, error=True))
            self._emit(events.Notify("on_trial_fail", trial))
            if self.fail_fast:
                self._stop_everything(f"{trial} failed, and fail_fast is set: {trial.error_msg}")
        if trial.is_finished():
            self._drop_exploit(progress)

    def _count_failure(self, trial: Trial, progress: TrialProgress, error: str, may_recover: bool = True) -> None:
        """Lets the trial start again, if it may. After a result that nobody can decide on, or refused, it would end the same."""
        trial.num_failures += 1
        trial.error_msg = error
        self._forget_wanted(progress)
        again = may_recover and (trial.max_failures < 0 or trial.num_failures <= trial.max_failures)
        progress.end = Trial.PENDING if again else Trial.ERROR
        self._emit(events.WriteError(trial, error, trial.num_failures))
        if again:
            self._emit(events.Notify("on_trial_recover", trial))

    def _missing(self, trial: Trial, result: Result) -> str | None:
        """Why nobody could decide on this result; None if all can."""
        for metric in (*self.required_metrics, *trial.stopping_criterion):
            value = lookup(result, metric)
            if value is None and not result.get(DONE):
                return (
                    f"{trial}: the result of iteration {result[TRAINING_ITERATION]} has no {metric!r}, which the scheduler, the "
                    f"search algorithm or a stopping criterion needs; {what_it_has(result, metric)}"
                )
            if value is not None and not isinstance(value, int | float):
                kind = type(value).__name__
                return f"{trial}: {metric!r} of iteration {result[TRAINING_ITERATION]} is a {kind}; expected a number"
        return None

    @staticmethod
    def _reaches_criterion(trial: Trial, result: Result) -> bool:
        return any(
            isinstance(value := lookup(result, metric), int | float) and value >= limit
            for metric, limit in trial.stopping_criterion.items()
        )

    def _emit(self, *instructions: Instruction) -> None:
        self._out.extend(instructions)

    def _found(self, trial_id: str) -> tuple[Trial, TrialProgress]:
        found = self.table.get(trial_id)
        assert found is not None, trial_id
        return found
