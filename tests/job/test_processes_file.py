"""`processes.json`: what its reader gives back, also of an earlier version's file, and what it says of a damaged one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.processes_file import PROCESSES_FILE, ProcessesFile, read_workers, was_stopping
from counterpoint.transport.errors import UserError

WORKER: dict[str, Any] = {"name": "trainer", "state": "ready", "since": 0, "pid": 1, "status": "step 19"}
"""As a version wrote it that knew no further keys."""


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_workers(tmp_path) == []
    assert not was_stopping(tmp_path)
    workers = [
        WorkerView("trainer", State.READY, 1.5, 7, "step 3", log_from=0, log_until=9, restarts=2, last_death="died"),
        WorkerView("orchestrator", State.WAITING, 0.0, None, ""),
    ]
    for job, stops in ((State.RUNNING, False), (State.STOPPING, True)):
        ProcessesFile(tmp_path).write(job, workers)
        assert read_workers(tmp_path) == [asdict(worker) for worker in workers]
        assert was_stopping(tmp_path) is stops


def test_a_worker_of_an_earlier_version_has_its_whole_log(tmp_path: Path) -> None:
    (tmp_path / PROCESSES_FILE).write_text(json.dumps({"job": "running", "workers": [WORKER]}))
    [worker] = read_workers(tmp_path)
    assert worker.items() >= WORKER.items()
    assert (worker["log_from"], worker["restarts"], worker["trouble"]) == (0, 0, "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "expected an object, found list"),
        ({}, "job is missing"),
        ({"processes": 3}, "job is missing"),
        ({"job": "running"}, "workers is missing"),
        ({"job": 3, "workers": []}, "job: expected 'waiting', 'starting', .*, found 3"),
        ({"job": "running", "workers": None}, "workers: expected a list, found None"),
        ({"job": "running", "workers": 3}, "workers: expected a list, found 3"),
        ({"job": "running", "workers": [3]}, r"workers\[0\]: expected an object, found 3"),
        ({"job": "running", "workers": [WORKER, {}]}, r"workers\[1\].name is missing"),
        *(
            ({"job": "running", "workers": [{**WORKER, key: value}]}, rf"workers\[0\].{key}: expected .*, found ")
            for key, value in (
                ("name", None),
                ("name", ["trainer"]),
                ("state", []),
                ("state", "asleep"),
                ("pid", "x"),
                ("status", 3),
                ("trouble", [3]),
                ("last_death", {}),
                ("restarts", None),
                ("log_from", "x"),
                ("log_from", -1),
                ("log_from", 2**63),
                ("log_until", []),
            )
        ),
        *(
            (
                {"job": "running", "workers": [{name: value for name, value in WORKER.items() if name != key}]},
                rf"workers\[0\].{key} is missing",
            )
            for key in WORKER
        ),
    ],
)
def test_a_damaged_file_is_named_with_its_key_and_what_to_do(tmp_path: Path, content: object, said: str) -> None:
    (tmp_path / PROCESSES_FILE).write_text(json.dumps(content))
    for read in (read_workers, was_stopping):
        with pytest.raises(UserError, match=rf"/processes.json is damaged: {said}.*; remove it: ") as error:
            read(tmp_path)
        assert error.value.code == 2
