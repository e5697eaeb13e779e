"""How a job that nobody can watch any more ends."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.attended.attended_job import AttendedJob
from counterpoint.cluster.manager.events import Outcome
from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.metrics.metrics_lines import Line
from counterpoint.job.supervision import MOST_SHOWN, Show, SupervisedJob, progress_of
from counterpoint.job.workers import SERVICE_LEASE_SECONDS, sections_of, specification
from counterpoint.orchestrator.step.differences import Notice
from counterpoint.transport.files import appended_lines
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.process.notify import Heartbeat
from tests.support.jobs import shipped_line, write_lines


def supervised(job_file: Path, warn: Callable[[str], None] = lambda text: None) -> SupervisedJob:
    config = load(JobConfig, job_file, [])
    config.output_dir.mkdir()
    return SupervisedJob(config, specification(config, dict.fromkeys(sections_of(config), job_file)), warn)


def test_progress_says_why_nothing_ships() -> None:
    history = History("test", 20)
    assert progress_of(history) == f"test step {history.progress}"
    history.discarded = {"step": 3, "discarded": 568, "reason": "KeyError: gone", "notable": False}
    assert progress_of(history) == f"test step {history.progress}"
    history.discarded["notable"] = True
    assert progress_of(history).startswith(f"test step {history.progress} (568 rollouts discarded since step 3")
    history.no_difference = Notice(64, "each rollout has the reward 0", "take easier examples", 0.0)
    assert "no difference" in progress_of(history)


@pytest.mark.parametrize("fault", ["show", "guests", "directory"])
def test_what_fails_after_the_job_has_ended_costs_neither_its_outcome_nor_its_summary(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    job = supervised(job_file)
    output_dir = job_file.parent / "out"
    ended = False

    async def run(job: AttendedJob, *, adopt: bool = False) -> Outcome:
        nonlocal ended
        ended = True
        if fault == "directory":
            shutil.rmtree(output_dir)
        return Outcome(3, "a worker failed")

    def fail_at_the_end(*arguments: object) -> Any:
        if ended:
            raise OSError(5, "Input/output error")
        return []

    monkeypatch.setattr(AttendedJob, "run", run)
    if fault == "guests":
        monkeypatch.setattr("counterpoint.job.supervision.run_ids_in", fail_at_the_end)
    show: Show = fail_at_the_end if fault == "show" else lambda workers, steps: None
    outcome = job.run(show)
    assert (outcome.code, outcome.reason) == (3, "a worker failed")
    assert job.summary(outcome)["outcome"] == "a worker failed"
    assert ("Input/output error" in caplog.text) == (fault != "directory")


def test_roles_below_a_service_manager_wait_longer_for_the_next_command(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(JobConfig, job_file, [])
    files = dict.fromkeys(sections_of(config), job_file)
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    by_hand = specification(config, files).lease_seconds
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    assert specification(config, files).lease_seconds == SERVICE_LEASE_SECONDS > by_hand


def test_heartbeats_do_not_wait_for_a_look_at_the_runs(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats, shown = threading.Semaphore(0), threading.Event()
    heard: list[bool] = []

    async def run(job: AttendedJob, *, adopt: bool = False) -> Outcome:
        await asyncio.to_thread(shown.wait)
        return Outcome(0, "done")

    def show(workers: list[WorkerView], steps: list[tuple[History, Line]]) -> None:
        if not shown.is_set():
            heard.extend(beats.acquire(timeout=60) for _ in range(4))
            shown.set()

    monkeypatch.setattr(AttendedJob, "run", run)
    monkeypatch.setattr(Heartbeat, "beat", lambda heartbeat: beats.release())
    monkeypatch.setattr("counterpoint.job.supervision.POLL_SECONDS", 0.001)
    supervised(job_file).run(show)
    assert heard == [True] * 4


def test_a_long_file_of_a_guest_is_read_in_many_looks_and_its_newest_steps_are_shown(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(job: AttendedJob, *, adopt: bool = False) -> Outcome:
        return Outcome(0, "done")

    looks: list[list[int]] = []
    warnings: list[str] = []
    monkeypatch.setattr(AttendedJob, "run", run)
    monkeypatch.setattr("counterpoint.job.supervision.LOOK_SECONDS", 0.0)
    job = supervised(job_file, warnings.append)
    path = job_file.parent / "out" / "run_guest" / "metrics.jsonl"
    write_lines(path, [shipped_line(step, float(step)) for step in range(1, 4 * MOST_SHOWN + 1)])
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", path.stat().st_size // 2)
    job.histories["guest"] = History.of(path.parent.parent, "guest")
    job.run(lambda workers, steps: looks.append([line["step"] for _, line in steps]))
    assert job.histories["guest"].step == 4 * MOST_SHOWN
    assert len(looks) > 2
    assert max(map(len, looks)) == MOST_SHOWN
    assert 4 * MOST_SHOWN in {step for look in looks for step in look}
    assert warnings == []


@pytest.mark.parametrize(
    ("death", "lines"), [("ended with exit code 1", ["the end"]), ("ended with exit code 2: no such model", [])]
)
def test_a_failed_worker_is_shown_with_its_last_lines_unless_it_gave_its_reason(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, death: str, lines: list[str]
) -> None:
    job = supervised(job_file)
    (job_file.parent / "out" / "inference_0.log").write_text("the end\n")
    failed = replace(job._job.views()[0], state=State.FAILED, last_death=death)
    assert failed.name == "inference_0"
    monkeypatch.setattr(job._job, "views", lambda: [failed])
    (shown,) = job.failed_workers(Outcome(1, death, "inference_0"))
    assert (shown.name, shown.death, shown.last_lines) == ("inference_0", death, lines)


def test_a_worker_that_missed_its_start_is_shown_with_what_it_did(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, death = supervised(job_file), "was not ready within 600 s"
    views = [replace(view, state=State.STOPPED, last_death=death, status="loading /m") for view in job._job.views()[:2]]
    monkeypatch.setattr(job._job, "views", lambda: views)
    (shown,) = job.failed_workers(Outcome(1, death, "trainer"))
    assert (shown.name, shown.death) == ("trainer", f"{death} (loading /m)")


def test_an_orchestrator_that_ends_with_0_before_its_last_step_fails_the_job(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does in which an environment calls `os._exit(0)`."""
    job = supervised(job_file)

    async def run(job: AttendedJob, *, adopt: bool = False) -> Outcome:
        return Outcome(0, "done")

    monkeypatch.setattr(AttendedJob, "run", run)
    outcome = job.run(lambda workers, steps: None)
    assert (outcome.code, outcome.failed_worker) == (1, "orchestrator")
    assert "after 0 of" in outcome.reason


def test_a_run_that_has_committed_all_is_complete_whatever_its_metrics_say(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look at a file of metrics may not reach its end."""
    job = supervised(job_file)
    (run,) = load(JobConfig, job_file, []).every_run
    with publish_directory(run.run_dir / f"checkpoints/step_{run.steps}"):
        pass

    async def run_job(job: AttendedJob, *, adopt: bool = False) -> Outcome:
        return Outcome(0, "done")

    monkeypatch.setattr(AttendedJob, "run", run_job)
    assert job.run(lambda workers, steps: None).code == 0


def test_what_a_worker_says_it_is_doing_waits_for_the_next_look_and_its_state_does_not(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status changes with each step: each would write the job's files, and wait for the disk."""
    job = supervised(job_file)
    views = job._job.views()
    monkeypatch.setattr(AttendedJob, "views", lambda self: views)
    job._on_change(job._job)
    job._changed.clear()
    views = [replace(view, status="step 3") for view in views]
    job._on_change(job._job)
    assert not job._changed.is_set()
    assert job._unseen[-1].workers == views
    views = [replace(view, state=State.READY) for view in views]
    job._on_change(job._job)
    assert job._changed.is_set()
