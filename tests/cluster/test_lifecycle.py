"""The supervisor's rules, without a process or a clock."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.events import (
    ENDED,
    BecameReady,
    Begin,
    EndAnnounced,
    Exited,
    ExtensionRequested,
    GuestsChanged,
    HeartbeatReceived,
    Instruction,
    Kill,
    Outcome,
    Spawn,
    SpawnFailed,
    State,
    StopRequested,
    Terminate,
    Tick,
    Worker,
    describe_exit,
)
from cluster.lifecycle import (
    FIRST_BACKOFF_SECONDS,
    HEALTHY_SECONDS,
    KILL_GRACE_SECONDS,
    LONGEST_BACKOFF_SECONDS,
    Lifecycle,
)


def worker(name: str, **options: Any) -> Worker:
    return Worker(name, ["true"], Path("log"), **({"ready_timeout_seconds": 60.0} | options))


def three(**options: Any) -> Lifecycle:
    """Two services, and the task that needs the second."""
    return Lifecycle(
        [
            worker("server", **options),
            worker("trainer", **options),
            worker("task", task=True, after=("trainer",), **options),
        ]
    )


def state_of(job: Lifecycle) -> State:
    """As a call, so that the type checker does not believe that a state once seen stays."""
    return job.state


def running(job: Lifecycle | None = None) -> Lifecycle:
    job = job or three()
    job.handle(Begin(0.0))
    for name in job.workers:
        job.handle(BecameReady(name, 1.0))
    assert state_of(job) is State.RUNNING
    return job


def end(job: Lifecycle, *names: str, code: int = 0) -> list[Instruction]:
    """Lets the workers end as asked, one after the other; returns what was instructed meanwhile."""
    return [instruction for name in names for instruction in job.handle(Exited(name, code, 5.0))]


def test_a_worker_waits_for_those_it_starts_after() -> None:
    job = three()
    assert job.handle(Begin(0.0)) == [Spawn("server"), Spawn("trainer")]
    assert job.states["task"] is State.WAITING
    assert job.handle(BecameReady("server", 1.0)) == []
    assert job.handle(BecameReady("trainer", 2.0)) == [Spawn("task")]
    assert state_of(job) is State.STARTING
    assert job.handle(BecameReady("task", 3.0)) == []
    assert state_of(job) is State.RUNNING
    assert job.deadline is None


def test_a_worker_that_does_not_notify_is_ready_once_started() -> None:
    job = Lifecycle([worker("first", ready_timeout_seconds=None), worker("second", after=("first",), task=True)])
    assert job.handle(Begin(0.0)) == [Spawn("first"), Spawn("second")]
    assert job.states["first"] is State.READY


def test_the_job_is_done_when_its_tasks_are_and_stops_the_rest_in_reverse() -> None:
    job = running()
    assert job.handle(Exited("task", 0, 4.0)) == [Terminate("trainer")]
    assert state_of(job) is State.STOPPING
    assert end(job, "trainer") == [Terminate("server")]
    assert end(job, "server") == []
    assert job.outcome == Outcome(0, "done")
    assert state_of(job) is State.STOPPED


def test_a_service_that_ends_too_early_fails_the_job_even_with_0() -> None:
    job = running()
    assert job.handle(Exited("server", 0, 4.0)) == [Terminate("task")]
    assert end(job, "task", "trainer") == [Terminate("trainer")]
    assert job.outcome == Outcome(1, "server ended with exit code 0, although the job still needs it", "server")
    assert state_of(job) is State.FAILED


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (3, 3), (137, 1), (127, 1)])
def test_a_failure_gives_the_job_its_exit_code(code: int, expected: int) -> None:
    job = running()
    job.handle(Exited("task", code, 4.0))
    end(job, "trainer", "server")
    assert job.outcome is not None
    assert (job.outcome.code, job.outcome.failed_worker) == (expected, "task")


def test_a_failure_while_starting_stops_what_has_started_and_nothing_new_starts() -> None:
    job = three()
    job.handle(Begin(0.0))
    assert job.handle(Exited("server", 1, 1.0)) == [Terminate("trainer")]
    assert job.states["task"] is State.STOPPED
    assert job.handle(BecameReady("trainer", 2.0)) == []
    assert end(job, "trainer") == []
    assert job.outcome == Outcome(1, "server ended with exit code 1", "server")


def test_a_worker_that_is_not_ready_in_time_fails_the_job() -> None:
    job = three()
    job.handle(Begin(0.0))
    job.handle(BecameReady("trainer", 1.0))
    assert job.deadline == 60.0
    assert job.handle(Tick(60.0)) == [Terminate("task")]
    end(job, "task", "trainer", "server")
    assert job.outcome == Outcome(1, "server was not ready within 60 s", "server")


def test_a_worker_that_does_not_stop_in_time_is_killed_and_the_next_one_stopped() -> None:
    job = running()
    assert job.handle(StopRequested("asked", 143, 10.0)) == [Terminate("task")]
    assert job.deadline == 40.0
    assert job.handle(Tick(40.0)) == [Kill("task")]
    assert job.handle(Exited("task", 137, 40.1)) == [Terminate("trainer")]
    end(job, "trainer", "server")
    assert job.outcome == Outcome(1, "task did not stop within 30 s and was killed", "task")


def test_a_process_that_cannot_be_killed_does_not_hold_the_others() -> None:
    job = running()
    job.handle(StopRequested("asked", 143, 10.0))
    job.handle(Tick(40.0))
    assert job.deadline is not None
    assert job.handle(Tick(job.deadline)) == [Terminate("trainer")]


def test_a_first_stop_is_polite_and_a_second_kills_everything() -> None:
    job = running()
    assert job.handle(StopRequested("Ctrl-C", 130, 10.0)) == [Terminate("task")]
    for at in (10.0, 10.3, 10.9):
        assert job.handle(StopRequested("Ctrl-C", 130, at)) == [], (
            "`timeout` sends its signal to the process, and to its group"
        )
    assert set(job.handle(StopRequested("Ctrl-C", 130, 11.0))) == {Kill("server"), Kill("trainer"), Kill("task")}
    for name in ("server", "trainer", "task"):
        job.handle(Exited(name, 137, 12.0))
    assert job.outcome == Outcome(130, "Ctrl-C, twice: everything was killed")


def sweep(*names: str, **options: Any) -> Lifecycle:
    """A service, and several tasks that do not know one another; all of them run."""
    tasks = [worker(name, task=True, after=("trainer",), **options) for name in names]
    return running(Lifecycle([worker("trainer", max_restarts=3), *tasks]))


def test_a_task_that_fails_leaves_the_others_alone_and_the_first_failure_is_the_jobs() -> None:
    job = sweep("a", "b", "c", "d")
    for name, code in (("b", 3), ("a", 0), ("d", 1)):
        assert job.handle(Exited(name, code, 4.0)) == []
    assert job.states == {
        "trainer": State.READY, "a": State.STOPPED, "b": State.FAILED, "c": State.READY, "d": State.FAILED
    }  # fmt: skip
    assert job.handle(Exited("c", 0, 5.0)) == [Terminate("trainer")]
    end(job, "trainer")
    assert job.outcome == Outcome(3, "b ended with exit code 3", "b")


def test_tasks_are_stopped_at_once_and_the_services_one_after_the_other() -> None:
    job = running(
        Lifecycle([worker("s1"), worker("s2"), worker("a", task=True), worker("b", task=True), worker("c", task=True)])
    )
    job.handle(Exited("b", 0, 2.0))
    assert job.handle(StopRequested("asked", 143, 10.0)) == [Terminate("c"), Terminate("a")]
    assert end(job, "a") == []
    assert end(job, "c", "s2") == [Terminate("s2"), Terminate("s1")]


def test_a_stop_does_not_hide_that_a_task_has_failed() -> None:
    job = sweep("a", "b")
    job.handle(Exited("a", 1, 4.0))
    job.handle(StopRequested("stopped by SIGTERM", 143, 5.0))
    end(job, "b", "trainer", code=143)
    assert job.outcome == Outcome(143, "stopped by SIGTERM, after a ended with exit code 1", "a")


def test_a_stop_that_found_only_a_failed_task_unfinished_leaves_its_code() -> None:
    job = sweep("a", "b")
    job.handle(Exited("a", 3, 4.0))
    job.handle(StopRequested("stopped by SIGTERM", 143, 5.0))
    end(job, "b", "trainer")
    assert job.outcome == Outcome(3, "a ended with exit code 3", "a")


@pytest.mark.parametrize(("code", "expected"), [(143, Outcome(143, "asked")), (0, Outcome(0, "done"))])
def test_a_job_that_was_told_to_end_ends_with_0_only_if_its_work_is_complete(code: int, expected: Outcome) -> None:
    job = running()
    job.handle(StopRequested("asked", 143, 10.0))
    job.handle(Exited("task", code, 11.0))
    for name in ("trainer", "server"):
        job.handle(Exited(name, 143, 12.0))
    assert job.outcome == expected


def test_a_task_that_had_not_begun_is_not_complete() -> None:
    job = three()
    job.handle(Begin(0.0))
    job.handle(StopRequested("asked", 143, 1.0))
    end(job, "trainer", "server")
    assert job.outcome == Outcome(143, "asked")


def test_a_job_that_is_done_stays_so_whoever_asks_for_its_end_then() -> None:
    job = running()
    job.handle(Exited("task", 0, 4.0))
    job.handle(StopRequested("asked", 143, 5.0))
    end(job, "trainer", "server")
    assert job.outcome == Outcome(0, "done")


@pytest.mark.parametrize("code", [130, 143])
def test_a_task_that_was_told_to_end_by_another_hand_is_not_started_again_and_not_complete(code: int) -> None:
    job = sweep("a", "b", max_restarts=3)
    assert job.handle(Exited("a", code, 4.0)) == []
    assert job.states["a"] is State.STOPPED
    assert job.handle(Exited("b", 0, 5.0)) == [Terminate("trainer")]
    end(job, "trainer")
    assert job.outcome == Outcome(143, "stopped before the work of a was complete")


def test_a_failure_while_stopping_is_the_jobs_code() -> None:
    job = running()
    job.handle(StopRequested("asked", 143, 10.0))
    job.handle(Exited("task", 1, 11.0))
    end(job, "trainer", "server")
    assert job.outcome == Outcome(1, "task ended with exit code 1 while it was being stopped", "task")


def test_a_task_that_is_never_ready_is_killed_alone() -> None:
    job = Lifecycle([worker("a", task=True, ready_timeout_seconds=5.0), worker("b", task=True)])
    job.handle(Begin(0.0))
    assert job.deadline == 5.0
    assert job.handle(Tick(5.0)) == [Kill("a")]
    job.handle(BecameReady("b", 5.5))
    assert job.handle(Exited("a", 137, 5.6)) == []
    assert job.states["a"] is State.FAILED
    job.handle(Exited("b", 0, 9.0))
    assert job.outcome == Outcome(1, "a was not ready within 5 s", "a")


def test_a_worker_with_deadlines_of_its_own_has_none_here() -> None:
    job = Lifecycle([worker("a", task=True, ready_timeout_seconds=math.inf)])
    assert job.handle(Begin(0.0)) == [Spawn("a")]
    assert (job.states["a"], job.deadline) == (State.STARTING, None)


def test_the_services_stay_for_guests() -> None:
    job = sweep("a")
    job.handle(GuestsChanged(("visitor",), 2.0))
    assert job.handle(Exited("a", 1, 3.0)) == []
    assert job.handle(GuestsChanged(("visitor", "another"), 4.0)) == []
    assert job.handle(GuestsChanged((), 5.0)) == [Terminate("trainer")]
    end(job, "trainer")
    assert job.outcome == Outcome(1, "a ended with exit code 1", "a")


def test_a_stop_does_not_wait_for_guests() -> None:
    job = sweep("a")
    job.handle(GuestsChanged(("visitor",), 2.0))
    assert job.handle(StopRequested("asked", 143, 3.0)) == [Terminate("a")]
    assert end(job, "a") == [Terminate("trainer")]


def test_what_dies_is_started_again_after_a_pause_that_doubles_and_only_so_often() -> None:
    job = running(three(max_restarts=7))
    at, pauses = 10.0, []
    for _ in range(7):
        assert job.handle(Exited("trainer", 137, at)) == []
        assert job.states["trainer"] is State.RESTARTING
        assert job.states["task"] is job.states["server"] is State.READY
        assert job.deadline is not None
        pauses.append(job.deadline - at)
        at = job.deadline
        assert job.handle(Tick(at - 0.1)) == []
        assert job.handle(Tick(at)) == [Spawn("trainer", again=True)]
        assert job.handle(BecameReady("trainer", at + 1)) == []
    assert pauses[0] == FIRST_BACKOFF_SECONDS
    assert all(later == min(2 * pause, LONGEST_BACKOFF_SECONDS) for pause, later in pairwise(pauses))
    assert pauses[-1] == LONGEST_BACKOFF_SECONDS
    assert job.handle(Exited("trainer", 1, at + 2)) == [Terminate("task")]
    assert job.restarts == {"server": 0, "trainer": 7, "task": 0}
    assert job.last_deaths["trainer"] == "ended with exit code 1"
    end(job, "task", "server")
    assert job.outcome == Outcome(1, "trainer ended with exit code 1", "trainer")


def test_a_start_that_fails_counts_as_a_death() -> None:
    job = three(max_restarts=1)
    job.handle(Begin(0.0))
    job.handle(BecameReady("trainer", 1.0))
    assert job.handle(SpawnFailed("server", "the disk is full", 1.0)) == []
    assert (job.states["server"], job.deadline) == (State.RESTARTING, 1.0 + FIRST_BACKOFF_SECONDS)
    assert job.last_deaths["server"] == "could not be started: the disk is full"
    assert job.handle(Tick(2.0)) == [Spawn("server", again=True)]
    assert job.handle(SpawnFailed("server", "the disk is full", 2.0)) == [Terminate("task")]
    end(job, "task", "trainer")
    assert job.outcome == Outcome(1, "server could not be started: the disk is full", "server")


def test_of_two_starts_that_fail_at_once_the_second_has_nothing_to_stop() -> None:
    job = three()
    job.handle(Begin(0.0))
    assert job.handle(SpawnFailed("server", "no memory", 0.0)) == [Terminate("trainer")]
    assert job.handle(SpawnFailed("trainer", "no memory", 0.0)) == []
    assert job.outcome == Outcome(1, "server could not be started: no memory", "server")


def beating(**options: Any) -> Lifecycle:
    """Three that are to be heard of every minute, and are ready at 1.0."""
    return running(three(silence_timeout_seconds=60.0, max_restarts=1, **options))


def test_a_worker_that_falls_silent_is_killed_and_started_again() -> None:
    job = beating()
    for name in ("server", "task"):
        assert job.handle(HeartbeatReceived(name, 50.0)) == []
    assert job.deadline == 61.0
    assert job.handle(Tick(60.9)) == []
    assert job.handle(Tick(61.0)) == [Kill("trainer")]
    assert job.states["trainer"].value == "stuck"
    assert job.handle(HeartbeatReceived("trainer", 61.1)) == [], "too late"
    assert job.handle(Exited("trainer", 137, 61.2)) == []
    assert job.states["trainer"].value == "restarting"
    assert job.last_deaths["trainer"] == "was silent for 60 s and was killed"
    assert job.handle(Tick(61.2 + FIRST_BACKOFF_SECONDS)) == [Spawn("trainer", again=True)]
    assert job.handle(BecameReady("trainer", 65.0)) == []
    assert job.deadline == 110.0, "the others', who were heard of at 50"


def test_a_worker_is_listened_for_from_its_first_word_on() -> None:
    job = Lifecycle([worker("task", task=True, ready_timeout_seconds=math.inf, silence_timeout_seconds=60.0)])
    job.handle(Begin(0.0))
    assert job.deadline is None
    job.handle(HeartbeatReceived("task", 30.0))
    assert job.handle(Tick(90.0)) == [Kill("task")], "although it waits for its turn without a deadline"


def test_a_silent_worker_that_cannot_be_killed_fails_the_job() -> None:
    job = beating()
    for name in ("server", "task"):
        job.handle(HeartbeatReceived(name, 50.0))
    job.handle(Tick(61.0))
    assert job.deadline == 61.0 + KILL_GRACE_SECONDS
    assert job.handle(Tick(61.0 + KILL_GRACE_SECONDS)) == [Terminate("task")]
    end(job, "task", "server")
    assert job.outcome == Outcome(1, "trainer was silent for 60 s and could not be killed", "trainer")


def test_a_worker_that_leaves_need_not_be_heard_of_and_has_its_time_to_stop() -> None:
    job = beating()
    for name in ("server", "trainer"):
        job.handle(HeartbeatReceived(name, 50.0))
    assert job.handle(EndAnnounced("task", 50.0)) == []
    assert job.handle(HeartbeatReceived("task", 51.0)) == []
    assert job.deadline == 80.0
    assert job.handle(Exited("task", 0, 70.0)) == [Terminate("trainer")]
    job = beating()
    job.handle(EndAnnounced("task", 1.0))
    assert job.handle(Tick(31.0)) == [Kill("task")]
    job.handle(Exited("task", 137, 31.1))
    assert job.last_deaths["task"] == "did not end within 30 s of announcing its end and was killed"


def test_a_worker_that_leaves_and_cannot_be_killed_fails_the_job() -> None:
    job = running()
    job.handle(EndAnnounced("task", 50.0))
    assert job.handle(Tick(80.0)) == [Kill("task")]
    job.handle(ExtensionRequested("task", 600.0, 81.0))
    assert job.deadline == 80.0 + KILL_GRACE_SECONDS, "it has had its time"
    assert job.handle(Tick(80.0 + KILL_GRACE_SECONDS)) == [Terminate("trainer")]
    end(job, "trainer", "server")
    assert job.outcome == Outcome(
        1, "task did not end within 30 s of announcing its end and could not be killed", "task"
    )


def test_a_worker_that_says_that_it_is_ready_after_it_has_begun_to_leave_keeps_its_deadline() -> None:
    """`READY=1` is said again with a heartbeat when it was lost."""
    job = three()
    job.handle(Begin(0.0))
    job.handle(BecameReady("server", 1.0))
    job.handle(EndAnnounced("trainer", 10.0))
    assert job.handle(BecameReady("trainer", 11.0)) == []
    job.handle(ExtensionRequested("trainer", 60.0, 12.0))
    assert job.handle(Tick(71.0)) == []
    assert Kill("trainer") in job.handle(Tick(72.0))


def test_a_worker_that_needs_more_time_to_end_gets_it() -> None:
    """It commits a step, and the disk is slow."""
    job = running()
    job.handle(ExtensionRequested("task", 60.0, 0.5))
    assert job.deadline is None, "only while it ends"
    job.handle(StopRequested("asked", 143, 10.0))
    assert job.deadline == 40.0
    job.handle(ExtensionRequested("task", 60.0, 30.0))
    assert job.handle(Tick(40.0)) == []
    job.handle(ExtensionRequested("task", 1.0, 50.0))
    assert job.handle(Tick(89.0)) == []
    assert job.handle(Tick(90.0)) == [Kill("task")]


def test_a_worker_that_is_killed_gets_no_more_time() -> None:
    """What it had said before may be read only after the kill."""
    job = running()
    job.handle(StopRequested("asked", 143, 10.0))
    assert job.handle(Tick(40.0)) == [Kill("task")]
    job.handle(ExtensionRequested("task", 600.0, 40.1))
    assert job.deadline == 40.0 + KILL_GRACE_SECONDS


def test_a_silent_worker_is_not_asked_to_stop_as_well() -> None:
    job = beating()
    for name in ("server", "trainer"):
        job.handle(HeartbeatReceived(name, 50.0))
    assert job.handle(Tick(61.0)) == [Kill("task")]
    assert job.handle(StopRequested("asked", 143, 62.0)) == []
    assert job.handle(Exited("task", 137, 63.0)) == [Terminate("trainer")]
    end(job, "trainer", "server")
    assert job.outcome == Outcome(1, "task was silent for 60 s and was killed", "task")


def test_a_worker_that_was_well_for_long_has_its_restarts_anew() -> None:
    job = running(three(max_restarts=1))
    at = 10.0
    for _ in range(5):
        job.handle(Exited("server", 1, at))
        assert job.states["server"] is State.RESTARTING
        job.handle(Tick(at + FIRST_BACKOFF_SECONDS))
        job.handle(BecameReady("server", at + 5))
        at += 5 + HEALTHY_SECONDS
    job.handle(Exited("server", 1, at))
    job.handle(Tick(at + FIRST_BACKOFF_SECONDS))
    assert job.handle(Exited("server", 1, at + 2)) == [Terminate("task")]


@pytest.mark.parametrize("code", [2, 3])
def test_a_bad_configuration_and_an_eviction_are_final(code: int) -> None:
    job = running(three(max_restarts=3))
    assert job.handle(Exited("task", code, 4.0)) == [Terminate("trainer")]


def test_a_service_that_was_told_to_end_by_another_hand_is_started_again() -> None:
    job = running(three(max_restarts=3))
    assert job.handle(Exited("trainer", 0, 4.0)) == []
    assert job.states["trainer"] is State.RESTARTING


def test_what_depends_on_a_service_that_dies_while_the_job_starts_waits_for_its_return() -> None:
    job = three(max_restarts=1)
    job.handle(Begin(0.0))
    job.handle(Exited("trainer", 1, 1.0))
    assert job.handle(Tick(2.0)) == [Spawn("trainer", again=True)]
    assert job.handle(BecameReady("trainer", 3.0)) == [Spawn("task")]


def test_a_job_that_stops_starts_nothing_again() -> None:
    job = running(three(max_restarts=3))
    job.handle(Exited("server", 137, 4.0))
    assert job.handle(StopRequested("asked", 143, 4.5)) == [Terminate("task")]
    assert job.states["server"] is State.STOPPED
    assert job.handle(Tick(6.0)) == []
    end(job, "task", "trainer", code=143)
    assert job.outcome == Outcome(143, "asked")


def test_one_ctrl_c_during_a_failure_stays_polite() -> None:
    job = running()
    job.handle(Exited("server", 1, 4.0))
    assert job.handle(StopRequested("Ctrl-C", 130, 5.0)) == []
    end(job, "task", "trainer")
    assert job.outcome == Outcome(1, "server ended with exit code 1", "server")


def test_a_worker_that_dies_of_sigterm_has_stopped_cleanly() -> None:
    job = running()
    job.handle(StopRequested("asked", 143, 10.0))
    for name in ("task", "trainer", "server"):
        job.handle(Exited(name, 143, 11.0))
    assert job.outcome == Outcome(143, "asked")


def test_a_worker_that_fails_while_being_stopped_fails_a_job_that_was_done() -> None:
    job = running()
    job.handle(Exited("task", 0, 4.0))
    job.handle(Exited("trainer", 1, 5.0))
    job.handle(Exited("server", 0, 6.0))
    assert job.outcome == Outcome(1, "trainer ended with exit code 1 while it was being stopped", "trainer")


def test_a_worker_that_follows_its_peers_out_is_no_failure() -> None:
    job = running()
    job.handle(StopRequested("asked", 143, 10.0))
    assert job.handle(Exited("server", 0, 11.0)) == []
    assert end(job, "task", code=143) == [Terminate("trainer")]
    end(job, "trainer")
    assert job.outcome == Outcome(143, "asked")


def test_an_order_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="must be listed before"):
        Lifecycle([worker("first", after=("second",)), worker("second")])
    with pytest.raises(ValueError, match="same name"):
        Lifecycle([worker("one"), worker("one")])


def test_exits_are_told_in_words() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(137) == "was killed by SIGKILL"
    assert describe_exit(255) == "ended with exit code 255"


NAMES = ("server", "trainer", "task", "other")
EVENTS = st.one_of(
    st.tuples(st.just("ready"), st.sampled_from(NAMES)),
    st.tuples(st.just("exit"), st.sampled_from(NAMES), st.sampled_from([0, 1, 3, 137, 143])),
    st.tuples(st.just("heard"), st.sampled_from(NAMES)),
    st.tuples(st.just("leaving"), st.sampled_from(NAMES)),
    st.tuples(st.just("needs time"), st.sampled_from(NAMES)),
    st.tuples(st.just("no start"), st.sampled_from(NAMES)),
    st.tuples(st.just("stop")),
    st.tuples(st.just("guests"), st.sampled_from([(), ("visitor",)])),
    st.tuples(st.just("tick"), st.floats(0, 100)),
)


@pytest.mark.slow
@given(st.lists(EVENTS, max_size=40), st.integers(0, 2))
def test_whatever_happens_every_started_worker_is_stopped_and_the_job_ends(script: list[Any], restarts: int) -> None:
    """Processes behave as processes do: only what was spawned exits, once; what is told to end, ends."""
    job = Lifecycle(
        [
            worker("server", max_restarts=restarts),
            worker("trainer", max_restarts=restarts, silence_timeout_seconds=30.0),
            worker("task", task=True, after=("trainer",), max_restarts=restarts),
            worker(
                "other", task=True, after=("trainer",), ready_timeout_seconds=math.inf, silence_timeout_seconds=30.0
            ),
        ]
    )
    alive: set[str] = set()
    started: list[str] = []
    now = 0.0

    def apply(event: Any) -> None:
        for instruction in job.handle(event):
            match instruction:
                case Spawn(name, again):
                    assert name not in alive
                    assert again == (name in started)
                    alive.add(name)
                    started.append(name)
                case Terminate(name) | Kill(name):
                    assert name in alive

    apply(Begin(now))
    for step in script:
        if job.outcome is not None:
            break
        match step:
            case ("ready", name) if name in alive:
                apply(BecameReady(name, now))
            case ("heard", name) if name in alive:
                apply(HeartbeatReceived(name, now))
            case ("leaving", name) if name in alive:
                apply(EndAnnounced(name, now))
            case ("needs time", name) if name in alive:
                apply(ExtensionRequested(name, 5.0, now))
            case ("exit", name, code) if name in alive:
                alive.remove(name)
                apply(Exited(name, code, now))
            case ("no start", name) if started[-1] == name and name in alive:
                alive.remove(name)
                apply(SpawnFailed(name, "no memory", now))
            case ("stop",):
                apply(StopRequested("asked", 143, now))
            case ("guests", names):
                apply(GuestsChanged(names, now))
            case ("tick", delay):
                now += delay
                apply(Tick(now))
        waiting = [name for name, state in job.states.items() if state is State.RESTARTING]
        assert not waiting or job.deadline is not None, "what is to be started again has a time for it"
    if job.outcome is None:
        apply(StopRequested("the end", 143, now))
    while alive:
        apply(Exited(alive.pop(), 0, now))
    assert job.outcome is not None
    assert set(job.states.values()) <= ENDED
    assert all(started.count(name) <= 1 + job.restarts[name] for name in NAMES)


def test_services_that_stay_need_no_task_and_outlive_all_guests() -> None:
    job = running(Lifecycle([worker("server"), worker("trainer")], stay=True))
    assert job.handle(GuestsChanged(("visitor",), 2.0)) == []
    assert job.handle(GuestsChanged((), 3.0)) == []
    assert job.handle(StopRequested("told to", 143, 4.0)) == [Terminate("trainer")]
    assert end(job, "trainer", "server") == [Terminate("server")]
    assert job.outcome == Outcome(143, "told to"), "what stays is never complete"


def test_services_that_came_back_for_a_guest_end_once_nobody_is_there() -> None:
    job = running(Lifecycle([worker("server"), worker("trainer")]))
    assert job.guests is None, "so that the first look counts, whatever it sees"
    assert job.handle(GuestsChanged((), 2.0)) == [Terminate("trainer")]
    assert end(job, "trainer", "server") == [Terminate("server")]
    assert job.outcome == Outcome(0, "done")


def test_services_that_stay_outlive_their_tasks() -> None:
    job = three()
    job = running(Lifecycle(list(job.workers.values()), stay=True))
    assert job.handle(Exited("task", 0, 2.0)) == []
    assert job.outcome is None
