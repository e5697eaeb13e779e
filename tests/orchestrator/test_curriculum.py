"""The daemon's examples: a run that is killed and resumed draws what an undisturbed one draws, and refuses other data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.step.checkpoint import load_newest
from counterpoint.run.config import RunConfig, ScheduleConfig
from tests.orchestrator.daemons import assert_whole, metrics_of, records_of, started
from tests.orchestrator.scripted_trainer import ScriptedTrainer

pytestmark = pytest.mark.slow

RUN_STEPS = 6


def configured(make_config: Callable[..., RunConfig], **fields: Any) -> RunConfig:
    """With a lead of 1 the groups of a step begin once the former one has shipped, so their examples depend on nothing else."""
    curriculum = {"passes_at": 0.5, "rest": 1, "explore": 0.3}
    toy = EnvironmentConfig.model_validate(
        {
            "name": "toy",
            "kind": "tests.orchestrator.toy_environment:Toy",
            "args": {"turns": 1},
            "curriculum": curriculum,
        }
    )
    schedule = ScheduleConfig(group_size=2, rollouts_per_step=8, max_inflight_rollouts=8, max_lead_steps=1)
    return make_config(**{"steps": RUN_STEPS, "environments": [toy], "schedule": schedule, "filters": []} | fields)


def stream_of(config: RunConfig) -> dict[int, int]:
    """The example of each group that shipped."""
    return {record["group_id"]: record["example_index"] for record in records_of(config)}


def test_a_killed_run_draws_what_an_undisturbed_one_draws(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    undisturbed = configured(make_config, output_dir=tmp_path / "undisturbed")
    with ScriptedTrainer(undisturbed.output_dir, "one", RUN_STEPS):
        assert run(undisturbed, lambda: None) == 0
    killed = configured(make_config)
    with ScriptedTrainer(killed.output_dir, "one", RUN_STEPS, durable_every=3) as trainer:
        with started(killed):
            trainer.wait_for_step(3)
        resumed = killed.model_copy(update={"resume": True})
        assert run(resumed, lambda: None) == 0
    assert_whole(killed, RUN_STEPS)
    expected = stream_of(undisturbed)
    assert stream_of(killed) == expected
    assert len(expected) == 4 * RUN_STEPS
    assert len(set(expected.values())) < len(expected), "the band was drawn from again before the epoch's end"
    one, other = load_newest(resumed), load_newest(undisturbed)
    assert one is not None
    assert other is not None
    assert one.scheduler["mix"] == other.scheduler["mix"]
    line = metrics_of(undisturbed)[-1]
    shares = [line[f"examples/toy/{band}"] for band in ("unseen", "hard", "band", "easy")]
    assert sum(shares) == pytest.approx(1)
    assert 0 < line["examples/toy/epoch"] < 1
    assert 0 <= line["examples/toy/pass_rate"] <= 1
    assert run(resumed.model_copy(update={"environments": [changed(resumed.environments[0])]}), lambda: None) == 2


def changed(environment: EnvironmentConfig) -> EnvironmentConfig:
    return environment.model_copy(update={"curriculum": None})


def test_a_run_is_not_resumed_with_other_data(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": 1}\n' * 20)
    kind = {"name": "toy", "kind": "tests.orchestrator.toy_environment:ToyOfFile", "args": {"path": str(rows)}}
    config = make_config(steps=2, environments=[kind])
    with ScriptedTrainer(config.output_dir, "one", 2) as trainer:
        assert run(config, lambda: None) == 0
        again = config.model_copy(update={"resume": True, "steps": 4})
        rows.write_text('{"a": 1}\n' * 19 + '{"a": 2}\n')
        assert run(again, lambda: None) == 2
        said = (config.run_dir / "orchestrator.log").read_text()
        assert "the examples of environment 'toy' have changed since the run was started: their fingerprint was" in said
        assert trainer.steps_trained == [1, 2]
