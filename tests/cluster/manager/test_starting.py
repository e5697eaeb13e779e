"""Who starts when, and how long that may take."""

from __future__ import annotations

import math

import pytest

from counterpoint.cluster.manager.ending import FIRST_BACKOFF_SECONDS
from counterpoint.cluster.manager.events import LONGEST_REASON, Allocate, Allocated, BeginJob, ChildrenChecked
from counterpoint.cluster.manager.state import ANSWER_SECONDS, CREATIONS_AT_ONCE
from counterpoint.cluster.spec import StartGate
from tests.cluster.manager.driver import Driver, command, managed, role
from tests.cluster.manager.jobs import failed, three


def test_a_worker_waits_for_those_it_starts_after() -> None:
    job = three()
    assert job.begin(0.0) == ["create server-0", "create trainer-0"]
    assert job["task-0"].phase.value == "waiting"
    assert job.ready("server-0", 1.0) == []
    assert job.ready("trainer-0", 2.0) == ["create task-0"]
    assert job.stage == "INIT"
    assert job.ready("task-0", 3.0) == []
    assert job.stage == "RUNNING", "commands run already: none is told to start"
    assert job.deadline is None


def test_the_deadline_of_a_creation_counts_from_its_turn() -> None:
    """Only some are carried out at a time; the last of many must not be killed for having waited."""
    job = Driver(command("a", count=200), answers=False)
    bundles = [
        instruction.bundle for instruction in job.manager.handle(BeginJob(0.0)) if isinstance(instruction, Allocate)
    ]
    for bundle in bundles:
        job.manager.handle(Allocated(bundle, 1, "node", 0.0))
    due = sorted(worker.deadline or 0.0 for worker in job.manager.state.workers.values())
    assert due == [(1 + place // CREATIONS_AT_ONCE) * ANSWER_SECONDS for place in range(200)]


def test_a_role_that_does_not_wait_for_the_job_is_checked_at_work_before_others_begin() -> None:
    job = Driver(
        managed("rank", count=2, start=StartGate.WORKER),
        role("learner", after=("rank",)),
    )
    job.begin(0.0)
    assert job.ready("rank-0") == ["start rank-0"]
    assert job.ready("rank-master") == ["start rank-master"]
    assert job.ready("rank-1") == ["check rank-master", "start rank-1"]
    assert job.stage == "INIT"
    assert job.checked("rank") == ["create learner-0"]
    job.exit("rank-0", 1)
    job.tick(job.deadline)
    assert job.ready("rank-0") == ["check rank-master", "start rank-0"], "it does not wait for the learner"
    job.ready("learner-0")
    assert job.stage == "INIT", "the new one is not checked"
    assert job.checked("rank") == ["start learner-0"]


def test_a_command_that_does_not_notify_is_ready_once_created() -> None:
    job = Driver(command("first", ready_timeout_seconds=None), command("second", after=("first",), task=True))
    assert job.begin(0.0) == ["create first-0", "create second-0"]
    assert job.phases() == {"first-0": "running", "second-0": "initializing"}
    assert job.ready("first-0") == []


@pytest.mark.parametrize("code", [0, 1])
def test_a_task_that_has_ended_holds_nobody_who_starts_after_it(code: int) -> None:
    job = Driver(command("prepare", task=True), command("task", task=True, after=("prepare",)))
    job.begin(0.0)
    assert job.exit("prepare-0", code) == ["create task-0"]
    job.ready("task-0")
    assert job.stage == "RUNNING"


def test_a_service_that_is_not_ready_in_time_fails_the_job() -> None:
    job = three()
    job.begin(0.0)
    job.ready("trainer-0", 1.0)
    assert job.deadline == 60.0
    assert job.tick(60.0) == ["stop task-0"]
    job.exits("task-0", "trainer-0", "server-0")
    assert job.outcome == failed(1, "server-0", "was not ready within 60 s")


def test_a_service_that_asks_for_more_time_before_it_is_ready_has_it() -> None:
    job = three()
    job.begin(0.0)
    job.ready("trainer-0", 1.0)
    job.needs("server-0", 60.0, 50.0)
    assert job.tick(60.0) == []
    assert job["server-0"].deadline == 110.0
    job.ready("server-0", 100.0)
    job.needs("server-0", 60.0, 105.0)
    assert job["server-0"].deadline is None, "one that is ready has no deadline"


def test_a_worker_without_a_deadline_gets_none_by_asking_for_time() -> None:
    job = Driver(command("a", ready_timeout_seconds=math.inf), command("b", task=True))
    job.begin(0.0)
    job.needs("a-0", 60.0, 1.0)
    assert job["a-0"].deadline is None


def test_a_task_that_is_never_ready_is_killed_alone() -> None:
    job = Driver(command("a", task=True, ready_timeout_seconds=5.0), command("b", task=True))
    job.begin(0.0)
    assert job.deadline == 5.0
    assert job.tick(5.0) == ["kill a-0"]
    job.ready("b-0", 5.5)
    assert job.exit("a-0", 137, 5.6) == []
    assert job["a-0"].phase.value == "failed"
    job.exit("b-0", 0, 9.0)
    assert job.outcome == failed(1, "a-0", "was not ready within 5 s")


def test_a_worker_of_a_class_that_is_not_ready_in_time_is_created_again() -> None:
    job = Driver(role("actor", ready_timeout_seconds=5.0, max_restarts=1))
    job.begin(0.0)
    assert job.tick(5.0) == ["kill actor-0"]
    assert job.exit("actor-0", 137, 5.1) == []
    assert job["actor-0"].last_death == "was not ready within 5 s and was killed"
    assert job.tick() == ["create actor-0 again"]
    job.tick()
    assert job.exit("actor-0", 137, 20.0) == []
    assert job.outcome == failed(1, "actor-0", "was not ready within 5 s and was killed")


def test_a_process_whose_creation_nobody_confirms_is_killed_and_created_again() -> None:
    job = Driver(role("actor"), answers=False)
    job.begin(0.0)
    assert job.place("actor-0", at=1.0) == ["create actor-0"]
    assert job.deadline == 1.0 + ANSWER_SECONDS
    assert job.tick() == ["kill actor-0"]
    assert job.exit("actor-0", 137, 200.0) == []
    assert job.tick(201.0) == ["create actor-0 again"]


def test_a_worker_that_never_confirms_its_start_is_killed() -> None:
    job = Driver(role("actor"))
    job.begin(0.0)
    assert job.ready("actor-0", 1.0) == ["start actor-0"]
    assert job.tick() == ["kill actor-0"]


def test_a_check_that_never_ends_kills_the_sub_master_and_is_repeated_by_the_next() -> None:
    job = Driver(managed("rank", ready_timeout_seconds=30.0))
    job.begin(0.0)
    job.ready("rank-0", 1.0)
    assert job.ready("rank-master", 2.0) == ["check rank-master"]
    assert job.deadline == 32.0
    assert job.tick() == ["kill rank-master"]
    job.exit("rank-master", 137, 33.0)
    assert job.tick() == ["create rank-master again"]
    assert job.ready("rank-master") == ["check rank-master"]
    assert job.checked("rank") == ["start rank-master", "start rank-0"]


def test_a_child_that_dies_during_the_check_makes_it_void() -> None:
    job = Driver(managed("rank", count=2))
    job.begin(0.0)
    for name in ("rank-0", "rank-1", "rank-master"):
        job.ready(name, 1.0)
    job.exit("rank-1", 1, 2.0)
    assert job.checked("rank", 2.5) == [], "of the children as they were"
    job.tick()
    assert job.ready("rank-1") == ["check rank-master"]
    assert job.checked("rank") == ["start rank-master", "start rank-0", "start rank-1"]


def test_a_start_that_fails_counts_as_a_death() -> None:
    job = three(max_restarts=1)
    job.begin(0.0)
    job.ready("trainer-0", 1.0)
    assert job.no_start("server-0", "the disk is full", 1.0) == []
    assert (job["server-0"].phase.value, job.deadline) == ("restarting", 1.0 + FIRST_BACKOFF_SECONDS)
    assert job["server-0"].last_death == "could not be started: the disk is full"
    assert job.tick(2.0) == ["create server-0 again"]
    assert job.no_start("server-0", "the disk is full", 2.0) == ["stop task-0"]
    job.exits("task-0", "trainer-0")
    assert job.outcome == failed(1, "server-0", "could not be started: the disk is full")


def test_of_two_starts_that_fail_at_once_the_second_has_nothing_to_stop() -> None:
    job = three()
    job.begin(0.0)
    assert job.no_start("server-0", "no memory", 0.0) == ["stop trainer-0"]
    assert job.no_start("trainer-0", "no memory", 0.0) == []
    assert job.outcome == failed(1, "server-0", "could not be started: no memory")


def test_a_reason_is_bounded() -> None:
    job = Driver(role("actor", max_restarts=0)).running()
    job.exit("actor-0", 1, reason="x" * 10 * LONGEST_REASON)
    assert job.outcome is not None
    assert len(job.outcome.reason) <= LONGEST_REASON
    assert job.outcome.reason.endswith("(log: logs/actor-0.log)")


def test_the_answer_to_an_earlier_check_is_void() -> None:
    job = Driver(managed("rank", count=2))
    job.begin(0.0)
    for name in ("rank-0", "rank-1", "rank-master"):
        job.ready(name, 1.0)
    job.exit("rank-1", 1, 2.0)
    job.tick()
    assert job.ready("rank-1") == ["check rank-master"]
    assert job.handle(ChildrenChecked("rank-master", 1, 1, 5.0)) == []
    assert job.stage == "INIT"
    assert job.handle(ChildrenChecked("rank-master", 1, 2, 6.0)) != []
