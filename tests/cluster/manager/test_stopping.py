"""In which order a job stops, for how long it waits, and how it ended."""

from __future__ import annotations

from typing import Any

import pytest

from counterpoint.cluster.manager.events import Outcome
from counterpoint.cluster.spec import JobSpec, RoleSpec, StartGate
from tests.cluster.manager.driver import Driver, command, managed, role
from tests.cluster.manager.jobs import KILLED_SECONDS, failed, in_a_row, sweep, three


def test_the_job_is_done_when_its_tasks_are_and_stops_the_rest_in_reverse() -> None:
    job = in_a_row().running()
    assert job.exit("task-0", 0, 4.0) == ["stop trainer-0"]
    assert job.stage == "STOPPING"
    assert job.exits("trainer-0") == ["stop server-0"]
    assert job.exits("server-0") == []
    assert job.outcome == Outcome(0, "done")
    assert job.stage == "STOPPED"


def test_commands_that_do_not_need_one_another_stop_at_once_after_the_tasks() -> None:
    """Trainer and servers of a job do so: none waits for the end of another, and the job waits for the slowest."""
    servers = [command(f"inference_{position}") for position in range(2)]
    job = Driver(command("trainer"), *servers, command("task", task=True, after=("trainer",))).running()
    assert job.exit("task-0", 0, 4.0) == ["stop inference_1-0", "stop inference_0-0", "stop trainer-0"]
    assert job.exits("trainer-0", "inference_1-0") == []
    assert job.outcome is None
    assert job.exits("inference_0-0") == []
    assert job.outcome == Outcome(0, "done")


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([command("a"), command("b"), command("c")], {"a": 1, "b": 1, "c": 1}),
        ([command("a"), command("b"), command("c", after=("a",))], {"a": 2, "b": 1, "c": 1}),
        ([command("a"), command("b", after=("a",)), command("c", after=("b",))], {"a": 3, "b": 2, "c": 1}),
        ([command("a"), managed("b"), command("c")], {"a": 3, "b": 2, "c": 1}),
        ([command("a"), command("b", task=True, after=("a",)), command("c")], {"a": 1, "c": 1}),
        ([command("a", task=True)], {}),
    ],
)
def test_in_which_order_roles_stop(roles: list[RoleSpec], expected: dict[str, int]) -> None:
    assert JobSpec(name="job", roles=tuple(roles)).stop_order() == expected


def test_a_service_that_ends_too_early_fails_the_job_even_with_0() -> None:
    job = three().running()
    assert job.exit("server-0", 0, 4.0) == ["stop task-0"]
    assert job.exits("task-0", "trainer-0") == ["stop trainer-0"]
    assert job.outcome == failed(1, "server-0", "ended with exit code 0, although the job still needs it")


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("code", [137, 1])
def test_a_sub_master_that_is_killed_while_the_job_ends_was_not_needed_any_more(code: int, asked: bool) -> None:
    job = Driver(managed("scorer"), role("work", task=True)).running()
    job.finished("work-0", 4.0)
    assert job.exit("work-0", 0, 5.0) == ["stop scorer-0"]
    if asked:
        assert job.exit("scorer-0", 0, 5.0) == ["stop scorer-master"]
    job.exit("scorer-master", code, 5.1)
    if not asked:
        job.exit("scorer-0", 0, 5.2)
    assert job.outcome is not None
    assert job.outcome.code == (0 if code == 137 else 1), job.outcome
    words = "was killed by SIGKILL" if code == 137 else "ended with exit code 1"
    assert job["scorer-master"].last_death.startswith(words)


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (3, 3), (137, 1), (127, 1)])
def test_a_failure_gives_the_job_its_exit_code(code: int, expected: int) -> None:
    job = three().running()
    job.exit("task-0", code, 4.0)
    job.exits("trainer-0", "server-0")
    assert job.outcome is not None
    assert (job.outcome.code, job.outcome.failed_worker) == (expected, "task-0")


def test_a_worker_that_does_not_stop_in_time_is_killed_and_the_next_one_stopped() -> None:
    job = in_a_row().running()
    assert job.stop(at=10.0) == ["stop task-0"]
    assert job.deadline == 40.0
    assert job.tick(40.0) == ["kill task-0"]
    assert job.exit("task-0", 137, 40.1) == ["stop trainer-0"]
    job.exits("trainer-0", "server-0")
    assert job.outcome == failed(1, "task-0", "did not stop within 30 s and was killed")


def test_a_process_that_cannot_be_killed_does_not_hold_the_others() -> None:
    job = in_a_row().running()
    job.stop(at=10.0)
    job.tick(40.0)
    assert job.tick() == ["stop trainer-0"]


def test_a_first_stop_is_polite_and_a_second_kills_everything() -> None:
    job = three().running()
    assert job.stop("Ctrl-C", 130, 10.0) == ["stop task-0"]
    for at in (10.0, 10.3, 10.9):
        assert job.stop("Ctrl-C", 130, at) == [], "`timeout` sends its signal to the process, and to its group"
    assert job.stop("Ctrl-C", 130, 11.0) == ["kill server-0", "kill trainer-0", "kill task-0"]
    job.exits("server-0", "trainer-0", "task-0", code=137)
    assert job.outcome == Outcome(130, "Ctrl-C, twice: everything was killed")


def test_a_worker_asks_in_vain_for_more_than_a_stop() -> None:
    job = Driver(role("actor"), role("learner", task=True)).running()
    assert job.stop("enough", 0, 10.0, by="learner-0") == ["stop learner-0"]
    assert job.stop("enough", 0, 12.0, by="learner-0") == []
    assert job.stop("Ctrl-C", 130, 13.0) == [], "the first request of a person is polite, too"

    assert job.stop("Ctrl-C", 130, 14.5) == ["kill actor-0", "kill learner-0"]


def test_the_workers_of_a_role_stop_at_once_and_its_sub_master_after_them() -> None:
    job = Driver(role("first", count=2), managed("second", count=2), managed("task", count=2, task=True)).running()
    assert job.stop(at=10.0) == ["stop task-1", "stop task-0"]
    assert job.exits("task-0", "task-1") == ["stop task-master"]
    assert job.exit("task-master") == ["stop second-1", "stop second-0"]
    assert job.exits("second-0", "second-1") == ["stop second-master"]
    assert job.exit("second-master") == ["stop first-1", "stop first-0"]
    job.exits("first-0", "first-1", code=143)
    assert job.outcome == Outcome(143, "asked")


def test_a_task_that_fails_leaves_the_others_alone_and_the_first_failure_is_the_jobs() -> None:
    job = sweep("a", "b", "c", "d")
    for name, code in (("b-0", 3), ("a-0", 0), ("d-0", 1)):
        assert job.exit(name, code, 4.0) == []
    assert job.phases() == {
        "trainer-0": "running", "a-0": "stopped", "b-0": "failed", "c-0": "running", "d-0": "failed"
    }  # fmt: skip
    assert job.exit("c-0", 0, 5.0) == ["stop trainer-0"]
    job.exits("trainer-0")
    assert job.outcome == failed(3, "b-0", "ended with exit code 3")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (143, Outcome(143, "asked, after a-0 ended with exit code 3 (log: logs/a-0.log)", "a-0")),
        (0, failed(3, "a-0", "ended with exit code 3")),  # only the failed one was not complete
    ],
)
def test_a_stop_does_not_hide_that_a_task_has_failed(code: int, expected: Outcome) -> None:
    job = sweep("a", "b")
    job.exit("a-0", 3, 4.0)
    job.stop(at=5.0)
    job.exits("b-0", "trainer-0", code=code)
    assert job.outcome == expected


@pytest.mark.parametrize(
    ("first", "code", "expected"),
    [
        ("task-0", 143, Outcome(143, "asked")),
        ("task-0", 0, Outcome(0, "done")),
        ("task-0", 1, failed(1, "task-0", "ended with exit code 1 while it was being stopped")),
        ("server-0", 1, failed(1, "server-0", "ended with exit code 1")),  # it was not asked yet
        ("server-0", 0, Outcome(143, "asked")),  # it follows its peers
    ],
)
def test_a_job_that_was_told_to_end_ends_by_what_its_workers_do(first: str, code: int, expected: Outcome) -> None:
    job = three().running()
    job.stop(at=10.0)
    job.exit(first, code, 11.0)
    job.exits(*(other for other in ("task-0", "trainer-0", "server-0") if other != first), code=143)
    assert job.outcome == expected


def test_a_worker_of_a_class_that_returns_because_it_was_asked_to_has_not_completed_its_work() -> None:
    job = Driver(role("learner", task=True, count=2)).running()
    job.finished("learner-0", 5.0)
    assert job.stop(at=10.0) == ["stop learner-1", "stop learner-0"]
    job.finished("learner-1", 11.0)
    job.exits("learner-0", "learner-1")
    assert job.outcome == Outcome(143, "asked")


def test_a_job_that_is_stopped_before_it_begins_ends() -> None:
    job = three()
    assert job.stop(at=1.0) == []
    assert job.outcome == Outcome(143, "asked")
    assert job.begin(2.0) == []


@pytest.mark.parametrize("code", [130, 143])
def test_a_task_that_was_told_to_end_by_another_hand_is_not_created_again_and_not_complete(code: int) -> None:
    job = sweep("a", "b", max_restarts=3)
    assert job.exit("a-0", code, 4.0) == []
    assert job["a-0"].phase.value == "stopped"
    assert job.exit("b-0", 0, 5.0) == ["stop trainer-0"]
    job.exits("trainer-0")
    assert job.outcome == Outcome(143, "stopped before the work of a-0 was complete")


def test_the_services_stay_for_guests() -> None:
    job = sweep("a")
    job.guests("visitor", at=2.0)
    assert job.exit("a-0", 1, 3.0) == []
    assert job.guests("visitor", "another", at=4.0) == []
    assert job.guests(at=5.0) == ["stop trainer-0"]
    job.exits("trainer-0")
    assert job.outcome == failed(1, "a-0", "ended with exit code 1")


def test_services_that_stay_need_no_task_and_outlive_all_guests() -> None:
    job = Driver(command("server"), command("trainer"), stay=True).running()
    assert job.guests("visitor", at=2.0) == []
    assert job.guests(at=3.0) == []
    assert job.stop("told to", at=4.0) == ["stop trainer-0", "stop server-0"]
    assert job.exits("trainer-0", "server-0") == []
    assert job.outcome == Outcome(143, "told to"), "what stays is never complete"


def test_services_that_came_back_for_a_guest_end_once_nobody_is_there() -> None:
    job = Driver(command("server"), command("trainer")).running()
    assert job.manager.state.guests is None, "so that the first look counts, whatever it sees"
    assert job.guests(at=2.0) == ["stop trainer-0", "stop server-0"]
    assert job.exits("trainer-0", "server-0") == []
    assert job.outcome == Outcome(0, "done")


def test_a_job_that_stops_creates_nothing_again() -> None:
    job = three(max_restarts=3).running()
    job.exit("server-0", 137, 4.0)
    assert job.stop(at=4.5) == ["stop task-0"]
    assert job["server-0"].phase.value == "stopped"
    assert job.tick(6.0) == []
    job.exits("task-0", "trainer-0", code=143)
    assert job.outcome == Outcome(143, "asked")


def test_one_ctrl_c_during_a_failure_stays_polite() -> None:
    job = three().running()
    job.exit("server-0", 1, 4.0)
    assert job.stop("Ctrl-C", 130, 5.0) == []
    job.exits("task-0", "trainer-0")
    assert job.outcome == failed(1, "server-0", "ended with exit code 1")


def test_a_worker_that_needs_more_time_to_end_gets_it() -> None:
    """It commits a step, and the disk is slow."""
    job = three().running()
    job.needs("task-0", 60.0, 0.5)
    assert job.deadline is None, "only while it ends"
    job.stop(at=10.0)
    assert job.deadline == 40.0
    job.needs("task-0", 60.0, 30.0)
    assert job.tick(40.0) == []
    job.needs("task-0", 1.0, 50.0)
    assert job.tick(89.0) == []
    assert job.tick(90.0) == ["kill task-0"]


def test_a_worker_that_is_killed_gets_no_more_time() -> None:
    """What it had said before may be read only after the kill."""
    job = three().running()
    job.stop(at=10.0)
    assert job.tick(40.0) == ["kill task-0"]
    job.needs("task-0", 600.0, 40.1)
    assert job.deadline == 40.0 + KILLED_SECONDS


def test_a_task_that_has_finished_and_does_not_end_is_killed_and_its_work_counts() -> None:
    job = Driver(role("learner", task=True)).running()
    job.finished("learner-0", 5.0)
    assert job.deadline == 35.0
    assert job.tick() == ["kill learner-0"]
    job.exit("learner-0", 137)
    assert job.outcome == Outcome(0, "done")


def test_the_end_of_a_sub_master_whose_workers_have_ended_is_no_death() -> None:
    job = Driver(role("actor"), managed("learner", task=True), command("other", task=True)).running()
    job.finished("learner-0", 5.0)
    job.exit("learner-0")
    job.exit("learner-master", 1)
    assert job["learner-master"].phase.value == "stopped"


def beside() -> Driver:
    """A service that the job can do without, and a task; both run."""
    return Driver(command("side", essential=False, max_restarts=1), command("task", task=True)).running()


def test_nobody_awaits_the_check_of_a_sub_master_that_was_not_needed_any_more() -> None:
    job = Driver(
        managed("rank", task=True, start=StartGate.WORKER, ready_timeout_seconds=30.0),
        command("next", task=True, after=("rank",)),
    )
    job.begin(0.0)
    assert job.ready("rank-0", 1.0) == ["start rank-0"]
    assert job.ready("rank-master", 2.0) == ["check rank-master", "start rank-master"]
    job.started("rank-0", 3.0)
    job.finished("rank-0", 4.0)
    job.exit("rank-0", 0, 5.0)
    job.started("rank-master", 6.0)
    assert job.exit("rank-master", 137, 7.0) == ["create next-0"]
    assert job["rank-master"].phase.value == "stopped"
    job.ready("next-0", 8.0)
    assert job.deadline is None, "no check is due"
    job.exit("next-0", 0, 60.0)
    assert job.outcome == Outcome(0, "done")


def test_the_job_goes_on_without_a_service_that_is_not_essential() -> None:
    job = beside()
    job.exit("side-0", 1, 4.0)
    job.tick(6.0)
    job.ready("side-0", 7.0)
    assert job.exit("side-0", 1, 8.0) == []
    assert job["side-0"].phase.value == "failed"
    assert job.outcome is None
    job.exit("task-0", 0, 9.0)
    assert job.outcome == Outcome(0, "done")


@pytest.mark.parametrize("code", [2, 137])
def test_the_end_of_a_service_that_is_not_essential_is_no_failure(code: int) -> None:
    job = beside()
    assert job.exit("task-0", 0, 4.0) == ["stop side-0"]
    job.exit("side-0", code, 5.0)
    assert job.outcome == Outcome(0, "done")


def test_a_service_that_is_not_essential_and_does_not_stop_is_killed_without_harm() -> None:
    job = beside()
    job.exit("task-0", 0, 4.0)
    assert job.tick(40.0) == ["kill side-0"]
    job.exit("side-0", 137, 40.1)
    assert job.outcome == Outcome(0, "done")


def test_a_service_that_is_not_essential_and_does_not_get_ready_is_tried_again() -> None:
    job = Driver(
        command("side", essential=False, max_restarts=1, ready_timeout_seconds=5.0), command("task", task=True)
    )
    job.begin(0.0)
    job.ready("task-0", 1.0)
    assert job.tick(10.0) == ["kill side-0"]
    job.exit("side-0", 137, 11.0)
    assert job.outcome is None
    assert job["side-0"].phase.value == "restarting"


def chain(**options: Any) -> Driver:
    """Roles of which each puts into the channel of the next, and a role that has no end of a channel."""
    lines, tokens = (
        {"name": name, "producers": [f"{producer}-0"]} for name, producer in (("lines", "source"), ("tokens", "stage"))
    )
    return Driver(
        role("host", config={"channels": [lines, tokens]}),
        role("sink", task=True, config={"input": tokens}, **options),
        role("stage", task=True, config={"input": lines, "output": tokens}, **options),
        role("source", task=True, **options),
        role("other", task=True, **options),
    ).running()


@pytest.mark.parametrize("worker", ["source-0", "stage-0", "sink-0"])
@pytest.mark.parametrize("code", [0, 1, 2, 137])
def test_a_task_at_a_channel_that_dies_for_good_ends_the_job(worker: str, code: int) -> None:
    """The others would wait for it for ever: it will neither end its stream nor take a record."""
    job = chain(max_restarts=0)
    others = sorted({"other-0", "sink-0", "source-0", "stage-0"} - {worker})
    assert sorted(job.exit(worker, code, 4.0)) == [f"stop {name}" for name in others]
    job.exits(*others, "host-0")
    assert job.outcome is not None
    assert (job.outcome.code, job.outcome.failed_worker) == (code if 0 < code < 126 else 1, worker)


def test_a_task_at_a_channel_has_its_restarts_and_one_without_leaves_the_pipeline_alone() -> None:
    job = chain(max_restarts=1)
    assert job.exit("stage-0", 1, 4.0) == []
    assert job.exit("other-0", 2, 5.0) == []
    assert job.phases()["stage-0"] == "restarting"
    assert job.phases()["other-0"] == "failed"
    assert job.stage == "RUNNING"
