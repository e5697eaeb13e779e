"""`counterpoint sweep --workers`: a job of workers, as real processes around runs that pretend. They are killed and stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.cli.main import main
from counterpoint.cluster import ClusterError, JobHandle
from counterpoint.job.sweep.submit_workers import GivenSweep, specification_of
from tests.cli.fleet import ALL_STEPS, Fleet
from tests.support.job_processes import kill_processes_of
from tests.support.polling import wait_until

SUBMIT = ("--workers", "2")


@pytest.fixture
def job(fleet: Fleet) -> Iterator[Path]:
    """The directory of the sweep's first job. What a failed test has left running there is killed."""
    directory = fleet.file.parent / "outputs" / "test-workers" / "1"
    yield directory
    kill_processes_of(directory.parent)


def claimed_by(fleet: Fleet, target_id: str) -> int:
    pid = fleet.status(target_id).pid
    assert pid is not None
    return pid


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_a_killed_command_finds_its_job(fleet: Fleet, job: Path) -> None:
    fleet.settings["grid"]["seed"] = [1, 2, 3]
    fleet.settings["lease_seconds"] = 6.0
    first = fleet.worker("wait", *SUBMIT)
    fleet.wait_for_step_3("seed-1")
    fleet.wait_for_step_3("seed-2")
    first.kill()
    first.wait()
    second = fleet.worker("wait", *SUBMIT)
    for words in ("run already; this command waits for them", "test: seed-2: RUNNING on "):
        wait_until(lambda: words in fleet.outputs[second].read_text(), words)  # noqa: B023 - awaited in the loop
    os.kill(claimed_by(fleet, "seed-1"), signal.SIGKILL)
    wait_until(
        lambda: not fleet.is_at_work("seed-1") or (fleet.status("seed-1").token or 0) >= 2,
        "the run to die with its worker, or to be taken over already",
    )
    for seed in (1, 2, 3):
        fleet.let_go(f"seed-{seed}")
    code, output = fleet.finish(second)
    assert code == 0, output
    assert "3 targets, 3 SUCCESS" in output
    for seed in (1, 2, 3):
        assert fleet.steps(f"seed-{seed}") == ALL_STEPS, "no step was trained twice"
        assert fleet.status(f"seed-{seed}").state == "SUCCESS"
    assert (fleet.status("seed-1").token or 0) >= 2, "taken over"
    ended = JobHandle(job).status()
    assert sorted(one.incarnation for one in ended.workers) == [1, 2]
    assert [entry.name for entry in job.parent.iterdir() if entry.is_dir()] == ["1"], "one job did it all"


@pytest.mark.slow
def test_a_signal_has_the_workers_give_back_what_they_hold_and_a_new_job_goes_on(
    fleet: Fleet, job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = fleet.worker("wait", *SUBMIT)
    fleet.wait_for_step_3("seed-1")
    fleet.wait_for_step_3("seed-2")
    monkeypatch.chdir(fleet.file.parent)
    assert main(["sweep", str(fleet.file), "--workers", "3"]) == 2
    assert f"with another configuration: wait for it with `counterpoint wait {job}`" in capsys.readouterr().err
    command.send_signal(signal.SIGINT)
    code, output = fleet.finish(command)
    assert code == 130, output
    assert "ended with exit code 130: stopped by its user" in output
    for seed in (1, 2):
        status = fleet.status(f"seed-{seed}")
        assert (status.state, status.attempts) == ("INTERRUPTED", 0)
        fleet.let_go(f"seed-{seed}")
    code, output = fleet.finish(fleet.worker("wait", *SUBMIT))
    assert code == 0, output
    assert fleet.steps("seed-1") == fleet.steps("seed-2") == ALL_STEPS
    assert (job.parent / "2" / "outcome.json").exists(), "a directory holds one job"


@pytest.mark.slow
def test_a_target_that_stays_failed_is_told_and_its_workers_are_not_started_again(fleet: Fleet, job: Path) -> None:
    fleet.settings |= {"max_attempts": 1}
    code, output = fleet.finish(fleet.worker("finish,seed-1=fail", *SUBMIT))
    assert code == 3, output
    assert "1 SUCCESS, 1 FAILED" in output
    assert "the disk is full" in output
    assert {one.incarnation for one in JobHandle(job).status().workers} == {1}


def test_the_workers_have_the_targets_of_the_command(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids follow from the order of a sweep's keys, which not every way to write a file keeps."""
    del fleet.settings["grid"]
    fleet.write()
    with open(fleet.file, "a") as file:
        file.write("\n[grid]\ntraining.learning_rate = [1e-3, 1e-4]\nseed = [1, 2]\n")
    given = [str(fleet.file), "--max_attempts=2"]
    monkeypatch.setenv("COUNTERPOINT_LEASE_SECONDS", "7")
    assert main(["sweep", *given, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for part in ("learning_rate-0.001__seed-1: ", "max_attempts = 2", "lease_seconds = 7"):
        assert part in shown
    sweeps: list[GivenSweep] = []

    def refuse(sweep: GivenSweep) -> JobHandle:
        sweeps.append(sweep)
        raise ClusterError("seen enough")

    monkeypatch.setattr("counterpoint.cli.sweep.submit_workers", refuse)
    assert main(["sweep", *given, *SUBMIT]) == 2
    capsys.readouterr()
    role = specification_of(sweeps[0], fleet.file.parent).role("worker")
    assert role.command is not None
    monkeypatch.setenv("COUNTERPOINT_LEASE_SECONDS", role.environment["COUNTERPOINT_LEASE_SECONDS"])
    assert main([*role.command[role.command.index("sweep") :], "--dry-run"]) == 0
    of_workers = capsys.readouterr().out
    assert of_workers.replace("workers = 2\n", "") == shown


def test_what_cannot_run_is_told_before_anything_is_submitted(
    fleet: Fleet, job: Path, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", fleet.write(), *SUBMIT, "--backend", "rai"]) == 2
    assert "backend = 'rai': expected one of local, ray" in capsys.readouterr().err
    del fleet.settings["join"]
    fleet.settings["file"] = str(job_file)
    fleet.settings["base"] = {"inference": {"port": 8000}}
    fleet.settings["grid"] = {"seed": [1, 2]}
    assert main(["sweep", fleet.write(), *SUBMIT]) == 2
    assert "targets seed-1 and seed-2 both start a server at port 8000 of this machine" in capsys.readouterr().err
    assert main(["sweep", fleet.write(), "--dry-run", "--worker", *SUBMIT]) == 0
    fleet.settings["base"] = {}
    assert main(["sweep", fleet.write(), "--dry-run", *SUBMIT]) == 0
    fleet.settings["zip"] = [{"seed": [1, 2], "inference": {"port": [8000, 8100]}}]
    del fleet.settings["grid"]
    assert main(["sweep", fleet.write(), "--dry-run", *SUBMIT]) == 0
    assert not job.parent.exists()
