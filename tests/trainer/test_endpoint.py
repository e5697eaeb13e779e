"""A trainer writes and shows the names of the catalogue, by run, and nothing of a run that has left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.telemetry import catalogue
from counterpoint.trainer.telemetry.endpoint import TrainerEndpoint
from counterpoint.trainer.work.contribution import optional_means
from counterpoint.transport.outages import OutageKind, Outages
from counterpoint.transport.telemetry.lines import NameTable
from counterpoint.transport.telemetry.metric import LineName
from tests.trainer.one_process_trainer import life, write_member
from tests.transport.telemetry.scraping import families

pytestmark = pytest.mark.slow

NOT_HERE = {"custom_loss/<name>", "custom_loss/<environment>/<metric>", "updates", "copied/run", "copied/step", "epoch"}
"""Rows of a loss of one's own, of several updates, of copies and of supervised fine-tuning: `test_rows_of_other_trainings`."""

ON_A_GPU = {"counterpoint_trainer_device_memory_bytes"}


def row_of(name: str) -> LineName:
    found = NameTable(catalogue.LINES).find(name)
    assert found is not None, f"{name} has no row in the catalogue"
    return found[0]


def test_a_trainer_writes_and_shows_the_names_of_the_catalogue(dense_directory: Path, tmp_path: Path) -> None:
    for run_id in ("first", "second"):
        write_member(tmp_path, dense_directory, run_id, steps=2)
    with (
        life(tmp_path, dense_directory, {"first": 2, "second": 1}) as one,
        one.trainer.shared.endpoint as endpoint,
    ):
        assert (tmp_path / "prometheus" / "trainer.json").exists()
        one.until_step(first=2, second=1)
        outages = Outages()
        outages.begin(OutageKind.ORCHESTRATOR, "that of first", "is not connected", "it was killed")
        endpoint._noted -= 60.0  # the trainer may have noted just now
        endpoint.note(one.manager.registry, outages, {})
        shown = families(endpoint.port)
        endpoint.forget("first")
        left = endpoint._endpoint.values.read()[catalogue.TOKENS]
    lines = [json.loads(line) for line in (tmp_path / "trainer" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    written = {row_of(name) for line in lines for name in line}
    optional = optional_means(
        TrainingConfig.model_validate({"reference": {}, "value_head": {}, "loss": {"kind": "ppo"}})
    )
    of_each = {f"{base}/toy{slash}{rest}" for base, slash, rest in (name.partition("/") for name in optional)}
    written |= {row_of(name) for name in {*optional, *of_each}}
    assert {row.pattern for row in catalogue.LINES if row not in written} == NOT_HERE
    shown_by = {row.metric.name for row in written if row.metric is not None}
    live = {metric.name for metric in catalogue.TRAINER.metrics} - {
        row.metric.name for row in catalogue.LINES if row.metric is not None
    }
    assert live - ON_A_GPU <= shown.keys()
    assert {each.metric.name for each in map(row_of, lines[0]) if each.metric is not None} <= shown.keys()
    assert {name for name in shown if "trainer" in name} <= shown_by | live
    assert shown["counterpoint_trainer_rows"] >= 2
    assert set(left) == {("second",)}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("custom_loss/clipped", "custom_loss/<name>"),
        ("custom_loss/toy/clipped", "custom_loss/<environment>/<metric>"),
        ("updates", "updates"),
        ("copied/step", "copied/step"),
        ("epoch", "epoch"),
        ("loss/toy", "loss/<environment>"),
        ("importance_ratio/max", "importance_ratio/max"),
        ("importance_ratio/max/max", "importance_ratio/<environment>/max"),
    ],
)
def test_rows_of_other_trainings(name: str, pattern: str) -> None:
    assert row_of(name).pattern == pattern


def test_a_trainer_that_is_not_served_takes_values(tmp_path: Path) -> None:
    endpoint = TrainerEndpoint(TrainerConfig(output_dir=tmp_path, model="m"))
    endpoint.publish("one", {"run_id": "one", "step": 3, "loss": 0.5, "phase/train": 2.0})
    assert endpoint._endpoint.values.read()[catalogue.LOSS] == {("one",): 0.5}
    assert not list(tmp_path.iterdir())
