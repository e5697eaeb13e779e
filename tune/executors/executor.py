"""The contract of an executor: what starts, continues, pauses, saves, restores and stops trials somewhere.

The runner carries out the state machine's instructions with it, from its loop. `start_trial`, `save` and their like ask and
return; what became of them arrives as an event from `next_events`. An executor never restarts a trial by itself and decides
nothing. The names are those of `TrialExecutor` in Ray Tune 1.x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transport.files.atomic import remove_directory
from tune.checkpoint import Checkpoint
from tune.result import Result
from tune.trial import Trial


@dataclass(frozen=True)
class Event:
    """Something that happened to one attempt at a trial.

    `attempt` is the number given to `start_trial`; the event of an earlier attempt is dropped.
    """

    trial_id: str
    attempt: int


@dataclass(frozen=True)
class Started(Event):
    """The trainable is set up, from its checkpoint if one was given, and waits for `continue_training`."""


@dataclass(frozen=True)
class Reported(Event):
    """One result. The trial waits for `continue_training`, `save`, `pause_trial` or `stop_trial`."""

    result: Result = field(default_factory=dict)


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is durable: the one that `save` asked for, or one that a function made by itself, before its result."""

    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class SaveFailed(Event):
    """`save` raised; the trial itself goes on as if it had not been asked."""

    error: str = ""


@dataclass(frozen=True)
class Completed(Event):
    """The trainable returned; there is no further result. The trial waits for `save` or `stop_trial`, which `Stopped` follows.

    A class that reports `done` needs no `Completed`: its result says so.
    """


@dataclass(frozen=True)
class Failed(Event):
    """The trial raised, exited or was killed, and its resources are free; no `Stopped` follows. Counts against `max_failures`."""

    error: str = ""
    """For the trial's `error.txt`: the traceback, or the signal or exit code and the end of its stderr."""

    may_recover: bool = True
    """Whether another attempt may do better; not if the trial's configuration was refused."""


@dataclass(frozen=True)
class Stopped(Event):
    """The process has ended after `stop_trial` or `pause_trial`, and its resources are free."""


class TrialExecutor:
    """Runs trials. Whatever it is asked about a trial that has ended meanwhile is ignored: its end is in the events."""

    queue_trials: bool = False
    """Whether a trial that needs more than there is waits until there is more, as in a cluster that grows, instead of failing."""

    def has_resources(self, trial: Trial) -> bool:
        """Whether what the trial needs is free now."""
        raise NotImplementedError

    def could_ever_run(self, trial: Trial) -> str | None:
        """None, or why no amount of waiting gives the trial what it needs; the message states need and total."""
        raise NotImplementedError

    def start_trial(self, trial: Trial, attempt: int, checkpoint: Checkpoint | None = None) -> None:
        """Takes the trial's resources and starts it, from a checkpoint if there is one."""
        raise NotImplementedError

    def continue_training(self, trial: Trial) -> None:
        """Lets the trial work towards its next result."""
        raise NotImplementedError

    def save(self, trial: Trial, checkpoint: Checkpoint) -> None:
        """Asks for a checkpoint at the path that is given."""
        raise NotImplementedError

    def restore(self, trial: Trial, checkpoint: Checkpoint) -> None:
        """Loads a checkpoint into the running trial. It then is as after `Started`."""
        raise NotImplementedError

    def reset_trial(self, trial: Trial, config: dict[str, Any], checkpoint: Checkpoint | None) -> bool:
        """Gives a running trial another configuration, and another's checkpoint, without a new process.

        Returns:
            False if this trial or this key cannot: it must be stopped and started again. After True, `Started` or `Failed`
            follows.
        """
        return False

    def pause_trial(self, trial: Trial) -> None:
        """Ends the trial's process and frees its resources. The runner has saved it before, if it is to be saved."""
        raise NotImplementedError

    def stop_trial(self, trial: Trial, error: bool = False) -> None:
        """Ends the trial in order, within a deadline; `Stopped` follows."""
        raise NotImplementedError

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Deletes what nobody needs any more. Called in a thread; raises `OSError`."""
        remove_directory(Path(checkpoint.path))

    def on_step_begin(self, trials: Sequence[Trial]) -> None:
        """Called at the start of each step of the runner."""

    def on_step_end(self, trials: Sequence[Trial]) -> None:
        """Called at the end of each step of the runner."""

    def has_gpus(self) -> bool:
        """Whether any trial could get a GPU here."""
        return False

    def export_trial_if_needed(self, trial: Trial) -> dict[str, str]:
        """Exports a trial that has completed, in its `export_formats`; paths by format."""
        return {}

    async def next_events(self, timeout: float) -> Sequence[Event]:
        """What has happened, in order; waits at most so many seconds for the first."""
        raise NotImplementedError

    def resource_string(self) -> str:
        """Used and total resources in one line."""
        raise NotImplementedError

    def debug_string(self) -> str:
        """One line for the status display."""
        return self.resource_string()

    async def cleanup(self) -> None:
        """Ends everything it started."""
        raise NotImplementedError
