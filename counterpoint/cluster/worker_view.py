"""A worker as people see it: its state in a word, and what is shown beside it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The state of a worker, or of the job."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    EXITED = "exited"
    """The process has ended, and what follows is not decided yet: the job waits for its disk."""
    RUNNING = "running"
    STUCK = "stuck"
    """The worker does not respond and is being killed."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


ENDED = frozenset({State.STOPPED, State.FAILED})


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The state of a worker, for display."""

    name: str
    state: State
    since: float
    """The time when it entered that state, in Unix seconds."""
    pid: int | None
    """The command's own process id; None before it is known and after its end."""
    status: str
    """The last `STATUS=` it sent."""
    log_from: int | None = None
    """The place in its log where its output begins, in bytes, restarts included; None before it is started."""
    log_until: int | None = None
    """The place where its output ended when it was asked to end, or killed; None unless it was."""
    restarts: int = 0
    """How often it was started again."""
    last_death: str = ""
    """How it died last, in words; empty unless it did."""
    last_output: str = ""
    """The last line of its output when it died last; empty if its death is explained."""
    trouble: str = ""
    """What is wrong with it while it lives, in words: a problem that it reports, or its silence. Empty if nothing is wrong."""
    node: str = ""
    """The node that it is on, or was last; empty before it is started."""
