"""A whole daemon writes and shows the names of the catalogue, all of them and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.inference.pool import meters as pool
from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.step.discarded import with_unrecorded
from counterpoint.orchestrator.step.shares import metric_of
from counterpoint.orchestrator.step.step_metrics import environment_metrics, step_metrics
from counterpoint.orchestrator.telemetry.catalogue import LINES, METRICS, OUTAGE_START, SILENT
from counterpoint.orchestrator.telemetry.endpoint import RunTelemetry
from counterpoint.run.config import RunConfig, ScheduleConfig
from counterpoint.transport.telemetry.lines import NameTable
from counterpoint.transport.telemetry.metric import EVERYWHERE, LineName
from tests.orchestrator.daemons import metrics_of
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.batches import make_batch
from tests.support.rollouts import make_rollout
from tests.transport.telemetry.scraping import families

pytestmark = pytest.mark.slow

TOY = "tests.orchestrator.toy_environment:Toy"

STEPS = 4

OF_WORKERS = {f"environment/<environment>/{rest}" for rest in ("lag/max", "restarts", "sessions", "workers")}
"""Only environments in processes of their own have them: `counterpoint/environments/workers/pool.py`."""

NOT_AT_THE_END = {OUTAGE_START.name, SILENT.name}
"""Shown during an outage, and while the loop goes on: `test_telemetry.py`."""


def rows_of(line: Mapping[str, Any]) -> set[LineName]:
    """The rows of a line's names, each of which must have one."""
    names = NameTable(LINES)
    found = {name: names.find(name) for name in line}
    assert not [name for name, row in found.items() if row is None], "names without a row in the catalogue"
    return {row[0] for row in found.values() if row is not None}


def test_a_run_writes_and_shows_the_names_of_the_catalogue(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = {"kind": TOY, "args": {"turns": 1, "fault": "exception"}, "state_columns": ["answer"]}
    curriculum = {"passes_at": 0.5, "rest": 1, "explore": 0.3}
    config = make_config(
        steps=STEPS,
        environments=[
            EnvironmentConfig.model_validate({"name": "plain", **toy}),
            EnvironmentConfig.model_validate({"name": "learnt", **toy, "curriculum": curriculum}),
        ],
        schedule=ScheduleConfig(group_size=4, rollouts_per_step=16, max_inflight_rollouts=32),
        evaluations=[
            {
                "name": "held-out",
                "environments": [{"name": "other", "kind": TOY, "args": {"turns": 1}, "state_columns": ["answer"]}],
                "interval": 2,
                "examples": 4,
                "rollouts_per_example": 2,
                "pass_at": [1],
                "success": 0.5,
            }
        ],
        training={"lora": {"rank": 4}},
    )
    shown: dict[str, float] = {}
    results: dict[str, Any] = {}
    leave, show = RunTelemetry.__exit__, RunTelemetry.publish_lasting

    def scrape_and_leave(telemetry: RunTelemetry, *ended: Any) -> None:
        shown.update(families(telemetry.port))
        leave(telemetry, *ended)

    def note_and_show(telemetry: RunTelemetry, values: Mapping[str, Any]) -> None:
        results.update(values)  # an evaluation may end after the last step's line
        show(telemetry, values)

    monkeypatch.setattr(RunTelemetry, "__exit__", scrape_and_leave)
    monkeypatch.setattr(RunTelemetry, "publish_lasting", note_and_show)
    monkeypatch.setattr("counterpoint.orchestrator.telemetry.endpoint.NOTE_SECONDS", 0.02)
    monkeypatch.setattr("counterpoint.orchestrator.scheduling.lossless.LEAST_STEPS", STEPS)
    with ScriptedTrainer(config.output_dir, "one", STEPS, train_seconds=0.1):
        assert run(config, lambda: None) == 0
    written = set().union(*map(rows_of, metrics_of(config)))
    written |= rows_of(step_metrics(make_batch("one"), optional_rollouts()))
    written |= rows_of(results) | rows_of({metric_of("stale", "toy", 1.0): 1})
    written |= rows_of(environment_metrics(optional_rollouts()))
    written |= rows_of(with_unrecorded({}, {"rollouts/unrecorded": 1, "unrecorded/rollouts/failed": 1}))
    missing = {row.pattern for row in LINES if row not in written}
    assert missing - {"filters/<filter>/<environment>", "changes", "early_warnings"} == OF_WORKERS
    by_line = {row.metric.name for row in LINES if row.metric is not None}
    live = {metric.name for metric in (*METRICS, *pool.METRICS, *EVERYWHERE)} - by_line
    assert live - NOT_AT_THE_END <= shown.keys()
    assert shown.keys() - live <= by_line
    for name in ("turn_seconds", "weight_update_seconds", "event_loop_lag_seconds", "phase_seconds", "step_seconds"):
        assert shown[f"counterpoint_{name}"] > 0


def optional_rollouts() -> list[Any]:
    """Rollouts with what the toy has not: rewards of players and turns, metrics, a cached answer, no answer, four examples."""
    unanswered = make_rollout()
    unanswered.error, unanswered.inference_failed = "InferenceError: no answer", True
    playing = make_rollout(player_rewards={"white": 1.0}, metrics={"length": 3.0}, turn_rewards=np.ones(1, np.float32))
    playing.turns = [replace(turn, cached_tokens=1) for turn in playing.turns]
    return [unanswered, playing, *map(make_rollout, range(1, 5))]
