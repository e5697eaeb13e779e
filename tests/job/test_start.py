"""`counterpoint.start`: a job from Python, as from a shell; and the notebook that does it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import counterpoint
from counterpoint.job.directory import JOB_LOCK
from counterpoint.job.reading.status import JobSnapshot, StatusReader
from counterpoint.job.start import StartedJob
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.child import Child
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.running_job import settings
from tests.support.synthetic_jobs import write_job
from tests.support.vllm_server import ServerProcess

HOLDS = """
import sys, time
from pathlib import Path
from counterpoint.transport.files.lock import take_lock
held = take_lock(Path(sys.argv[1]), "taken")
time.sleep(600)
"""
NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "job.ipynb"


def written(directory: Path, server: ServerProcess | None = None) -> Path:
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(settings(directory / "job", server=server, steps=3)))
    return file


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"orchestrator": {"stepz": 5}}, r"orchestrator\.stepz.*steps"),
        ({"orchestrator": {"steps": "many"}}, r"orchestrator\.steps.*many"),
        ({"max_restarts": object()}, "max_restarts"),
    ],
)
def test_a_wrong_override_is_refused_before_a_process_starts(
    tmp_path: Path, overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        counterpoint.start(written(tmp_path), **overrides)


@pytest.mark.slow
def test_a_job_that_cannot_start_says_why_whether_a_file_or_a_dict_describes_it(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "of-somebody-else").touch()
    content = settings(tmp_path / "job", steps=3)
    of_dict = counterpoint.start(content | {"output_dir": tmp_path / "job", "keys": None})
    assert of_dict.wait(DEADLINE_SECONDS) == 2
    job = counterpoint.start(written(tmp_path))
    assert job.wait(DEADLINE_SECONDS) == 2
    assert str(tmp_path / "job") in job.output
    assert job.code == 2
    with pytest.raises(UserError, match="exit code 2") as raised:
        job.wait(check=True)
    assert str(tmp_path / "job") in str(raised.value)
    assert of_dict.output == job.output


def test_a_dict_that_is_wrong_writes_nothing(tmp_path: Path) -> None:
    content = settings(tmp_path / "job", steps=3)
    with pytest.raises(UserError, match=r"(?s)orchestrator\.stepz.*steps"):
        counterpoint.start(content | {"orchestrator": content["orchestrator"] | {"stepz": 5}})
    with pytest.raises(UserError, match="object"):
        counterpoint.start(content | {"max_restarts": object()})
    assert not (tmp_path / "job.toml").exists()
    (tmp_path / "job.toml").write_text("# my own\n")
    with pytest.raises(UserError, match=r"job\.toml"):
        counterpoint.start(content)
    assert (tmp_path / "job.toml").read_text() == "# my own\n"


@pytest.mark.slow
def test_a_job_that_has_just_started_reads_as_empty(tmp_path: Path) -> None:
    write_job(tmp_path / "job", steps=3)
    job = counterpoint.start(written(tmp_path), fresh=True)
    try:
        assert job.status().as_json()["running"]
        results = counterpoint.read(job.directory)
        assert results.runs == [], "those that are there are of the job before"
        assert list(results.steps().columns) == ["run_id", "step"]
        assert (len(results.steps()), len(results.rollouts()), len(results.evaluations())) == (0, 0, 0)
        wait_until(lambda: not job.is_beginning, "the command to take the directory", DEADLINE_SECONDS)
        assert job.status().as_json()["running"], job.output
        wait_until(lambda: len(counterpoint.read(job.directory).steps()) == 0, "the former job to be moved aside")
    finally:
        job.stop(DEADLINE_SECONDS)


def test_the_status_survives_that_the_earlier_job_is_moved_aside_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of the command there is a process that does no more than hold the directory: one that starts a job would
    write there just now, and end because the test has moved it."""
    directory = tmp_path / "job"
    write_job(directory, steps=3)
    read = StatusReader.read

    def moved_meanwhile(reader: StatusReader) -> JobSnapshot:
        monkeypatch.undo()
        directory.rename(tmp_path / "job.1")
        return read(reader)

    def damaged(reader: StatusReader) -> JobSnapshot:
        raise UserError("the job's file is damaged")

    with Child("the job", [sys.executable, "-c", HOLDS, str(directory / JOB_LOCK)], guarded=False) as process:
        job = StartedJob(directory, process, os.memfd_create("output of a job"), None)
        wait_until(lambda: not job.is_beginning, "the process to take the directory", DEADLINE_SECONDS)
        assert [*job.status().histories] == ["run-0000"]
        monkeypatch.setattr(StatusReader, "read", moved_meanwhile)
        assert job.status().as_json()["running"]
        assert job.status().as_json()["runs"] == []
        (tmp_path / "job.1").rename(directory)
        monkeypatch.setattr(StatusReader, "read", damaged)
        with pytest.raises(UserError, match="damaged"):
            job.status()


@pytest.mark.slow
@pytest.mark.vllm
def test_a_job_is_started_stopped_and_resumed(tmp_path: Path, moe_server: ServerProcess) -> None:
    file = written(tmp_path, moe_server)
    overrides: dict[str, Any] = {"orchestrator": {"steps": 1000, "schedule": {"group_size": 2}}}
    job = counterpoint.start(file, **overrides)
    with pytest.raises(TimeoutError, match="still runs"):
        job.wait(0.1)
    assert job.code is None
    wait_until(lambda: "step 1" in job.output, "the first step", DEADLINE_SECONDS, lambda: job.output)
    assert job.stop(DEADLINE_SECONDS) == 143, job.output
    stopped_at = job.status().as_json()["runs"][0]["step"]
    before = counterpoint.read(job.directory).steps()
    trained = int(before.loss.notna().sum()) if "loss" in before else 0  # a slow trainer has some steps yet to train
    overrides["orchestrator"]["steps"] = stopped_at + 1
    told: list[dict[str, Any]] = []
    job = counterpoint.start(file, resume=True, on_step=told.append, **overrides)
    assert job.wait(DEADLINE_SECONDS, check=True) == 0, job.output
    (run,) = job.status().as_json()["runs"]
    assert (run["step"], run["trained"]) == (stopped_at + 1, stopped_at + 1)
    results = counterpoint.read(job.directory)
    steps = results.steps()
    assert steps.loss.notna().tolist() == [True] * (stopped_at + 1)
    assert told[-1]["step"] == stopped_at + 1
    assert told[-1]["loss"] == steps.loss.iloc[-1]
    assert [row["step"] for row in told] == [*range(trained + 1, stopped_at + 2)], (
        "the earlier steps are not told again"
    )
    assert set(results.rollouts().groupby(["step", "example_index"]).size()) == {2}


@pytest.mark.slow
@pytest.mark.vllm
def test_the_notebook_runs(tmp_path: Path, moe_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, moe_server)  # in place of its own, which starts a server
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    values: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), values)
    assert values["steps"].step.tolist() == [1, 2, 3]
    assert len(values["rollouts"]) >= 16
