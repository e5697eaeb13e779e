"""What is created again with a worker that dies at work: itself, its role, or the job; and who is told."""

from __future__ import annotations

from counterpoint.cluster.spec import RestartScope
from tests.cluster.manager.driver import Driver, command, managed, role
from tests.cluster.manager.jobs import KILLED_SECONDS, failed

ROLE, JOB = RestartScope.ROLE, RestartScope.JOB


def ranks(**options: object) -> Driver:
    """Three ranks that go together, under a SubMaster, and others that have nothing to do with them."""
    return Driver(role("actor"), managed("rank", count=3, task=True, restart=ROLE, **options)).running()


def test_a_role_is_stopped_and_created_again_as_a_whole_and_the_others_go_on() -> None:
    job = ranks()
    assert job.exit("rank-1", 1, 10.0) == ["stop rank-0", "stop rank-2"]
    assert job.exit("rank-0", 143, 10.5) == []
    assert job.exit("rank-2", 0, 11.5) == []
    assert job.tick() == ["create rank-0 again", "create rank-1 again", "create rank-2 again"]
    assert job.ready("rank-0") == job.ready("rank-2") == []
    assert job.ready("rank-1") == ["tell rank-master of rank-1 rank-0 rank-2", "check rank-master"]
    assert job.checked("rank") == ["start rank-0", "start rank-1", "start rank-2"]
    assert [job.incarnation(name) for name in ("actor-0", "rank-master", "rank-0", "rank-1", "rank-2")] == [
        1,
        1,
        2,
        2,
        2,
    ]
    assert [job[name].restarts for name in ("rank-0", "rank-1", "rank-2")] == [0, 1, 0]


def test_the_pause_counts_from_the_death_and_nobody_is_created_before_all_have_ended() -> None:
    job = ranks()
    job.exit("rank-1", 1, 10.0)
    job.exit("rank-0", 143, 10.1)
    assert job.tick(11.0) == [], "rank-2 has not ended"
    job.exit("rank-2", 143, 20.0)
    assert job.tick(20.0) == ["create rank-0 again", "create rank-1 again", "create rank-2 again"]


def test_the_pause_is_kept_also_if_all_end_before_it_is_over() -> None:
    job = ranks()
    job.exit("rank-1", 1, 10.0)
    job.exit("rank-0", 143, 10.1)
    job.exit("rank-2", 143, 10.2)
    assert job.deadline == 11.0


def test_one_that_does_not_stop_is_killed_and_created_again_with_the_others() -> None:
    job = ranks(stop_timeout_seconds=5.0)
    job.exit("rank-1", 1, 10.0)
    job.exit("rank-0", 143, 10.1)
    assert job.tick(15.0) == ["kill rank-2"]
    assert job.exit("rank-2", 137, 16.0) == []
    assert job.tick() == ["create rank-0 again", "create rank-1 again", "create rank-2 again"]
    job = ranks(stop_timeout_seconds=5.0)
    job.exit("rank-1", 1, 10.0)
    job.exit("rank-0", 143, 10.1)
    job.tick(15.0)
    words = job.tick(15.0 + KILLED_SECONDS)
    assert job["rank-2"].phase.value == "failed"
    assert words == ["stop rank-master"]
    job.exits("rank-master", "actor-0")
    assert job.outcome == failed(1, "rank-2", "could not be killed")


def test_one_that_was_killed_is_asked_to_end_the_next_time() -> None:
    job = Driver(role("rank", count=2, restart=ROLE)).running()
    job.exit("rank-1", 1, 10.0)
    assert job.tick() == ["kill rank-0"]
    job.exit("rank-0", 137)
    job.tick()
    job.bring_up()
    assert job.exit("rank-1", 1) == ["stop rank-0"]


def test_a_second_death_while_the_role_is_created_again_costs_only_that_worker() -> None:
    job = ranks()
    job.exit("rank-1", 1, 10.0)
    job.exits("rank-0", "rank-2", code=143)
    job.tick()
    job.ready("rank-0")
    assert job.exit("rank-2", 1, 12.0) == [], "it had not begun to work"
    job.ready("rank-1")
    assert job.tick() == ["create rank-2 again"]
    assert job.ready("rank-2")[-1] == "check rank-master"
    assert job.checked("rank") == ["start rank-0", "start rank-1", "start rank-2"]
    assert [job.incarnation(f"rank-{rank}") for rank in range(3)] == [2, 2, 3]


def test_a_second_failure_of_the_role_is_handled_as_the_first() -> None:
    job = ranks()
    for incarnation in (2, 3, 4):
        assert job.exit("rank-1", 1) == ["stop rank-0", "stop rank-2"]
        job.exits("rank-0", "rank-2", code=143)
        job.tick()
        job.bring_up()
        assert [job.incarnation(f"rank-{rank}") for rank in range(3)] == [incarnation] * 3
    assert job.exit("rank-1", 1) == ["stop rank-2", "stop rank-0"], "they need it"
    job.exits("rank-0", "rank-2", "rank-master", "actor-0", code=143)
    assert job.outcome == failed(1, "rank-1", "ended with exit code 1")


def test_a_silent_one_among_them_is_created_again_with_them() -> None:
    job = ranks()
    assert job.silent("rank-2", at=10.0) == ["kill rank-2"]
    assert job.exit("rank-1", 1, 10.1) == ["stop rank-0"]
    job.exit("rank-0", 143, 10.2)
    assert job.tick(11.1) == ["create rank-0 again", "create rank-1 again"]
    assert job.exit("rank-2", 137, 11.2) == []
    assert job.tick() == ["create rank-2 again"]


def test_a_task_of_the_role_that_has_finished_is_not_repeated() -> None:
    job = ranks()
    job.finished("rank-0", 5.0)
    assert job.exit("rank-1", 1, 10.0) == ["stop rank-2"]
    job.exit("rank-0", 0, 10.1)
    job.exit("rank-2", 143, 10.2)
    assert job.tick() == ["create rank-1 again", "create rank-2 again"]


def test_roles_that_start_after_the_role_are_told_of_its_restart() -> None:
    job = Driver(
        role("actor", count=2, restart=ROLE), role("learner", after=("actor",)), command("watch", after=("actor",))
    ).running()
    job.exit("actor-0", 1, 10.0)
    job.exit("actor-1", 143)
    job.tick()
    assert job.ready("actor-0") == []
    assert job.ready("actor-1") == ["tell learner-0 of actor-0 actor-1", "start actor-0", "start actor-1"]


def test_the_sub_master_dies_and_its_children_go_on() -> None:
    job = ranks()
    assert job.exit("rank-master", 1, 10.0) == []
    assert job.tick() == ["create rank-master again"]
    assert job.ready("rank-master") == ["check rank-master"]
    assert job.checked("rank") == ["start rank-master"]
    assert [job.incarnation(f"rank-{rank}") for rank in range(3)] == [1, 1, 1]


def test_a_role_of_commands_is_created_again_as_a_whole_from_its_first_ready_worker_on() -> None:
    job = Driver(command("rank", count=2, task=True, restart=ROLE, max_restarts=3))
    job.begin(0.0)
    assert job.exit("rank-0", 1, 1.0) == []
    assert job.tick() == ["create rank-0 again"]
    job.ready("rank-0")
    assert job.exit("rank-0", 1, 3.0) == ["stop rank-1"]


def test_the_job_is_created_again_as_a_whole_in_its_order() -> None:
    job = Driver(
        role("actor"), managed("rank", count=2, task=True, restart=JOB, after=("actor",)), role("done", task=True)
    ).running()
    job.finished("done-0")
    job.exit("done-0")
    assert job.exit("rank-1", 1, 10.0) == ["stop actor-0", "stop rank-master", "stop rank-0"]
    assert job.stage == "INIT"
    job.exits("rank-0", "rank-master", code=143)
    assert job.exit("actor-0", 143, 12.0) == []
    assert job.tick() == ["create actor-0 again"], "the others start after it"
    assert job.ready("actor-0") == ["create rank-master again", "create rank-0 again", "create rank-1 again"]
    job.bring_up()
    assert job.stage == "RUNNING"
    assert job["done-0"].incarnation == 1, "its work is complete"
    assert {job.incarnation(name) for name in ("actor-0", "rank-master", "rank-0", "rank-1")} == {2}


def test_a_command_that_ends_as_it_was_asked_to_for_the_restart_is_created_again_also_if_it_is_a_task() -> None:
    job = Driver(role("learner", restart=JOB), command("task", task=True)).running()
    assert job.exit("learner-0", 1, 10.0) == ["stop task-0"]
    assert job.exit("task-0", 143, 11.0) == []
    assert job.tick() == ["create learner-0 again", "create task-0 again"]


def test_a_sub_master_is_created_again_with_the_job_also_if_its_workers_have_done_their_work() -> None:
    job = Driver(managed("rank", task=True), role("learner", task=True, restart=JOB)).running()
    job.finished("rank-0")
    job.exit("rank-0", 0, 9.0)
    assert job.exit("learner-0", 1, 10.0) == ["stop rank-master"]
    assert job.exit("rank-master", 143, 11.0) == []
    assert job.tick() == ["create learner-0 again", "create rank-master again"]
