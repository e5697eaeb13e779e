"""Whatever happens, in whatever order, and however often masters change: the job ends, and nobody runs twice."""

from __future__ import annotations

import json
import random
from collections import defaultdict, deque
from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.manager.state import ENDED, JobLedger, JobState, Phase
from counterpoint.cluster.spec import JobSpec, RestartScope, StartGate
from tests.cluster.manager.backend_model import NODES, Backend
from tests.cluster.manager.driver import command, managed, role

ENOUGH_ROUNDS = 300
"""Rounds within which any job ends once nothing goes wrong any more."""

SPECS = tuple(
    JobSpec(name="job", roles=roles)
    for roles in (
        (
            role("actor", count=2, max_restarts=2),
            managed("rank", count=2, task=True, restart=RestartScope.ROLE, after=("actor",), max_restarts=2),
            command("watch", ready_timeout_seconds=None, max_restarts=1),
        ),
        (
            command("server", max_restarts=1),
            command("trainer", max_restarts=1),
            command("task", count=2, task=True, after=("trainer",), max_restarts=1),
        ),
        (
            managed("rank", count=2, min_count=1, max_count=3, collocate="near", max_restarts=2),
            role("critic", collocate="near", max_restarts=2),
            role("learner", task=True, restart=RestartScope.JOB, after=("critic",), max_restarts=2),
        ),
        (
            role("source", count=2, restart=RestartScope.ROLE, max_restarts=1),
            managed("sink", count=2, task=True, after=("source",), max_restarts=1),
            role("extra", count=2, min_count=1, max_count=3),
        ),
        (
            managed("rank", count=2, start=StartGate.WORKER, max_restarts=2),
            command("task", count=2, task=True, after=("rank",), max_restarts=1),
        ),
    )
)

COUNTERS = ("_by_phase", "_in_phase")


class AnyOrder(RuleBasedStateMachine):
    """A manager, its backend, and the instructions that its master has not carried out."""

    @initialize(spec=st.sampled_from(SPECS), seed=st.integers(0, 999), well=st.booleans())
    def begin(self, spec: JobSpec, seed: int, well: bool) -> None:
        self.spec = spec
        self.random = random.Random(seed)
        self.manager = PrimeManager(spec)
        self.backend = Backend()
        self.orders: deque[events.Instruction] = deque()
        self.events: list[events.Event] = []
        self.removals: dict[str, int] = defaultdict(int)
        self.handle(events.BeginJob(0.0))
        if well:
            self.all_goes_well_for_a_while()

    def handle(self, event: events.Event) -> None:
        """A stale event changes nothing."""
        self.events.append(event)
        stale = self.is_stale(event)
        before = self.manager.snapshot() if stale else None
        phases = {name: worker.phase for name, worker in self.manager.state.workers.items()}
        instructions = self.manager.handle(event)
        if stale:
            assert not instructions
            assert self.manager.snapshot() == before
        for name, phase in phases.items():
            self.removals[name] += phase is not Phase.REMOVED is self.manager.state.workers[name].phase
        self.orders.extend(instructions)

    def is_stale(self, event: Any) -> bool:
        worker = self.manager.state.workers.get(getattr(event, "worker", ""))
        if worker is None or not hasattr(event, "incarnation"):
            return False
        return event.incarnation != worker.incarnation or worker.phase in ENDED

    def go_on(self) -> None:
        """A few steps of all that goes on by itself, in any order."""
        for _ in range(self.random.randrange(16)):
            match self.random.randrange(4):
                case 0 if self.orders:
                    self.backend.execute(self.orders.popleft())
                case 1 | 2:
                    self.deliver_one(again=self.random.random() < 0.1)
                case 3:
                    self.become_ready(self.random.randrange(8))
        self.tick_if_due()

    def deliver_one(self, again: bool) -> None:
        """Reports of one worker come in order; one that was heard may come again."""
        if keys := self.backend.waiting():
            reports = self.backend.reports[self.random.choice(keys)]
            self.handle(reports[0])
            if not again:
                self.backend.late.append(reports.popleft())
        if self.backend.late and self.random.random() < 0.1:
            self.handle(self.random.choice(self.backend.late))

    def living(self, number: int) -> str | None:
        names = sorted(self.backend.processes)
        return names[number % len(names)] if names else None

    # --- the master and the wire ---

    @rule()
    def all_goes_well_for_a_while(self) -> None:
        for _ in range(3):
            self.settle()
            for name, process in sorted(self.backend.processes.items()):
                if not process.ready:
                    self.backend.become_ready(name)
        self.settle()
        self.go_on()

    def settle(self) -> None:
        while self.orders or self.backend.waiting():
            while self.orders:
                self.backend.execute(self.orders.popleft())
            for key in self.backend.waiting():
                self.handle(self.backend.reports[key].popleft())

    @rule(from_snapshot=st.booleans())
    def change_masters(self, from_snapshot: bool) -> None:
        """What the former one had not carried out is lost; the new one folds the journal, or goes on from a snapshot."""
        self.orders.clear()
        former = self.manager
        if from_snapshot:
            self.manager = PrimeManager(self.spec, json.loads(json.dumps(former.snapshot())))
        else:
            self.manager = PrimeManager(self.spec)
            for event in self.events:
                self.manager.handle(event)
        assert self.manager.snapshot() == former.snapshot()
        self.handle(events.MasterChanged(former.state.epoch + 1, self.backend.now))
        self.go_on()

    @rule(seconds=st.sampled_from([0.5, 5.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.backend.now += seconds
        self.tick_if_due()
        self.go_on()

    @rule()
    def the_deadline_comes(self) -> None:
        if self.manager.deadline is not None:
            self.backend.now = max(self.backend.now, self.manager.deadline)
            self.tick_if_due()
        self.go_on()

    def tick_if_due(self) -> None:
        if self.manager.deadline is not None and self.manager.deadline <= self.backend.now:
            self.handle(events.Tick(self.backend.now))

    # --- what workers do ---

    def become_ready(self, number: int) -> None:
        name = self.living(number)
        if name is not None and not self.backend.processes[name].ready:
            self.backend.become_ready(name)

    @rule(number=st.integers(0, 7), code=st.sampled_from([0, 1, 1, 3, 137, 137, 143]))
    def die(self, number: int, code: int) -> None:
        if name := self.living(number):
            self.backend.end(name, code)
        self.go_on()

    @rule(number=st.integers(0, 7))
    def finish(self, number: int) -> None:
        if name := self.living(number):
            record, process = self.manager.state.workers[name], self.backend.processes[name]
            is_command = self.manager.role_of(record).command is not None
            if process.started or (is_command and process.ready):
                self.backend.finish(name, record.task, is_command)
        self.go_on()

    @rule(number=st.integers(0, 7))
    def end_with_the_keeper(self, number: int) -> None:
        if name := self.living(number):
            self.backend.end(name, 137, lost=True)
        self.go_on()

    @rule(number=st.integers(0, 7))
    def announce_the_end(self, number: int) -> None:
        if name := self.living(number):
            process = self.backend.processes[name]
            self.backend.report(name, events.EndAnnounced(name, process.incarnation, self.backend.now))
            self.backend.report(name, events.ExtensionRequested(name, process.incarnation, 20.0, self.backend.now))
        self.go_on()

    @rule(number=st.integers(0, 7))
    def fall_silent(self, number: int) -> None:
        if name := self.living(number):
            self.handle(events.WorkerSilent(name, self.backend.processes[name].incarnation, 15.0, self.backend.now))
        self.go_on()

    @rule(number=st.integers(0, 7), heard=st.booleans())
    def miss_heartbeats(self, number: int, heard: bool) -> None:
        if name := self.living(number):
            incarnation = self.backend.processes[name].incarnation
            self.handle(events.WorkerSuspected(name, incarnation, 4.0, self.backend.now))
            if heard:
                self.handle(events.WorkerHeard(name, incarnation, self.backend.now))
        self.go_on()

    @rule(number=st.integers(0, 7), unkillable=st.sampled_from([False, False, True]))
    def resist(self, number: int, unkillable: bool) -> None:
        if name := self.living(number):
            self.backend.processes[name].obstinate = True
            self.backend.processes[name].unkillable = unkillable
        self.go_on()

    @rule(by=st.integers(0, 7), number=st.integers(0, 7))
    def ask_for_another(self, by: int, number: int) -> None:
        asks, child = self.living(by), self.living(number)
        if asks is not None and child is not None:
            incarnations = (self.backend.processes[name].incarnation for name in (asks, child))
            self.handle(
                events.ReplaceRequested(asks, next(incarnations), child, next(incarnations), "slow", self.backend.now)
            )
        self.go_on()

    # --- what happens to the job ---

    @rule(node=st.sampled_from(NODES), told_twice=st.booleans())
    def lose_node(self, node: str, told_twice: bool) -> None:
        self.backend.lose(node)
        if told_twice:
            self.backend.report(node, events.NodeLost(node, "gone", self.backend.now))
        self.go_on()

    @rule(places=st.booleans())
    def be_short_of_something(self, places: bool) -> None:
        if places:
            self.backend.failing_places += 1
        else:
            self.backend.failing_creations += 1
        self.go_on()

    @rule(role_number=st.integers(0, 2), count=st.integers(0, 4))
    def scale(self, role_number: int, count: int) -> None:
        roles = self.spec.roles
        self.handle(events.ScaleRequested(roles[role_number % len(roles)].name, count, self.backend.now))
        self.go_on()

    @precondition(lambda self: len(self.events) > 30)
    @rule(by=st.sampled_from(["", "", "rank-0"]), code=st.sampled_from([0, 143]))
    def ask_to_stop(self, by: str, code: int) -> None:
        self.handle(events.JobStopRequested("asked", code, by, self.backend.now))
        self.go_on()

    @rule(guests=st.sampled_from([(), ("visitor",)]))
    def change_guests(self, guests: tuple[str, ...]) -> None:
        self.handle(events.GuestsChanged(guests, self.backend.now))
        self.go_on()

    # --- what holds ---

    @invariant()
    def counters_are_those_of_the_records(self) -> None:
        ledger: Any = self.manager._ledger
        anew: Any = JobLedger(self.spec, JobState.from_dict(self.manager.snapshot()))
        for name in COUNTERS:
            assert getattr(ledger, name) == getattr(anew, name), name
        assert ledger.deadline == anew.deadline
        for table in (ledger.left_in_group, ledger.left_in_bundle, ledger.bundles_on):
            for key in [key for key, value in table.items() if not value]:
                del table[key]
        assert (ledger.left_in_group, ledger.left_in_bundle, ledger.bundles_on) == (
            anew.left_in_group, anew.left_in_bundle, anew.bundles_on
        )  # fmt: skip

    @invariant()
    def budgets_hold(self) -> None:
        for worker in self.manager.state.workers.values():
            assert worker.deaths <= self.manager.role_of(worker).max_restarts

    @invariant()
    def only_what_is_affected_is_created_again(self) -> None:
        workers = self.manager.state.workers.values()
        restarted = {worker.role for worker in workers if worker.restarts and worker.rank >= 0}
        if any(self.manager.role_of(worker).restart is RestartScope.JOB for worker in workers if worker.restarts):
            return
        for worker in workers:
            whole = self.manager.role_of(worker).restart is RestartScope.ROLE and worker.rank >= 0
            if not whole or worker.role not in restarted:
                assert worker.incarnation <= 1 + worker.restarts + self.removals[worker.name]

    @invariant()
    def nothing_waits_for_ever(self) -> None:
        if self.manager.outcome is not None or self.orders or self.backend.waiting():
            return
        someone = any(worker.phase in (Phase.RUNNING, Phase.FINISHED) for worker in self.manager.state.workers.values())
        assert self.manager.deadline is not None or someone or self.manager.state.guests

    def teardown(self) -> None:
        """From here on nothing goes wrong: the job ends, nothing of it lives, and its state is the fold of the events."""
        self.backend.failing_places = self.backend.failing_creations = 0
        self.handle(events.GuestsChanged((), self.backend.now))
        for _ in range(ENOUGH_ROUNDS):
            if self.manager.outcome is not None:
                break
            self.all_goes_well_for_a_while()
            self.let_work_end()
        assert self.manager.outcome is not None, "the job does not end"
        self.settle()
        assert not [process for process in self.backend.processes.values() if not process.unkillable]
        again = PrimeManager(self.spec)
        for event in self.events:
            again.handle(event)
        assert again.snapshot() == self.manager.snapshot()

    def let_work_end(self) -> None:
        """Tasks finish; else the deadline comes; else somebody stops the job, which only a job without tasks may need."""
        for name, process in sorted(self.backend.processes.items()):
            record = self.manager.state.workers[name]
            is_command = self.manager.role_of(record).command is not None
            if record.task and (process.started or (is_command and process.ready)):
                self.backend.finish(name, True, is_command)
        if self.backend.waiting() or self.manager.outcome is not None:
            return
        if self.manager.deadline is not None:
            self.the_deadline_comes()
            return
        assert not any(role.task for role in self.spec.roles), "nothing is due, and the job has not ended"
        self.handle(events.JobStopRequested("the end", 143, "", self.backend.now))


@pytest.mark.slow
def test_whatever_happens_the_job_ends() -> None:
    # Not made smaller after a failure: that takes minutes, and another seed goes another way.
    generate = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=40, stateful_step_count=30, phases=generate))
