"""Real sinks of real libraries, in processes that are killed: what they have in the end is each step once."""

from __future__ import annotations

import importlib
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from counterpoint.job.tracking.sinks.wandb_files import _records, steps_in
from tests.job.tracking.jobs import Feeding, Job

STEPS = 12


def tensorboard_steps(job: Job) -> list[int]:
    return [step for step, values in job.shown().items() if round(values["reward/mean"], 6) == step / 100]


def trackio_steps(job: Job) -> list[int]:
    with sqlite3.connect(job.directory / "tracking" / "trackio" / "counterpoint.db") as database:
        rows = database.execute(
            "SELECT step FROM metrics WHERE CAST(metrics AS TEXT) LIKE '%reward/mean%' ORDER BY id"
        ).fetchall()
    database.close()
    return [step for (step,) in rows]


def wandb_steps(job: Job) -> list[int]:
    files = sorted((job.directory / "tracking" / "wandb").glob("wandb/offline-run-*/run-*.wandb"))
    found = [(step, values) for file in files for step, values in steps_in(file)]
    assert all(float(values["reward/mean"]) == step / 100 for step, values in found)
    return sorted(step for step, _ in found)


def runs_in(file: Path) -> list[Any]:
    """W&B's own records of a run."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    records = [record.FromString(data) for data in _records(file.read_bytes())]
    return [record.run for record in records if record.WhichOneof("record_type") == "run"]


READ = {"tensorboard": tensorboard_steps, "trackio": trackio_steps, "wandb": wandb_steps}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(READ))
def test_a_sink_that_is_killed_at_any_point_has_each_step_once(name: str, tmp_path: Path) -> None:
    job = Job(tmp_path)
    options: dict[str, Any] = {"mode": "offline"} if name == "wandb" else {}
    job.steps(*range(1, 9))
    for rows in (1, 4):  # before anything is noted, and one row after
        with Feeding(job, name, dies_after=rows, **options) as process:
            assert process.wait() == 128 + signal.SIGKILL
    with Feeding(job, name, **options) as process:
        process.await_step(8)
        job.steps(*range(9, STEPS + 1))
        job.evaluate(STEPS, 0.25)
        process.await_step(STEPS)
        assert not process.maps("/torch/"), "2 s of CPU and 180 MB, for nothing"
        assert process.finish() == 0
    assert READ[name](job) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_steps_that_are_trained_again_replace_those_that_tensorboard_shows(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with Feeding(job, "tensorboard") as process:
        job.steps(*range(1, 6))
        job.evaluate(2, 0.25)
        process.await_step(5)
        job.rewind_trainer(3)
        for step in (4, 5, 6):
            job.train(step, loss=100.0 + step)
        job.ship(6)
        process.await_step(6)
        assert process.finish() == 0
    shown = job.shown()
    assert {step: values["trainer/loss"] for step, values in shown.items()} == {
        1: 1.0,
        2: 2.0,
        3: 3.0,
        4: 104.0,
        5: 105.0,
        6: 106.0,
    }
    assert shown[2]["evaluation/held/pass@1"] == 0.25


@pytest.mark.slow
def test_wandb_keeps_the_first_values_of_steps_that_are_trained_again_and_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with Feeding(job, "wandb", mode="offline") as process:
        job.steps(*range(1, 6))
        job.evaluate(2, 0.25)
        process.await_step(5)
        job.rewind_trainer(3)
        for step in (4, 5, 6):
            job.train(step, loss=100.0 + step)
        job.ship(6)
        assert process.finish() == 0
    (file,) = (job.directory / "tracking" / "wandb").glob("wandb/offline-run-*/run-*.wandb")
    rows = dict(steps_in(file))
    assert {step: float(values["trainer/loss"]) for step, values in rows.items()} == {
        1: 1.0,
        2: 2.0,
        3: 3.0,
        4: 4.0,
        5: 5.0,
        6: 106.0,
    }
    assert {step for step, values in rows.items() if "trained_again_from" in values} == {6}
    assert float(rows[6]["trained_again_from"]) == 4
    evaluated = [values for values in rows.values() if "evaluation/held/pass@1" in values]
    assert [float(values["evaluation/held/step"]) for values in evaluated] == [2.0]
