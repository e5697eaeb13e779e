"""The contract between the runner and an executor: what is asked of it, and the events by which it answers.

The runner carries out the state machine's instructions with an `EventExecutor`, from its loop. `begin`, `save_to` and their like
ask and return; what became of them arrives as an event from `next_events`. An executor never restarts a trial by itself and
decides nothing. An executor that is called instead (`TrialExecutor`) is driven through `counterpoint/tune/executors/polled.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.transport.files.atomic import remove_directory
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.executors.trial_executor import TrialExecutor
from counterpoint.tune.result import Result
from counterpoint.tune.trial import Trial


@dataclass(frozen=True)
class Event:
    """Something that happened to one attempt at a trial.

    `attempt` is the number given to `begin`; the event of an earlier attempt is dropped.
    """

    trial_id: str
    attempt: int


@dataclass(frozen=True)
class Started(Event):
    """The trainable is set up, from its checkpoint if one was given, and waits for `proceed`."""


@dataclass(frozen=True)
class Reported(Event):
    """One result. The trial waits for `proceed`, `save_to`, `suspend` or `end`."""

    result: Result = field(default_factory=dict)


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is durable: the one that `save_to` asked for, or one that a function made by itself, before its result."""

    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class SaveFailed(Event):
    """The save failed; the trial itself goes on as if it had not been asked."""

    error: str = ""


@dataclass(frozen=True)
class Completed(Event):
    """The trainable returned; there is no further result. The trial waits for `save_to` or `end`, which `Stopped` follows.

    A class that reports `done` needs no `Completed`: its result says so.
    """


@dataclass(frozen=True)
class Failed(Event):
    """The trial raised, exited or was killed, and its resources are free; no `Stopped` follows. Counts against `max_failures`."""

    error: str = ""
    """The text of the trial's `error.txt`: the traceback, or the signal or exit code and the end of its stderr."""

    may_recover: bool = True
    """Whether another attempt may do better; not if the trial's configuration was refused."""


@dataclass(frozen=True)
class Stopped(Event):
    """The process has ended after `end` or `suspend`, and its resources are free."""


class EventExecutor(TrialExecutor):
    """Runs trials. Whatever it is asked about a trial that has ended meanwhile is ignored: its end is in the events.

    What both kinds of executors have (`has_resources`, `on_step_begin`, ...) is in `TrialExecutor`.
    """

    raised: dict[str, BaseException]
    """What the last attempt at a trial raised, by trial id, as far as it could be made again in this process."""

    remembers_needs = True
    """Whether `could_ever_run` answers the same for the same needs at any time."""

    def __init__(self, queue_trials: bool = False) -> None:
        super().__init__(queue_trials)
        self.raised = {}

    def prepare(self) -> None:
        """Called once by a runner, before its event loop and its threads begin."""

    def could_ever_run(self, trial: Trial) -> str | None:
        """None, or why no amount of waiting gives the trial what it needs; the message states need and total."""
        raise NotImplementedError

    def begin(self, trial: Trial, attempt: int, checkpoint: Checkpoint | None = None) -> None:
        """Takes the trial's resources and starts it, from a checkpoint if there is one."""
        raise NotImplementedError

    def proceed(self, trial: Trial) -> None:
        """Lets the trial work towards its next result."""
        raise NotImplementedError

    def save_to(self, trial: Trial, checkpoint: Checkpoint) -> None:
        """Asks for a checkpoint at the path that is given."""
        raise NotImplementedError

    def change(
        self, trial: Trial, config: dict[str, Any], checkpoint: Checkpoint | None, experiment_tag: str = ""
    ) -> bool:
        """Gives a running trial another configuration, and another's checkpoint, without a new process.

        Returns:
            False if this trial or this key cannot: it must be stopped and started again. After True, `Started` or `Failed`
            follows.
        """
        return False

    def suspend(self, trial: Trial) -> None:
        """Ends the trial's process and frees its resources. The runner has saved it before, if it is to be saved."""
        raise NotImplementedError

    def end(self, trial: Trial, error: bool = False) -> None:
        """Ends the trial in order, within a deadline; `Stopped` follows. Without `error` it is exported first."""
        raise NotImplementedError

    def end_paused(self, trial: Trial, error: bool = False) -> None:
        """Gives up what is kept of a trial that is paused and has ended now; no event follows. It may be known no more."""

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Deletes what nobody needs any more. Called in a thread; raises `OSError`."""
        remove_directory(Path(checkpoint.path))

    async def next_events(self, timeout: float) -> Sequence[Event]:
        """What has happened, in order; waits at most so many seconds for the first."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends everything it started."""
        raise NotImplementedError
