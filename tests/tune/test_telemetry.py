"""What the tuner shows of its trials."""

from __future__ import annotations

import asyncio
from pathlib import Path

from counterpoint.tune import telemetry as catalogue
from counterpoint.tune.config import TuneConfig
from counterpoint.tune.file_experiment import run_to_end
from counterpoint.tune.runner.trial_runner import TrialRunner
from counterpoint.tune.telemetry import ExperimentTelemetry
from tests.transport.telemetry.scraping import families
from tests.tune.runner.scripted import ScriptedExecutor, ScriptedTrials


def test_trials_results_and_the_best_score_are_shown(tmp_path: Path) -> None:
    config = TuneConfig(name="search", trainable="m:f", metric="value", mode="max")
    telemetry = ExperimentTelemetry(config, tmp_path)
    scripts: list[list[object]] = [[3, 2], [5, "die once", 4]]
    runner = TrialRunner(
        ScriptedTrials(tmp_path, scripts, max_failures=1, checkpoint_freq=1),
        local_checkpoint_dir=tmp_path,
        trial_executor=ScriptedExecutor(),
    )
    with telemetry.of(runner):
        asyncio.run(run_to_end(runner, asyncio.Event()))
        shown = families(telemetry.port)
        values = telemetry._endpoint.values.read()
        assert (tmp_path / "prometheus" / "tune.json").exists()
    assert {metric.name for metric in catalogue.TUNE.metrics} <= shown.keys()
    assert values[catalogue.TRIALS]["TERMINATED",] == 2
    assert values[catalogue.BEST] == {("value",): 5}
    assert values[catalogue.RESULTS] == {(): 5}
    events = values[catalogue.EVENTS]
    assert (events["start",], events["recover",], events["complete",]) == (3, 1, 2)
    assert not (tmp_path / "prometheus" / "tune.json").exists()
