"""The vocabulary of supervision: what a worker is, what can happen to it, and what is to be done about it.

`cluster.lifecycle` is the machine that turns the events into the instructions; `cluster.job` is the shell that hears the
former and carries out the latter.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class State(StrEnum):
    """Of a worker, and of the job."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    RUNNING = "running"
    STUCK = "stuck"
    """It does not respond and is being killed."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


ENDED = frozenset({State.STOPPED, State.FAILED})


ASKED_TO_END = frozenset({128 + signal.SIGINT, 128 + signal.SIGTERM})
"""Exit codes of a process that a signal ended before its work was complete: it ended in order, or, if it had no handler yet, the
kernel ended it."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of a job: its command and the rules of its life."""

    name: str
    command: Sequence[str]
    log_file: Path
    """Its standard output and error are appended here."""
    after: tuple[str, ...] = ()
    """Workers that must be ready before this one starts."""
    task: bool = False
    """True: it does a part of the job's work, and ends with 0 once that is complete; the job is over once every task has ended,
    one way or another. False: a service, which must live until then."""
    ready_timeout_seconds: float | None = None
    """Longest time from its start to `READY=1`; infinite for one with deadlines of its own. Unset: it does not notify, and is
    ready once started."""
    stop_timeout_seconds: float = 30.0
    """Longest time from SIGTERM to its end; then it is killed."""
    silence_timeout_seconds: float | None = None
    """Longest time without `WATCHDOG=1` from its first one on, or from `READY=1`; then it is killed, and started again as after
    any death. Unset: it need not send any."""
    nice: int = 0
    """Added to the niceness: above 0 it yields the CPU to the others."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's environment."""
    max_restarts: int = 0
    """How often in a row it is started again after it died."""
    restart_arguments: tuple[str, ...] = ()
    """Added to the command when it is started again."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The job starts."""

    at: float


@dataclass(frozen=True, slots=True)
class BecameReady:
    """The worker has said `READY=1`."""

    worker: str
    at: float


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """The worker has said `WATCHDOG=1`: it lives."""

    worker: str
    at: float


@dataclass(frozen=True, slots=True)
class EndAnnounced:
    """The worker has said `STOPPING=1`: it ends by itself, and need not send heartbeats any more."""

    worker: str
    at: float


@dataclass(frozen=True, slots=True)
class ExtensionRequested:
    """The worker has said `EXTEND_TIMEOUT_USEC`: it will go on ending for so long, and must not be killed meanwhile."""

    worker: str
    seconds: float
    at: float


@dataclass(frozen=True, slots=True)
class Exited:
    """The worker is gone. `code` is 128 + signal for a killed one."""

    worker: str
    code: int
    at: float


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The worker could not be started."""

    worker: str
    reason: str
    """For a person."""
    at: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Someone asked for the end, politely the first time; the second time everything is killed."""

    reason: str
    code: int
    """Exit code of the job if the workers stop cleanly before its work is complete."""
    at: float


@dataclass(frozen=True, slots=True)
class GuestsChanged:
    """Who makes use of the services now without being a task of this job. The services live on for them."""

    guests: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline that `Lifecycle.deadline` named may have passed."""

    at: float


Event = (
    Begin
    | BecameReady
    | HeartbeatReceived
    | EndAnnounced
    | ExtensionRequested
    | Exited
    | SpawnFailed
    | StopRequested
    | GuestsChanged
    | Tick
)


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the worker."""

    worker: str
    again: bool = False
    """It has run before: with its `restart_arguments`."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the worker to end."""

    worker: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the worker and everything below it."""

    worker: str


Instruction = Spawn | Terminate | Kill


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    code: int
    reason: str
    """For a person."""
    failed_worker: str | None = None
    """Whose output tells more."""


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code <= 128:
        return f"ended with exit code {code}"
    try:
        return f"was {'stopped' if code in ASKED_TO_END else 'killed'} by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with exit code {code}"
