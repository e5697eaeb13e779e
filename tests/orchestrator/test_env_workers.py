"""A whole daemon whose environment runs in a worker: it trains, and the death of the worker costs only what that played."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint.orchestrator.daemon import run
from counterpoint.run.config import RunConfig
from tests.orchestrator.daemons import assert_whole, metrics_of, records_of
from tests.orchestrator.scripted_trainer import ScriptedTrainer


@pytest.mark.slow
def test_the_death_of_a_worker_costs_only_its_rollouts(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    marker = tmp_path / "killed"
    kind = "tests.orchestrator.toy_environment:Mortal"
    environment = {"name": "toy", "kind": kind, "args": {"marker": str(marker)}, "workers": 1}
    config = make_config(steps=2, environments=[environment])
    with ScriptedTrainer(config.output_dir, "one", 2) as trainer:
        assert run(config, lambda: None) == 0
        assert trainer.steps_trained == [1, 2]
    assert_whole(config, 2)
    assert marker.exists()
    assert sum(line.get("environment/toy/restarts", 0) for line in metrics_of(config)) == 1
    errors = [record["error"] for record in records_of(config) if record["error"] is not None]
    assert errors
    assert all("its worker 0 died: signal 9 (SIGKILL)" in error for error in errors)
    assert any(record["outcome"] == "completed" for record in records_of(config))
