"""A backend for the tests of the manager: it carries out instructions when told to, and keeps every report until it is delivered.

It is idempotent as `counterpoint/cluster/backends/base.py` asks, and checks what no backend may see: two living processes of one
worker.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from counterpoint.cluster.manager import events

NODES = ("one", "two", "three")


@dataclass
class Process:
    """A living process."""

    worker: str
    incarnation: int
    bundle: str
    ready: bool = False
    started: bool = False
    obstinate: bool = False
    """It ignores a request to end."""
    unkillable: bool = False


class Backend:
    """Places, processes, and reports that wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.places: dict[str, tuple[int, str]] = {}
        """The attempt and the node of each bundle."""
        self.processes: dict[str, Process] = {}
        self.created: dict[str, int] = defaultdict(int)
        """The highest incarnation of each worker that was created."""
        self.reports: dict[str, deque[events.Event]] = defaultdict(deque)
        """In order for each worker, bundle or node."""
        self.late: list[events.Event] = []
        """Reports that were delivered."""
        self.failing_places = 0
        self.failing_creations = 0
        self._next_node = 0

    def report(self, key: str, event: events.Event) -> None:
        self.reports[key].append(event)

    def waiting(self) -> list[str]:
        """Who has reports that are not delivered."""
        return sorted(key for key, reports in self.reports.items() if reports)

    def living(self, worker: str, incarnation: int) -> Process | None:
        process = self.processes.get(worker)
        return process if process is not None and process.incarnation == incarnation else None

    # --- instructions ---

    def execute(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.Allocate(bundle, attempt, _, avoid):
                self._allocate(bundle, attempt, avoid)
            case events.Create(worker, incarnation, bundle):
                self._create(worker, incarnation, bundle)
            case events.Release(bundle):
                self.places.pop(bundle, None)
                for process in list(self.processes.values()):
                    if process.bundle == bundle:
                        self.end(process.worker, 137)
            case events.StopWorker(worker, incarnation) | events.Kill(worker, incarnation):
                self._end(worker, incarnation, kill=isinstance(instruction, events.Kill))
            case events.Start(worker, incarnation):
                if started := self.living(worker, incarnation):
                    assert started.ready, f"{worker} is started before it is ready"
                    started.started = True
                    self.report(worker, events.WorkerStarted(worker, incarnation, self.now))
            case events.CheckChildren(worker, incarnation, check):
                if self.living(worker, incarnation):
                    self.report(worker, events.ChildrenChecked(worker, incarnation, check, self.now))
            case events.Failover(worker, incarnation, notice):
                if self.living(worker, incarnation):
                    self.report(worker, events.FailoverDone(worker, incarnation, notice, self.now))

    def _allocate(self, bundle: str, attempt: int, avoid: tuple[str, ...]) -> None:
        if bundle in self.places and self.places[bundle][0] == attempt:
            self.report(bundle, events.Allocated(bundle, attempt, self.places[bundle][1], self.now))
            return
        nodes = [node for node in NODES if node not in avoid]
        if self.failing_places or not nodes:
            final = not nodes or (self.failing_places > 0 and bundle.startswith("extra"))
            self.failing_places = max(0, self.failing_places - 1)
            self.report(bundle, events.AllocationFailed(bundle, attempt, "no room", final, self.now))
            return
        self._next_node += 1
        self.places[bundle] = (attempt, nodes[self._next_node % len(nodes)])
        self.report(bundle, events.Allocated(bundle, attempt, self.places[bundle][1], self.now))

    def _create(self, worker: str, incarnation: int, bundle: str) -> None:
        if incarnation <= self.created[worker]:
            if self.living(worker, incarnation):
                self.report(worker, events.Created(worker, incarnation, self.places[bundle][1], 1, self.now))
            return
        assert worker not in self.processes, f"a second {worker} is created while {self.processes[worker]} lives"
        self.created[worker] = incarnation
        if bundle not in self.places or self.failing_creations:
            self.failing_creations = max(0, self.failing_creations - 1)
            self.report(worker, events.CreateFailed(worker, incarnation, "no memory", self.now))
            return
        self.processes[worker] = Process(worker, incarnation, bundle)
        self.report(worker, events.Created(worker, incarnation, self.places[bundle][1], 1, self.now))

    def _end(self, worker: str, incarnation: int, kill: bool) -> None:
        process = self.living(worker, incarnation)
        if process is None:
            self.created[worker] = max(self.created[worker], incarnation)  # one that comes later is refused
            self.report(worker, events.WorkerExited(worker, incarnation, 143, "there is no such process", self.now))
        elif not process.unkillable and (kill or not process.obstinate):
            self.end(worker, 137 if kill else 143)

    # --- what happens by itself ---

    def end(self, worker: str, code: int, *, lost: bool = False) -> None:
        process = self.processes.pop(worker)
        self.report(worker, events.WorkerExited(worker, process.incarnation, code, "", self.now, lost))

    def become_ready(self, worker: str) -> None:
        process = self.processes[worker]
        process.ready = True
        self.report(worker, events.WorkerReady(worker, process.incarnation, f"ipc://{worker}", "", self.now))

    def finish(self, worker: str, task: bool, command: bool) -> None:
        process = self.processes[worker]
        if not command:
            process.started = False
            self.report(worker, events.WorkFinished(worker, process.incarnation, self.now))
        if task:
            self.end(worker, 0)

    def lose(self, node: str) -> None:
        """The node's processes are gone without a word; a node of the same name may be back at once."""
        lost = {bundle for bundle, (_, where) in self.places.items() if where == node}
        for bundle in lost:
            del self.places[bundle]
        self.processes = {name: process for name, process in self.processes.items() if process.bundle not in lost}
        self.report(node, events.NodeLost(node, "gone", self.now))
