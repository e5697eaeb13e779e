"""What an agent decides, held against arbitrary masters, workers and clocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from counterpoint.cluster.agent import protocol
from counterpoint.cluster.agent.instructions import Answer, Finish, Instruction, Kill, Spawn, Tell, Terminate
from counterpoint.cluster.agent.reports import MOST_REQUESTS
from counterpoint.cluster.agent.table import Table

LEASE = 10.0
WORKERS = ("role-0", "role-1")


def order(worker: str, incarnation: int, **fields: Any) -> dict[str, Any]:
    known = {"worker": worker, "incarnation": incarnation, "bundle": "b", "command": ["true"], "environment": {}}
    return known | {"log_file": "/log", "notifies": False, "stop_timeout_seconds": 30.0} | fields


def fresh(now: float = 0.0) -> Table:
    return Table("a", "node", "job", LEASE, heard=now)


def hello(table: Table, epoch: int = 1, received: int = 0, now: float = 0.0, peer: str = "") -> list[Instruction]:
    message = {"kind": protocol.HELLO, "epoch": epoch, "job": "job", "lease_seconds": LEASE, "received": received}
    return table.receive(peer or f"master-{epoch}", message, now)


def command(table: Table, kind: str, epoch: int = 1, now: float = 0.0, **fields: Any) -> list[Instruction]:
    return table.receive("anyone", {"kind": kind, "epoch": epoch, "id": 7, **fields}, now)


def created(table: Table, worker: str = "role-0", incarnation: int = 1, **fields: Any) -> list[Instruction]:
    done = command(table, protocol.CREATE, **order(worker, incarnation, **fields))
    assert any(isinstance(one, Spawn) for one in done)
    return done + table.spawned(worker, 100)


def told(instructions: list[Instruction]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (one.message["event"], dict(one.message["fields"]))
        for one in instructions
        if isinstance(one, Tell) and one.message["kind"] == protocol.REPORT
    ]


def refusals(instructions: list[Instruction]) -> list[str]:
    return [
        one.message["reason"]
        for one in instructions
        if isinstance(one, Answer) and one.message["kind"] == protocol.REFUSED
    ]


class AgentMachine(RuleBasedStateMachine):
    """Masters of two epochs, workers that live and die, and a shell that carries out what is decided."""

    def __init__(self) -> None:
        super().__init__()
        self.table = fresh()
        self.now = 0.0
        self.living: dict[str, int] = {}
        self.started: set[tuple[str, int]] = set()
        self.exits: set[tuple[str, int]] = set()
        """Exits that were reported and not acknowledged."""
        self.numbers: dict[int, tuple[str, int]] = {}
        self.epoch = 0
        self.spawns_fail = False
        self.finished = False

    def carry_out(self, instructions: list[Instruction]) -> list[Instruction]:
        waiting = list(instructions)
        for one in waiting:
            match one:
                case Spawn(its):
                    assert its.worker not in self.living, "two living processes of one worker"
                    assert (its.worker, its.incarnation) not in self.started, "one incarnation was started twice"
                    self.exits = {(worker, n) for worker, n in self.exits if worker != its.worker}
                    self.started.add((its.worker, its.incarnation))
                    if self.spawns_fail:
                        waiting += self.table.spawn_failed(its.worker, "no memory")
                    else:
                        self.living[its.worker] = its.incarnation
                        waiting += self.table.spawned(its.worker, 100)
                case Tell(message) if message.get("event") == "WorkerExited":
                    key = (message["fields"]["worker"], message["fields"]["incarnation"])
                    self.numbers[message["number"]] = key
                    self.exits.add(key)
                case Finish():
                    assert not self.living
                    assert not self.finished
                    self.finished = True
        return waiting

    @rule(epoch=st.integers(1, 3))
    def hello(self, epoch: int) -> None:
        done = self.carry_out(hello(self.table, epoch, now=self.now))
        if epoch < self.epoch:
            assert refusals(done)
            return
        self.epoch = epoch
        latest = {worker: self.table._highest.get(worker, 0) for worker in WORKERS}
        again = {(fields["worker"], fields["incarnation"]) for event, fields in told(done) if event == "WorkerExited"}
        assert {key for key in self.exits if key[1] == latest[key[0]]} <= again

    @rule(worker=st.sampled_from(WORKERS), incarnation=st.integers(1, 4), epoch=st.integers(1, 3))
    def create(self, worker: str, incarnation: int, epoch: int) -> None:
        self.obey(protocol.CREATE, epoch, **order(worker, incarnation))

    @rule(
        kind=st.sampled_from((protocol.STOP, protocol.KILL)),
        worker=st.sampled_from(WORKERS),
        incarnation=st.integers(1, 4),
        epoch=st.integers(1, 3),
    )
    def end_worker(self, kind: str, worker: str, incarnation: int, epoch: int) -> None:
        self.obey(kind, epoch, worker=worker, incarnation=incarnation)
        if epoch == self.epoch and self.living.get(worker) != incarnation:
            started = (worker, incarnation) in self.started
            assert started or self.table._highest.get(worker, 0) >= incarnation, "it may be started later"

    def obey(self, kind: str, epoch: int, **fields: Any) -> None:
        before = dict(self.living)
        done = self.carry_out(command(self.table, kind, epoch, self.now, **fields))
        if epoch != self.epoch:
            assert refusals(done)
            assert self.living == before
        answers = [one for one in done if isinstance(one, Answer)]
        assert len(answers) == 1, "each command has one answer"

    @rule(worker=st.sampled_from(WORKERS), code=st.sampled_from((0, 1, 137)))
    def exits_by_itself(self, worker: str, code: int) -> None:
        if worker in self.living:
            del self.living[worker]
            self.carry_out(self.table.exited(worker, code))

    @rule(worker=st.sampled_from(WORKERS), incarnation=st.integers(1, 4), other=st.integers(0, 99))
    def asks(self, worker: str, incarnation: int, other: int) -> None:
        message = {"kind": protocol.REPLACE, "worker": f"role-{other}", "incarnation": 1, "reason": "r" * 3000}
        self.carry_out(self.table.hear(worker, incarnation, message))

    @rule(fail=st.booleans())
    def memory(self, fail: bool) -> None:
        self.spawns_fail = fail

    @rule(seconds=st.sampled_from((0.1, 3.0, LEASE + 1)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        silent = self.now - self.table.heard
        self.carry_out(self.table.tick(self.now))
        if silent > LEASE:
            assert self.table.ending

    @rule(back=st.integers(0, 3))
    def acknowledge(self, back: int) -> None:
        number = max(self.numbers, default=0) - back
        if self.epoch and self.now - self.table.heard <= LEASE:
            command(self.table, protocol.ACKNOWLEDGE, self.epoch, self.now, number=number)
            self.exits -= {key for its, key in self.numbers.items() if its <= number}

    @invariant()
    def bounded(self) -> None:
        assert len(self.table.reports) <= len(WORKERS) * 4 * 12 + len(WORKERS) * 4 * MOST_REQUESTS

    @invariant()
    def ended_agents_start_nothing(self) -> None:
        if self.finished:
            assert not self.living
            assert self.table.ending


TestAgentMachine = pytest.mark.slow(AgentMachine.TestCase)
TestAgentMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_later_incarnation_waits_for_the_end_of_the_earlier_one() -> None:
    table = fresh()
    hello(table)
    created(table)
    done = command(table, protocol.CREATE, **order("role-0", 2))
    assert Kill("role-0") in done
    assert not [one for one in done if isinstance(one, Spawn)]
    assert [one.order.incarnation for one in table.exited("role-0", 137) if isinstance(one, Spawn)] == [2]


def test_a_repeated_create_starts_nothing_again() -> None:
    table = fresh()
    hello(table)
    created(table)
    again = command(table, protocol.CREATE, **order("role-0", 1))
    assert [one.message["kind"] for one in again if isinstance(one, Answer)] == [protocol.DONE]
    assert len(again) == 1


def test_a_killed_incarnation_is_not_started_by_a_late_create() -> None:
    table = fresh()
    hello(table)
    assert told(command(table, protocol.KILL, worker="role-0", incarnation=2))[0][0] == "WorkerExited"
    late = command(table, protocol.CREATE, **order("role-0", 2))
    assert not [one for one in late if isinstance(one, Spawn)]


def test_what_was_frozen_for_a_lease_obeys_nobody() -> None:
    table = fresh()
    hello(table)
    created(table)
    done = command(table, protocol.CREATE, now=LEASE + 0.1, **order("role-1", 1))
    assert Terminate("role-0") in done
    assert "no master" in refusals(done)[0]
    assert Kill("role-0") in table.tick(2 * LEASE), "two leases after the master was last heard"
    done = table.exited("role-0", 137)
    assert told(done)[0][1]["lost"]
    assert [one for one in done if isinstance(one, Finish)]


@pytest.mark.parametrize("code", [0, 130, 143])
def test_a_task_that_the_agent_cut_off_is_not_reported_as_complete(code: int) -> None:
    table = fresh()
    hello(table)
    created(table)
    assert Terminate("role-0") in table.tick(LEASE + 1)
    ((event, fields),) = told(table.exited("role-0", code))
    assert (event, fields["code"], fields["lost"]) == ("WorkerExited", 137, True)
    assert "its agent asked it to end: no master for" in fields["reason"]


def test_a_task_that_had_finished_before_the_agent_ended_stays_complete() -> None:
    table = fresh()
    hello(table)
    created(table)
    table.hear("role-0", 1, {"kind": protocol.FINISHED})
    table.tick(LEASE + 1)
    assert told(table.exited("role-0", 0)) == [
        ("WorkerExited", {"worker": "role-0", "incarnation": 1, "code": 0, "reason": "", "lost": False})
    ]


def test_a_worker_that_its_master_asked_to_end_ends_as_it_says() -> None:
    table = fresh()
    hello(table)
    created(table)
    command(table, protocol.STOP, worker="role-0", incarnation=1)
    table.tick(LEASE + 1)
    fields = told(table.exited("role-0", 143))[0][1]
    assert (fields["code"], fields["lost"]) == (143, False)


def test_without_workers_it_ends_at_once_after_a_lease() -> None:
    table = fresh()
    assert not table.tick(LEASE)
    assert [type(one) for one in table.tick(LEASE + 0.1)] == [Tell, Finish]


def test_reports_go_to_every_master_until_one_acknowledges() -> None:
    table = fresh()
    hello(table)
    created(table)
    assert [event for event, _ in told(hello(table, epoch=2))] == ["Created", "WorkerReady"]
    assert [event for event, _ in told(hello(table, epoch=2, received=1))] == ["WorkerReady"]
    command(table, protocol.ACKNOWLEDGE, epoch=2, number=2)
    assert told(hello(table, epoch=2)) == []


def test_a_master_of_a_lower_epoch_is_told_the_higher_one() -> None:
    table = fresh()
    hello(table, epoch=5)
    answers = [one.message for one in hello(table, epoch=4) if isinstance(one, Answer)]
    assert answers[0]["kind"] == protocol.REFUSED
    assert answers[0]["epoch"] == 5
    assert table.peer == "master-5"


def test_a_malformed_message_is_refused_and_says_what_is_wrong() -> None:
    table = fresh()
    hello(table)
    assert "stop.worker is 3; expected str" in refusals(command(table, protocol.STOP, worker=3, incarnation=1))[0]
    assert "no message of kind" in refusals(command(table, "dance"))[0]
    assert len(refusals(command(table, "dance" * 2**18))[0]) < 200
    assert "malformed" in refusals(command(table, protocol.CREATE, worker="w", incarnation=1, command="true"))[0]


def test_the_reason_of_a_hook_is_the_reason_of_the_exit() -> None:
    table = fresh()
    hello(table)
    created(table, description={"any": 1})
    table.hear("role-0", 1, {"kind": protocol.FAILED, "reason": "`setup` raised ValueError: \x1b[2Jno"})
    assert told(table.exited("role-0", 1))[0][1]["reason"] == "`setup` raised ValueError: \\x1b[2Jno", (
        "it controls no terminal"
    )


@pytest.mark.parametrize(("code", "kept"), [(1, True), (134, True), (137, False), (143, False)])
def test_an_error_that_a_command_survived_is_no_reason_of_its_end_by_another_hand(code: int, kept: bool) -> None:
    table = fresh()
    hello(table)
    created(table)
    table.hear("role-0", 1, {"kind": protocol.FAILED, "reason": "no such file"})
    assert told(table.exited("role-0", code))[0][1]["reason"] == ("no such file" if kept else "")


def test_members_reach_workers_that_are_created_later() -> None:
    table = fresh()
    hello(table)
    command(table, protocol.PUBLISH, members=[{"worker": "role-1", "incarnation": 1}])
    sent = [getattr(one, "message", {}).get("kind") for one in created(table, description={"any": 1})]
    assert sent.index(protocol.DESCRIPTION) < sent.index(protocol.MEMBERS)


def test_only_a_sub_master_scales_and_only_its_own_role() -> None:
    table = fresh()
    hello(table)
    for worker in ("role-master", "role-0"):
        created(table, worker)
    assert told(table.hear("role-master", 1, {"kind": protocol.SCALE, "count": 3})) == [
        ("ScaleRequested", {"role": "role", "count": 3})
    ]
    assert table.hear("role-0", 1, {"kind": protocol.SCALE, "count": 3}) == []
    assert table.hear("role-master", 1, {"kind": protocol.SCALE, "count": "3"}) == []
    (later,) = told(table.hear("role-master", 1, {"kind": protocol.SCALE, "count": 2}))
    assert later[1]["count"] == 2
