"""`counterpoint submit`, and `status`, `logs`, `stop` and `wait` for the job that it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from counterpoint.cli.main import main
from counterpoint.cluster import JobFailed, JobHandle, JobSpec, RoleSpec, load_spec, submit
from counterpoint.cluster.job_files import JOB_FILE, OUTCOME_FILE, JobFile, read_master, read_outcome, write_privately
from tests.support.job_processes import kill_processes_of, processes_of
from tests.support.polling import wait_until

WORKERS = "tests.cluster.master.tiny_workers"


def file_of_job(tmp_path: Path, task: str = f"{WORKERS}:Counter", **keys: object) -> Path:
    """A job of a service and a task."""
    roles = [
        {"name": "service", "worker": f"{WORKERS}:Service"},
        {"name": "task", "worker": task, "task": True, "max_restarts": 0, "after": ["service"]},
    ]
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps({"name": "tiny", "lease_seconds": 60.0, "roles": roles, **keys}))
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A job's directory. What a failed test has left running there is killed."""
    directory = tmp_path / "the job"
    yield directory
    kill_processes_of(directory)


@pytest.mark.slow
def test_a_job_is_submitted_watched_and_awaited(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(file_of_job(tmp_path)), "--directory", str(directory)]
    command = [sys.executable, "-m", "counterpoint.cli.main", "submit", *given, "--detach"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert f"counterpoint status, wait or stop {directory}" in completed.stdout
    assert main(["submit", *given]) == 2
    assert "has a job already" in capsys.readouterr().err
    handle = JobHandle(directory)
    wait_until(lambda: handle.status().stage == "RUNNING", "the running job")
    wait_until(lambda: handle.logs("task-0") != "", "its first line")
    assert main(["status", str(directory)]) == 0
    shown = capsys.readouterr().out
    for part in ("job tiny: RUNNING, epoch 1", "service-0", "task-0", "node-0", "incarnation"):
        assert part in shown
    assert main(["status", str(directory), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["worker"], one["incarnation"]) for one in told["workers"]] == [("service-0", 1), ("task-0", 1)]
    assert main(["logs", "--job", str(directory)]) == 0
    assert "master, service-0, task-0" in capsys.readouterr().out
    assert main(["logs", "task-0", "--job", str(directory)]) == 0
    assert capsys.readouterr().out == "task-0 has started\n"
    (directory / "go").touch()
    assert main(["wait", str(directory)]) == 0
    assert "the job is complete: done" in capsys.readouterr().out
    assert main(["status", str(directory)]) == 0
    assert "ended with exit code 0: done" in capsys.readouterr().out
    assert main(["stop", str(directory)]) == 0
    assert "has ended: done" in capsys.readouterr().out


@pytest.mark.slow
def test_a_failed_worker_gives_its_reason_and_the_end_of_its_log(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of_job(tmp_path, f"{WORKERS}:Broken")
    assert main(["submit", str(file), "--directory", str(directory)]) == 1
    shown = capsys.readouterr().out
    assert "task-0 ended with exit code 1: `setup` raised ValueError: the model is missing" in shown
    assert f"end of {directory}/logs/task-0.log:\nTraceback" in shown
    assert main(["status", str(directory)]) == 0
    assert "last death: task-0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_job_without_a_master_is_said_to_have_none_and_is_stopped_in_order(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = submit(load_spec(file_of_job(tmp_path)), directory, standby=False)
    wait_until((directory / "task-0.started").exists, "the task")
    known = read_master(directory)
    assert known is not None
    os.kill(known.pid, signal.SIGKILL)
    wait_until(lambda: known.pid not in processes_of(directory), "the death of the master")
    assert main(["status", str(directory)]) == 0
    assert "no master answers" in capsys.readouterr().out
    assert main(["stop", str(directory)]) == 0
    assert "ended with exit code 143: stopped by its user" in capsys.readouterr().out
    with pytest.raises(JobFailed):
        handle.wait()


@pytest.mark.slow
def test_a_signal_stops_the_job_in_order(tmp_path: Path, directory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "counterpoint.cli.main",
        "submit",
        str(file_of_job(tmp_path)),
        "--directory",
        str(directory),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        wait_until((directory / "task-0.started").exists, "the task")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "ended with exit code 130: stopped by its user" in output
    outcome = read_outcome(directory)
    assert outcome is not None
    assert outcome.code == 130


def test_what_is_wrong_with_the_file_is_said_before_anything_is_written(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of_job(tmp_path, "no_such_module:Worker")
    assert main(["submit", str(file), "--directory", str(directory)]) == 2
    assert f"{file}: role 'task': worker = 'no_such_module:Worker': there is no module" in capsys.readouterr().err
    file = file_of_job(tmp_path, "tests.cluster.master.tiny_workers.Counter")
    assert main(["submit", str(file), "--directory", str(directory)]) == 2
    assert "expected text that matches" in capsys.readouterr().err
    file = file_of_job(tmp_path)
    assert main(["submit", str(file), "--directory", str(directory), "--backend", "rai"]) == 2
    assert "backend = 'rai': expected one of local, ray" in capsys.readouterr().err
    assert not directory.exists()


def test_a_file_of_the_other_kind_of_job_is_named(
    tmp_path: Path, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(job_file)]) == 2
    assert "this is a job file: use `counterpoint run" in capsys.readouterr().err
    ours = tmp_path / "ours.toml"
    ours.write_text(tomli_w.dumps({"name": "tiny", "roles": [{"name": "a", "command": ["true"]}]}))
    assert main(["run", str(ours)]) == 2
    assert f"use `counterpoint submit {ours}`" in capsys.readouterr().err


def test_where_there_is_no_job_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wait", str(tmp_path)]) == 2
    assert "has no job" in capsys.readouterr().err


ENDED: dict[str, Any] = {"job": "tiny", "stage": "STOPPED", "epoch": 1}
"""The keys that a job's last status has at least."""

WORKER: dict[str, Any] = {
    **dict.fromkeys(
        ("worker", "role", "stage", "phase", "node", "address", "last_death", "status", "trouble", "log"), "x"
    ),
    **dict.fromkeys(("rank", "incarnation", "pid", "restarts"), 1),
}


def end(directory: Path, status: object) -> None:
    """Writes the files of a job that has ended with such a last status."""
    directory.mkdir()
    spec = JobSpec(name="tiny", roles=(RoleSpec(name="a", command=("true",)),))
    write_privately(directory / JOB_FILE, JobFile(spec=spec))
    (directory / OUTCOME_FILE).write_text(json.dumps({"code": 0, "reason": "done", "status": status}))


def test_the_last_status_of_a_job_is_shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end(directory, ENDED | {"workers": [WORKER], "of a later version": 3})
    assert main(["status", str(directory), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["stage"], told["trouble"], told["workers"]) == ("STOPPED", "", [WORKER])
    assert told["outcome"]["reason"] == "done"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, "job is missing"),
        (ENDED | {"epoch": "x"}, "epoch: expected a valid integer"),
        (ENDED | {"trouble": None}, "trouble: expected a valid string, found None"),
        (ENDED | {"workers": 3}, "workers: expected a list, found 3"),
        (ENDED | {"workers": [3]}, "workers[0]: expected an object, found 3"),
        (ENDED | {"workers": [{}]}, "workers[0].worker is missing"),
        *((ENDED | {"workers": [WORKER | {key: []}]}, f"workers[0].{key}: expected a valid ") for key in WORKER),
    ],
)
def test_a_damaged_last_status_is_named(
    directory: Path, capsys: pytest.CaptureFixture[str], status: object, said: str
) -> None:
    end(directory, status)
    for flags in ([], ["--json"]):
        assert main(["status", str(directory), *flags]) == 2
        error = capsys.readouterr().err
        assert f"counterpoint: error: status in {directory / OUTCOME_FILE} is damaged: {said}" in error
        assert f"`counterpoint wait {directory}` still says how the job ended" in error
    assert main(["wait", str(directory)]) == 0
