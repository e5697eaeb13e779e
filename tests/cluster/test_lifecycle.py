"""The supervisor's rules, without a process or a clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lifecycle import (
    ENDED,
    FOLLOW_SECONDS,
    BecameReady,
    Begin,
    Exited,
    Instruction,
    Kill,
    Lifecycle,
    Outcome,
    Spawn,
    State,
    StopRequested,
    Terminate,
    Tick,
    Worker,
    describe_exit,
)


def worker(name: str, **options: Any) -> Worker:
    return Worker(name, ["true"], Path("log"), **({"ready_timeout_seconds": 60.0} | options))


def three() -> Lifecycle:
    """A service, one that may end by itself, and the task that needs the latter."""
    return Lifecycle([worker("server"), worker("trainer", may_end=True), worker("task", task=True, after=("trainer",))])


def state_of(job: Lifecycle) -> State:
    """As a call, so that the type checker does not believe that a state once seen stays."""
    return job.state


def running() -> Lifecycle:
    job = three()
    job.handle(Begin(0.0))
    for name in ("server", "trainer", "task"):
        job.handle(BecameReady(name, 1.0))
    assert state_of(job) is State.RUNNING
    return job


def end(job: Lifecycle, *names: str) -> list[Instruction]:
    """Lets the workers end as asked, one after the other; returns what was instructed meanwhile."""
    return [instruction for name in names for instruction in job.handle(Exited(name, 0, 5.0))]


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


def test_a_service_that_may_end_does_not_end_the_job() -> None:
    job = running()
    assert job.handle(Exited("trainer", 0, 4.0)) == []
    assert state_of(job) is State.RUNNING
    assert job.handle(Exited("task", 0, 5.0)) == [Terminate("server")]


def test_a_task_does_not_wait_for_ever_for_a_service_that_has_ended() -> None:
    """A trainer that was told to stop ends with 0, like one that is done; its orchestrator would wait for its return."""
    job = running()
    job.handle(Exited("trainer", 0, 4.0))
    assert job.deadline == 4.0 + FOLLOW_SECONDS
    assert job.handle(Tick(4.0 + FOLLOW_SECONDS)) == [Terminate("task")]
    end(job, "task", "server")
    assert job.outcome == Outcome(1, "trainer ended, but task did not within 120 s of it", "trainer")


def test_a_task_that_is_ready_only_after_its_service_has_ended_does_not_wait_for_ever() -> None:
    job = three()
    job.handle(Begin(0.0))
    for name in ("server", "trainer"):
        job.handle(BecameReady(name, 1.0))
    job.handle(Exited("trainer", 0, 2.0))
    assert job.deadline == 61.0
    job.handle(BecameReady("task", 3.0))
    assert job.deadline == 3.0 + FOLLOW_SECONDS
    assert job.handle(Exited("task", 0, 4.0)) == [Terminate("server")]
    end(job, "server")
    assert job.outcome == Outcome(0, "done")


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
    assert job.handle(StopRequested("asked", 0, 10.0)) == [Terminate("task")]
    assert job.deadline == 40.0
    assert job.handle(Tick(40.0)) == [Kill("task")]
    assert job.handle(Exited("task", 137, 40.1)) == [Terminate("trainer")]
    end(job, "trainer", "server")
    assert job.outcome == Outcome(1, "task did not stop within 30 s and was killed", "task")


def test_a_process_that_cannot_be_killed_does_not_hold_the_others() -> None:
    job = running()
    job.handle(StopRequested("asked", 0, 10.0))
    job.handle(Tick(40.0))
    assert job.deadline is not None
    assert job.handle(Tick(job.deadline)) == [Terminate("trainer")]


def test_a_first_stop_is_polite_and_a_second_kills_everything() -> None:
    job = running()
    assert job.handle(StopRequested("Ctrl-C", 130, 10.0)) == [Terminate("task")]
    assert set(job.handle(StopRequested("Ctrl-C", 130, 11.0))) == {Kill("server"), Kill("trainer"), Kill("task")}
    for name in ("server", "trainer", "task"):
        job.handle(Exited(name, 137, 12.0))
    assert job.outcome == Outcome(130, "Ctrl-C, twice: everything was killed")


def test_one_ctrl_c_during_a_failure_stays_polite() -> None:
    job = running()
    job.handle(Exited("server", 1, 4.0))
    assert job.handle(StopRequested("Ctrl-C", 130, 5.0)) == []
    end(job, "task", "trainer")
    assert job.outcome == Outcome(1, "server ended with exit code 1", "server")


def test_a_worker_that_dies_of_sigterm_has_stopped_cleanly() -> None:
    job = running()
    job.handle(StopRequested("asked", 0, 10.0))
    for name in ("task", "trainer", "server"):
        job.handle(Exited(name, 143, 11.0))
    assert job.outcome == Outcome(0, "asked")


def test_a_worker_that_fails_while_being_stopped_fails_a_job_that_was_done() -> None:
    job = running()
    job.handle(Exited("task", 0, 4.0))
    job.handle(Exited("trainer", 1, 5.0))
    job.handle(Exited("server", 0, 6.0))
    assert job.outcome == Outcome(1, "trainer ended with exit code 1 while it was being stopped", "trainer")


def test_a_worker_that_follows_its_peers_out_is_no_failure() -> None:
    job = running()
    job.handle(StopRequested("asked", 0, 10.0))
    assert job.handle(Exited("server", 0, 11.0)) == []
    assert end(job, "task") == [Terminate("trainer")]
    end(job, "trainer")
    assert job.outcome == Outcome(0, "asked")


def test_an_order_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="must be listed before"):
        Lifecycle([worker("first", after=("second",)), worker("second")])
    with pytest.raises(ValueError, match="same name"):
        Lifecycle([worker("one"), worker("one")])


def test_exits_are_told_in_words() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(137) == "was killed by SIGKILL"
    assert describe_exit(255) == "ended with exit code 255"


NAMES = ("server", "trainer", "task")
EVENTS = st.one_of(
    st.tuples(st.just("ready"), st.sampled_from(NAMES)),
    st.tuples(st.just("exit"), st.sampled_from(NAMES), st.sampled_from([0, 1, 137, 143])),
    st.tuples(st.just("stop")),
    st.tuples(st.just("tick"), st.floats(0, 100)),
)


@given(st.lists(EVENTS, max_size=30))
def test_whatever_happens_every_started_worker_is_stopped_and_the_job_ends(script: list[Any]) -> None:
    """Processes behave as processes do: only what was spawned exits, once; what is told to end, ends."""
    job = three()
    alive: set[str] = set()
    now = 0.0

    def apply(event: Any) -> None:
        for instruction in job.handle(event):
            match instruction:
                case Spawn(name):
                    assert name not in alive
                    alive.add(name)
                case Terminate(name) | Kill(name):
                    assert name in alive

    apply(Begin(now))
    for step in script:
        match step:
            case ("ready", name) if name in alive:
                apply(BecameReady(name, now))
            case ("exit", name, code) if name in alive:
                alive.remove(name)
                apply(Exited(name, code, now))
            case ("stop",) if job.outcome is None:
                apply(StopRequested("asked", 0, now))
            case ("tick", delay) if job.outcome is None:
                now += delay
                apply(Tick(now))
    if job.outcome is None:
        apply(StopRequested("the end", 0, now))
    while alive:
        apply(Exited(alive.pop(), 0, now))
    assert job.outcome is not None
    assert set(job.states.values()) <= ENDED
