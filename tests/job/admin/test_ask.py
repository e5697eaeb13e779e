"""Requests that are made again under their id, and ids that were used for something else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from counterpoint.job.admin.ask import Refused
from counterpoint.job.admin.change import change_run
from counterpoint.job.admin.run_requests import checkpoint_now, pause_run, resume_run
from counterpoint.run.requests import (
    Answer,
    AnyRequest,
    ChangeRequest,
    PauseRequest,
    ResumeRequest,
    SaveRequest,
    write_answer,
    write_request,
)
from counterpoint.transport.files.lock import take_lock

PAUSE = PauseRequest(request_id="mine", reason="a cable")
CHANGE = ChangeRequest(request_id="mine", changes={"sampling.temperature": 0.5, "log_level": "debug"})


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "run_a" / "control").mkdir(parents=True)
    lock = take_lock(tmp_path / "run_a" / "orchestrator.lock", "taken")
    yield tmp_path
    os.close(lock)


def answer(job: Path, request: AnyRequest) -> None:
    write_request(job / "run_a", request)
    write_answer(job / "run_a", Answer(request_id=request.request_id, outcome="done", step=7), request)


def test_a_request_that_is_made_again_gets_its_answer(job: Path) -> None:
    answer(job, PAUSE)
    assert pause_run(job, "a", PAUSE).step == 7
    answer(job, CHANGE.model_copy(update={"request_id": "other"}))
    changes = {"log_level": "debug", "sampling.temperature": 0.5}
    assert change_run(job, "a", ChangeRequest(changes=changes, request_id="other")).step == 7


@pytest.mark.parametrize("leave", [answer, lambda job, request: write_request(job / "run_a", request)])
@pytest.mark.parametrize(
    ("request_", "ask", "said"),
    [
        (PAUSE, lambda job: resume_run(job, "a", ResumeRequest(request_id="mine")), "'pause'"),
        (PAUSE, lambda job: checkpoint_now(job, "a", SaveRequest(request_id="mine")), "'pause'"),
        (
            PAUSE,
            lambda job: pause_run(job, "a", PAUSE.model_copy(update={"reason": "a fire"})),
            "'pause' with other values",
        ),
        (
            CHANGE,
            lambda job: change_run(job, "a", ChangeRequest(changes={"log_level": "debug"}, request_id="mine")),
            "'change' with other values",
        ),
    ],
)
def test_an_id_that_was_used_for_another_request_is_refused(
    job: Path,
    leave: Callable[[Path, AnyRequest], None],
    request_: AnyRequest,
    ask: Callable[[Path], object],
    said: str,
) -> None:
    leave(job, request_)
    requests = job / "run_a" / "control" / "requests"
    waiting = [path.read_bytes() for path in requests.iterdir()]
    with pytest.raises(Refused, match=f"request_id = 'mine' was used for {said}"):
        ask(job)
    assert [path.read_bytes() for path in requests.iterdir()] == waiting


def test_an_answer_of_an_earlier_version_is_the_answer_to_whatever_is_asked(job: Path) -> None:
    answers = job / "run_a" / "control" / "answers"
    answers.mkdir()
    (answers / "mine.json").write_text(json.dumps({"request_id": "mine", "outcome": "done", "step": 7}))
    assert pause_run(job, "a", PauseRequest(request_id="mine")).step == 7
