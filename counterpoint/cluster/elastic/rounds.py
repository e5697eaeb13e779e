"""The ElasticMaster's decisions as a pure state machine: events in, instructions out; no clock, no I/O.

The stages are GATHERING, CHECKING, READY, RENDEZVOUS, TRAINING, then ENDED; any failure, and any newcomer, leads through
STOPPING_ALL back to GATHERING. Each round has fixed members. `elastic_master` passes in the events, and carries out the
instructions; PrimeMaster creates dead workers again, so nothing here counts their deaths.
"""

from __future__ import annotations

from counterpoint.cluster.elastic import events
from counterpoint.cluster.elastic.check import NodeCheck
from counterpoint.cluster.elastic.events import (
    HAS_RANKS,
    Activity,
    Ending,
    Event,
    Instruction,
    Report,
    RoundsStage,
    Rules,
    WorkerId,
)


def _rank(worker: WorkerId) -> tuple[int, str]:
    """Orders workers by the number at the end of their names."""
    number = worker.name.rpartition("-")[2]
    return (int(number) if number.isdecimal() else -1, worker.name)


class Rounds:
    """The rounds of one training."""

    def __init__(self, rules: Rules) -> None:
        if not 1 <= rules.min_workers <= rules.max_workers:
            raise ValueError(
                f"min_workers = {rules.min_workers}, max_workers = {rules.max_workers}; expected 1 <= min <= max"
            )
        self.rules = rules
        self.stage = RoundsStage.GATHERING
        self.round = 0
        self.members: tuple[WorkerId, ...] = ()
        """The members of the current or last round, by rank."""
        self.activities: dict[WorkerId, Activity] = {}
        """What each member last said."""
        self.set_aside: dict[str, str] = {}
        """Workers whose nodes failed the check too often, with the last reason."""
        self.stragglers: list[str] = []
        """The stragglers of the last check, a line each."""
        self.ending: Ending | None = None
        """Decided, perhaps before all ranks have ended."""
        self.deadline: float | None = None
        """The time when `Tick` is due."""
        self._alive: dict[str, WorkerId] = {}
        self._expected = 0
        self._released = False
        self._began = False
        self._check: NodeCheck | None = None
        self._attempt = 0
        self._awaited: set[str] = set()
        """Workers that died or were replaced during the check, and should come again."""
        self._check_failures: dict[str, int] = {}
        self._stopping: set[WorkerId] = set()
        self._failed_rounds = 0
        self._gathering_since = 0.0
        self._training_since: float | None = None

    def handle(self, event: Event) -> list[Instruction]:
        """Returns the instructions for one event, in order."""
        if isinstance(event, events.Expected):
            self._expected = event.count
        elif isinstance(event, events.Released):
            self._released = True
        if self.stage is RoundsStage.ENDED or self._began == isinstance(event, events.Begin):
            return []
        match event:
            case events.Begin():
                return self._begin(event)
            case events.Released():
                return self._start_round() if self.stage is RoundsStage.READY else []
            case events.WorkerUp(worker, at):
                return self._worker_up(worker, at)
            case events.WorkerDown(worker, at):
                return self._worker_down(worker, at)
            case events.Unresponsive(worker, reason, at):
                if self._alive.get(worker.name) != worker:
                    return []
                return [events.Replace(worker, reason), *self._worker_down(worker, at)]
            case events.NodeMeasured() if self._check is not None:
                return [*self._check.measured(event), *self._conclude_check(event.at)]
            case events.PairChecked() if self._check is not None:
                return [*self._check.pair_checked(event), *self._conclude_check(event.at)]
            case events.Reported(worker, report, at):
                return self._reported(worker, report, at)
            case events.Expected(_, at):
                return self._gather(at) if self.stage is RoundsStage.GATHERING else []
            case events.Tick(at):
                return self._tick(at)
        return []  # an answer to a check that is over

    # --- the beginning, perhaps in the middle ---

    def _begin(self, event: events.Begin) -> list[Instruction]:
        """Takes over a round that runs undisturbed; ends what else is found."""
        self._began = True
        self._alive = {worker.name: worker for worker in event.reports}
        self.round = max((report.round for report in event.reports.values()), default=0)
        if event.finished and self._expected == 0:
            return self._end(0, "the training is complete")
        current = {w: r for w, r in event.reports.items() if r.round == self.round and r.activity is not Activity.IDLE}
        self.members = next((report.members for report in current.values()), ())
        self.activities = {worker: report.activity for worker, report in current.items()}
        if Activity.SUCCEEDED in self.activities.values():
            finished = (worker for worker in self.members if worker.name in event.finished)
            self.activities = dict.fromkeys(finished, Activity.SUCCEEDED) | self.activities
        if current and self.activities.keys() == set(self.members):
            return self._take_over(current, event.at)
        if any(report.activity in HAS_RANKS for report in event.reports.values()):
            return self._stop_all(f"round {self.round} has lost workers while no SubMaster was there", event.at)
        return self._regather(event.at)

    def _take_over(self, current: dict[WorkerId, Report], at: float) -> list[Instruction]:
        self.stage, self._released = RoundsStage.RENDEZVOUS, True
        tell = events.Tell(f"round {self.round} goes on under a new incarnation of its SubMaster")
        for worker, report in current.items():
            if report.activity is Activity.FAILED:
                return [tell, *self._script_failed(worker, report.reason, at)]
        return [tell, *self._note_progress(at)]

    # --- gathering ---

    @property
    def _available(self) -> list[WorkerId]:
        return sorted((worker for name, worker in self._alive.items() if name not in self.set_aside), key=_rank)

    def _regather(self, at: float) -> list[Instruction]:
        self.stage, self._gathering_since = RoundsStage.GATHERING, at
        self._check = None
        return self._gather(at)

    def _gather(self, at: float) -> list[Instruction]:
        """Begins once all are there that may come, or enough are and the others take too long."""
        available, rules = self._available, self.rules
        wanted = min(rules.max_workers, max(rules.min_workers, self._expected - len(self.set_aside)))
        enough = len(available) >= rules.min_workers
        self.deadline = self._gathering_since + (rules.join_seconds if enough else rules.give_up_seconds)
        if len(available) >= wanted or (enough and at >= self.deadline):
            return self._begin_check(available[: rules.max_workers])
        if at >= self.deadline:
            return self._end(1, self._too_few(f"after {rules.give_up_seconds:.0f} s"))
        return []

    def _too_few(self, when: str) -> str:
        aside = "".join(f"; {name} was set aside: {reason}" for name, reason in self.set_aside.items())
        return f"only {len(self._available)} of at least {self.rules.min_workers} workers are there {when}{aside}"

    # --- the node check ---

    def _begin_check(self, workers: list[WorkerId]) -> list[Instruction]:
        self.deadline = None
        if not self.rules.check:
            return self._ready(workers)
        self.stage = RoundsStage.CHECKING
        self._attempt += 1
        self._awaited.clear()
        self._check = NodeCheck(self._attempt)
        return [instruction for worker in workers for instruction in self._check.add(worker)]

    def _conclude_check(self, at: float) -> list[Instruction]:
        """Once all pairs are tested: has the abnormal workers created again, or goes on without any."""
        if self.stage is not RoundsStage.CHECKING or self._check is None or not self._check.complete:
            return []
        abnormal = self._check.abnormal
        instructions: list[Instruction] = [*self._check.drop(*abnormal)]
        for worker, reason in abnormal.items():
            instructions.append(self._condemn(worker, reason, at))
        if self._awaited or not self._check.complete:
            return instructions
        return [*instructions, *self._end_check(at)]

    def _condemn(self, worker: WorkerId, reason: str, at: float) -> Instruction:
        """Has a worker created again, or sets it aside if it failed the check too often."""
        count = self._check_failures[worker.name] = self._check_failures.get(worker.name, 0) + 1
        if count >= self.rules.max_check_failures:
            self.set_aside[worker.name] = reason
            return events.Tell(f"{worker} failed {count} node checks and is set aside: {reason}")
        self._alive.pop(worker.name, None)
        self._await(worker.name, at)
        return events.Replace(worker, f"it failed the node check: {reason}")

    def _await(self, name: str, at: float) -> None:
        self._awaited.add(name)
        self.deadline = at + self.rules.join_seconds

    def _end_check(self, at: float) -> list[Instruction]:
        assert self._check is not None
        passed = sorted(self._check.passed, key=_rank)
        self.stragglers = self._check.stragglers(self.rules.straggler_ratio)
        self._check_failures = {n: c for n, c in self._check_failures.items() if n not in {w.name for w in passed}}
        if len(passed) >= self.rules.min_workers:
            return [*(events.Tell(line) for line in self.stragglers), *self._ready(passed[: self.rules.max_workers])]
        if self._expected - len(self.set_aside) < self.rules.min_workers:
            return self._end(1, self._too_few("after the node check"))
        return self._regather(at)

    # --- a round ---

    def _ready(self, members: list[WorkerId]) -> list[Instruction]:
        self.stage, self.deadline, self._check = RoundsStage.READY, None, None
        self.members = tuple(members)
        return self._start_round() if self._released else []

    def _start_round(self) -> list[Instruction]:
        self.stage = RoundsStage.RENDEZVOUS
        self.round += 1
        self.activities, self._training_since = {}, None
        return [events.EndCheck(tuple(self._alive.values())), events.StartRound(self.round, self.members)]

    def _reported(self, worker: WorkerId, report: Report, at: float) -> list[Instruction]:
        if worker not in self.members or report.round < self.round:
            return []
        if self.stage is RoundsStage.STOPPING_ALL and report.activity is Activity.IDLE:
            self._stopping.discard(worker)
            return self._all_stopped(at)
        if self.stage not in (RoundsStage.RENDEZVOUS, RoundsStage.TRAINING):
            return []
        self.activities[worker] = report.activity
        if report.activity is Activity.FAILED:
            return self._script_failed(worker, report.reason, at)
        if report.activity is Activity.IDLE:
            return self._stop_all(f"{worker} has ended its ranks without being asked", at)
        return self._note_progress(at)

    def _note_progress(self, at: float) -> list[Instruction]:
        """Notices when all ranks run, and when all have succeeded."""
        activities = {self.activities.get(worker, Activity.JOINING) for worker in self.members}
        if activities == {Activity.SUCCEEDED}:
            return self._end(0, "the training is complete")
        if self.stage is RoundsStage.RENDEZVOUS and Activity.JOINING not in activities:
            self.stage, self._training_since = RoundsStage.TRAINING, at
            return self._notice_newcomers(at)
        return []

    def _notice_newcomers(self, at: float) -> list[Instruction]:
        """Ends the round soon if it could have more members."""
        if len(self.members) < min(self.rules.max_workers, len(self._available)) and self.deadline is None:
            self.deadline = at + self.rules.settle_seconds
        return []

    def _script_failed(self, worker: WorkerId, reason: str, at: float) -> list[Instruction]:
        if self._training_since is not None and at - self._training_since >= self.rules.healthy_seconds:
            self._failed_rounds = 0
        self._failed_rounds += 1
        if self._failed_rounds > self.rules.max_restarts:
            self.ending = Ending(
                1, f"{self._failed_rounds} rounds failed in a row, the last on {worker.name}: {reason}"
            )
        return self._stop_all(f"round {self.round} failed on {worker}: {reason}", at)

    def _stop_all(self, why: str, at: float) -> list[Instruction]:
        self.stage = RoundsStage.STOPPING_ALL
        self.deadline = at + self.rules.stop_seconds
        self._stopping = {worker for worker in self.members if self._alive.get(worker.name) == worker}
        stop = [events.StopRound(self.round, tuple(sorted(self._stopping, key=_rank)))] if self._stopping else []
        return [events.Tell(why), *stop, *self._all_stopped(at)]

    def _all_stopped(self, at: float) -> list[Instruction]:
        if self._stopping:
            return []
        return self._regather(at) if self.ending is None else self._end(self.ending.code, self.ending.reason)

    def _end(self, code: int, reason: str) -> list[Instruction]:
        self.stage, self.deadline = RoundsStage.ENDED, None
        self.ending = Ending(code, reason)
        return [events.End(self.ending)]

    # --- workers come and go, time passes ---

    def _worker_up(self, worker: WorkerId, at: float) -> list[Instruction]:
        known = self._alive.get(worker.name)
        if known is not None and known.incarnation >= worker.incarnation:
            return []
        gone = self._worker_down(known, at) if known is not None else []
        self._alive[worker.name] = worker
        match self.stage:
            case RoundsStage.GATHERING:
                return [*gone, *self._gather(at)]
            case RoundsStage.CHECKING if self._check is not None and worker.name not in self.set_aside:
                self._awaited.discard(worker.name)
                return [*gone, *self._check.add(worker)]
            case RoundsStage.READY:
                return [*gone, *self._regather(at)]
            case RoundsStage.TRAINING:
                return [*gone, *self._notice_newcomers(at)]
        return gone

    def _worker_down(self, worker: WorkerId, at: float) -> list[Instruction]:
        if self._alive.get(worker.name) != worker:
            return []
        del self._alive[worker.name]
        match self.stage:
            case RoundsStage.CHECKING if self._check is not None:
                self._await(worker.name, at)
                return [*self._check.drop(worker), *self._conclude_check(at)]
            case RoundsStage.READY:
                return self._regather(at)
            case RoundsStage.RENDEZVOUS | RoundsStage.TRAINING if worker in self.members:
                if self.activities.get(worker) is Activity.SUCCEEDED:
                    return []
                return self._stop_all(f"{worker} is gone in round {self.round}", at)
            case RoundsStage.STOPPING_ALL:
                self._stopping.discard(worker)
                return self._all_stopped(at)
        return []

    def _tick(self, at: float) -> list[Instruction]:
        if self.deadline is None or at < self.deadline:
            return []
        self.deadline = None
        match self.stage:
            case RoundsStage.GATHERING:
                return self._gather(at)
            case RoundsStage.CHECKING:  # who was awaited does not come; if the check still runs, its end concludes it
                self._awaited.clear()
                return self._conclude_check(at)
            case RoundsStage.TRAINING if Activity.SUCCEEDED not in self.activities.values():
                return self._stop_all(f"round {self.round} ends so that more workers can join", at)
            case RoundsStage.STOPPING_ALL:
                late = sorted(self._stopping, key=_rank)
                seconds = f"{self.rules.stop_seconds:.0f} s"
                replaced = [events.Replace(worker, f"it did not end its ranks within {seconds}") for worker in late]
                for worker in late:
                    self._alive.pop(worker.name)
                self._stopping.clear()
                return [*replaced, *self._all_stopped(at)]
        return []
