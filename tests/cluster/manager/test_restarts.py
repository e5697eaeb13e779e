"""What dies is created again, after which pause and how often; silence, and announced ends."""

from __future__ import annotations

from itertools import pairwise

import pytest

from counterpoint.cluster.manager.ending import FIRST_BACKOFF_SECONDS, HEALTHY_SECONDS, LONGEST_BACKOFF_SECONDS
from counterpoint.cluster.manager.events import Outcome, WorkerSuspected
from counterpoint.transport.process.permanent_errors import DISK_FULL, PASSING
from tests.cluster.manager.driver import Driver, managed, role
from tests.cluster.manager.jobs import KILLED_SECONDS, failed, in_a_row, three


def test_what_dies_is_created_again_after_a_pause_that_doubles_and_only_so_often() -> None:
    job = three(max_restarts=7).running()
    at, pauses = 10.0, []
    for _ in range(7):
        assert job.exit("trainer-0", 137, at) == []
        assert job.phases() == {"server-0": "running", "trainer-0": "restarting", "task-0": "running"}
        assert job.deadline is not None
        pauses.append(job.deadline - at)
        at = job.deadline
        assert job.tick(at - 0.1) == []
        assert job.tick(at) == ["create trainer-0 again"]
        assert job.ready("trainer-0", at + 1) == []
    assert pauses[0] == FIRST_BACKOFF_SECONDS
    assert all(later == min(2 * pause, LONGEST_BACKOFF_SECONDS) for pause, later in pairwise(pauses))
    assert pauses[-1] == LONGEST_BACKOFF_SECONDS
    assert job.exit("trainer-0", 1, at + 2) == ["stop task-0"]
    assert [job[name].restarts for name in ("server-0", "trainer-0", "task-0")] == [0, 7, 0]
    assert job["trainer-0"].last_death == "ended with exit code 1"
    job.exits("task-0", "server-0")
    assert job.outcome == failed(1, "trainer-0", "ended with exit code 1")


def test_a_command_that_was_never_ready_and_gives_the_same_reason_again_is_not_started_a_third_time() -> None:
    job = three(max_restarts=7)
    job.begin()
    assert job.exit("trainer-0", 1, 10.0, "no memory: 21.8 GiB of 500") == []
    assert job.tick() == ["create trainer-0 again"]
    assert job.exit("trainer-0", 1, 20.0, "the port is taken") == [], "another reason"
    assert job.tick() == ["create trainer-0 again"]
    assert job.exit("trainer-0", 1, 30.0, "no memory: 20.1 GiB of 500") == []
    assert job.tick() == ["create trainer-0 again"]
    job.exit("trainer-0", 1, 40.0, "no memory: 19 GiB of 500")
    job.exits("server-0")
    assert job.outcome == failed(1, "trainer-0", "ended with exit code 1: no memory: 19 GiB of 500")


@pytest.mark.parametrize("was_ready", [True, False])
def test_a_reason_that_comes_again_counts_only_before_a_command_was_ever_ready(was_ready: bool) -> None:
    job = three(max_restarts=2)
    job.begin()
    if was_ready:
        job.ready("server-0", 1.0)
    for at, reason in ((10.0, "no memory"), (20.0, "no memory")):
        job.exit("server-0", 1, at, reason)
        job.tick()
    assert job["server-0"].phase.value == ("initializing" if was_ready else "failed")


def test_an_obstacle_that_may_pass_is_met_again_as_often_as_a_command_may_die() -> None:
    job = three(max_restarts=2)
    job.begin()
    for at in (10.0, 20.0):
        assert job.exit("trainer-0", PASSING, at, "the port is in use") == []
        assert job.tick() == ["create trainer-0 again"]
    job.exit("trainer-0", PASSING, 30.0, "the port is in use")
    job.exits("server-0")
    assert job.outcome == failed(1, "trainer-0", f"ended with exit code {PASSING}: the port is in use")


def test_a_worker_that_a_full_disk_ended_is_created_again_however_often() -> None:
    job = three(max_restarts=1).running()
    for at in (100.0, 200.0, 300.0, 400.0):
        assert job.exit("trainer-0", DISK_FULL, at) == []
        assert job.deadline == at + LONGEST_BACKOFF_SECONDS
        assert job.tick() == ["create trainer-0 again"]
        job.ready("trainer-0")
    assert job.exit("trainer-0", 1, 450.0) == [], "the others have not used up what it has"
    job.tick()
    job.ready("trainer-0")
    assert job.exit("trainer-0", 1, 460.0) == ["stop task-0"]


def test_a_worker_that_falls_silent_is_killed_and_created_again() -> None:
    job = three(max_restarts=1).running()
    assert job.silent("trainer-0", 60.0, 61.0) == ["kill trainer-0"]
    assert job["trainer-0"].phase.value == "stuck"
    assert job.silent("trainer-0", 60.0, 61.1) == []
    assert job.exit("trainer-0", 137, 61.2) == []
    assert job["trainer-0"].last_death == "was silent for 60 s and was killed"
    assert job.tick(61.2 + FIRST_BACKOFF_SECONDS) == ["create trainer-0 again"]
    assert job.ready("trainer-0", 65.0) == []
    assert job.phases()["trainer-0"] == "running"


def test_a_silent_worker_whose_node_is_gone_was_not_killed() -> None:
    for lost in (True, False):
        job = three(max_restarts=1).running()
        job.silent("trainer-0", 60.0, 61.0)
        job.exit("trainer-0", 137, 61.2, "its keeper is gone: no answer for 10 s", lost=lost)
        said = job["trainer-0"].last_death
        assert said.startswith("was silent for 60 s, and ")
        assert "its keeper is gone: no answer for 10 s" in said


def test_a_worker_that_leaves_need_not_be_heard_of_and_has_its_time_to_stop() -> None:
    job = in_a_row(max_restarts=1).running()
    assert job.leaves("task-0", 50.0) == []
    assert job.silent("task-0", 60.0, 70.0) == []
    assert job.deadline == 80.0
    assert job.exit("task-0", 0, 70.0) == ["stop trainer-0"]
    job = in_a_row(max_restarts=1).running()
    job.leaves("task-0", 1.0)
    assert job.tick(31.0) == ["kill task-0"]
    job.exit("task-0", 137, 31.1)
    assert job["task-0"].last_death == "did not end within 30 s of announcing its end and was killed"


def test_a_worker_that_leaves_and_cannot_be_killed_fails_the_job() -> None:
    job = in_a_row().running()
    job.leaves("task-0", 50.0)
    assert job.tick(80.0) == ["kill task-0"]
    job.needs("task-0", 600.0, 81.0)
    assert job.deadline == 80.0 + KILLED_SECONDS, "it has had its time"
    assert job.tick() == ["stop trainer-0"]
    job.exits("trainer-0", "server-0")
    assert job.outcome == failed(1, "task-0", "did not end within 30 s of announcing its end and could not be killed")


def test_a_worker_that_says_that_it_is_ready_after_it_has_begun_to_leave_keeps_its_deadline() -> None:
    """`READY=1` is said again with a heartbeat when it was lost."""
    job = three()
    job.begin(0.0)
    job.ready("server-0", 1.0)
    job.leaves("trainer-0", 10.0)
    assert job.ready("trainer-0", 11.0) == []
    job.needs("trainer-0", 60.0, 12.0)
    assert job.tick(71.0) == []
    assert "kill trainer-0" in job.tick(72.0)


def test_a_silent_worker_is_not_asked_to_stop_as_well() -> None:
    job = in_a_row(max_restarts=1).running()
    assert job.silent("task-0", 60.0, 61.0) == ["kill task-0"]
    assert job.stop(at=62.0) == []
    assert job.exit("task-0", 137, 63.0) == ["stop trainer-0"]
    job.exits("trainer-0", "server-0")
    assert job.outcome == failed(1, "task-0", "was silent for 60 s and was killed")


def test_a_worker_that_was_well_for_long_has_its_restarts_anew() -> None:
    job = three(max_restarts=1).running()
    at = 10.0
    for _ in range(5):
        job.exit("server-0", 1, at)
        assert job["server-0"].phase.value == "restarting"
        job.tick(at + FIRST_BACKOFF_SECONDS)
        job.ready("server-0", at + 5)
        at += 5 + HEALTHY_SECONDS
    job.exit("server-0", 1, at)
    job.tick(at + FIRST_BACKOFF_SECONDS)
    assert job.exit("server-0", 1, at + 2) == ["stop task-0"]


@pytest.mark.parametrize("code", [2, 3])
def test_a_bad_configuration_and_an_eviction_are_final(code: int) -> None:
    job = in_a_row(max_restarts=3).running()
    assert job.exit("task-0", code, 4.0) == ["stop trainer-0"]


def test_a_worker_that_ended_with_its_keeper_is_created_again_at_once_and_at_no_cost() -> None:
    job = in_a_row(max_restarts=0).running()
    for at in (4.0, 5.0, 6.0):
        job.exit("trainer-0", 137, at, "its keeper had ended", lost=True)
        assert job["trainer-0"].last_death == "was lost: its keeper had ended"
        assert job.tick(at) == ["create trainer-0 again"]
        job.ready("trainer-0", at + 0.5)
    assert job["trainer-0"].restarts == 3
    job.exit("task-0", 137, 7.0, "its keeper had ended", lost=True)
    assert job.stop(at=8.0) == ["stop trainer-0"]
    assert job.exit("trainer-0", 137, 9.0, "its keeper had ended", lost=True) == ["stop server-0"]
    job.exits("server-0", code=143)
    assert job.outcome == Outcome(143, "asked")


@pytest.mark.parametrize("code", [0, 143])
def test_a_task_of_a_class_that_ends_before_its_work_is_created_again(code: int) -> None:
    job = Driver(managed("rank", count=2, task=True, max_restarts=1)).running()
    job.exit("rank-0", code, 4.0)
    assert job["rank-0"].phase.value == "restarting"
    assert job.tick(4.0 + FIRST_BACKOFF_SECONDS) == ["create rank-0 again"]
    job.ready("rank-0", 6.0)
    job.exit("rank-0", code, 7.0)
    job.finished("rank-1", 8.0)
    job.exits("rank-1", "rank-master")
    assert job.outcome is not None
    assert (job.outcome.code, job.outcome.failed_worker) == (1, "rank-0"), "a success is FINISHED alone"


def test_the_sub_master_has_a_worker_of_its_role_created_again_and_nobody_else_may() -> None:
    job = Driver(managed("rank", count=2), managed("actor")).running()
    assert job.replace("rank-master", "actor-0") == []
    assert job.replace("rank-0", "rank-1") == []
    assert job.replace("rank-master", "rank-master") == []
    assert job.replace("rank-master", "rank-1", 10.0) == ["kill rank-1"]
    assert job.replace("rank-master", "rank-1", 10.1) == []
    job.exit("rank-1", 137, 11.0)
    assert job["rank-1"].last_death == "was found unfit by rank-master (slow) and was killed"
    assert job.tick() == ["create rank-1 again"]
    assert job.ready("rank-1") == ["tell rank-master of rank-1", "check rank-master"]


def test_notices_are_told_one_at_a_time_and_lost_with_the_worker_that_did_not_answer() -> None:
    job = Driver(managed("rank", count=3)).running()

    def die_and_return(name: str) -> list[str]:
        job.exit(name, 1)
        job.tick()
        words = job.ready(name)
        job.checked("rank")
        job.started(name)
        return words

    assert "tell rank-master of rank-0" in die_and_return("rank-0")
    for name in ("rank-1", "rank-2"):
        assert die_and_return(name) == ["check rank-master"]
    assert job.failover_done("rank-master") == ["tell rank-master of rank-1 rank-2"]
    job.exit("rank-master", 1)
    assert job["rank-master"].noticed == []
    job.tick()
    assert job.ready("rank-master") == ["check rank-master"]


def test_one_that_is_created_again_is_not_suspected_any_more() -> None:
    job = Driver(role("actor")).running()
    job.handle(WorkerSuspected("actor-0", 1, 4.0, 5.0))
    assert job["actor-0"].suspected
    job.exit("actor-0", 1, 6.0)
    job.tick()
    assert (job["actor-0"].incarnation, job["actor-0"].suspected) == (2, False)
