"""The life of a job's workers as a pure state machine: events in, instructions out; no processes, no clock, no I/O.

A worker is *waiting* (for others to be ready), *starting*, *ready*, *stopping*, and ends *stopped* or *failed*. The job as a
whole is *starting*, *running* once every worker is ready, *stopping*, and ends *stopped* or *failed*. Every rule of
supervision lives here: what starts after what, which death ends the job, in which order the rest stops, how long each
may take. `cluster.job` feeds it with what really happened and does what it says.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

KILL_GRACE_SECONDS = 15.0
"""A killed process that is still there after this is stuck in the kernel; we go on without it and say so."""

FOLLOW_SECONDS = 120.0
"""Once a service has ended by itself, its work done, the tasks must end within this, too: nothing will come from it any more."""


class State(StrEnum):
    """Of a worker, and of the job."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


ENDED = frozenset({State.STOPPED, State.FAILED})


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
    """True: it does the job's work, and the job is done once every task has ended with 0. False: a service, which must live
    until the tasks are done."""
    may_end: bool = False
    """A service that may end with 0 by itself, because it knows when its work is done."""
    ready_timeout_seconds: float | None = None
    """Longest time from its start to `READY=1`. Unset: it does not notify, and is ready once started."""
    stop_timeout_seconds: float = 30.0
    """Longest time from SIGTERM to its end; then it is killed."""
    nice: int = 0
    """Added to the niceness: above 0 it yields the CPU to the others."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's environment."""


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
class Exited:
    """The worker is gone. `code` is 128 + signal for a killed one."""

    worker: str
    code: int
    at: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Someone asked for the end, politely the first time; the second time everything is killed."""

    reason: str
    code: int
    """Exit code of the job, should the workers stop cleanly."""
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline that `Lifecycle.deadline` named may have passed."""

    at: float


Event = Begin | BecameReady | Exited | StopRequested | Tick


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the worker."""

    worker: str


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
        return f"was killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with exit code {code}"


class Lifecycle:
    """The state machine of one job. Workers start in the order given (subject to `after`) and stop in its reverse."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = {worker.name: worker for worker in workers}
        if len(self.workers) != len(workers):
            raise ValueError("two workers have the same name")
        for position, worker in enumerate(workers):
            earlier = {other.name for other in workers[:position]}
            if unknown := set(worker.after) - earlier:
                raise ValueError(f"{worker.name} starts after {sorted(unknown)}, which must be listed before it")
        self.state = State.WAITING
        self.states = dict.fromkeys(self.workers, State.WAITING)
        self.outcome: Outcome | None = None
        """Set once everything has ended."""
        self._verdict: Outcome | None = None
        """How it will have ended, known from the first event that decides it."""
        self._deadlines: dict[str, float] = {}
        self._killed: set[str] = set()
        self._stop_requests = 0

    @property
    def deadline(self) -> float | None:
        """When `Tick` is due, on the events' clock."""
        return min(self._deadlines.values(), default=None)

    def handle(self, event: Event) -> list[Instruction]:
        """One event's consequences, in order."""
        match event:
            case Begin():
                self.state = State.STARTING
                return self._start_what_may(event.at)
            case BecameReady():
                return self._became_ready(event)
            case Exited():
                return self._exited(event)
            case StopRequested():
                return self._stop_requested(event)
            case Tick():
                return self._tick(event.at)

    def _start_what_may(self, at: float) -> list[Instruction]:
        """Starts every waiting worker whose predecessors are ready, and notices when the whole job runs."""
        instructions: list[Instruction] = []
        for name, worker in self.workers.items():
            ready = all(self.states[other] in {State.READY, State.STOPPED} for other in worker.after)
            if self.states[name] is not State.WAITING or not ready:
                continue
            instructions.append(Spawn(name))
            if worker.ready_timeout_seconds is None:
                self.states[name] = State.READY
            else:
                self.states[name] = State.STARTING
                self._deadlines[name] = at + worker.ready_timeout_seconds
        if not {State.WAITING, State.STARTING} & set(self.states.values()):
            self.state = State.RUNNING
        return instructions

    def _became_ready(self, event: BecameReady) -> list[Instruction]:
        if self.states[event.worker] is not State.STARTING or self.state is State.STOPPING:  # said twice, or too late
            return []
        self.states[event.worker] = State.READY
        del self._deadlines[event.worker]
        self._bound_tasks(event.at)
        return self._start_what_may(event.at)

    def _bound_tasks(self, at: float) -> None:
        """Gives the tasks that run a deadline once a service has ended by itself."""
        if self._ended_services():
            for name, worker in self.workers.items():
                if worker.task and self.states[name] is State.READY:
                    self._deadlines.setdefault(name, at + FOLLOW_SECONDS)

    def _ended_services(self) -> list[str]:
        return [name for name, worker in self.workers.items() if worker.may_end and self.states[name] is State.STOPPED]

    def _exited(self, event: Exited) -> list[Instruction]:
        name, code = event.worker, event.code
        if self.states[name] in ENDED:
            return []
        self._deadlines.pop(name, None)
        worker = self.workers[name]
        if self.states[name] is State.STOPPING:
            clean = code in (0, 128 + signal.SIGTERM) and name not in self._killed
            self.states[name] = State.STOPPED if clean else State.FAILED
            if not clean and name not in self._killed:  # why a killed one was killed is known already
                self._failed(name, f"{name} {describe_exit(code)} while it was being stopped", code)
            return self._stop_next(event.at)
        if code == 0 and self.state is State.STOPPING:  # it saw that its peers had gone, and went too
            self.states[name] = State.STOPPED
            return self._stop_next(event.at)
        if code == 0 and (worker.task or worker.may_end):
            self.states[name] = State.STOPPED
            if all(self.states[task.name] is State.STOPPED for task in self.workers.values() if task.task):
                return self._stop(Outcome(0, "done"), event.at)
            self._bound_tasks(event.at)
            return self._start_what_may(event.at)
        still_needed = ", although the job still needs it" if code == 0 else ""
        self.states[name] = State.FAILED
        return self._stop(Outcome(_job_code(code), f"{name} {describe_exit(code)}{still_needed}", name), event.at)

    def _stop_requested(self, event: StopRequested) -> list[Instruction]:
        self._stop_requests += 1
        if self._stop_requests == 1:
            return self._stop(Outcome(event.code, event.reason), event.at)
        self._verdict = Outcome(event.code or 1, f"{event.reason}, twice: everything was killed")
        alive = [name for name, state in self.states.items() if state not in ENDED]
        return [instruction for name in alive for instruction in self._kill(name, event.at)]

    def _tick(self, at: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for name in [name for name, deadline in self._deadlines.items() if deadline <= at]:
            del self._deadlines[name]
            if self.states[name] is State.STARTING:
                timeout = self.workers[name].ready_timeout_seconds
                reason = f"{name} was not ready within {timeout:g} s"
                instructions += self._stop(Outcome(1, reason, name), at)
            elif self.states[name] is State.READY:
                service = self._ended_services()[0]
                reason = f"{service} ended, but {name} did not within {FOLLOW_SECONDS:g} s of it"
                instructions += self._stop(Outcome(1, reason, service), at)
            elif name not in self._killed:
                timeout = self.workers[name].stop_timeout_seconds
                self._failed(name, f"{name} did not stop within {timeout:g} s and was killed", 1)
                instructions += self._kill(name, at)
            else:
                self.states[name] = State.FAILED
                self._failed(name, f"{name} could not be killed", 1)
                instructions += self._stop_next(at)
        return instructions

    def _kill(self, name: str, at: float) -> list[Instruction]:
        self.states[name] = State.STOPPING
        self._killed.add(name)
        self._deadlines[name] = at + KILL_GRACE_SECONDS
        return [Kill(name)]

    def _stop(self, verdict: Outcome, at: float) -> list[Instruction]:
        """The job is over, for the reason given; the first reason counts, unless a later one is a failure."""
        if self._verdict is None or (self._verdict.code == 0 and verdict.code != 0):
            self._verdict = verdict
        self.state = State.STOPPING
        for name, state in self.states.items():
            if state is State.WAITING:
                self.states[name] = State.STOPPED
        return self._stop_next(at)

    def _stop_next(self, at: float) -> list[Instruction]:
        """Stops one worker at a time, the last one first: each may need those before it to end well."""
        for name in reversed(self.workers):
            if self.states[name] in ENDED:
                continue
            if self.states[name] is State.STOPPING:
                return []
            self.states[name] = State.STOPPING
            self._deadlines[name] = at + self.workers[name].stop_timeout_seconds
            return [Terminate(name)]
        assert self._verdict is not None
        self.outcome = self._verdict
        self.state = State.FAILED if self._verdict.failed_worker else State.STOPPED
        return []

    def _failed(self, name: str, reason: str, code: int) -> None:
        """Notes a failure while stopping; the first failure is the one that counts."""
        if self._verdict is not None and self._verdict.failed_worker is None:
            self._verdict = Outcome(self._verdict.code or _job_code(code), reason, name)


def _job_code(code: int) -> int:
    """A worker's exit code as the job's: kept when it is a code of its own, 1 for a death by signal or a silent 0."""
    return code if 0 < code < 126 else 1
