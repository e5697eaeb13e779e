"""The commands that steer a run: what they ask for, and how its answer is shown. A thread stands for orchestrator and trainer."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.cli.main import main
from counterpoint.run.requests import Answer, ChangeRequest, DamagedRequest, waiting_requests, write_answer
from counterpoint.transport.files.lock import take_lock
from tests.support.past_jobs import make_job
from tests.support.polling import wait_until

KINDS = ("save", "change", "pause", "resume", "dump", "profile")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    run_dir, stopping = tmp_path / "run_one", threading.Event()
    (run_dir / "control").mkdir(parents=True)
    lock = take_lock(run_dir / "orchestrator.lock", "taken")

    def answer() -> None:
        while not stopping.wait(0.01):
            for request_id, request in waiting_requests(run_dir, KINDS):
                assert not isinstance(request, DamagedRequest)
                refused = isinstance(request, ChangeRequest) and "steps" in request.changes
                outcome = "refused" if refused else "done"
                write_answer(
                    run_dir,
                    Answer(request_id=request_id, outcome=outcome, step=7, reason="steps cannot change" * refused),
                )

    thread = threading.Thread(target=answer)
    thread.start()
    yield tmp_path
    stopping.set()
    thread.join(60)
    os.close(lock)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pause", "one", "--reason", "a cable"], "run one is paused, after step 7"),
        (["resume", "one"], "run one goes on, after step 7"),
        (
            ["change", "one", "sampling.temperature=0.5", "log_level=debug"],
            "from step 7 on: sampling.temperature = 0.5, log_",
        ),
        (["checkpoint", "one"], "trainer/one/saved/step_7"),
        (["dump", "one"], "run_one/raw_rollouts/step_7"),
        (["profile", "one", "--seconds", "0.1"], ".speedscope.json"),
    ],
)
def test_a_command_says_what_has_come_of_it(
    job: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main([*words, "--job", str(job)]) == 0
    assert said in capsys.readouterr().out
    assert main([*words, "--job", str(job), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "one"
    requests = job / "run_one" / "control" / "requests"
    wait_until(lambda: not list(requests.iterdir()), "the removal of a request, which follows its answer")


def test_the_job_may_be_named_before_what_changes(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["change", "one", "--job", str(job), "sampling.temperature=0.7"]) == 0
    assert "sampling.temperature = 0.7" in capsys.readouterr().out


def test_a_run_that_has_not_started_is_said_not_to_have_started(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [{"run_id": run_id, "steps": 8} for run_id in ("one", "two")]
    (job / "job.json").write_text(json.dumps({"runs": runs}))
    for words in (["stop", "two"], ["stop", "two", "--evict", "a reason"], ["pause", "two"]):
        assert main([*words, "--job", str(job)]) == 2
        assert f"run 'two' of {job} has not started yet; `counterpoint status {job}` shows" in capsys.readouterr().err
    assert main(["pause", "three", "--job", str(job)]) == 2
    assert "there is no run 'three'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("processes.json", "{}"),
        ("processes.json", '{"job": "running", "workers": [3]}'),
        ("processes.json", '{"job": "running", "workers": 3}'),
        ("job.json", "{}"),
        ("job.json", '{"orchestrator": {"run_id": 3, "steps": 20}}'),
        ("job.json", '{"runs": 3}'),
        ("job.json", '{"orchestrator": 3}'),
    ],
)
def test_stop_names_a_damaged_file_of_a_job_that_runs(
    past: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    make_job(past)
    (past / name).write_text(content)
    lock = take_lock(past / "job.lock", "taken")
    assert main(["stop", "test", "--job", str(past)]) == 2
    assert f"counterpoint: error: {past / name} is damaged: " in capsys.readouterr().err
    os.close(lock)


def test_what_cannot_be_is_told(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["change", "one", "steps=3"], "run one refuses 'change': steps cannot change"),
        (["change", "one", "steps"], "expected KEY=VALUE"),
        (["pause", "two"], "there is no run 'two'"),
        (["profile", "one", "--seconds", "1000"], "less than or equal to 300"),
        (["servers", "drain", "http://a"], "holds no job"),
    ):
        assert main([*words, "--job", str(job)]) == 2
        assert message in capsys.readouterr().err
    (job / "run_idle" / "control").mkdir(parents=True)
    assert main(["pause", "idle", "--job", str(job)]) == 2
    assert "run idle does not run" in capsys.readouterr().err
