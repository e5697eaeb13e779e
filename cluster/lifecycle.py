"""The life of a job's workers as a pure state machine: events in, instructions out; no processes, no clock, no I/O.

A worker is *waiting* (for others to be ready), *starting*, *ready*, *restarting* (dead, and to be started again), *stuck*
(it does not answer, and is being killed), *stopping*, and ends *stopped* or *failed*. The job as a whole is *starting*,
*running* once every worker has been ready, *stopping*, and ends *stopped* or *failed*. Every rule of supervision is here:
the order in which workers start and stop, which death causes a restart and which ends the job, how long each step may take,
and how long a worker may be silent. `cluster.job` passes in the events and carries out the instructions.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence

from cluster.events import (
    ASKED_TO_END,
    ENDED,
    BecameReady,
    Begin,
    EndAnnounced,
    Event,
    Exited,
    ExtensionRequested,
    GuestsChanged,
    HeartbeatReceived,
    Instruction,
    Kill,
    Outcome,
    Spawn,
    SpawnFailed,
    State,
    StopRequested,
    Terminate,
    Tick,
    Worker,
    describe_exit,
)
from transport.process.stop_requests import StopRequests

KILL_GRACE_SECONDS = 15.0
"""A killed process that exists after this is stuck in the kernel; the job goes on without it, and reports it."""

FIRST_BACKOFF_SECONDS = 1.0
"""Between a death and the first restart; doubled for each further restart in a row."""

LONGEST_BACKOFF_SECONDS = 30.0
"""The limit of the doubling."""

HEALTHY_SECONDS = 180.0
"""After a worker was ready for this long, its restarts are counted anew."""

FINAL_CODES = frozenset({2, 3})
"""Exit codes after which a restart would end alike: a bad configuration, an eviction."""

STOPPED_EARLY = 128 + signal.SIGTERM
"""Exit code of a job whose tasks were stopped one by one before their work was complete."""

DONE = Outcome(0, "done")


class Lifecycle:
    """The state machine of one job.

    Workers start in the order given (subject to `after`). The tasks stop first, all at once; then the services, in the
    reverse of the order given. With `stay`, the services run until a stop request.
    """

    def __init__(self, workers: Sequence[Worker], stay: bool = False) -> None:
        self.workers = {worker.name: worker for worker in workers}
        if len(self.workers) != len(workers):
            raise ValueError("two workers have the same name")
        for position, worker in enumerate(workers):
            earlier = {other.name for other in workers[:position]}
            if unknown := set(worker.after) - earlier:
                raise ValueError(f"{worker.name} starts after {sorted(unknown)}, which must be listed before it")
        self._stay = stay
        self.state = State.WAITING
        self.states = dict.fromkeys(self.workers, State.WAITING)
        self.restarts = dict.fromkeys(self.workers, 0)
        """How often each was started again, in all."""
        self.last_deaths = dict.fromkeys(self.workers, "")
        """How each died last, for a person; empty for one that never did."""
        self.guests: tuple[str, ...] | None = None
        """None before the first check."""
        self.outcome: Outcome | None = None
        """Set once everything has ended."""
        self._decided: Outcome | None = None
        """The outcome that the job is being stopped with; None until an event decides it."""
        self._failed_task: Outcome | None = None
        """The first task's failure: the job's, once the other tasks have ended as well."""
        self._settled: set[str] = set()
        """The tasks whose work is complete, or never will be: they failed."""
        self._deadlines: dict[str, float] = {}
        self._silence: dict[str, float] = {}
        """For each worker, the time by which its next heartbeat must arrive."""
        self._ending: set[str] = set()
        """Workers that have announced their end (`STOPPING=1`)."""
        self._stuck: dict[str, str] = {}
        """For workers that are being killed, what they failed to do, for a person."""
        self._ready_since: dict[str, float] = {}
        self._deaths_in_a_row = dict.fromkeys(self.workers, 0)
        self._killed: set[str] = set()
        self._requests = StopRequests()

    @property
    def deadline(self) -> float | None:
        """The time at which `Tick` is due, on the events' clock; None if none is."""
        return min([*self._deadlines.values(), *self._silence.values()], default=None)

    def handle(self, event: Event) -> list[Instruction]:
        """Returns the instructions for one event, in order."""
        match event:
            case Begin():
                self.state = State.STARTING
                return self._start_unblocked(event.at)
            case BecameReady():
                return self._became_ready(event)
            case HeartbeatReceived():
                self._expect_heartbeat(event.worker, event.at)
                return []
            case EndAnnounced():
                return self._end_announced(event)
            case ExtensionRequested(name, seconds, at):
                ends = name in self._ending or self.states[name] is State.STOPPING
                if ends and name not in self._killed:
                    self._deadlines[name] = max(self._deadlines[name], at + seconds)
                return []
            case Exited():
                return self._exited(event)
            case SpawnFailed():
                return self._spawn_failed(event)
            case StopRequested():
                return self._stop_requested(event)
            case GuestsChanged():
                self.guests = event.guests
                return self._stop_when_idle(event.at)
            case Tick():
                return self._tick(event.at)

    # --- starting ---

    def _start_unblocked(self, at: float) -> list[Instruction]:
        """Starts every waiting worker whose predecessors are ready, and notices when the whole job runs."""
        instructions: list[Instruction] = []
        for name, worker in self.workers.items():
            if self.states[name] is State.WAITING and all(self.states[other] is State.READY for other in worker.after):
                instructions.append(self._spawn(name, at))
        if not {State.WAITING, State.STARTING} & set(self.states.values()):
            self.state = State.RUNNING
        return instructions

    def _spawn(self, name: str, at: float) -> Spawn:
        timeout = self.workers[name].ready_timeout_seconds
        if timeout is None:
            self.states[name] = State.READY
            self._ready_since[name] = at
        else:
            self.states[name] = State.STARTING
            if math.isfinite(timeout):
                self._deadlines[name] = at + timeout
        return Spawn(name, again=self.restarts[name] > 0)

    def _became_ready(self, event: BecameReady) -> list[Instruction]:
        starting = self.states[event.worker] is State.STARTING and event.worker not in self._ending
        if not starting or self.state is State.STOPPING:  # sent twice, or too late
            return []
        self.states[event.worker] = State.READY
        self._ready_since[event.worker] = event.at
        self._deadlines.pop(event.worker, None)
        self._expect_heartbeat(event.worker, event.at)
        return self._start_unblocked(event.at)

    # --- silence ---

    def _expect_heartbeat(self, name: str, at: float) -> None:
        timeout = self.workers[name].silence_timeout_seconds
        if timeout is not None and self.states[name] in (State.STARTING, State.READY) and name not in self._ending:
            self._silence[name] = at + timeout

    def silent_for(self, name: str, at: float) -> float:
        """Seconds since the worker's last heartbeat; 0 for a worker that need not send any."""
        timeout = self.workers[name].silence_timeout_seconds
        return 0.0 if timeout is None or name not in self._silence else at - (self._silence[name] - timeout)

    def _end_announced(self, event: EndAnnounced) -> list[Instruction]:
        """Gives the worker as long to end as after a SIGTERM."""
        name = event.worker
        if self.states[name] in (State.STARTING, State.READY) and name not in self._ending:
            self._ending.add(name)
            self._silence.pop(name, None)
            self._deadlines[name] = event.at + self.workers[name].stop_timeout_seconds
        return []

    def _kill_stuck(self, name: str, words: str, at: float) -> list[Instruction]:
        """Kills a worker that missed a deadline; its death is then handled like any other."""
        self.states[name] = State.STUCK
        self._stuck[name] = words
        self._silence.pop(name, None)
        self._ending.discard(name)
        self._deadlines[name] = at + KILL_GRACE_SECONDS
        return [Kill(name)]

    # --- deaths ---

    def _exited(self, event: Exited) -> list[Instruction]:
        name, code = event.worker, event.code
        if self.states[name] in ENDED:
            return []
        self._deadlines.pop(name, None)
        self._silence.pop(name, None)
        self._ending.discard(name)
        stuck = self._stuck.pop(name, None)
        ready_since = self._ready_since.pop(name, event.at)
        if code == 0 and self.workers[name].task:
            self._settled.add(name)
        if self.states[name] is State.STOPPING:
            clean = (code == 0 or code in ASKED_TO_END) and name not in self._killed
            self.states[name] = State.STOPPED if clean else State.FAILED
            if not clean and name not in self._killed:  # why a killed one was killed is known already
                self.last_deaths[name] = f"{describe_exit(code)} while it was being stopped"
                self._failed(name, f"{name} {self.last_deaths[name]}", code)
            return self._continue(event.at)
        terminated = code in ASKED_TO_END and self.workers[name].task  # by another process, as `counterpoint stop` does
        if terminated or (code == 0 and (self.workers[name].task or self.state is State.STOPPING)):
            self.states[name] = State.STOPPED  # its work is done; or its peers had gone, and it ended, too
            return self._continue(event.at)
        words = describe_exit(code) + (", although the job still needs it" if code == 0 else "")
        words = words if stuck is None else f"{stuck} and was killed"
        return self._died(name, code, words, ready_since, event.at)

    def _spawn_failed(self, event: SpawnFailed) -> list[Instruction]:
        """Handles it as a death, since the cause (a full disk, no memory) may be gone at the next attempt."""
        name = event.worker
        self._deadlines.pop(name, None)
        self._ready_since.pop(name, None)
        if self.states[name] is State.STOPPING:
            self.states[name] = State.STOPPED
            return self._continue(event.at)
        return self._died(name, 1, f"could not be started: {event.reason}", event.at, event.at)

    def _died(self, name: str, code: int, words: str, ready_since: float, at: float) -> list[Instruction]:
        """Restarts a worker that ended unexpectedly, or counts it as failed."""
        self.last_deaths[name] = words
        if at - ready_since >= HEALTHY_SECONDS:
            self._deaths_in_a_row[name] = 0
        before = self._deaths_in_a_row[name]
        stays_dead = code in FINAL_CODES or before >= self.workers[name].max_restarts
        if self.state is not State.STOPPING and not stays_dead:
            self._deaths_in_a_row[name] += 1
            self.restarts[name] += 1
            self.states[name] = State.RESTARTING
            self._deadlines[name] = at + min(FIRST_BACKOFF_SECONDS * 2**before, LONGEST_BACKOFF_SECONDS)
            return []
        self.states[name] = State.FAILED
        failure = Outcome(_job_code(code), f"{name} {words}", name)
        return self._task_failed(name, failure, at) if self.workers[name].task else self._stop(failure, at)

    def _task_failed(self, name: str, failure: Outcome, at: float) -> list[Instruction]:
        """Notes the failure of a task; the other tasks go on."""
        self._failed_task = self._failed_task or failure
        self._settled.add(name)
        return self._stop(failure, at) if self.state is State.STOPPING else self._stop_when_idle(at)

    def _stop_when_idle(self, at: float) -> list[Instruction]:
        """Stops the job once all its tasks have ended, unless it has guests or stays."""
        ended = all(self.states[worker.name] in ENDED for worker in self.workers.values() if worker.task)
        if not ended or self.guests or self._stay or self.state is State.STOPPING or self.outcome is not None:
            return []
        left = [name for name, worker in self.workers.items() if worker.task and name not in self._settled]
        stopped = Outcome(STOPPED_EARLY, f"stopped before the work of {', '.join(left)} was complete") if left else DONE
        return self._stop(self._failed_task or stopped, at)

    def _continue(self, at: float) -> list[Instruction]:
        return self._stop_next(at) if self.state is State.STOPPING else self._stop_when_idle(at)

    # --- stopping ---

    def _stop_requested(self, event: StopRequested) -> list[Instruction]:
        request = self._requests.note(event.at)
        if request == 0:
            return []
        if request == 1:
            failure = self._failed_task
            if failure is None:
                return self._stop(Outcome(event.code, event.reason), event.at)
            reason = f"{event.reason}, after {failure.reason}"
            return self._stop(Outcome(event.code, reason, failure.failed_worker), event.at)
        self._decided = Outcome(event.code or 1, f"{event.reason}, twice: everything was killed")
        alive = [name for name, state in self.states.items() if state not in ENDED]
        return [instruction for name in alive for instruction in self._kill(name, event.at)]

    def _tick(self, at: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for name in [name for name, until in self._silence.items() if until <= at]:
            instructions += self._kill_stuck(
                name, f"was silent for {self.workers[name].silence_timeout_seconds:g} s", at
            )
        for name in [name for name, deadline in self._deadlines.items() if deadline <= at]:
            if self._deadlines.pop(name, None) is not None:  # an earlier one's consequences may have lifted it
                instructions += self._overdue(name, at)
        return instructions

    def _overdue(self, name: str, at: float) -> list[Instruction]:
        worker = self.workers[name]
        if self.states[name] is State.RESTARTING:
            return [self._spawn(name, at)]
        if name in self._ending:
            return self._kill_stuck(
                name, f"did not end within {worker.stop_timeout_seconds:g} s of announcing its end", at
            )
        if self.states[name] is State.STUCK:
            self.states[name] = State.FAILED
            self.last_deaths[name] = f"{self._stuck.pop(name)} and could not be killed"
            failure = Outcome(1, f"{name} {self.last_deaths[name]}", name)
            return self._task_failed(name, failure, at) if worker.task else self._stop(failure, at)
        if self.states[name] is State.STARTING:
            self.last_deaths[name] = f"was not ready within {worker.ready_timeout_seconds:g} s"
            failure = Outcome(1, f"{name} {self.last_deaths[name]}", name)
            if not worker.task:
                return self._stop(failure, at)
            self._failed_task = self._failed_task or failure
            self._settled.add(name)
            return self._kill(name, at)
        if name not in self._killed:
            self.last_deaths[name] = f"did not stop within {worker.stop_timeout_seconds:g} s and was killed"
            self._failed(name, f"{name} {self.last_deaths[name]}", 1)
            return self._kill(name, at)
        self.states[name] = State.FAILED
        self.last_deaths[name] = "could not be killed"
        self._failed(name, f"{name} {self.last_deaths[name]}", 1)
        return self._continue(at)

    def _kill(self, name: str, at: float) -> list[Instruction]:
        self.states[name] = State.STOPPING
        self._silence.pop(name, None)
        self._ending.discard(name)
        self._killed.add(name)
        self._deadlines[name] = at + KILL_GRACE_SECONDS
        return [Kill(name)]

    def _stop(self, outcome: Outcome, at: float) -> list[Instruction]:
        """Begins to stop the job. The first outcome counts, unless a later one is a failure."""
        if self._decided is None or (outcome.code != 0 and not _is_failure(self._decided)):
            self._decided = outcome
        self.state = State.STOPPING
        for name, state in self.states.items():
            if state in (State.WAITING, State.RESTARTING):
                self.states[name] = State.STOPPED
                self._deadlines.pop(name, None)
        return self._stop_next(at)

    def _stop_next(self, at: float) -> list[Instruction]:
        """Stops all tasks, which do not need one another; then one service at a time, the last one first.

        A service may need those before it to end well.
        """
        alive = [name for name in reversed(self.workers) if self.states[name] not in ENDED]
        tasks = [name for name in alive if self.workers[name].task]
        instructions: list[Instruction] = []
        for name in tasks or alive[:1]:
            if self.states[name] not in (State.STOPPING, State.STUCK):
                self.states[name] = State.STOPPING
                self._silence.pop(name, None)
                self._ending.discard(name)
                self._deadlines[name] = at + self.workers[name].stop_timeout_seconds
                instructions.append(Terminate(name))
        if not alive:
            self.outcome = self._conclusion()
            self.state = State.FAILED if self.outcome.failed_worker else State.STOPPED
        return instructions

    def _conclusion(self) -> Outcome:
        """Returns the outcome of the job.

        If its work was complete, a stop request does not count, except for a job that stays, which has no end of its own.
        """
        assert self._decided is not None
        over = self._settled >= {name for name, worker in self.workers.items() if worker.task} and not self._stay
        return (self._failed_task or DONE) if over and not _is_failure(self._decided) else self._decided

    def _failed(self, name: str, reason: str, code: int) -> None:
        """Notes a failure while stopping; the first failure is the one that counts."""
        if self._decided is not None and self._decided.failed_worker is None:
            self._decided = Outcome(self._decided.code if _is_failure(self._decided) else _job_code(code), reason, name)


def _is_failure(outcome: Outcome) -> bool:
    """Whether the outcome is neither success nor an end by a signal."""
    return 0 < outcome.code < 128


def _job_code(code: int) -> int:
    """Returns a worker's exit code as the job's: 1 for a death by signal or an unexpected 0."""
    return code if 0 < code < 126 else 1
