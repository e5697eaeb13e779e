"""What the executors share that run each trial in a process of its own; they themselves only say where the process is."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.executors.attempt import END, Deadlines, ProcessLink, TrialAttempt, require_free
from counterpoint.tune.executors.executor import Event, EventExecutor, Failed, Stopped
from counterpoint.tune.registry import environments, require_no_import, trainable_path
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)

KILL_SECONDS = 30.0
"""How long the end of a killed process may take to be known."""


class ProcessTrialExecutor(EventExecutor):
    """Runs each attempt in a process, and turns its answers into events. Call it on one event loop."""

    most_idle: float = math.inf
    """Processes that may wait to be used anew; more are ended."""

    def __init__(self, deadlines: Deadlines | None, reuse_actors: bool, queue_trials: bool = False) -> None:
        super().__init__(queue_trials)
        require_no_import()
        self._deadlines = deadlines or Deadlines()
        self._reuse = reuse_actors
        self._attempts: dict[str, TrialAttempt] = {}
        self._exported: dict[str, dict[str, str]] = {}
        """The paths of what each trial exported when it was stopped, by format."""
        self._idle: dict[tuple[str, str], list[ProcessLink]] = {}
        """The processes that wait to be used anew, by key."""
        self._events: list[Event] = []
        self._arrived = asyncio.Event()

    # --- what the executors differ in ---

    def _link(self, trial: Trial, trainable: str) -> tuple[ProcessLink, dict[str, str]]:
        """Takes the trial's resources and a process for it; the environment it needs is returned, too."""
        raise NotImplementedError

    def _free(self, trial_id: str) -> None:
        """Frees the resources of a trial whose end is told now: before, who asks would start one more than there is room for."""
        raise NotImplementedError

    # --- the contract ---

    def begin(self, trial: Trial, attempt: int, checkpoint: Checkpoint | None = None) -> None:
        """See `EventExecutor.begin`. Raises `TuneError` if the resources are not free, or the trainable has no name."""
        require_free(self._attempts, trial)
        trainable = trainable_path(trial.trainable_name)
        link, environment = self._link(trial, trainable)
        path = trial.restore_path if checkpoint is None else checkpoint.path
        stdout, stderr = _log_files(trial)
        made = TrialAttempt(trial, attempt, link, self._deadlines, self._emit, self._over)
        self._attempts[trial.trial_id] = made
        self.raised.pop(trial.trial_id, None)
        made.setup(
            {
                "trainable": trainable,
                "config": trial.config,
                "trial_id": trial.trial_id,
                "trial_name": str(trial),
                "logdir": str(Path(trial.logdir).absolute()),
                "path": path,
                "stdout": stdout,
                "stderr": stderr,
                "environment": environment,
                "export": trial.export_formats,
                "environments": environments(),
                "memory": 0 if trial.resources.gpu else trial.resources.memory,
            }
        )

    def proceed(self, trial: Trial) -> None:
        """See `EventExecutor.proceed`."""
        self._of(trial, TrialAttempt.train)

    def save_to(self, trial: Trial, checkpoint: Checkpoint) -> None:
        """See `EventExecutor.save_to`. A function's newest checkpoint may be older; `Saved` says of which iteration it is."""
        self._of(trial, lambda attempt: attempt.save(checkpoint))

    def change(
        self, trial: Trial, config: dict[str, Any], checkpoint: Checkpoint | None, experiment_tag: str = ""
    ) -> bool:
        """See `EventExecutor.change`: a class that has `reset_config`, or a function."""
        attempt = self._attempts.get(trial.trial_id)
        if attempt is None or not attempt.link.resets:
            return False
        attempt.reset(config, checkpoint)
        return True

    def suspend(self, trial: Trial) -> None:
        """See `EventExecutor.suspend`. A step in progress may end, and its result is delivered before `Stopped`."""
        self._of(trial, lambda attempt: attempt.stop([], self._reuses(attempt)))

    def end(self, trial: Trial, error: bool = False) -> None:
        """Does as `EventExecutor.end`; exports it first, unless it ends with an error."""
        export = [] if error else trial.export_formats
        self._of(trial, lambda attempt: attempt.stop(export, self._reuses(attempt) and not error))

    async def next_events(self, timeout: float) -> Sequence[Event]:
        """See `EventExecutor.next_events`."""
        if self._events:
            await asyncio.sleep(0)  # what has arrived meanwhile comes with them
        else:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        return self._told()

    def _told(self) -> Sequence[Event]:
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, Stopped | Failed):
                self._free(event.trial_id)
        return events

    async def _stop_all(self) -> None:
        """Stops every attempt in order, and waits until each is over, or killing it has taken too long."""
        for attempt in list(self._attempts.values()):
            attempt.stop([], reuse=False)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadlines.stop_seconds + KILL_SECONDS
        while self._attempts and loop.time() < deadline:
            await self.next_events(1.0)
        for attempt in self._attempts.values():
            logger.warning("the process of trial %s cannot be ended", attempt.trial_id)
            attempt.abandon()
        self._attempts.clear()
        self._told()

    # --- inside ---

    def _of(self, trial: Trial, ask: Callable[[TrialAttempt], None]) -> None:
        if (attempt := self._attempts.get(trial.trial_id)) is not None:
            ask(attempt)

    def _reuses(self, attempt: TrialAttempt) -> bool:
        return self._reuse and attempt.link.resets

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    def _over(self, attempt: TrialAttempt, reusable: bool) -> None:
        if attempt.raised is not None:
            self.raised[attempt.trial_id] = attempt.raised
        if attempt.exported:
            self._exported[attempt.trial_id] = attempt.exported
        del self._attempts[attempt.trial_id]
        if reusable:
            self._keep_idle(attempt.link)

    # --- processes that wait to be used anew ---

    def _take_idle(self, key: tuple[str, str]) -> ProcessLink | None:
        waiting = self._idle.get(key)
        return waiting.pop() if waiting else None

    def _keep_idle(self, process: ProcessLink) -> None:
        if sum(map(len, self._idle.values())) >= self.most_idle:
            process.attach(lambda message: None, lambda how: None)
            process.send(END)
            return
        waiting = self._idle.setdefault(process.key, [])
        process.attach(lambda message: None, lambda how: waiting.remove(process) if process in waiting else None)
        waiting.append(process)

    def _end_idle(self) -> None:
        """Ends them in order, so that each trainable cleans up."""
        for process in [process for waiting in self._idle.values() for process in waiting]:
            process.send(END)
        self._idle.clear()


def _log_files(trial: Trial) -> tuple[str | None, str | None]:
    """Returns the files that `log_to_file` names for standard output and error."""
    asked = trial.log_to_file
    if asked is False or asked == "":
        return None, None
    names = ("stdout", "stderr") if asked is True else (asked, asked) if isinstance(asked, str) else asked
    logdir = Path(trial.logdir).absolute()
    return str(logdir / names[0]), str(logdir / names[1])
