"""An executor that a user wrote by the calls of `TrialExecutor`, as the runner needs it: what it answers becomes events.

All calls are made from one thread, one at a time: the user's class needs no locks. While it waits in `get_next_available_trial`,
what the runner asks waits for its turn, and no trial starts; the runner itself goes on.

The executor gets its own copy of each trial, whose status it sets. What the experiment decides by is the runner's.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.transport.files.atomic import remove_directory, write_atomically
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors import executor as executors
from counterpoint.tune.executors.executor import Event, EventExecutor
from counterpoint.tune.executors.trial_executor import TrialExecutor, as_checkpoint
from counterpoint.tune.json_values import as_json
from counterpoint.tune.resources import Resources
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_SECONDS = 0.05
"""How long to wait after `get_next_available_trial` has returned None, which is to wait by itself."""

NOTE = "executor_checkpoint.json"
"""File in a checkpoint's directory that says where the executor has put it."""


class PolledExecutor(EventExecutor):
    """Calls `called`."""

    remembers_needs = False

    def __init__(self, called: TrialExecutor) -> None:
        super().__init__(called.queue_trials)
        self.called = called
        self._thread = ThreadPoolExecutor(1, "trial executor")
        self._attempts: dict[str, int] = {}
        """The trials that were started and have not ended."""
        self._copies: dict[str, Trial] = {}
        self._at_work: set[str] = set()
        """The trials of which a result is to come."""
        self._due: deque[Event] = deque()
        self._waiting: asyncio.Future[None] | None = None

    # --- resources ---

    def _now(self, otherwise: T, ask: Callable[..., T], *arguments: Any) -> T:
        """What the executor says; `otherwise` while it waits for a result."""
        return otherwise if self._waiting is not None else self._ask(ask, *arguments).result()

    def has_resources(self, resources: Resources) -> bool:
        """What the executor says; False while it waits for a result."""
        return bool(self._now(False, self.called.has_resources, resources))

    def could_ever_run(self, trial: Trial) -> str | None:
        """None while a trial runs, whose end may free enough; then, that the executor has not enough for this one alone."""
        if self._waiting is not None or self._attempts:
            return None
        return (
            f"trial {trial} can never run here: nothing runs, and {type(self.called).__name__}.has_resources says that "
            f"{trial.resources.totals()} is not free; with queue_trials it would wait"
        )

    def has_gpus(self) -> bool:
        """What the executor says; False while it waits for a result."""
        return bool(self._now(False, self.called.has_gpus))

    def resource_string(self) -> str:
        """What the executor says; empty while it waits for a result."""
        return str(self._now("", self.called.resource_string))

    def debug_string(self) -> str:
        """What the executor says; empty while it waits for a result."""
        return str(self._now("", self.called.debug_string))

    def on_step_begin(self, trial_runner: Any) -> None:
        """Passed on, unless it waits for a result."""
        self._now(None, self.called.on_step_begin, trial_runner)

    def on_step_end(self, trial_runner: Any) -> None:
        """Passed on, unless it waits for a result."""
        self._now(None, self.called.on_step_end, trial_runner)

    # --- the life of a trial ---

    def begin(self, trial: Trial, attempt: int, checkpoint: Checkpoint | None = None) -> None:
        """`start_trial` without training; a False, an exception and the status ERROR are a failure."""
        own = self._copies.setdefault(trial.trial_id, copy.copy(trial))
        was_paused = own.status == Trial.PAUSED
        vars(own).update({**vars(trial), "status": own.status if was_paused else Trial.PENDING})
        own.checkpoints = list(trial.checkpoints)  # to which the executor may add
        found = own.checkpoint = None if checkpoint is None else _located(checkpoint)
        self._attempts[trial.trial_id] = attempt

        def start() -> None:
            if was_paused:
                self.called.unpause_trial(own)
            began = self.called.start_trial(own, found, train=False)
            if began is False or own.status == Trial.ERROR:
                raise TuneError(own.error_msg or f"start_trial did not start {own}")
            if own.status != Trial.RUNNING:
                self.called.set_status(own, Trial.RUNNING)
            self._due.append(executors.Started(trial.trial_id, attempt))

        self._do(trial, start)

    def proceed(self, trial: Trial) -> None:
        """`continue_training`."""

        def go_on(own: Trial) -> None:
            self.called.continue_training(own)
            self._at_work.add(trial.trial_id)

        self._of(trial, go_on)

    def save_to(self, trial: Trial, checkpoint: Checkpoint) -> None:
        """`save`; at the path that is given it is noted where the executor has put it, or what it has returned."""

        def save(own: Trial) -> None:
            who = trial.trial_id, self._attempts[trial.trial_id]
            try:
                saved = self.called.save(own, storage=Checkpoint.PERSISTENT, result=checkpoint.result)
                if saved is None:
                    raise TuneError("save returned None")
                note, here = _note_of(saved, own), Path(checkpoint.path)
                if "path" not in note or Path(note["path"]).absolute() != here.absolute():  # which ours may choose, too
                    here.mkdir(parents=True)
                    write_atomically(here / NOTE, json.dumps(note).encode())
            except Exception:  # noqa: BLE001 - the trial goes on without this checkpoint
                self._due.append(executors.SaveFailed(*who, traceback.format_exc()))
            else:
                self._due.append(executors.Saved(*who, checkpoint))

        self._of(trial, save)

    def change(
        self, trial: Trial, config: dict[str, Any], checkpoint: Checkpoint | None, experiment_tag: str = ""
    ) -> bool:
        """`reset_trial`, then `restore`. False while the executor waits for a result."""
        own, attempt = self._copies.get(trial.trial_id), self._attempts.get(trial.trial_id)
        if own is None or attempt is None or self._waiting is not None:
            return False
        if not self._ask(self.called.reset_trial, own, config, experiment_tag).result():
            return False
        own.config, own.experiment_tag = config, experiment_tag

        def restore() -> None:
            if checkpoint is not None and self.called.restore(own, _located(checkpoint), block=True) is False:
                raise TuneError(own.error_msg or f"restore returned False for {checkpoint.path}")
            self._due.append(executors.Started(trial.trial_id, attempt))

        self._do(trial, restore)
        return True

    def suspend(self, trial: Trial) -> None:
        """`pause_trial`; of the base class's only what follows its `save`, since the runner has saved the trial."""
        pause: Callable[[Trial], None] = self.called.pause_trial
        if type(self.called).pause_trial is TrialExecutor.pause_trial:
            pause = partial(self.called.stop_trial, stop_logger=False)
        self._end(trial, Trial.PAUSED, pause)

    def end(self, trial: Trial, error: bool = False) -> None:
        """`export_trial_if_needed`, unless it ends with an error, and `stop_trial`."""

        def stop(own: Trial) -> None:
            if own.export_formats and not error:
                exported = self.called.export_trial_if_needed(own)
                logger.info("%s was exported: %s", own, exported)
            self.called.stop_trial(own, error=error)

        self._end(trial, Trial.ERROR if error else Trial.TERMINATED, stop)

    def end_paused(self, trial: Trial, error: bool = False) -> None:
        """`stop_trial`, of a trial that the executor has paused: it may have kept something of it."""

        def stop() -> None:
            own = self._copies.get(trial.trial_id)
            if own is not None and own.status == Trial.PAUSED:
                self._stop(
                    own, Trial.ERROR if error else Trial.TERMINATED, partial(self.called.stop_trial, error=error)
                )

        self._do(trial, stop)

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Does as the base; also removes what the executor has put into the trial's directory, and nothing elsewhere."""
        located, directory = _located(checkpoint), Path(checkpoint.path)
        found = Path(located.path) if isinstance(located, Checkpoint) else directory
        if directory.parent in found.absolute().parents and found != directory:
            remove_directory(found) if found.is_dir() else found.unlink(missing_ok=True)
        remove_directory(directory)

    # --- events ---

    async def next_events(self, timeout: float) -> Sequence[Event]:
        """What has happened; waits for a result, if a trial works towards one. Raises what the executor's waiting raises."""
        if not self._due:
            if self._waiting is None and self._at_work:
                self._waiting = asyncio.get_running_loop().run_in_executor(self._thread, self._wait_for_one)
            if self._waiting is None:
                await asyncio.sleep(timeout)
            else:
                await asyncio.wait([self._waiting], timeout=timeout)
        if self._waiting is not None and self._waiting.done():
            waited, self._waiting = self._waiting, None
            waited.result()
            self._ask(bool).result()  # what was asked meanwhile is done
        events = list(self._due)
        for _ in events:
            self._due.popleft()
        return events

    async def close(self) -> None:
        """Stops what runs, and lets the executor clean up. A step in progress is waited for, however long it takes."""
        if self._waiting is not None:
            await asyncio.wait([self._waiting])
        for own in [self._copies[trial_id] for trial_id in self._attempts]:
            self._ask(self._call_quietly, self.called.stop_trial, own)
        self._attempts.clear()
        self._at_work.clear()
        parameters = inspect.signature(self.called.cleanup).parameters.values()
        needs_trial = any(each.default is each.empty and each.kind is not each.VAR_POSITIONAL for each in parameters)
        for arguments in [(own,) for own in self._copies.values()] if needs_trial else [()]:
            self._ask(self._call_quietly, self.called.cleanup, *arguments)
        await asyncio.to_thread(self._thread.shutdown)

    # --- inside ---

    def _ask(self, ask: Callable[..., T], *arguments: Any) -> Future[T]:
        return self._thread.submit(ask, *arguments)

    def _do(self, trial: Trial, work: Callable[[], None]) -> None:
        """Has something done, now if the executor waits for nothing; what that raises is a failure of the trial."""

        def done() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever the user's class raises
                self._fail(trial.trial_id, traceback.format_exc(), error)

        asked = self._ask(done)
        if self._waiting is None:
            asked.result()

    def _of(self, trial: Trial, work: Callable[[Trial], None]) -> None:
        def on_it() -> None:
            if trial.trial_id in self._attempts:
                work(self._copies[trial.trial_id])

        self._do(trial, on_it)

    def _end(self, trial: Trial, status: str, end: Callable[[Trial], None]) -> None:
        def ended(own: Trial) -> None:
            self._stop(own, status, end)
            self._over(trial.trial_id, executors.Stopped)

        self._of(trial, ended)

    def _stop(self, own: Trial, status: str, stop: Callable[[Trial], None]) -> None:
        self._call_quietly(stop, own)
        if own.status != status:
            self.called.set_status(own, status)

    def _over(self, trial_id: str, kind: type[Event], *fields: Any) -> None:
        self._at_work.discard(trial_id)
        attempt = self._attempts.pop(trial_id, None)
        if attempt is not None:
            self._due.append(kind(trial_id, attempt, *fields))

    def _fail(self, trial_id: str, message: str, error: BaseException | None = None) -> None:
        if trial_id not in self._attempts:
            return
        if error is not None:
            self.raised[trial_id] = error
        own = self._copies[trial_id]
        own.error_msg = message
        self._call_quietly(self.called.stop_trial, own, error=True, error_msg=message)
        self._over(trial_id, executors.Failed, message)

    def _call_quietly(self, call: Callable[..., object], *arguments: Any, **named: Any) -> None:
        try:
            call(*arguments, **named)
        except Exception:
            logger.exception("%s failed", getattr(call, "__qualname__", call))

    def _wait_for_one(self) -> None:
        """Waits for one result or failure."""
        lost = self.called.get_next_failed_trial()
        if lost is not None and lost.trial_id in self._attempts:
            self._fail(lost.trial_id, lost.error_msg or f"{lost} was lost: get_next_failed_trial returned it")
            return
        found = self.called.get_next_available_trial()
        if found is None:
            time.sleep(IDLE_SECONDS)
            return
        attempt = self._attempts.get(found.trial_id)
        if attempt is None:
            logger.warning("get_next_available_trial returned %s, which does not run; it is passed over", found)
            time.sleep(IDLE_SECONDS)
            return
        self._at_work.discard(found.trial_id)
        try:
            result = self.called.fetch_result(self._copies[found.trial_id])
            if not isinstance(result, dict):
                raise TuneError(f"fetch_result returned a {type(result).__name__}; expected a dict of metrics")
            result = as_json(result, "the result", finite=False)
        except Exception as error:  # noqa: BLE001 - the trial's own
            self._fail(found.trial_id, traceback.format_exc(), error)
        else:
            self._copies[found.trial_id].last_result = result
            self._due.append(executors.Reported(found.trial_id, attempt, result))


def for_runner(executor: TrialExecutor) -> EventExecutor:
    """The executor itself, if it reports events; else what makes events of its answers."""
    return executor if isinstance(executor, EventExecutor) else PolledExecutor(executor)


def _note_of(saved: Any, trial: Trial) -> dict[str, Any]:
    """What is noted of what an executor's `save` returned: a path, or an object, which must be JSON to outlive this process."""
    if isinstance(saved, dict | list):
        return {"object": as_json(saved, f"what save returned for {trial}", finite=False)}
    return {"path": as_checkpoint(saved, trial).path}


def _located(checkpoint: Checkpoint) -> Any:
    """The checkpoint where the executor has put it, or the object that it has returned."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads((Path(checkpoint.path) / NOTE).read_bytes())
        return noted["object"] if "object" in noted else replace(checkpoint, path=str(noted["path"]))
    return checkpoint
