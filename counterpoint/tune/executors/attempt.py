"""One attempt at a trial in a process: what it was asked, by when it must answer, and which events its answers are.

The process is at the other end of a `ProcessLink`, wherever that runs it. An attempt ends exactly once: with `Stopped` after it
was asked to stop, else with `Failed`; both come when the process and all below it are gone. With `reuse` the process may outlive
it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import Field

from counterpoint.transport.config import Config
from counterpoint.transport.frames import BadFrame
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors import executor as executors
from counterpoint.tune.executors.executor import Event
from counterpoint.tune.executors.frames import made_again
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)


END: dict[str, Any] = {"kind": "stop", "export": [], "reuse": False}
"""Asks a process that waits to be used anew to clean up and end."""


class Deadlines(Config):
    """How long the process of a trial may take to answer. A step has no limit, as in Ray Tune: only `stop_trial` ends it."""

    start_seconds: float = Field(default=600.0, gt=0)
    """Deadline to start, import, set up and restore; also to take another config or checkpoint in place."""
    save_seconds: float = Field(default=600.0, gt=0)
    """Deadline to save; beyond that the trial has failed."""
    stop_seconds: float = Field(default=30.0, gt=0)
    """Deadline to end its step and clean up when it is stopped or paused; beyond that it is killed."""


@dataclass(frozen=True)
class Exported(Event):
    """What `export` asked for is done, or there is nothing to export."""

    paths: dict[str, str] = field(default_factory=dict)
    """The files that were written, by format."""


class ProcessLink:
    """A process of a trial, as its attempt uses it. It is heard by what `attach` was given."""

    def __init__(self, key: tuple[str, str]) -> None:
        """A process that waits to be used anew is for a trial with the same `key`."""
        self.key = key
        self.resets = False
        """Whether the trainable said that it takes another config in place."""
        self.attach(lambda message: None, lambda how: None)

    def attach(self, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[str], None]) -> None:
        """Says who hears the process's messages, and how it ended once nothing of it is left."""
        self._on_message, self._on_end = on_message, on_end

    def send(self, message: dict[str, Any]) -> None:
        """Asks something. Never waits; nothing happens if the process is gone. Raises `BadFrame`."""
        raise NotImplementedError

    def kill(self) -> None:
        """Has the process and all below it killed; `on_end` follows."""
        raise NotImplementedError


class TrialAttempt:
    """The attempt `number` at `trial`."""

    def __init__(
        self,
        trial: Trial,
        number: int,
        link: ProcessLink,
        deadlines: Deadlines,
        emit: Callable[[Event], None],
        on_over: Callable[[TrialAttempt, bool], None],
    ) -> None:
        """`on_over` hears once, before the last event, that resources are free, and whether the process waits to be used anew."""
        self.trial, self.trial_id, self.number, self.link = trial, trial.trial_id, number, link
        self.raised: BaseException | None = None
        """What the trial raised, if it could be made again here."""
        self.exported: dict[str, str] = {}
        self._name = str(trial)
        self._deadlines, self._emit, self._on_over = deadlines, emit, on_over
        self._timer: asyncio.TimerHandle | None = None
        self._saving: Checkpoint | None = None
        self._stopping = False
        self._late = ""
        """Which deadline has passed."""
        self._error = ""
        """What the process said of its failure."""
        link.attach(self._hear, self._end)

    # --- what it is asked ---

    def setup(self, message: dict[str, Any]) -> None:
        """Sets the trial up, and restores it from `path` if there is one."""
        self._ask({"kind": "setup", **message}, "start", self._deadlines.start_seconds)

    def train(self) -> None:
        """Makes one step."""
        self._ask({"kind": "train"})

    def save(self, checkpoint: Checkpoint) -> None:
        """Saves at the checkpoint's path."""
        self._saving = checkpoint
        self._ask({"kind": "save", "path": checkpoint.path}, "save", self._deadlines.save_seconds)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores in place."""
        self._ask({"kind": "restore", "path": checkpoint.path}, "restore", self._deadlines.start_seconds)

    def reset(self, config: dict[str, Any], checkpoint: Checkpoint | None) -> None:
        """Takes another config, and a checkpoint."""
        path = None if checkpoint is None else checkpoint.path
        self._ask({"kind": "reset", "config": config, "path": path}, "reset", self._deadlines.start_seconds)

    def stop(self, export: list[str], reuse: bool) -> None:
        """Ends it in order; kills it after the deadline."""
        if not self._stopping:
            self._stopping = True
            self._ask({"kind": "stop", "export": export, "reuse": reuse}, "stop", self._deadlines.stop_seconds)

    def export(self, formats: list[str]) -> None:
        """Exports it in these formats; it goes on afterwards."""
        self._ask({"kind": "export", "formats": formats}, "export", self._deadlines.save_seconds)

    def abandon(self) -> None:
        """Expects nothing of it any more."""
        self._clear_deadline()
        self.link.attach(lambda message: None, lambda how: None)

    def _ask(self, message: dict[str, Any], deadline: str = "", seconds: float = 0.0) -> None:
        try:
            self.link.send(message)
        except BadFrame as error:
            self._error = self._error or f"{message['kind']} could not be asked of trial {self._name}: {error}"
            self.link.kill()
            return
        if deadline:
            self._set_deadline(deadline, seconds)

    def _set_deadline(self, what: str, seconds: float) -> None:
        self._clear_deadline()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._pass, what, seconds)

    def _clear_deadline(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pass(self, what: str, seconds: float) -> None:
        self._timer = None
        self._late = f"trial {self._name} was killed: it did not {what} within {seconds:g} s"
        logger.warning("%s", self._late)
        self.link.kill()

    # --- what it answers ---

    def _hear(self, message: dict[str, Any]) -> None:
        try:
            self._take(message)
        except (KeyError, TypeError) as error:
            self._error = (
                f"the process of trial {self._name} said {message.get('kind')!r} without what belongs to it: {error!r}"
            )
            self.link.kill()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        who = (self.trial_id, self.number)
        if not self._stopping:
            self._clear_deadline()
        if kind == "started":
            self.link.resets = bool(message["resets"])
            self._emit(executors.Started(*who))
        elif kind == "result":
            self._emit(executors.Reported(*who, dict(message["result"])))
        elif kind == "made":
            result = dict(message["result"])
            made = Checkpoint(self.trial_id, int(message["iteration"]), str(message["path"]), result)
            self._emit(executors.Saved(*who, made))
        elif kind == "completed":
            self._emit(executors.Completed(*who))
        elif kind == "saved" and self._saving is not None:
            saved, self._saving = replace(self._saving, iteration=int(message["iteration"])), None
            self._emit(executors.Saved(*who, saved))
        elif kind == "save_failed":
            self._saving = None
            self._emit(executors.SaveFailed(*who, str(message["error"])))
        elif kind in ("exported", "stopped"):
            self.exported = dict(message["exported"]) or self.exported
            if message["error"]:
                logger.warning("trial %s was not exported: %s", self._name, message["error"])
            if kind == "exported":
                self._emit(Exported(*who, self.exported))
            elif message["reuse"]:
                self._over(reusable=True)
        elif kind == "failed":
            self._error = str(message["error"])
            self.raised = made_again(message["raised"])
            self._set_deadline("end after its failure", self._deadlines.stop_seconds)
        else:
            raise KeyError(kind)

    def _end(self, how: str) -> None:
        """The process is gone, and all below it."""
        if self._stopping:
            if self._error:
                logger.warning("trial %s failed while it stopped: %s", self._name, self._error)
            self._over(reusable=False)
            return
        self._clear_deadline()
        self._on_over(self, False)
        said = self._error or self._late or f"the process of trial {self._name} {how}"
        self._emit(executors.Failed(self.trial_id, self.number, said))

    def _over(self, reusable: bool) -> None:
        self._clear_deadline()
        self._on_over(self, reusable)
        self._emit(executors.Stopped(self.trial_id, self.number))


def require_free(attempts: dict[str, TrialAttempt], trial: Trial) -> None:
    """Raises `TuneError` if the trial runs already."""
    if trial.trial_id in attempts:
        raise TuneError(f"trial {trial} cannot be started: its attempt {attempts[trial.trial_id].number} has not ended")
