"""The ElasticMaster's rules, without a worker or a clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.cluster.elastic.events import (
    Activity,
    Begin,
    CheckPair,
    End,
    EndCheck,
    Event,
    Expected,
    Instruction,
    Measured,
    MeasureNode,
    NodeMeasured,
    PairChecked,
    Released,
    Replace,
    Report,
    Reported,
    RoundsStage,
    Rules,
    StartRound,
    StopRound,
    Tell,
    Tick,
    Unresponsive,
    WorkerDown,
    WorkerId,
    WorkerUp,
)
from counterpoint.cluster.elastic.rounds import Rounds

IDLE = Report(Activity.IDLE)
RULES = Rules(min_workers=2, max_workers=3)


def named(rank: int, incarnation: int = 1) -> WorkerId:
    return WorkerId(f"trainer-{rank}", incarnation)


A, B, C = named(0), named(1), named(2)


class World:
    """Workers as `Rounds` sees them: obeys instructions at once, as far as the test does not say otherwise."""

    def __init__(self, rules: Rules = RULES, bad: frozenset[str] = frozenset(), obey: bool = True) -> None:
        self.rounds = Rounds(rules)
        self.bad = set(bad)
        """Names of workers whose nodes are bad."""
        self.obey = obey
        self.at = 0.0
        self.alive: dict[str, WorkerId] = {}
        self.running: dict[WorkerId, int] = {}
        """The round of the ranks that each worker has."""
        self.done: list[Instruction] = []

    def begin(self, *workers: WorkerId, expected: int = 3) -> None:
        self.alive = {worker.name: worker for worker in workers}
        self.tell(Expected(expected, self.at), Begin(dict.fromkeys(workers, IDLE), self.at), Released(self.at))

    def tell(self, *events: Event) -> list[Instruction]:
        """Handles these events and what follows from them; returns all instructions."""
        queue, all_instructions = list(events), []
        while queue:
            instructions = self.rounds.handle(queue.pop(0))
            all_instructions += instructions
            self.done += instructions
            if self.obey:
                for instruction in instructions:
                    queue += self.obeyed(instruction)
        return all_instructions

    def obeyed(self, instruction: Instruction) -> list[Event]:
        match instruction:
            case MeasureNode(attempt, worker):
                return [NodeMeasured(attempt, worker, Measured((("compute", 1.0),)), "", self.at)]
            case CheckPair(attempt, first, second):
                failed = bool(self.bad & {first.name, second.name})
                reason = "timeout" if failed else ""
                return [PairChecked(attempt, first, second, None if failed else 1.0, reason, self.at)]
            case StartRound(number, members):
                assert not set(self.running) & set(self.alive.values()), "ranks of an earlier round still run"
                self.running |= dict.fromkeys(members, number)
                return [self.report(worker, Activity.TRAINING) for worker in members]
            case StopRound(_, workers):
                for worker in workers:
                    self.running.pop(worker, None)
                return [self.report(worker, Activity.IDLE) for worker in workers]
            case Replace(worker, _):
                return self.replaced(worker)
        return []

    def replaced(self, worker: WorkerId) -> list[Event]:
        """Its death, and its next incarnation."""
        self.running.pop(worker, None)
        successor = WorkerId(worker.name, worker.incarnation + 1)
        self.alive[worker.name] = successor
        return [WorkerDown(worker, self.at), WorkerUp(successor, self.at)]

    def measured(self, *workers: WorkerId) -> list[Event]:
        return [event for worker in workers for event in self.obeyed(MeasureNode(1, worker))]

    def report(self, worker: WorkerId, activity: Activity, reason: str = "") -> Reported:
        return Reported(worker, Report(activity, self.rounds.round, self.rounds.members, reason), self.at)

    def pass_time(self) -> list[Instruction]:
        assert self.rounds.deadline is not None
        self.at = self.rounds.deadline
        return self.tell(Tick(self.at))

    def stage(self) -> RoundsStage:
        """As a call, so that the type checker does not believe that a stage once seen stays."""
        return self.rounds.stage

    def state(self) -> tuple[RoundsStage, int, tuple[WorkerId, ...]]:
        return self.rounds.stage, self.rounds.round, self.rounds.members


def of(kind: type, instructions: list[Instruction]) -> list[Any]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def test_workers_are_checked_and_trained_to_the_end() -> None:
    world = World()
    world.begin(A, B, C)
    assert world.state() == (RoundsStage.TRAINING, 1, (A, B, C))
    assert len(of(MeasureNode, world.done)) == len(of(CheckPair, world.done)) == 3
    assert of(EndCheck, world.done) == [EndCheck((A, B, C))]
    world.tell(*(world.report(worker, Activity.SUCCEEDED) for worker in (A, B)))
    assert world.stage() is RoundsStage.TRAINING
    assert of(End, world.tell(world.report(C, Activity.SUCCEEDED)))[0].ending.code == 0
    assert world.tell(WorkerDown(A, 9.0), Tick(9e9)) == []


def test_training_waits_for_the_whole_job() -> None:
    world = World()
    world.tell(Expected(3, 0.0), Begin(dict.fromkeys((A, B, C), IDLE), 0.0))
    assert world.stage() is RoundsStage.READY
    world.tell(Released(1.0))
    assert world.stage() is RoundsStage.TRAINING


def test_enough_workers_wait_for_the_others_only_so_long() -> None:
    world = World()
    world.begin(A, C)
    assert (world.rounds.stage, world.rounds.deadline) == (RoundsStage.GATHERING, RULES.join_seconds)
    world.pass_time()
    assert world.state() == (RoundsStage.TRAINING, 1, (A, C))
    world = World()
    world.begin(A, C, expected=2)  # nobody else was created
    assert world.state() == (RoundsStage.TRAINING, 1, (A, C))


def test_too_few_workers_wait_long_and_fail() -> None:
    world = World()
    world.begin(A)
    ending = of(End, world.pass_time())[0].ending
    assert ending.code == 1
    assert "1 of at least 2" in ending.reason


def test_the_abnormal_worker_alone_is_started_again_and_checked() -> None:
    world = World(bad=frozenset({"trainer-1"}))
    world.obey = False
    world.begin(A, B, C)
    world.obey = True
    world.tell(*(event for instruction in world.done for event in world.obeyed(instruction)))
    assert [each.worker for each in of(Replace, world.done)] == [B, named(1, 2)]
    assert "is good" in of(Replace, world.done)[0].reason
    assert list(world.rounds.set_aside) == ["trainer-1"]  # its third incarnation was no better
    assert world.state() == (RoundsStage.TRAINING, 1, (A, C))


def test_a_node_that_is_good_again_takes_part() -> None:
    world = World(bad=frozenset({"trainer-1"}))
    world.obey = False
    world.begin(A, B, C)
    queue = list(world.done)
    while queue:
        instruction = queue.pop(0)
        if isinstance(instruction, Replace):
            world.bad.clear()
        for event in world.obeyed(instruction):
            queue += world.tell(event)
    assert world.state() == (RoundsStage.TRAINING, 1, (A, named(1, 2), C))


def test_nodes_that_nobody_can_tell_apart_are_all_started_again() -> None:
    world = World(rules=replace(RULES, max_workers=2), bad=frozenset({"trainer-0"}))
    world.begin(A, B, expected=2)
    assert {each.worker.name for each in of(Replace, world.done)} == {"trainer-0", "trainer-1"}
    assert world.rounds.ending is not None
    assert "0 of at least 2" in world.rounds.ending.reason
    assert "set aside" in world.rounds.ending.reason


def test_a_node_that_fails_alone_meets_nobody() -> None:
    world = World(obey=False)
    world.begin(A, B, C)
    world.tell(NodeMeasured(1, A, None, "no GPU", 0.0))
    pairs = world.tell(*world.measured(B, C))
    assert pairs == [CheckPair(1, B, C)]
    assert world.tell(PairChecked(1, B, C, 1.0, "", 0.0)) == [Replace(A, "it failed the node check: no GPU")]
    world.tell(WorkerUp(A, 1.0))  # the dying one is still seen
    assert world.stage() is RoundsStage.CHECKING


def test_a_worker_that_dies_during_the_check_is_awaited() -> None:
    world = World(obey=False)
    world.begin(A, B, C)
    world.obey = True
    world.tell(WorkerDown(B, 0.0))
    world.tell(*world.measured(A, C))
    assert world.stage() is RoundsStage.CHECKING
    world.tell(WorkerUp(named(1, 2), 1.0))
    assert world.state() == (RoundsStage.TRAINING, 1, (A, named(1, 2), C))


def test_a_worker_that_dies_during_the_check_is_not_awaited_for_ever() -> None:
    world = World(obey=False)
    world.begin(A, B, C)
    world.tell(WorkerDown(B, 0.0))
    assert of(CheckPair, world.tell(*world.measured(A, C))) == [CheckPair(1, A, C)]
    assert world.tell(PairChecked(1, A, C, 1.0, "", 1.0)) == []
    assert of(StartRound, world.pass_time()) == [StartRound(1, (A, C))]


def test_a_death_stops_all_and_begins_the_next_round_with_the_successor() -> None:
    world = World()
    world.begin(A, B, C)
    death, birth = world.replaced(B)
    assert of(StopRound, world.tell(death)) == [StopRound(1, (A, C))]
    assert world.stage() is RoundsStage.GATHERING
    started = world.tell(birth)
    assert of(StartRound, started) == [StartRound(2, (A, named(1, 2), C))]
    assert of(MeasureNode, started), "nodes are checked again"


def test_a_death_in_the_rendezvous_and_a_second_one_while_all_stop() -> None:
    world = World(rules=replace(RULES, check=False), obey=False)
    world.begin(A, B, C)
    assert world.stage() is RoundsStage.RENDEZVOUS
    assert of(StopRound, world.tell(WorkerDown(B, 1.0))) == [StopRound(1, (A, C))]
    assert world.tell(WorkerDown(C, 1.0)) == []
    world.tell(world.report(A, Activity.IDLE))
    assert world.stage() is RoundsStage.GATHERING


def test_a_failing_script_is_started_again_within_its_budget() -> None:
    world = World(rules=replace(RULES, max_restarts=2))
    world.begin(A, B, C)
    for number in (1, 2):
        world.tell(world.report(B, Activity.FAILED, "exit code 1"))
        assert world.state()[:2] == (RoundsStage.TRAINING, number + 1)
    last = world.tell(world.report(B, Activity.FAILED, "exit code 1"))
    assert of(StopRound, last)
    ending = of(End, last)[0].ending
    assert ending.code == 1
    assert "trainer-1: exit code 1" in ending.reason


def test_a_long_healthy_round_restores_the_budget() -> None:
    world = World(rules=replace(RULES, max_restarts=1))
    world.begin(A, B, C)
    for _ in range(5):
        world.at += RULES.healthy_seconds
        world.tell(world.report(B, Activity.FAILED, "exit code 1"))
        assert world.stage() is RoundsStage.TRAINING


def test_a_newcomer_ends_the_round_once_others_had_time_to_come_too() -> None:
    world = World()
    world.begin(A, B, expected=2)
    assert world.tell(Expected(3, 1.0), WorkerUp(C, 1.0)) == []
    assert world.rounds.deadline == 1.0 + RULES.settle_seconds
    world.pass_time()
    assert world.state() == (RoundsStage.TRAINING, 2, (A, B, C))
    world.tell(Expected(4, 9.0), WorkerUp(named(3), 9.0))  # a spare
    assert world.rounds.deadline is None


def test_a_newcomer_does_not_disturb_a_training_that_ends() -> None:
    world = World()
    world.begin(A, B, expected=2)
    world.tell(WorkerUp(C, 1.0), world.report(A, Activity.SUCCEEDED))
    world.pass_time()
    assert world.state()[:2] == (RoundsStage.TRAINING, 1)
    world.tell(WorkerDown(A, 9.0))  # its part is complete
    assert of(End, world.tell(world.report(B, Activity.SUCCEEDED)))[0].ending.code == 0


def test_who_does_not_end_its_ranks_in_time_is_replaced() -> None:
    world = World(rules=replace(RULES, check=False))
    world.begin(A, B, C)
    world.obey = False
    world.tell(WorkerDown(B, 1.0), world.report(A, Activity.IDLE))
    late = world.pass_time()
    assert [each.worker for each in of(Replace, late)] == [C]
    assert world.stage() is RoundsStage.GATHERING


def test_an_unresponsive_worker_is_replaced_once() -> None:
    world = World()
    world.begin(A, B, C)
    world.obey = False
    told = world.tell(Unresponsive(B, "no answer", 1.0), Unresponsive(B, "no answer", 1.0))
    assert of(Replace, told) == [Replace(B, "no answer")]


def test_ranks_that_ended_unasked_end_the_round() -> None:
    world = World()
    world.begin(A, B, C)
    world.tell(world.report(B, Activity.IDLE))
    assert world.state()[:2] == (RoundsStage.TRAINING, 2)


def test_stale_reports_and_answers_change_nothing() -> None:
    world = World()
    world.begin(A, B, C)
    world.tell(world.report(B, Activity.FAILED, "x"))
    before = world.state()
    for event in (
        Reported(A, Report(Activity.FAILED, 1, (A, B, C)), 9.0),
        Reported(named(1, 9), Report(Activity.FAILED, 2), 9.0),
        NodeMeasured(1, A, None, "", 9.0),
        PairChecked(1, A, B, None, "", 9.0),
        WorkerDown(named(0, 9), 9.0),
        WorkerUp(A, 9.0),
        Unresponsive(named(0, 9), "", 9.0),
    ):
        assert world.tell(event) == []
    assert world.state() == before


def report_of_all(activity: Activity, *workers: WorkerId) -> dict[WorkerId, Report]:
    return {worker: Report(activity, 4, (A, B, C)) for worker in workers}


def test_a_new_sub_master_takes_over_a_round_that_runs() -> None:
    world = World(obey=False)
    assert of(Tell, world.tell(Begin(report_of_all(Activity.TRAINING, A, B, C), 0.0)))
    assert world.state() == (RoundsStage.TRAINING, 4, (A, B, C))
    world.tell(*(world.report(worker, Activity.SUCCEEDED) for worker in (A, B, C)))
    assert world.stage() is RoundsStage.ENDED


def test_a_new_sub_master_finds_the_training_complete_for_some_or_for_all() -> None:
    world = World(obey=False)
    finished = frozenset({"trainer-1", "trainer-2"})
    told = world.tell(Expected(1, 0.0), Begin(report_of_all(Activity.SUCCEEDED, A), 0.0, finished))
    assert of(End, told)[0].ending.code == 0
    assert of(End, World(obey=False).tell(Expected(0, 0.0), Begin({}, 0.0, finished)))[0].ending.code == 0
    removed = World(obey=False)  # and the others are being created
    assert removed.tell(Expected(2, 0.0), Begin({}, 0.0, finished)) == []


@pytest.mark.parametrize(
    "reports",
    [
        report_of_all(Activity.TRAINING, A, B),
        report_of_all(Activity.TRAINING, A, B) | {C: IDLE},
        report_of_all(Activity.TRAINING, A, B) | {named(2, 2): IDLE},
        report_of_all(Activity.TRAINING, A, B) | report_of_all(Activity.FAILED, C),
    ],
)
def test_a_new_sub_master_ends_a_broken_round(reports: dict[WorkerId, Report]) -> None:
    world = World(obey=False)
    stop = of(StopRound, world.tell(Expected(3, 0.0), Begin(reports, 0.0)))[0]
    assert stop.round == 4
    assert {A, B} <= {*stop.workers} <= {A, B, C}
    world.obey = True
    world.tell(*(world.report(worker, Activity.IDLE) for worker in stop.workers))
    assert world.stage() in (RoundsStage.GATHERING, RoundsStage.READY, RoundsStage.TRAINING)
    assert world.rounds.round == 4 + len(of(StartRound, world.done))


def test_stragglers_are_named() -> None:
    world = World(obey=False)
    world.begin(A, B, C)
    world.tell(
        *(
            NodeMeasured(1, worker, Measured((("compute", rate),)), "", 0.0)
            for worker, rate in ((A, 9.0), (B, 10.0), (C, 1.0))
        )
    )
    world.obey = True
    told = world.tell(*world.obeyed(CheckPair(1, A, B)))
    assert [each.text for each in of(Tell, told)] == ["trainer-2 is a straggler: its compute rate is 11% of the median"]
    assert world.stage() is RoundsStage.TRAINING


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="min_workers = 3, max_workers = 2"):
        Rounds(Rules(3, 2))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60), st.integers(1, 3), st.booleans())
@settings(max_examples=200)
def test_whatever_happens_members_live_and_no_two_rounds_overlap(
    story: list[tuple[int, int]], fewest: int, check: bool
) -> None:
    """Deaths, failures, slow ends and bad nodes in any order; then peace, in which the training must end."""
    world = World(Rules(fewest, 4, max_restarts=10**6, max_check_failures=10**6, check=check))
    world.begin(*(named(rank) for rank in range(4)), expected=4)
    for what, rank in story:
        worker = world.alive[f"trainer-{rank}"]
        match what:
            case 0:
                world.tell(*world.replaced(worker))
            case 1:
                world.tell(world.report(worker, Activity.FAILED, "exit code 1"))
            case 2:
                world.tell(Unresponsive(worker, "no answer", world.at))
            case 3:
                death, birth = world.replaced(worker)
                world.tell(death)
                world.tell(Tick(world.at))
                world.tell(birth)
            case 4 if world.rounds.deadline is not None:
                world.pass_time()
        for start in of(StartRound, world.done):
            assert fewest <= len(start.members) <= 4
        rounds = [start.round for start in of(StartRound, world.done)]
        assert rounds == list(range(1, len(rounds) + 1))
    for _ in range(20):
        if world.stage() is RoundsStage.TRAINING:
            break
        world.tell(WorkerUp(world.alive["trainer-0"], world.at))
        if world.rounds.deadline is not None:
            world.pass_time()
    assert world.stage() is RoundsStage.TRAINING
    assert all(world.alive[member.name] == member for member in world.rounds.members)
    world.tell(*(world.report(worker, Activity.SUCCEEDED) for worker in world.rounds.members))
    assert len(of(End, world.done)) == 1
