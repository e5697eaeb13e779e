"""Carries out what `rounds.Rounds` decides: calls the workers, watches them, and passes in what happens.

An asyncio program that may be left and entered again: what was outstanding is then begun anew. `elastic_master` runs it in its
hooks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from counterpoint.cluster.elastic import events
from counterpoint.cluster.elastic.events import Activity, Event, Instruction, Report, RoundsStage, WorkerId
from counterpoint.cluster.elastic.progress import Totals
from counterpoint.cluster.elastic.rounds import Rounds
from counterpoint.cluster.elastic.scaling import Scaler
from counterpoint.cluster.errors import CallError
from counterpoint.cluster.worker import Context, Stage

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""How often the list of members is looked at."""

REPORT_SECONDS = 5.0
"""How long a worker may hold back an unchanged report."""

REPORTS_IN_A_WINDOW = 20
"""How often a worker reports in each window in which the progress is measured, at least."""

CALL_SECONDS = 15.0
"""Deadline of a call that takes no time by itself."""

UNRESPONSIVE_SECONDS = 60.0
"""A living worker whose reports fail for so long is replaced. Its silence is noticed elsewhere, and earlier."""

REPEAT_SECONDS = 5.0
"""A request to replace a worker is repeated until it is gone."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The rendezvous of a round; without members while none runs, or after a change of SubMasters in its middle."""

    round: int
    members: tuple[str, ...] = ()
    """The workers, by rank."""
    host: str = ""
    port: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns it as values that calls take."""
        return {"round": self.round, "members": list(self.members), "host": self.host, "port": self.port}


class Driver:
    """Runs one `Rounds` on the workers of `context.role`."""

    def __init__(self, rounds: Rounds, context: Context, check_seconds: float, scaler: Scaler | None = None) -> None:
        """A `scaler` gives the role more workers or fewer, by the progress of the rounds."""
        self.rounds = rounds
        self._scaler = scaler
        self._report_seconds = REPORT_SECONDS
        if scaler is not None:  # so often that what is known of a window is of nearly all of it
            self._report_seconds = min(REPORT_SECONDS, scaler.window_seconds / REPORTS_IN_A_WINDOW)
        self._progress: dict[WorkerId, tuple[int, float, Totals]] = {}
        """What each worker said last of its ranks' progress: of which round, and when."""
        self._context = context
        self._check_seconds = check_seconds
        self._meeting = Meeting(0)
        """The address at which the ranks of the last round met."""
        self._began = False
        self._alive: dict[str, WorkerId] = {}
        self._expected = -1
        self.replacing: dict[WorkerId, str] = {}
        """Workers that are being created again, and why."""
        self._outstanding: list[Instruction] = []
        """What is being carried out; begun anew by the next `run`."""
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._watchers: dict[WorkerId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, done: Callable[[], bool], first: Event | None = None) -> None:
        """Handles events until `done()`, beginning with `first`; raises what a task of its own raised."""
        earlier, self._events = self._events, asyncio.Queue()  # a queue belongs to one event loop
        while not earlier.empty():
            self._events.put_nowait(earlier.get_nowait())
        if first is not None:
            self._events.put_nowait(first)
        for instruction in self._outstanding:
            self._begin(self._carry_out(instruction))
        self._begin(self._follow_members())
        self._begin(self._repeat_replacing())
        if self._scaler is not None:
            self._begin(self._scale(self._scaler))
        try:
            while not done():
                await self._handle_next()
        finally:
            tasks = [*self._tasks, *self._watchers.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._watchers.clear()
            self._tasks.clear()

    async def _handle_next(self) -> None:
        deadline = self.rounds.deadline
        seconds = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                self._take(await self._events.get())
        if deadline is not None and time.monotonic() >= deadline and self.rounds.deadline == deadline:
            self._take(events.Tick(time.monotonic()))
        for task in [task for task in [*self._tasks, *self._watchers.values()] if task.done()]:
            self._tasks.discard(task)
            if not task.cancelled():
                task.result()  # raises a defect of ours

    def _take(self, event: Event) -> None:
        before = self.rounds.stage
        for instruction in self.rounds.handle(event):
            self._outstanding.append(instruction)
            self._begin(self._carry_out(instruction))
        if self.rounds.stage is not before:
            logger.info("%s: %s -> %s, round %d", self._context.role, before, self.rounds.stage, self.rounds.round)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(coroutine))

    def _post(self, event: Event) -> None:
        self._events.put_nowait(event)

    @property
    def meeting(self) -> Meeting:
        """The address at which the ranks of the round that runs meet."""
        rounds = self.rounds
        runs = rounds.stage in (RoundsStage.RENDEZVOUS, RoundsStage.TRAINING) and self._meeting.round == rounds.round
        return self._meeting if runs else Meeting(rounds.round)

    # --- the workers ---

    def living(self) -> dict[str, WorkerId]:
        """Returns the workers that take calls, by name."""
        return {
            member.worker: WorkerId(member.worker, member.incarnation)
            for member in self._context.get_nodes_by_role(self._context.role)
            if member.stage in (Stage.READY, Stage.RUNNING) and member.address
        }

    async def _follow_members(self) -> None:
        """Passes on who came and went; the first time, asks everyone what they do, since a round may be under way."""
        while True:
            now, living = time.monotonic(), self.living()
            members = self._context.get_nodes_by_role(self._context.role)
            expected = sum(member.stage not in (Stage.FINISH, Stage.FAILED) for member in members)
            if expected != self._expected:
                self._expected = expected
                self._post(events.Expected(expected, now))
            if not self._began:
                reports = await asyncio.gather(*(self._first_report(worker) for worker in living.values()))
                said = {worker: report for worker, report in reports if report is not None}
                self._alive = {worker.name: worker for worker in said}
                finished = frozenset(member.worker for member in members if member.stage is Stage.FINISH)
                self._post(events.Begin(said, time.monotonic(), finished))
                self._began = True
            for name, worker in [*self._alive.items()]:
                if living.get(name) != worker:
                    del self._alive[name]
                    self._post(events.WorkerDown(worker, now))
            for name, worker in living.items():
                if name not in self._alive:
                    self._alive[name] = worker
                    self._post(events.WorkerUp(worker, now))
            self._watch()
            await asyncio.sleep(LOOK_SECONDS)

    async def _first_report(self, worker: WorkerId) -> tuple[WorkerId, Report | None]:
        try:
            return worker, (await self._report(worker, -1, 0.0))[1]
        except CallError as error:
            logger.warning("%s does not say what it does, and counts as absent: %s", worker, error)
            return worker, None

    def _watch(self) -> None:
        for worker in self._alive.values():
            if worker not in self._watchers:
                self._watchers[worker] = asyncio.create_task(self._watch_reports(worker))
        for worker in [worker for worker in self._watchers if self._alive.get(worker.name) != worker]:
            self._watchers.pop(worker).cancel()

    async def _watch_reports(self, worker: WorkerId) -> None:
        known, heard = -1, time.monotonic()
        while True:
            try:
                version, report = await self._report(worker, known, self._report_seconds)
            except CallError as error:
                if time.monotonic() - heard > UNRESPONSIVE_SECONDS:
                    self._post(events.Unresponsive(worker, f"it does not report: {error}", time.monotonic()))
                    return
                await asyncio.sleep(LOOK_SECONDS)
                continue
            heard = time.monotonic()
            if version != known:
                known = version
                self._post(events.Reported(worker, report, heard))

    async def _report(self, worker: WorkerId, known: int, seconds: float) -> tuple[int, Report]:
        said = await self._call(worker, "report", known, seconds, seconds=seconds + CALL_SECONDS)
        members = tuple(WorkerId(name, incarnation) for name, incarnation in said["members"])
        report = Report(Activity(said["activity"]), int(said["round"]), members, str(said["reason"]))
        totals = Totals(float(said["done"]), float(said["idle_seconds"]), int(said["ranks"]))
        self._progress[worker] = (report.round, time.monotonic(), totals)
        return int(said["version"]), report

    def _totals(self) -> tuple[float, Totals] | None:
        """Returns the progress of the round that trains, and when it was so far.

        None while no round trains, or a worker of the role takes no part in it.
        """
        rounds = self.rounds
        if rounds.stage is not RoundsStage.TRAINING or len(rounds.members) != self._expected:
            return None
        said = [self._progress[worker] for worker in rounds.members if worker in self._progress]
        if [number for number, _, _ in said] != [rounds.round] * len(rounds.members):
            return None
        return sum(at for _, at, _ in said) / len(said), sum((totals for *_, totals in said), Totals())

    async def _scale(self, scaler: Scaler) -> None:
        """Shows the scaler the progress, and asks for what it decides."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            found = self._totals()
            at, totals = found if found is not None else (time.monotonic(), None)
            decision = scaler.observe(at, self.rounds.round, len(self.rounds.members), totals)
            if decision is not None:
                logger.info("%s: %s", self._context.role, decision)
                if decision.is_change:
                    self._context.scale(decision.wanted)

    async def _call(self, worker: WorkerId, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        rank = int(worker.name.rpartition("-")[2])
        group = self._context.group(self._context.role)
        return await group.call(method, worker.incarnation, *arguments, rank=rank, timeout=seconds)

    # --- the instructions ---

    async def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case events.MeasureNode(attempt, worker):
                measured, reason = None, ""
                try:
                    rates = await self._call(worker, "do_node_check", seconds=self._check_seconds + CALL_SECONDS)
                    measured = events.Measured(tuple(sorted(rates.items())))
                except CallError as error:
                    reason = str(error)
                self._post(events.NodeMeasured(attempt, worker, measured, reason, time.monotonic()))
            case events.CheckPair(attempt, first, second):
                seconds, reason = None, ""
                try:
                    seconds = await self._check_pair(first, second)
                except CallError as error:
                    reason = str(error)
                self._post(events.PairChecked(attempt, first, second, seconds, reason, time.monotonic()))
            case events.EndCheck(workers):
                await asyncio.gather(*(self._end_check(worker) for worker in workers))
            case events.StartRound(number, members):
                await self._start_round(number, members)
            case events.StopRound(number, workers):
                await asyncio.gather(*(self._or_unresponsive(w, self._call(w, "stop_round", number)) for w in workers))
            case events.Replace(worker, reason):
                self.replacing[worker] = reason
                self._context.replace(worker.name, worker.incarnation, reason)
            case events.Tell(text):
                logger.info("%s: %s", self._context.role, text)
            case events.End(ending):
                logger.info("%s ends with code %d: %s", self._context.role, ending.code, ending.reason)
        self._outstanding.remove(instruction)

    async def _check_pair(self, first: WorkerId, second: WorkerId) -> float:
        seconds = self._check_seconds + CALL_SECONDS
        host, port = await self._call(first, "open_pair", seconds=seconds)
        calls = [
            self._call(worker, "check_pair", host, port, rank, seconds=seconds)
            for rank, worker in enumerate((first, second))
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return max(float(result) for result in results if not isinstance(result, BaseException))

    async def _end_check(self, worker: WorkerId) -> None:
        try:
            await self._call(worker, "end_check")
        except CallError as error:
            logger.info("%s keeps the process of its check: %s", worker, error)

    async def _start_round(self, number: int, members: tuple[WorkerId, ...]) -> None:
        address: list[Any] = []

        async def open_round() -> None:
            address.extend(await self._call(members[0], "open_round", number))

        await self._or_unresponsive(members[0], open_round())
        if address:
            self._meeting = Meeting(number, tuple(member.name for member in members), str(address[0]), int(address[1]))
            ids = [[*member] for member in members]
            calls = [self._call(worker, "start_elastic_job", number, ids, *address) for worker in members]
            await asyncio.gather(*(self._or_unresponsive(w, call) for w, call in zip(members, calls, strict=True)))

    async def _or_unresponsive(self, worker: WorkerId, call: Awaitable[Any]) -> None:
        try:
            await call
        except CallError as error:
            self._post(events.Unresponsive(worker, str(error), time.monotonic()))

    async def _repeat_replacing(self) -> None:
        """A request may get lost with the master that received it."""
        while True:
            await asyncio.sleep(REPEAT_SECONDS)
            living = set(self.living().values())
            self.replacing = {worker: reason for worker, reason in self.replacing.items() if worker in living}
            for worker, reason in self.replacing.items():
                self._context.replace(worker.name, worker.incarnation, reason)
