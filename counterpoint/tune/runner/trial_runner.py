"""The event loop of an experiment: it feeds the state machine and carries out what it asks for. As `TrialRunner` in Ray Tune 1.x.

A step waits for events of the executor and of the search algorithm, makes them durable, and carries out the instructions. Then
trials start for as long as the scheduler chooses any. Killed at any moment, an experiment goes on where its journal ends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from counterpoint.tune.callbacks.callback import Callback, Callbacks
from counterpoint.tune.callbacks.trial_loggers import TrialLoggers
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors import executor as executors
from counterpoint.tune.executors.executor import EventExecutor
from counterpoint.tune.executors.local import LocalTrialExecutor
from counterpoint.tune.executors.polled import for_runner
from counterpoint.tune.executors.trial_executor import TrialExecutor
from counterpoint.tune.json_values import as_json
from counterpoint.tune.resources import Resources
from counterpoint.tune.result import Result
from counterpoint.tune.runner import codec, events
from counterpoint.tune.runner.acting import Acting
from counterpoint.tune.runner.events import Event
from counterpoint.tune.runner.experiment_server import ExperimentServer
from counterpoint.tune.runner.experiment_state import DurableExperiment
from counterpoint.tune.runner.machine import ExperimentMachine
from counterpoint.tune.runner.resume import Resume, copy_experiment, prepare
from counterpoint.tune.runner.search_thread import SearchThread, failed, tell
from counterpoint.tune.runner.status_lines import StatusLines
from counterpoint.tune.runner.trial_files import read_runner_state, write_state
from counterpoint.tune.schedulers.scheduler import TrialScheduler
from counterpoint.tune.search.search_alg import NoSearch, SearchAlg
from counterpoint.tune.stoppers.stopper import Stopper
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.5
"""How long a step waits for something to happen. Stoppers with clocks are asked as often."""

CHECKPOINT_SECONDS = 10.0
"""Seconds between two flushes of the journal to the disk, and between two writings of the state file."""

FIRST_STATE_SECONDS = 1.0
"""How soon the state file is there for whoever looks at an experiment that has just begun."""

SHARE_OF_CHECKPOINTS = 0.05
"""The largest share of the time that is spent on checkpoints."""

BACKLOG = 256
"""Fewest notifications between two saved states of the search algorithm."""

BYTES_OF_NOTIFICATION = 256
"""About; a larger state of the search algorithm is saved less often, so that writing both stays linear."""


_runners: WeakValueDictionary[Path, TrialRunner] = WeakValueDictionary()
"""The runners of this process by the directory that each has taken."""


class TrialRunner(Acting):
    """Runs one experiment. Not thread-safe; `step` or `step_async`, not both."""

    def __init__(
        self,
        search_alg: SearchAlg | None = None,
        scheduler: TrialScheduler | None = None,
        local_checkpoint_dir: str | Path | None = None,
        remote_checkpoint_dir: str | None = None,
        sync_to_cloud: Any = None,
        stopper: Stopper | None = None,
        resume: Resume = False,
        server_port: int | None = None,
        fail_fast: bool | str = False,
        verbose: bool | int = True,
        checkpoint_period: float | None = None,
        trial_executor: TrialExecutor | None = None,
        callbacks: Sequence[Callback] | None = None,
        metric: str | None = None,
    ) -> None:
        """Takes the directory's lock and resumes as asked. Arguments that Ray Tune has are documented in `docs/tune.md`.

        Without a search algorithm it runs the trials that `add_trial` is given. Without an executor they run on this machine.
        Raises `TuneError` for arguments that do not fit, a directory in use, or an experiment that cannot be resumed.
        """
        if fail_fast not in (True, False, "raise"):
            raise TuneError(f"fail_fast = {fail_fast!r}: expected True, False or 'raise'")
        _require("search_alg", search_alg, SearchAlg, "; a searcher is given as tune.SearchGenerator(searcher)")
        _require("scheduler", scheduler, TrialScheduler)
        _require("stopper", stopper, Stopper, "; a function is given as tune.FunctionStopper(function)")
        _require("trial_executor", trial_executor, TrialExecutor)
        _require("metric", metric, str)
        for each in callbacks or ():
            _require("an entry of callbacks", each, Callback)
        if checkpoint_period is not None and not checkpoint_period >= 0:
            raise TuneError(f"checkpoint_period = {checkpoint_period!r}: expected seconds, 0 or more")
        self.search_alg = search_alg or NoSearch()
        self.scheduler = scheduler or TrialScheduler()
        self.stopper = stopper or Stopper()
        self.trial_executor = trial_executor or LocalTrialExecutor()
        self._executor = for_runner(self.trial_executor)
        self.directory = None if local_checkpoint_dir is None else Path(local_checkpoint_dir).expanduser().absolute()
        self._status = StatusLines(int(verbose), metric, self.directory, self.scheduler.mode)
        self.callbacks = Callbacks([*(callbacks or ()), *self.scheduler.callbacks(), self._status, TrialLoggers()])
        self.iteration = 0
        self._fail_fast = fail_fast
        self._period = CHECKPOINT_SECONDS if checkpoint_period is None else checkpoint_period
        self._remote = prepare(self.directory, remote_checkpoint_dir, sync_to_cloud, resume)
        self._sync = sync_to_cloud or copy_experiment
        metrics = [each for each in (metric, self.scheduler.metric) if each]
        machine = ExperimentMachine(
            self.scheduler,
            tuple(metrics),
            bool(fail_fast),
            max_pending=self.search_alg.max_pending_trials,
            max_running=self.search_alg.max_concurrent,
        )
        before = None if self.directory is None else _runners.get(self.directory)
        if before is not None and before.is_finished():
            before._leave_directory()
        self._experiment = DurableExperiment(machine, self.directory)
        self._machine = machine
        self._errored_again = resume == "ERRORED_ONLY"
        self._is_set_up = self._is_closed = self._is_acting = self._has_left = False
        self._files = threading.Lock()
        """Held while checkpoints are deleted or copied."""
        self._events: asyncio.Task[Sequence[executors.Event]] | None = None
        self._answered = asyncio.Event()
        """Set by the search algorithm's thread."""
        self._private: asyncio.Runner | None = None
        self._search: SearchThread | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._free: tuple[str, ...] = ()
        """The needs for which resources were free when a trial was last to start."""
        self._could_run: set[str] = set()
        """The needs that can be met some time."""
        self._checkpoint_due = time.monotonic() + min(self._period, FIRST_STATE_SECONDS)
        self._search_backlog = BACKLOG
        self._saving_search = self._said_it_waits = False
        self._server: ExperimentServer | None = None
        try:
            self.resume()
            self._executor.prepare()
            if server_port is not None:
                self._server = ExperimentServer(self.directory, server_port)
        except BaseException:
            self._experiment.close()
            raise
        if self.directory is not None:
            _runners[self.directory] = self

    # --- what Ray Tune has ---

    def get_trial(self, trial_id: str) -> Trial | None:
        """The trial of an id."""
        found = self._machine.table.get(trial_id)
        return None if found is None else found[0]

    def is_finished(self) -> bool:
        """Whether nothing runs and nothing is to come."""
        return self._machine.is_finished() and not self._experiment.has_instructions

    @property
    def stopped_because(self) -> str | None:
        """Why every trial was ended before its own end; None if none was."""
        return self._machine.stopping

    def has_resources_for_trial(self, trial: Trial) -> bool:
        """Whether what the trial needs is free now."""
        return self.trial_executor.has_resources(trial.resources)

    def has_resources(self, resources: Resources) -> bool:
        """Whether these resources are free now."""
        return self.trial_executor.has_resources(resources)

    def debug_string(self) -> str:
        """The trials by status, the executor's resources and the scheduler's state, for people."""
        parts = (
            self._status.counts(self.get_trials()),
            self.trial_executor.debug_string(),
            self.scheduler.debug_string(),
        )
        return "\n".join(filter(None, parts))

    def add_trial(self, trial: Trial) -> None:
        """Adds a trial beside those of the search algorithm; it starts in one of the next steps.

        Raises `TuneError` for what is no trial, a configuration that is no JSON, and an id that is taken.
        """
        _require("what add_trial was given", trial, Trial)
        trial.config = as_json(trial.config)
        if self._machine.table.get(trial.trial_id) is not None:
            raise TuneError(f"there is a trial with the id {trial.trial_id!r} already")
        trial.dirname = trial.dirname or trial.named_by_tag()
        self._decide(events.TrialAdded(trial))

    def step(self) -> None:
        """One step, on an event loop of this runner's own. Raises as `step_async`."""
        self._require_work()
        if self._private is None:
            self._private = asyncio.Runner()
        self._private.run(self.step_async())

    def stop_trial(self, trial: Trial) -> None:
        """Asks for a trial's end; it ends in the next step."""
        self._decide(events.TrialStopRequested(trial.trial_id))

    request_stop_trial = stop_trial

    def request_stop_experiment(self, reason: str = "somebody asked for it") -> None:
        """Asks for the end of all trials; they end in the next steps."""
        self._decide(events.StopRequested(reason))

    def checkpoint(self, force: bool = False) -> None:
        """Writes what outlives the machine and what others read, if `checkpoint_period` has passed, or at once."""
        now = time.monotonic()
        if self.directory is None or self._has_left or (not force and now < self._checkpoint_due):
            return
        if force or self._experiment.snapshot_is_due:
            self._experiment.snapshot(self._others())
        else:
            self._experiment.flush()
        shown = {"iteration": self.iteration, "stopping": self.stopped_because, "stopper": self.stopper.state()}
        compared = {"metric": self.scheduler.metric, "mode": self.scheduler.mode}
        write_state(self.directory, self.get_trials(), shown | compared)
        if self._remote is not None and not self._files.locked() and not force:
            self._in_background(self._send)
        done = time.monotonic()
        self._checkpoint_due = done + max(self._period, (done - now) / SHARE_OF_CHECKPOINTS)

    def resume(self) -> None:
        """Goes on with what the directory holds; the constructor calls it. Raises `TuneError`."""
        resumed = self._experiment.resumed(self._restore_others, self._replay)
        if resumed and self.directory is not None and (saved := read_runner_state(self.directory).get("stopper")):
            self.stopper.catch_up(saved)
        self._restore_search()
        self._heard = self._machine.search.told
        self._set_up()
        if resumed:
            self._status.say_resumed(self.get_trials())
        if not self._machine.is_finished() or self._errored_again or not self._machine.table.trials:
            self._decide(events.Opened(self._errored_again))

    async def cleanup(self) -> None:
        """Ends what runs, and releases the directory; what was not finished can be resumed. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._events is not None:
                self._events.cancel()
                await asyncio.wait([self._events])
            if self._search is not None:
                await asyncio.to_thread(self._search.close)
            await self._executor.close()
            if self._background:
                await asyncio.wait(self._background)
            self.callbacks.notify("on_experiment_end", trials=self.get_trials())
            if not self._is_acting:  # else a step has failed, and the journal alone knows what is still to be told
                self.checkpoint(force=True)
            if not self._has_left:
                await asyncio.to_thread(self._send)
        finally:
            if self._server is not None:
                self._server.end()
            self._leave_directory()

    def _leave_directory(self) -> None:
        """Releases the directory: in `cleanup`, or for another runner once the experiment is at its end."""
        if not self._has_left:
            if not self._is_closed and not self._is_acting:
                self.checkpoint(force=True)
            self._has_left = True
            self._experiment.close()

    def _require_work(self) -> None:
        if self._is_closed or self._has_left:
            raise TuneError(
                f"this runner of {self.directory} is closed; another one, with resume=True, goes on with it"
            )
        if self._machine.table.trials and self.is_finished():
            raise TuneError("step was called after the last trial had ended: ask is_finished() first")

    def close(self) -> None:
        """`cleanup` for callers of `step`."""
        runner = self._private or asyncio.Runner()
        try:
            runner.run(self.cleanup())
        finally:
            runner.close()
            self._private = None

    cleanup_trials = close

    async def step_async(self) -> None:
        """Waits for what happens, at most for a moment, and acts on it.

        Raises `TuneError` when the experiment cannot go on, or is at its end; with `fail_fast="raise"` what the first trial in
        ERROR raised, or `TuneError` where that is not known here; `OSError` when its directory cannot be written.
        """
        self._require_work()
        trials = self.get_trials()
        self._is_acting = True
        if self._search is None:
            self._begin()
        self.callbacks.notify("on_step_begin", iteration=self.iteration, trials=trials)
        self._executor.on_step_begin(self)
        for event in await self._next_events():
            self._receive(event)
        if self._machine.stopping is None and self.stopper.stop_all():
            self._decide(
                events.StopRequested(f"the stopper {type(self.stopper).__qualname__} has ended the experiment")
            )
        self._carry_out()
        self._start_trials()
        heard = None if self._search is None else self._search.idle_after
        if heard is not None and self._experiment.decide(events.SearchIdle(heard)):
            self._start_trials()
        self._save_search()
        self._executor.on_step_end(self)
        self.iteration += 1
        self.callbacks.notify("on_step_end", iteration=self.iteration, trials=trials)
        self._is_acting = False
        self.checkpoint(force=self._experiment.snapshot_is_due)
        self._check()

    # --- the way of an event ---

    def _begin(self) -> None:
        """Starts what needs the event loop, and tells the search algorithm what its saved state has not heard."""
        loop = asyncio.get_running_loop()
        wake = functools.partial(_wake, loop, self._answered)
        self._search = SearchThread(self.search_alg, self._heard, wake)
        self._carry_out()
        self._start_trials()

    async def _next_events(self) -> Sequence[Event | executors.Reported]:
        """What has happened; waits for it if nothing has."""
        assert self._search is not None
        answers = self._search.take()
        if (answers or not self._machine.search.asked) and self._events is None:
            arrived: Sequence[Any] = await self._executor.next_events(0.0 if answers else WAIT_SECONDS)
            return [*answers, *arrived]
        if self._events is None:
            self._events = asyncio.create_task(_next_events(self._executor))
        answered = asyncio.create_task(self._answered.wait())
        try:
            await asyncio.wait([self._events, answered], timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answered.cancel()
        self._answered.clear()
        arrived = []
        if self._events.done():
            arrived, self._events = self._events.result(), None
        return [*answers, *self._search.take(), *arrived]

    def _receive(self, event: Event | executors.Reported) -> None:
        """Completes an executor's event by what the state machine cannot know, and lets it decide."""
        if not isinstance(event, executors.Reported):
            self._decide(event)
            return
        received = events.ResultReceived(event.trial_id, event.attempt, event.result, None)
        try:
            if self._machine.accepts(received) and self._machine.counts(received):
                received = replace(received, stop=self._is_to_stop(event.trial_id, event.result))
            self._decide(received)
        except (TypeError, ValueError, OverflowError) as error:
            self._decide(events.ResultRefused(event.trial_id, event.attempt, f"the result is no data: {error}"))

    def _is_to_stop(self, trial_id: str, result: Result) -> bool:
        try:
            return bool(self.stopper(trial_id, result))
        except Exception as error:
            name = type(self.stopper).__qualname__
            raise TuneError(f"the stopper {name} failed: {type(error).__name__}: {error}") from error

    def _decide(self, event: Event) -> None:
        if self._is_closed or self._has_left:
            raise TuneError(
                f"this runner of {self.directory} is closed; another one, with resume=True, goes on with it"
            )
        self._experiment.decide(event)

    def _carry_out(self) -> None:
        """Makes what was decided durable, and acts on it, until nothing more follows."""
        while instructions := self._experiment.commit():
            try:
                for instruction in instructions:
                    self._act(instruction)
            except BaseException:
                self._experiment.break_off()
                raise

    def _start_trials(self) -> None:
        """Lets the scheduler choose trials for as long as resources are free and it chooses one."""
        while examples := self._machine.startable():
            free = tuple(
                sorted(key for key, trial in examples.items() if self._executor.has_resources(trial.resources))
            )
            self._refuse_impossible(examples, free)
            if not free or not (self._machine.may_start or free != self._free):
                break
            self._free = free
            self._decide(events.ResourcesFree(free))
            self._carry_out()
        self._carry_out()

    def _refuse_impossible(self, examples: dict[str, Trial], free: tuple[str, ...]) -> None:
        for key, trial in examples.items():
            if key not in free and key not in self._could_run and not self._executor.queue_trials:
                reason = self._executor.could_ever_run(trial)
                if reason is None and self._executor.remembers_needs:
                    self._could_run.add(key)
                elif reason is not None:
                    self._decide(events.CannotRun(trial.trial_id, reason))

    def _save_search(self) -> None:
        """Asks for the search algorithm's state when it has heard much since the last: a resume tells it all that again."""
        side = self._machine.search
        if len(side.backlog) < self._search_backlog:
            self._saving_search = False
        elif not self._saving_search and not side.asked and self._search is not None:
            self._saving_search = True
            size = 0 if side.state is None else len(codec.pack(side.state))
            self._search_backlog = max(BACKLOG, size // BYTES_OF_NOTIFICATION)
            self._search.save()

    def _check(self) -> None:
        """Raises what ends the experiment."""
        if self._fail_fast == "raise":
            for trial in self._machine.with_status(Trial.ERROR):
                failure = TuneError(f"{trial} failed, and fail_fast is 'raise':\n{trial.error_msg}")
                if (raised := self._executor.raised.get(trial.trial_id)) is not None:
                    raise raised from failure
                raise failure
        if self._free and self._machine.waits_for_search_alone() and not self._said_it_waits:
            self._said_it_waits = True
            logger.warning(
                "only paused trials are left, the scheduler resumes none of them, and the search algorithm has nothing to "
                "propose while they are unfinished, as behind a limiter with too few places: %s",
                self.scheduler.debug_string(),
            )
        if self._free and self._machine.is_stuck():
            raise TuneError(
                f"only paused trials are left, and the scheduler resumes none of them: {self.scheduler.debug_string()}"
            )

    # --- a resume ---

    def _others(self) -> dict[str, Any]:
        """What a snapshot holds beyond the state machine."""
        return {"iteration": self.iteration, "stopper": self.stopper.state(), "callbacks": self.callbacks.state()}

    def _restore_others(self, others: dict[str, Any]) -> None:
        self.iteration = others["iteration"]
        self.stopper.restore_state(others["stopper"])
        self.callbacks.restore_state(others["callbacks"])
        self._set_up()

    def _restore_search(self) -> None:
        """Brings the search algorithm to where the journal ends: its saved state, and what it has heard since."""
        side = self._machine.search
        try:
            if side.state is not None:
                self.search_alg.restore_state(side.state)
            for told in side.backlog:
                tell(self.search_alg, told)
        except TuneError:
            raise
        except Exception as error:
            raise failed(self.search_alg, error) from error

    def _set_up(self) -> None:
        if not self._is_set_up:
            self._is_set_up = True
            self.callbacks.notify("setup", stop=self.stopper, total_num_samples=self.search_alg.total_samples)


def _require(name: str, given: object, kind: type, hint: str = "") -> None:
    if given is not None and not isinstance(given, kind):
        raise TuneError(f"{name} is {given!r}: expected an instance of {kind.__name__}{hint}")


async def _next_events(executor: EventExecutor) -> Sequence[executors.Event]:
    return await executor.next_events(WAIT_SECONDS)


def _wake(loop: asyncio.AbstractEventLoop, answered: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(answered.set)
    except RuntimeError:  # the loop has ended, and nobody waits
        logger.debug("the search algorithm answered after the end")
