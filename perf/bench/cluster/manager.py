"""Measures the time of the cluster's PrimeManager for an event, and of its tally for a heartbeat, with 10 to 10,000 workers.

    python -m perf.bench.cluster.manager [--quick | --full]

No processes: one worker after the other dies, is created again, becomes ready and is started, while all others run. With more
workers more of them are between two of these at any time.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator
from itertools import cycle, islice

from cluster.manager.events import (
    Allocate,
    Allocated,
    Begin,
    Create,
    Created,
    Event,
    Instruction,
    Start,
    Tick,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from cluster.manager.manager import PrimeManager
from cluster.manager.restarts import HEALTHY_SECONDS
from cluster.manager.tally import Tally
from cluster.spec import JobSpec, RoleSpec
from orchestrator.loop_health.gc_tuning import freeze_gc, infrequent_gc
from perf.bench.command import Size, show
from perf.figures import Case, Figure

WORKERS = (10, 100, 1_000, 10_000)
ROUNDS = 5
"""Passes over each number of workers, in turn; the fastest counts, so that what else the machine does matters less."""

HEARTBEAT_SECONDS = 5.0
"""Between two heartbeats of a worker."""


def measure(size: Size) -> list[Case]:
    """Measures the case `cluster-manager`, in 10 s; 5 s when quick."""
    events = size.pick(4_000, 20_000, 40_000)
    with infrequent_gc():
        jobs = {workers: _Deaths(workers) for workers in WORKERS}
        freeze_gc()
        seconds: dict[int, list[float]] = {workers: [] for workers in WORKERS}
        longest = dict.fromkeys(WORKERS, 0.0)
        beats: dict[int, list[float]] = {workers: [] for workers in WORKERS}
        for _ in range(ROUNDS):
            for workers, job in jobs.items():
                each = job.handle(events)
                seconds[workers].append(sum(each) / len(each))
                longest[workers] = max(longest[workers], *each)
                beats[workers].append(job.hear(events))
    least, most = WORKERS[0], WORKERS[-1]
    figures = [Figure("events each", ROUNDS * events, "")]
    for workers in WORKERS:
        figures += [
            Figure(f"an event with {workers:,} workers: mean", 1e6 * min(seconds[workers]), "us"),
            Figure(f"an event with {workers:,} workers: longest", 1e3 * longest[workers], "ms"),
            Figure(f"a heartbeat with {workers:,} workers: mean", 1e6 * min(beats[workers]), "us"),
        ]
    for name, means in (("event", seconds), ("heartbeat", beats)):
        rounds = tuple(many / few for many, few in zip(means[most], means[least], strict=True))
        ratio = min(means[most]) / min(means[least])
        figures.append(Figure(f"{name}: mean with {most:,} workers over {least}", ratio, "x", 2.0, rounds=rounds))
    return [Case("cluster-manager", figures)]


class _Deaths:
    """A job in which one worker after the other dies and comes back."""

    def __init__(self, workers: int) -> None:
        role = RoleSpec(name="worker", worker="perf.bench.cluster.manager:Worker", count=workers)
        self._manager = PrimeManager(JobSpec(name="bench", roles=(role,)))
        self._tally = Tally(self._manager)
        self._now = 0.0
        self._due: deque[Event] = deque()
        self._names: Iterator[str] = cycle(role.worker_names)
        self._pause = 1.1 * HEALTHY_SECONDS / workers
        """Seconds between two deaths, so that each worker has its restarts anew."""
        due: deque[Event] = deque([Begin(self._now)])
        while due:
            due += self._answers(self._manager.handle(due.popleft()))
        for name in role.worker_names:
            self._tally.follow(name, self._now)
        self._now = HEALTHY_SECONDS
        self._beating: Iterator[str] = cycle(role.worker_names)
        self._heard_at = 0.0

    def handle(self, events: int) -> array[float]:
        """Returns the CPU seconds of this thread for each of so many events."""
        seconds = array("d")
        while len(seconds) < events:
            event = self._next()
            began = time.thread_time()
            instructions = self._manager.handle(event)
            self._manager.take_changes()
            seconds.append(time.thread_time() - began)
            self._due += self._answers(instructions)
        assert self._manager.outcome is None
        return seconds

    def hear(self, beats: int) -> float:
        """Returns the mean CPU seconds of so many heartbeats, each followed by a look at who is silent.

        Each worker is heard of every 5 s, by a clock of their own.
        """
        workers = self._manager.state.workers
        heard = [(name, workers[name].incarnation) for name in islice(self._beating, beats)]
        pause = HEARTBEAT_SECONDS / len(workers)
        began = time.thread_time()
        for name, incarnation in heard:
            self._heard_at += pause
            self._tally.heard(name, incarnation, self._heard_at)
            self._tally.missed(self._heard_at)
        return (time.thread_time() - began) / beats

    def _next(self) -> Event:
        """Answers come first, then what is due, then the next death."""
        if self._due:
            return self._due.popleft()
        death = self._now + self._pause
        deadline = self._manager.deadline
        if deadline is not None and deadline <= death:
            self._now = max(self._now, deadline)
            return Tick(self._now)
        self._now = death
        name = next(self._names)
        return WorkerExited(name, self._manager.state.workers[name].incarnation, 137, "", self._now)

    def _answers(self, instructions: list[Instruction]) -> list[Event]:
        answers: list[Event] = []
        for instruction in instructions:
            match instruction:
                case Allocate(bundle, attempt):
                    answers.append(Allocated(bundle, attempt, "node", self._now))
                case Create(worker, incarnation):
                    answers.append(Created(worker, incarnation, "node", 1, self._now))
                    answers.append(WorkerReady(worker, incarnation, f"ipc://{worker}", "", self._now))
                case Start(worker, incarnation):
                    answers.append(WorkerStarted(worker, incarnation, self._now))
        return answers


if __name__ == "__main__":
    show(measure)
