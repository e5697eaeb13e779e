"""Silence, and requests that come too often, before the journal."""

from __future__ import annotations

from counterpoint.cluster.manager.events import (
    ExtensionRequested,
    JobStopRequested,
    ReplaceRequested,
    WorkerExited,
    WorkerHeard,
    WorkerSilent,
    WorkerSuspected,
)
from counterpoint.cluster.manager.tally import REQUESTS_AT_ONCE, Tally
from tests.cluster.manager.driver import Driver, command, managed


def silent(tally: Tally, at: float) -> list[WorkerSilent]:
    """Those that were silent for too long; who is only suspected is left out."""
    return [event for event in tally.missed(at) if isinstance(event, WorkerSilent)]


def beating() -> tuple[Driver, Tally]:
    """Two services and a task, to be heard of every minute; ready, and followed from 1.0 on."""
    options = {"silence_timeout_seconds": 60.0, "max_restarts": 1}
    job = Driver(command("server", **options), command("trainer", **options), command("task", task=True, **options))
    job.running()
    tally = Tally(job.manager)
    for name in job.phases():
        tally.follow(name, 1.0)
    return job, tally


def test_a_worker_that_is_not_heard_of_is_silent_once() -> None:
    _, tally = beating()
    for name in ("server-0", "task-0"):
        tally.heard(name, 1, 50.0)
    assert silent(tally, 60.9) == []
    assert tally.silent_for("trainer-0", 60.0) == 59.0
    assert silent(tally, 61.0) == [WorkerSilent("trainer-0", 1, 60.0, 61.0)]
    assert silent(tally, 61.0) == []
    assert tally.deadline == 110.0, "the others', who were heard of at 50"


def test_a_worker_is_suspected_when_two_heartbeats_are_missing_and_until_it_is_heard() -> None:
    job, tally = beating()
    for name in ("server-0", "task-0"):
        tally.heard(name, 1, 6.0)
    assert tally.deadline == 11.0, "a command that may be silent for 60 s sends one every 5 s"
    suspected = WorkerSuspected("trainer-0", 1, 10.0, 11.0)
    assert tally.missed(11.0) == [suspected]
    assert tally.passes(suspected)
    assert job.handle(suspected) == []
    assert job["trainer-0"].suspected
    assert tally.missed(12.0) == []
    anew = Tally(job.manager)
    anew.follow("trainer-0", 12.0)
    for each in (tally, anew):
        each.heard("trainer-0", 1, 13.0)
        each.heard("trainer-0", 1, 14.0)
        assert each.missed(14.0) == [WorkerHeard("trainer-0", 1, 13.0)]
        assert each.deadline == 16.0 if each is tally else 23.0
    job.handle(WorkerHeard("trainer-0", 1, 13.0))
    assert not job["trainer-0"].suspected
    assert not tally.passes(WorkerHeard("trainer-0", 1, 13.0))
    assert WorkerSuspected("trainer-0", 1, 10.0, 24.0) in tally.missed(24.0)


def test_a_worker_whose_heartbeats_come_and_go_does_not_fill_the_journal() -> None:
    _, tally = beating()
    passed = [tally.passes(WorkerSuspected("trainer-0", 1, 10.0, 2.0)) for _ in range(2 * REQUESTS_AT_ONCE)]
    assert passed.count(True) == REQUESTS_AT_ONCE


def test_a_heartbeat_of_another_incarnation_counts_nothing() -> None:
    _, tally = beating()
    tally.heard("trainer-0", 2, 50.0)
    assert [event.worker for event in silent(tally, 61.0)] == ["server-0", "task-0", "trainer-0"]


def test_a_worker_that_leaves_or_is_stopped_need_not_be_heard_of() -> None:
    job, tally = beating()
    job.leaves("task-0", 10.0)
    tally.heard("task-0", 1, 20.0)
    job.silent("server-0", 60.0, 30.0)
    assert [event.worker for event in silent(tally, 100.0)] == ["trainer-0"]
    assert tally.deadline is None


def test_a_worker_is_listened_for_from_its_first_word_on_and_else_from_its_being_ready() -> None:
    job = Driver(command("a", silence_timeout_seconds=60.0), command("b", silence_timeout_seconds=60.0))
    job.begin(0.0)
    tally = Tally(job.manager)
    for name in ("a-0", "b-0"):
        tally.follow(name, 0.0)
    assert tally.deadline is None
    tally.heard("a-0", 1, 10.0)
    job.ready("b-0", 20.0)
    tally.follow("b-0", 20.0)
    assert [event.worker for event in silent(tally, 70.0)] == ["a-0"]
    assert [event.worker for event in silent(tally, 80.0)] == ["b-0"]


def test_a_new_incarnation_is_listened_for_anew() -> None:
    job, tally = beating()
    job.exit("trainer-0", 1, 40.0)
    tally.follow("trainer-0", 40.0)
    job.tick(41.0)
    job.ready("trainer-0", 50.0)
    tally.follow("trainer-0", 50.0)
    assert tally.silent_for("trainer-0", 55.0) == 5.0
    assert [event.worker for event in silent(tally, 61.0)] == ["server-0", "task-0"]


def test_stale_events_and_repeated_requests_do_not_pass() -> None:
    job = Driver(managed("rank", count=2)).running()
    tally = Tally(job.manager)
    assert tally.passes(WorkerExited("rank-0", 1, 0, "", 2.0))
    assert not tally.passes(WorkerExited("rank-0", 2, 0, "", 2.0))
    request = ReplaceRequested("rank-master", 1, "rank-0", 1, "slow", 2.0)
    assert tally.passes(request)
    job.handle(request)
    assert not tally.passes(request)
    for number in range(REQUESTS_AT_ONCE + 1):
        assert tally.passes(JobStopRequested("enough", 0, "rank-1", 3.0)) == (number < REQUESTS_AT_ONCE)
        assert tally.passes(JobStopRequested("enough", 0, "", 3.0)), "a person's always does"
        assert tally.passes(ExtensionRequested("rank-master", 1, 5.0, 3.0 + number)), "once a second"
