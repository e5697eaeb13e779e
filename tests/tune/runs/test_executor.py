"""The executor of runs, with a job that pretends: what a fault does to one trial, and that results come once."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from counterpoint.job.population.exploit import outcome
from counterpoint.run.requests import Answer
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.executor import Completed, Failed, Reported, Saved, Started, Stopped
from counterpoint.tune.result import TRAINING_ITERATION
from counterpoint.tune.runs import result_lines
from counterpoint.tune.runs.host_job import HostJob
from counterpoint.tune.runs.saved import read_saved
from counterpoint.tune.trial import Trial
from tests.support.polling import wait_until
from tests.tune.runs.conftest import PretendedJob

pytestmark = pytest.mark.slow


def results(job: PretendedJob, trial: Trial, count: int) -> list[int]:
    """The iterations of so many further results; the trial keeps the last, as the runner has it."""
    found = []
    for _ in range(count):
        job.executor.proceed(trial)
        event = job.until(Reported, trial)
        trial.last_result = event.result
        found.append(event.result[TRAINING_ITERATION])
    return found


def test_each_step_is_a_result_and_the_end_follows(job: PretendedJob) -> None:
    trial = job.trial("a")
    job.executor.begin(trial, 1)
    job.until(Started, trial)
    assert results(job, trial, 6) == [1, 2, 3, 4, 5, 6]
    assert trial.last_result["reward/mean"] == pytest.approx(0.3)
    job.executor.proceed(trial)
    job.until(Completed, trial)
    job.executor.save_to(trial, job.checkpoint(trial, 6))
    job.executor.end(trial)
    assert asyncio.run(job.executor.next_events(5.0)), "the checkpoint of a run that never was durable fails"
    wait_until(lambda: not job.orchestrators(), "the end of the orchestrator")


def test_a_pause_loses_and_repeats_nothing(job: PretendedJob) -> None:
    job.direct("a", "allowed", "4")
    trial = job.trial("a")
    job.executor.begin(trial, 1)
    job.until(Started, trial)
    assert results(job, trial, 2) == [1, 2]
    wait_until(lambda: (job.output / "run_exp.a/metrics.jsonl").read_text().count("\n") == 4, "two more steps")
    job.executor.suspend(trial)
    job.until(Stopped, trial)
    job.direct("a", "allowed", "6")
    job.executor.begin(trial, 2)
    job.until(Started, trial)
    assert results(job, trial, 4) == [3, 4, 5, 6], "the lines of before the pause come first"


def test_slots_are_the_resource(job: PretendedJob) -> None:
    for name in "ab":
        job.direct(name, "allowed", "1")
    first, second, third = (job.trial(name) for name in "abc")
    assert job.executor.could_ever_run(first) is None
    for trial in (first, second):
        assert job.executor.has_resources(trial.resources)
        job.executor.begin(trial, 1)
    assert not job.executor.has_resources(third.resources)
    for trial in (first, second):
        job.until(Started, trial)
    assert "2/2 slots" in job.executor.resource_string()
    job.executor.end(first)
    job.until(Stopped, first)
    assert job.executor.has_resources(third.resources)


def test_a_run_that_dies_fails_alone_and_goes_on_after_its_last_result(job: PretendedJob) -> None:
    job.direct("a", "die", "3")
    job.direct("a", "allowed", "1")
    dying, other = job.trial("a"), job.trial("b")
    for trial in (dying, other):
        job.executor.begin(trial, 1)
        job.until(Started, trial)
    assert results(job, dying, 1) == [1]
    job.direct("a", "allowed", "6")
    failed = job.until(Failed, dying)
    assert "SIGKILL" in failed.error
    assert results(job, other, 6) == [1, 2, 3, 4, 5, 6]
    job.executor.begin(dying, 2)
    job.until(Started, dying)
    assert results(job, dying, 5) == [2, 3, 4, 5, 6]


def test_a_run_whose_process_ends_with_0_before_its_last_step_has_failed(job: PretendedJob) -> None:
    job.direct("a", "leave", "3")
    job.direct("a", "allowed", "1")
    trial = job.trial("a")
    job.executor.begin(trial, 1)
    job.until(Started, trial)
    job.direct("a", "allowed", "6")
    assert "exit code 0 after step 3 of 6" in job.until(Failed, trial).error


def test_a_run_that_ends_well_is_complete_also_if_its_results_wait_for_room(
    job: PretendedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_lines, "MOST_WAITING", 0)
    job.direct("a", "allowed", "2")
    trial = job.trial("a")
    job.executor.begin(trial, 1)
    job.until(Started, trial)
    assert results(job, trial, 1) == [1]
    asyncio.run(job.executor.next_events(0.5))
    job.direct("a", "allowed", "6")
    wait_until(lambda: not job.orchestrators(), "the end of the orchestrator")
    assert results(job, trial, 5) == [2, 3, 4, 5, 6]
    job.executor.proceed(trial)
    job.until(Completed, trial)


def test_an_evicted_run_says_why(job: PretendedJob) -> None:
    job.direct("a", "die", "1")
    job.direct("a", "evicted.txt", "the operator wants its place")
    trial = job.trial("a")
    job.executor.begin(trial, 1)
    job.executor.proceed(trial)
    failed = next(
        event
        for event in iter(lambda: job.events.pop(0) if job.events else _next(job), None)
        if isinstance(event, Failed)
    )
    assert "evicted: the operator wants its place" in failed.error


def _next(job: PretendedJob) -> object:
    job.events += asyncio.run(job.executor.next_events(1.0))
    return job.events.pop(0) if job.events else Started("", 0)


def test_a_configuration_that_no_run_can_have_fails_the_trial(job: PretendedJob) -> None:
    trial = job.trial("a", training={"learning_rate": -1.0})
    job.executor.begin(trial, 1)
    assert "training.learning_rate = -1.0" in job.until(Failed, trial).error
    trial = job.trial("b", training={"learning_rat": 1.0})
    job.executor.begin(trial, 1)
    assert "the nearest is training.learning_rate" in job.until(Failed, trial).error


def test_a_copy_in_place_reports_no_step_of_the_old_weights(job: PretendedJob) -> None:
    for name in "ab":
        job.direct(name, "allowed", "2")
    winner, loser = job.trial("a"), job.trial("b", training={"learning_rate": 0.1})
    for trial in (winner, loser):
        job.executor.begin(trial, 1)
        job.until(Started, trial)
    assert results(job, winner, 2) == results(job, loser, 2) == [1, 2]
    checkpoint = job.checkpoint(winner, 2)
    job.executor.save_to(winner, checkpoint)
    assert job.until(Saved, winner).checkpoint == checkpoint
    assert read_saved(checkpoint.path).step == 2

    assert not job.executor.change(loser, {"training": {"optimizer": "sgd"}}, checkpoint), "needs a new start"
    assert job.executor.change(loser, {"training": {"learning_rate": 0.2}}, checkpoint)
    job.until(Started, loser)
    assert (job.output / "run_exp.b/control/copied.txt").read_text().startswith("3 exp.a 2 ")
    job.direct("b", "allowed", "6")
    assert results(job, loser, 3) == [3, 4, 5], "they count on from the winner's iteration"
    assert trial.last_result["step"] == 6
    assert trial.last_result["learning_rate"] == 0.2


def test_a_copy_is_made_once_though_the_tuner_was_killed(job: PretendedJob) -> None:
    for name in "ab":
        job.direct(name, "allowed", "2")
    winner, loser = job.trial("a"), job.trial("b")
    for trial in (winner, loser):
        job.executor.begin(trial, 1)
        job.until(Started, trial)
    results(job, loser, 2)
    checkpoint = job.checkpoint(winner, 2)
    job.executor.save_to(winner, checkpoint)
    job.until(Saved, winner)
    assert job.executor.change(loser, {"training": {"learning_rate": 0.2}}, checkpoint)
    copied = job.output / "run_exp.b/control/copied.txt"
    wait_until(copied.exists, "the copy")
    asyncio.run(job.executor.close())  # as after a kill, nothing of it was journalled

    job.executor = job.another_executor()
    loser.config = {"training": {"learning_rate": 0.2}}
    job.direct("b", "allowed", "5")
    job.executor.begin(loser, 2, checkpoint)
    job.until(Started, loser)
    assert copied.read_text().count("\n") == 1
    assert results(job, loser, 2) == [3, 4]


def test_a_paused_trial_copies_the_same_checkpoint_again(job: PretendedJob) -> None:
    """The winner waits, while the loser falls behind a second time."""
    for name in "ab":
        job.direct(name, "allowed", "1")
    winner, loser = job.trial("a"), job.trial("b")
    for trial in (winner, loser):
        job.executor.begin(trial, 1)
        job.until(Started, trial)
    assert results(job, loser, 1) == [1]
    checkpoint = job.checkpoint(winner, 1)
    job.executor.save_to(winner, checkpoint)
    job.until(Saved, winner)
    copied = job.output / "run_exp.b/control/copied.txt"
    for attempt, rate, copies in ((2, 0.2, 1), (3, 0.3, 2), (4, 0.3, 2)):  # the last, after a kill, is no new one
        job.executor.suspend(loser)
        job.until(Stopped, loser)
        loser.config = {"training": {"learning_rate": rate}}
        job.executor.begin(loser, attempt, checkpoint)
        job.until(Started, loser)
        assert copied.read_text().count("\n") == copies


def test_a_new_start_has_its_values_whatever_was_changed_in_place(job: PretendedJob) -> None:
    job.direct("a", "allowed", "1")
    trial = job.trial("a", training={"learning_rate": 0.1})
    job.executor.begin(trial, 1)
    job.until(Started, trial)
    assert results(job, trial, 1) == [1]
    assert job.executor.change(trial, {"training": {"learning_rate": 0.2}}, None)
    job.until(Started, trial)
    job.executor.suspend(trial)
    job.until(Stopped, trial)
    trial.config = {"training": {"learning_rate": 0.3}}
    job.executor.begin(trial, 2)
    job.until(Started, trial)
    job.direct("a", "allowed", "2")
    assert results(job, trial, 1) == [2]
    assert trial.last_result["learning_rate"] == 0.3


def before_a_refused_copy(job: PretendedJob) -> tuple[Trial, Checkpoint]:
    """Returns a trial whose run will refuse a copy, and another trial's checkpoint."""
    for name in "ab":
        job.direct(name, "allowed", "1")
    job.direct("b", "refuse", "its rank is another")
    winner, loser = job.trial("a"), job.trial("b")
    for trial in (winner, loser):
        job.executor.begin(trial, 1)
        job.until(Started, trial)
    checkpoint = job.checkpoint(winner, 1)
    results(job, winner, 1)
    job.executor.save_to(winner, checkpoint)
    job.until(Saved, winner)
    return loser, checkpoint


def test_a_refused_copy_fails_the_trial(job: PretendedJob) -> None:
    loser, checkpoint = before_a_refused_copy(job)
    assert job.executor.change(loser, {}, checkpoint)
    assert "its rank is another" in job.until(Failed, loser).error
    wait_until(lambda: len(job.orchestrators()) <= 2, "the loser's orchestrator to end")


def test_a_refusal_that_comes_between_two_looks_fails_the_trial(
    job: PretendedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    loser, checkpoint = before_a_refused_copy(job)
    looks = 0

    def answered_after_the_first_look(*request: Any) -> Answer | None:
        nonlocal looks
        looks += 1
        if looks > 1:
            return outcome(*request)
        wait_until(lambda: outcome(*request) is not None, "the refusal of the copy")
        return None

    monkeypatch.setattr("counterpoint.tune.runs.exploit.outcome", answered_after_the_first_look)
    assert job.executor.change(loser, {}, checkpoint)
    assert "its rank is another" in job.until(Failed, loser).error
    assert looks == 2


def test_a_copy_that_comes_after_the_last_step_fails_nothing(job: PretendedJob) -> None:
    job.direct("a", "allowed", "2")
    winner, done = job.trial("a"), job.trial("b")
    for trial in (winner, done):
        job.executor.begin(trial, 1)
        job.until(Started, trial)
    results(job, winner, 2)
    checkpoint = job.checkpoint(winner, 2)
    job.executor.save_to(winner, checkpoint)
    job.until(Saved, winner)
    results(job, done, 4)
    wait_until(lambda: len(job.orchestrators()) <= 2, "the end of the run that has all its steps")
    assert job.executor.change(done, {}, checkpoint)
    job.until(Started, done)
    assert results(job, done, 2) == [5, 6]
    job.executor.proceed(done)
    job.until(Completed, done)


def test_a_new_trial_begins_with_anothers_state(job: PretendedJob) -> None:
    job.direct("a", "allowed", "2")
    winner, late = job.trial("a"), job.trial("b")
    job.executor.begin(winner, 1)
    job.until(Started, winner)
    results(job, winner, 2)
    checkpoint = job.checkpoint(winner, 2)
    job.executor.save_to(winner, checkpoint)
    job.until(Saved, winner)
    job.executor.begin(late, 1, checkpoint)
    job.until(Started, late)
    assert 'run = "exp.a"' in (job.output / "roles/orchestrator_exp.b.toml").read_text()
    assert results(job, late, 2) == [3, 4]


def test_a_copy_counts_on_from_the_step_that_was_saved(job: PretendedJob) -> None:
    """The winner has gone on since the result that the tuner looked at."""
    for name, steps in (("a", 2), ("b", 1)):
        job.direct(name, "allowed", str(steps))
    winner, loser, late = job.trial("a"), job.trial("b"), job.trial("c")
    for trial in (winner, loser):
        job.executor.begin(trial, 1)
        job.until(Started, trial)
    assert results(job, winner, 1) == results(job, loser, 1) == [1]
    metrics = job.output / "run_exp.a/metrics.jsonl"
    wait_until(lambda: metrics.read_bytes().count(b"\n") == 2, "the winner's second step")
    checkpoint = job.checkpoint(winner, 1)
    job.executor.save_to(winner, checkpoint)
    job.until(Saved, winner)
    assert (read_saved(checkpoint.path).step, read_saved(checkpoint.path).iteration) == (2, 2)
    assert job.executor.change(loser, {"training": {"learning_rate": 0.2}}, checkpoint)
    job.until(Started, loser)
    job.direct("b", "allowed", "4")
    assert results(job, loser, 2) == [3, 4]
    job.executor.begin(late, 1, checkpoint)
    job.until(Started, late)
    assert results(job, late, 1) == [3]


def test_steps_of_checkpoints_that_were_removed_are_forgotten(job: PretendedJob) -> None:
    job.direct("a", "allowed", "1")
    trial = job.trial("a")
    job.executor.begin(trial, 1)
    job.until(Started, trial)
    results(job, trial, 1)
    first, second = job.checkpoint(trial, 1), job.checkpoint(trial, 2)
    job.executor.save_to(trial, first)
    job.until(Saved, trial)
    shutil.rmtree(first.path)
    job.direct("a", "allowed", "2")
    results(job, trial, 1)
    job.executor.save_to(trial, second)
    job.until(Saved, trial)
    assert [path.name for path in (job.output / "trainer/exp.a/saved").iterdir()] == ["step_2"]


def test_an_orchestrator_that_does_not_end_is_killed(job: PretendedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.job.admin.orchestrator_process.DRAIN_GRACE_SECONDS", 0.0)
    job.direct("a", "stubborn")
    job.direct("a", "allowed", "0")
    trial = job.trial("a")
    job.executor.begin(trial, 1)
    job.until(Started, trial)
    job.executor.end(trial)
    job.until(Stopped, trial)
    wait_until(lambda: not job.orchestrators(), "its end")


def test_a_job_that_is_not_there_is_waited_for(job: PretendedJob) -> None:
    job.show("starting")
    trial = job.trial("a")
    job.executor.begin(trial, 1)
    assert asyncio.run(job.executor.next_events(0.3)) == []
    assert not job.orchestrators()
    job.show("ready")
    job.until(Started, trial)


@pytest.mark.parametrize(
    ("states", "unready"),
    [
        (
            {
                "trainer": "ready",
                "inference_0": "ready",
                "orchestrator_own": "stopped",
                "orchestrator_evicted": "failed",
            },
            "",
        ),
        ({"trainer": "ready", "serve": "restarting", "tracking": "failed", "orchestrator": "waiting"}, ""),
        (
            {"trainer": "ready", "inference_0": "starting", "inference_1": "ready", "serve": "failed"},
            "inference_0 (starting)",
        ),
        ({"trainer": "restarting", "inference_0": "failed"}, "trainer (restarting), inference_0 (failed)"),
    ],
)
def test_a_job_is_ready_once_its_trainer_and_servers_are(
    job: PretendedJob, states: dict[str, str], unready: str
) -> None:
    job.show(**states)
    expected = f"the job in {job.output} is not ready: {unready}" if unready else None
    assert job.executor.job.obstacle() == expected


def test_a_job_that_has_ended_ends_the_experiment(job: PretendedJob, tmp_path: Path) -> None:
    job.end()
    job.executor.job = HostJob(job.output, tmp_path / "missing.toml")
    job.executor.job.start()
    job.executor.begin(job.trial("a"), 1)

    with pytest.raises(TuneError, match="missing"):
        job.until(Reported, job.trial("a"))


def test_cleanup_leaves_no_process(job: PretendedJob) -> None:
    job.direct("a", "allowed", "1")
    trials = [job.trial("a"), job.trial("b")]
    for trial in trials:
        job.executor.begin(trial, 1)
        job.until(Started, trial)
    asyncio.run(job.executor.close())
    assert not job.orchestrators()
    assert "0/2 slots" in job.executor.resource_string()
