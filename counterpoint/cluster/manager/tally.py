"""Who was heard of, and who asks too often: what precedes the manager. Pure, and kept by each master for itself.

Heartbeats are no events: each would be a write of the state, and a new master listens anew. Only what follows from their
absence, `WorkerSilent`, is an event. What a worker repeats is dropped, too, before it costs a write each time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from counterpoint.cluster.manager.events import (
    EndAnnounced,
    Event,
    ExtensionRequested,
    JobStopRequested,
    ReplaceRequested,
    ScaleRequested,
    WorkerHeard,
    WorkerReady,
    WorkerSilent,
    WorkerSuspected,
)
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.manager.state import WELL, Phase

BEATS_MISSED = 2
"""A worker is suspected once so many heartbeats are missing."""

REQUESTS_AT_ONCE = 20
"""How many requests of a worker pass at once; after that, one a second."""


class Tally:
    """What a master has heard of the workers of one job.

    A worker is listened for from its first heartbeat on, or from its being ready, until it announces its end or is asked to end.
    `follow` the manager after each event with the workers that it changed.
    """

    def __init__(self, manager: PrimeManager) -> None:
        self._manager = manager
        self._due: dict[str, _Due] = {}
        self._heap: list[tuple[float, str]] = []
        self._requests: dict[str, _Allowance] = {}
        self._recovered: dict[str, WorkerHeard] = {}

    @property
    def deadline(self) -> float | None:
        """The time at which `silent` is due; None if nobody is listened for."""
        while self._heap:
            at, worker = self._heap[0]
            due = self._due.get(worker)
            if due is not None and due.looked_at == at:
                return at
            heapq.heappop(self._heap)
        return None

    def heard(self, worker: str, incarnation: int, at: float) -> None:
        """Notes a heartbeat; one of another incarnation, or of a worker that is to end, counts nothing."""
        if self._timeout(worker, incarnation) is None:
            return
        self._listen(worker, incarnation, at)
        due = self._due[worker]
        if due.suspected:
            due.suspected = False
            self._look_at(worker, due, at + self._suspicion(worker))
            self._recovered[worker] = WorkerHeard(worker, incarnation, at)

    def follow(self, worker: str, at: float) -> None:
        """Looks at a worker that has changed: listens for it once it is ready, and no more once it ends."""
        record = self._manager.state.workers[worker]
        known = self._due.get(worker)
        if self._timeout(worker, record.incarnation) is None:
            self._due.pop(worker, None)
        elif record.phase is not Phase.INITIALIZING and (known is None or known.incarnation != record.incarnation):
            self._listen(worker, record.incarnation, at)

    def missed(self, at: float) -> list[WorkerSuspected | WorkerHeard | WorkerSilent]:
        """Returns the workers of which two heartbeats are missing, or that were not heard of for longer than their role allows.

        Each is returned once; one that was suspected is returned again when it was heard of.
        """
        events: list[WorkerSuspected | WorkerHeard | WorkerSilent] = [*self._recovered.values()]
        self._recovered.clear()
        while (deadline := self.deadline) is not None and deadline <= at:
            worker = heapq.heappop(self._heap)[1]
            due = self._due[worker]
            timeout, suspicion = self._timeout(worker, due.incarnation), self._suspicion(worker)
            if timeout is None:
                del self._due[worker]
            elif due.heard + timeout <= at:
                del self._due[worker]
                events.append(WorkerSilent(worker, due.incarnation, timeout, at))
            elif due.suspected or due.heard + suspicion > at:
                self._look_at(worker, due, due.heard + (timeout if due.suspected else suspicion))
            else:
                due.suspected = True
                self._look_at(worker, due, due.heard + timeout)
                events.append(WorkerSuspected(worker, due.incarnation, suspicion, at))
        return events

    def silent_for(self, worker: str, at: float) -> float:
        """Seconds since the worker's last heartbeat; 0 for one that is not listened for."""
        due = self._due.get(worker)
        return 0.0 if due is None else at - due.heard

    def passes(self, event: Event) -> bool:
        """Whether an event is worth a write of the state: it is not stale, and no request of a worker that asks too often."""
        if self._manager.is_stale(event):
            return False
        workers = self._manager.state.workers
        match event:
            case WorkerReady(worker):
                return workers[worker].phase in (Phase.CREATING, Phase.INITIALIZING)
            case EndAnnounced(worker):
                return not workers[worker].ending
            case ReplaceRequested(by, _, worker):
                asks = workers.get(by)
                child = workers[worker]
                return asks is not None and asks.rank < 0 and asks.role == child.role and child.phase is not Phase.STUCK
            case ExtensionRequested(worker, _, _, at):
                return self._allow(worker, at)
            case ScaleRequested(role, _, at):
                return self._allow(role, at)
            case WorkerSuspected(worker, _, _, at):
                return self._allow(f"silence of {worker}", at)
            case WorkerHeard(worker):
                return workers[worker].suspected
            case JobStopRequested(_, _, by, at) if by:
                return self._allow(by, at)
        return True

    def _allow(self, who: str, at: float) -> bool:
        allowance = self._requests.setdefault(who, _Allowance(REQUESTS_AT_ONCE, at))
        allowance.left = min(REQUESTS_AT_ONCE, allowance.left + at - allowance.at)
        allowance.at = at
        if allowance.left < 1.0:
            return False
        allowance.left -= 1.0
        return True

    def _timeout(self, worker: str, incarnation: int) -> float | None:
        """The longest silence of a worker that is to be listened for; None if it is not."""
        record = self._manager.state.workers.get(worker)
        if record is None or record.incarnation != incarnation or record.phase not in WELL or record.ending:
            return None
        return self._manager.role_of(record).silence_timeout_seconds

    def _suspicion(self, worker: str) -> float:
        """The silence after which two heartbeats are missing."""
        role = self._manager.role_of(self._manager.state.workers[worker])
        limit = role.silence_timeout_seconds or 0.0
        return min(BEATS_MISSED * (role.heartbeat_seconds or limit), limit)

    def _listen(self, worker: str, incarnation: int, at: float) -> None:
        due = self._due.get(worker)
        if due is not None and due.incarnation == incarnation:
            due.heard = max(due.heard, at)
            return
        timeout = self._timeout(worker, incarnation)
        if timeout is not None:
            due = self._due[worker] = _Due(incarnation, at, at, self._manager.state.workers[worker].suspected)
            self._look_at(worker, due, at + (timeout if due.suspected else self._suspicion(worker)))

    def _look_at(self, worker: str, due: _Due, at: float) -> None:
        """A heartbeat does not move the entry in the heap: when it comes up, it is put back as far as was heard meanwhile."""
        due.looked_at = at
        heapq.heappush(self._heap, (at, worker))


@dataclass(slots=True)
class _Due:
    incarnation: int
    heard: float
    looked_at: float
    """The entry of the heap that counts."""
    suspected: bool


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float
