"""Drives a PrimeManager by short words: events in, instructions out as `"create trainer-0"`, with places and processes answered
at once unless a test wants to do that itself."""

from __future__ import annotations

from typing import Any

from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.manager.state import WorkerRecord
from counterpoint.cluster.spec import JobSpec, RoleSpec


def command(name: str, **options: Any) -> RoleSpec:
    """A role of one command, as `counterpoint run` has."""
    defaults = {"ready_timeout_seconds": 60.0, "silence_timeout_seconds": None, "max_restarts": 0}
    return RoleSpec(name=name, command=("true",), **(defaults | options))


def role(name: str, **options: Any) -> RoleSpec:
    """A role of a class."""
    return RoleSpec(name=name, worker="here:Worker", **options)


def managed(name: str, **options: Any) -> RoleSpec:
    """A role with a SubMaster."""
    return role(name, sub_master="here:SubMaster", **options)


class Driver:
    """A manager and what a backend would answer at once."""

    def __init__(self, *roles: RoleSpec, stay: bool = False, answers: bool = True) -> None:
        self.manager = PrimeManager(JobSpec(name="job", roles=roles, stay=stay))
        self.answers = answers
        self.now = 0.0
        self.nodes: dict[str, str] = {}
        """Where a bundle is placed, if not on `node`."""
        self.instructions: list[events.Instruction] = []
        """All that was ever instructed."""

    def __getitem__(self, worker: str) -> WorkerRecord:
        return self.manager.state.workers[worker]

    @property
    def outcome(self) -> events.Outcome | None:
        return self.manager.outcome

    @property
    def stage(self) -> str:
        return self.manager.stage.value

    @property
    def deadline(self) -> float | None:
        return self.manager.deadline

    def phases(self) -> dict[str, str]:
        return {name: worker.phase.value for name, worker in self.manager.state.workers.items()}

    # --- events ---

    def handle(self, event: events.Event) -> list[str]:
        """Passes in an event, and the answers to what follows; returns the instructions in words, but for places."""
        self.now = max(self.now, event.at)
        words: list[str] = []
        waiting = [event]
        while waiting:
            for instruction in self.manager.handle(waiting.pop(0)):
                self.instructions.append(instruction)
                if not isinstance(instruction, events.Allocate | events.Release) or not self.answers:
                    words.append(in_words(instruction))
                if self.answers:
                    waiting += self._answer(instruction)
        return words

    def _answer(self, instruction: events.Instruction) -> list[events.Event]:
        match instruction:
            case events.Allocate(bundle, attempt):
                return [events.Allocated(bundle, attempt, self.nodes.get(bundle, "node"), self.now)]
            case events.Create(worker, incarnation, bundle):
                return [events.Created(worker, incarnation, self.nodes.get(bundle, "node"), 100, self.now)]
        return []

    def at(self, at: float | None) -> float:
        return self.now if at is None else at

    def incarnation(self, worker: str) -> int:
        return self[worker].incarnation

    def begin(self, at: float | None = None) -> list[str]:
        return self.handle(events.BeginJob(self.at(at)))

    def ready(self, worker: str, at: float | None = None) -> list[str]:
        return self.handle(events.WorkerReady(worker, self.incarnation(worker), f"ipc://{worker}", "", self.at(at)))

    def started(self, worker: str, at: float | None = None) -> list[str]:
        return self.handle(events.WorkerStarted(worker, self.incarnation(worker), self.at(at)))

    def finished(self, worker: str, at: float | None = None) -> list[str]:
        return self.handle(events.WorkFinished(worker, self.incarnation(worker), self.at(at)))

    def exit(
        self, worker: str, code: int = 0, at: float | None = None, reason: str = "", *, lost: bool = False
    ) -> list[str]:
        return self.handle(events.WorkerExited(worker, self.incarnation(worker), code, reason, self.at(at), lost))

    def exits(self, *workers: str, code: int = 0) -> list[str]:
        return [word for worker in workers for word in self.exit(worker, code)]

    def no_start(self, worker: str, reason: str, at: float | None = None) -> list[str]:
        return self.handle(events.CreateFailed(worker, self.incarnation(worker), reason, self.at(at)))

    def leaves(self, worker: str, at: float | None = None) -> list[str]:
        return self.handle(events.EndAnnounced(worker, self.incarnation(worker), self.at(at)))

    def needs(self, worker: str, seconds: float, at: float | None = None) -> list[str]:
        return self.handle(events.ExtensionRequested(worker, self.incarnation(worker), seconds, self.at(at)))

    def silent(self, worker: str, seconds: float = 15.0, at: float | None = None) -> list[str]:
        return self.handle(events.WorkerSilent(worker, self.incarnation(worker), seconds, self.at(at)))

    def checked(self, role: str, at: float | None = None) -> list[str]:
        worker, number = f"{role}-master", self.manager.state.roles[role].check
        return self.handle(events.ChildrenChecked(worker, self.incarnation(worker), number, self.at(at)))

    def failover_done(self, worker: str, at: float | None = None) -> list[str]:
        return self.handle(events.FailoverDone(worker, self.incarnation(worker), self[worker].notice, self.at(at)))

    def replace(self, by: str, worker: str, at: float | None = None) -> list[str]:
        incarnations = self.incarnation(by), self.incarnation(worker)
        return self.handle(events.ReplaceRequested(by, incarnations[0], worker, incarnations[1], "slow", self.at(at)))

    def scale(self, role: str, count: int, at: float | None = None) -> list[str]:
        return self.handle(events.ScaleRequested(role, count, self.at(at)))

    def lose(self, node: str, at: float | None = None) -> list[str]:
        return self.handle(events.NodeLost(node, "its keeper does not answer", self.at(at)))

    def no_place(self, bundle: str, final: bool = False, at: float | None = None) -> list[str]:
        attempt = self.manager.state.bundles[bundle].attempt
        return self.handle(events.AllocationFailed(bundle, attempt, "no room", final, self.at(at)))

    def place(self, bundle: str, node: str = "node", at: float | None = None) -> list[str]:
        attempt = self.manager.state.bundles[bundle].attempt
        return self.handle(events.Allocated(bundle, attempt, node, self.at(at)))

    def stop(self, reason: str = "asked", code: int = 143, at: float | None = None, by: str = "") -> list[str]:
        return self.handle(events.JobStopRequested(reason, code, by, self.at(at)))

    def guests(self, *guests: str, at: float | None = None) -> list[str]:
        return self.handle(events.GuestsChanged(guests, self.at(at)))

    def tick(self, at: float | None = None) -> list[str]:
        """A tick at that time, or at the deadline."""
        due = self.deadline if at is None else at
        assert due is not None, "nothing is due"
        return self.handle(events.Tick(due))

    def new_master(self, epoch: int, at: float | None = None) -> list[str]:
        return self.handle(events.MasterChanged(epoch, self.at(at)))

    # --- more at once ---

    def running(self) -> Driver:
        """Brings the whole job up, one second after another."""
        self.begin(0.0)
        self.bring_up(1.0)
        assert self.stage == "RUNNING", self.phases()
        return self

    def bring_up(self, at: float | None = None) -> list[str]:
        """Answers whatever asks for an answer, until nothing does."""
        words: list[str] = []
        while step := self._next_answer(self.at(at)):
            words += step
        return words

    def _next_answer(self, at: float) -> list[str]:
        for name, worker in self.manager.state.workers.items():
            if worker.phase.value == "initializing":
                return [*self.ready(name, at), "."]
            if worker.phase.value == "starting":
                return [*self.started(name, at), "."]
        for name, record in self.manager.state.roles.items():
            if record.checking:
                return [*self.checked(name, at), "."]
        return []


def in_words(instruction: events.Instruction) -> str:
    match instruction:
        case events.Allocate(bundle):
            return f"allocate {bundle}"
        case events.Release(bundle):
            return f"release {bundle}"
        case events.Create(worker, _, _, again):
            return f"create {worker}" + (" again" if again else "")
        case events.CheckChildren(worker):
            return f"check {worker}"
        case events.Failover(worker, _, _, failed):
            return f"tell {worker} of {' '.join(failed)}"
        case events.StopWorker(worker):
            return f"stop {worker}"
        case _:
            return f"{type(instruction).__name__.lower()} {instruction.worker}"
