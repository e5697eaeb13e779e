"""The vocabulary of supervision: what a worker is, what can happen to it, and what the supervisor then does.

`cluster.lifecycle` is the state machine that turns the events into instructions. `cluster.job` is the shell that receives
the events and carries out the instructions.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class State(StrEnum):
    """The state of a worker, or of the job."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    RUNNING = "running"
    STUCK = "stuck"
    """The worker does not respond and is being killed."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


ENDED = frozenset({State.STOPPED, State.FAILED})


ASKED_TO_END = frozenset({128 + signal.SIGINT, 128 + signal.SIGTERM})
"""Exit codes of a process that a signal ended before its work was complete: it ended in order, or, if it had no handler yet, the
kernel ended it."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of a job: its command, and the rules of its supervision."""

    name: str
    command: Sequence[str]
    log_file: Path
    """Its standard output and error are appended here."""
    after: tuple[str, ...] = ()
    """Workers that must be ready before this one starts."""
    task: bool = False
    """True: it does a part of the job's work, and ends with 0 once that is complete; the job is over once every task has ended,
    successfully or not. False: a service, which must run until then."""
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
    """A worker sent `READY=1`."""

    worker: str
    at: float


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """A worker sent `WATCHDOG=1`: it is alive."""

    worker: str
    at: float


@dataclass(frozen=True, slots=True)
class EndAnnounced:
    """A worker sent `STOPPING=1`: it ends by itself, and need not send heartbeats any more."""

    worker: str
    at: float


@dataclass(frozen=True, slots=True)
class ExtensionRequested:
    """A worker sent `EXTEND_TIMEOUT_USEC`: it needs that many more seconds to end, and must not be killed meanwhile."""

    worker: str
    seconds: float
    at: float


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker has ended. `code` is 128 + signal for a killed one."""

    worker: str
    code: int
    at: float


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """A worker could not be started."""

    worker: str
    reason: str
    """For a person."""
    at: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A request to stop the job: the first one stops it in order, the second one kills everything."""

    reason: str
    code: int
    """Exit code of the job if the workers stop cleanly before its work is complete."""
    at: float


@dataclass(frozen=True, slots=True)
class GuestsChanged:
    """The guests of the job changed: runs that use its services and are not among its tasks. The services continue for them."""

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
    """Whether it ran before: it then gets its `restart_arguments`."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send the worker SIGTERM."""

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
    """The worker whose output explains the reason."""


def describe_exit(code: int) -> str:
    """Describes an exit code, for a person."""
    if code <= 128:
        return f"ended with exit code {code}"
    try:
        return f"was {'stopped' if code in ASKED_TO_END else 'killed'} by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with exit code {code}"
