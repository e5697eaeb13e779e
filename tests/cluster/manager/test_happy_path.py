"""A job from its beginning to its end, when nothing goes wrong but what may."""

from __future__ import annotations

from tests.cluster.manager.driver import Driver, command, managed, role


def test_a_place_comes_before_a_process_and_all_are_ready_before_any_starts() -> None:
    job = Driver(role("actor", count=2), role("learner", task=True, after=("actor",)), answers=False)
    assert job.begin(0.0) == ["allocate actor-0", "allocate actor-1", "allocate learner-0"]
    assert job.place("actor-0") == ["create actor-0"]
    assert job.place("learner-0") == [], "it starts after the actors"
    assert job.place("actor-1") == ["create actor-1"]
    assert job.ready("actor-0") == []
    assert job.ready("actor-1") == ["create learner-0"]
    assert job.stage == "INIT"
    assert job.ready("learner-0") == ["start actor-0", "start actor-1", "start learner-0"]
    assert job.stage == "READY"
    for name in ("actor-0", "actor-1", "learner-0"):
        job.started(name)
    assert job.stage == "RUNNING"
    assert job.deadline is None


def test_places_are_given_back_with_the_last_worker_in_them() -> None:
    job = Driver(command("server"), command("task", task=True), answers=False)
    job.begin(0.0)
    for name in ("server-0", "task-0"):
        job.place(name)
        job.ready(name)
    assert job.exit("task-0") == ["release task-0", "stop server-0"]
    assert job.exit("server-0") == ["release server-0"]


def test_a_service_whose_start_has_returned_still_works() -> None:
    job = Driver(managed("server"), role("work", task=True)).running()
    for name in ("server-0", "server-master"):
        job.finished(name, 4.0)
        assert (job[name].phase, job[name].stage) == ("finished", "RUNNING")
    assert job.stage == "RUNNING"
    assert job.exit("server-0", 137, 5.0) == []
    assert job["server-0"].phase == "restarting"
    job.finished("work-0", 6.0)
    assert job["work-0"].stage == "FINISH"
