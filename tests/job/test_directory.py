"""What is read of a job's `job.json` from outside, and what is said of a damaged one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from counterpoint.job.directory import JOB_FILE, own_runs, own_steps, runs_at_once
from counterpoint.transport.errors import UserError

RUN: dict[str, Any] = {"run_id": "a", "steps": 20}
ENVIRONMENT = {"name": "reverse", "kind": "reverse-text"}


def write(directory: Path, content: object) -> None:
    (directory / JOB_FILE).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("content", "steps"),
    [
        ({"orchestrator": RUN}, {"a": 20}),
        ({"orchestrator": RUN, "runs": []}, {"a": 20}),
        ({"runs": [RUN, {"run_id": "b", "steps": 8, "seed": 3}]}, {"a": 20, "b": 8}),
        ({"orchestrator": {"run_id": "default", "steps": 100}, "runs": [RUN]}, {"a": 20}),
        ({"orchestrator": RUN | {"environments": [ENVIRONMENT]}, "runs": [], "stay": True}, {"a": 20}),
        ({"orchestrator": RUN | {"environments": []}, "runs": [], "stay": True}, {}),
    ],
)
def test_the_own_runs_of_a_job(tmp_path: Path, content: dict[str, Any], steps: dict[str, int]) -> None:
    assert own_steps(tmp_path) is None
    write(tmp_path, content)
    assert own_steps(tmp_path) == steps
    assert [run["run_id"] for run in own_runs(content)] == [*steps]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "trainer is missing"),
        ({"trainer": 3}, "trainer: expected an object, found 3"),
        ({"trainer": {}}, "trainer.max_runs is missing"),
        ({"trainer": {"max_runs": "x"}}, "trainer.max_runs: expected a valid integer.*, found 'x'"),
        ({"trainer": {"max_runs": 0}}, "trainer.max_runs: expected .*, found 0"),
    ],
)
def test_a_damaged_trainer_of_a_job_is_named(tmp_path: Path, content: object, said: str) -> None:
    write(tmp_path, {"trainer": {"max_runs": 4}})
    assert runs_at_once(tmp_path) == 4
    write(tmp_path, content)
    with pytest.raises(UserError, match=rf"/job.json is damaged: {said}"):
        runs_at_once(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (3, "expected an object, found int"),
        ({}, "expected the job's run as orchestrator"),
        ({"processes": 3}, "expected the job's run as orchestrator"),
        ({"orchestrator": None}, "expected the job's run as orchestrator"),
        ({"orchestrator": None, "stay": True}, "expected the job's run as orchestrator"),
        ({"orchestrator": 3}, "orchestrator: expected an object, found 3"),
        ({"orchestrator": {}}, "orchestrator.run_id is missing"),
        ({"orchestrator": {"run_id": "a"}}, "orchestrator.steps is missing"),
        ({"orchestrator": RUN | {"run_id": 3}}, "orchestrator.run_id: expected a valid string, found 3"),
        ({"orchestrator": RUN | {"run_id": ["a"]}}, "orchestrator.run_id: expected a valid string, found "),
        ({"orchestrator": RUN | {"run_id": "../a"}}, "orchestrator.run_id: .*, found '../a'"),
        ({"orchestrator": RUN | {"steps": "x"}}, "orchestrator.steps: expected a valid integer.*, found 'x'"),
        ({"orchestrator": RUN | {"steps": None}}, "orchestrator.steps: expected a valid integer, found None"),
        ({"orchestrator": RUN | {"steps": 0}}, "orchestrator.steps: expected .*, found 0"),
        ({"orchestrator": RUN, "runs": 3}, "runs: expected a list, found 3"),
        ({"runs": [3]}, r"runs\[0\]: expected an object, found 3"),
        ({"runs": [RUN, {"run_id": "b"}]}, r"runs\[1\].steps is missing"),
    ],
)
def test_a_damaged_file_is_named_with_its_key_and_what_to_do(tmp_path: Path, content: object, said: str) -> None:
    write(tmp_path, content)
    with pytest.raises(UserError, match=rf"/job.json is damaged: {said}.*; .*--fresh starts anew") as error:
        own_steps(tmp_path)
    assert error.value.code == 2
