"""A fake server, and the configuration of a small run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.sampling import SamplingConfig
from counterpoint.run.config import RunConfig, ScheduleConfig
from tests.orchestrator.daemons import STEPS
from tests.orchestrator.toy_model import make_toy_model
from tests.support.fake_inference import FakeInference


@pytest.fixture
def inference() -> Iterator[FakeInference]:
    with FakeInference() as server:
        yield server


@pytest.fixture
def make_config(tmp_path: Path, inference: FakeInference) -> Callable[..., RunConfig]:
    model = make_toy_model(tmp_path / "model")

    def make(**fields: Any) -> RunConfig:
        environment = {
            "name": "toy",
            "kind": "tests.orchestrator.toy_environment:Toy",
            "args": fields.pop("args", {}),
            "state_columns": ["answer"],
            "rollout_timeout_seconds": fields.pop("rollout_timeout_seconds", 120.0),
        }
        values: dict[str, Any] = {
            "run_id": "one",
            "output_dir": tmp_path / "job",
            "model": str(model),
            "steps": STEPS,
            "environments": [EnvironmentConfig(**environment)],
            "sampling": SamplingConfig(max_tokens=8),
            "schedule": ScheduleConfig(group_size=4, rollouts_per_step=8, max_inflight_rollouts=32),
            "inference": {"urls": [inference.url], "health_interval_seconds": 0.1},
            "stall_timeout_seconds": 120,
            "shutdown_timeout_seconds": 60,
        }
        return RunConfig.model_validate(values | fields)

    return make
