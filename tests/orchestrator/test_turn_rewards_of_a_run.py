"""Rewards of turns through the whole daemon: a drain and a resume, dumps and their replay, an evaluation, records and frames."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

import counterpoint
from counterpoint.environments.base import Example, Model
from counterpoint.environments.reward import Reward
from counterpoint.job.replay.boundary import Recording, rig
from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.rollouts.dump import open_dump
from counterpoint.run.config import RunConfig
from counterpoint.transport.records import Rollout
from tests.orchestrator.daemons import STEPS, metrics_of, records_of, started
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.orchestrator.toy_environment import Toy
from tests.support.polling import DEADLINE_SECONDS

pytestmark = pytest.mark.slow


class Rewarding(Toy):
    """Three turns, of which the first and the last are rewarded, by chance."""

    def __init__(self) -> None:
        super().__init__(turns=3)

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await super().rollout(example, model, state)
        model.reward(0.5)
        model.reward(-0.25, 0)

    async def score(self, example: Example, rollout: Rollout) -> Any:
        assert rollout.turn_rewards is not None
        assert rollout.turn_rewards.tolist() == [-0.25, 0.0, 0.5]
        middle = self._chance(rollout)
        return Reward(middle + 0.25, turns=rollout.turn_rewards + np.array([0, middle, 0]))


@pytest.mark.parametrize("workers", [0, 1])
def test_rewards_of_turns_survive_a_drain_a_resume_and_a_replay(
    make_config: Callable[..., RunConfig], tmp_path: Path, workers: int
) -> None:
    environment = {"name": "toy", "kind": f"{__name__}:Rewarding"}
    evaluation = {"name": "held-out", "interval": STEPS, "examples": 2, "environments": [environment]}
    config = make_config(
        environments=[environment | {"workers": workers}], dump_raw_rollouts=True, evaluations=[evaluation]
    )
    with ScriptedTrainer(config.output_dir, "one", STEPS, train_seconds=0.1) as trainer:
        with started(config) as process:
            trainer.wait_for_step(2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
        assert run(config.model_copy(update={"resume": True}), lambda: None) == 0
    assert [line["step"] for line in metrics_of(config)] == list(range(1, STEPS + 1))
    records = records_of(config)
    assert len({record["reward"] for record in records}) > 1
    for record in records:
        first, middle, last = (turn["reward"] for turn in record["turns"])
        assert (first, last) == (-0.25, 0.5)
        assert record["reward"] == pytest.approx(first + middle + last)
    rows = counterpoint.read(config.output_dir).rollouts()
    read = dict(zip(rows.rollout_id, ([turn["reward"] for turn in turns] for turns in rows.turns), strict=True))
    assert read == {record["rollout_id"]: [turn["reward"] for turn in record["turns"]] for record in records}
    lines = [orjson.loads(line) for line in (config.run_dir / "evaluations.jsonl").read_bytes().splitlines()]
    assert lines[-1]["metrics"]["toy/reward/turn/1/mean"]["value"] == -0.25
    dump = open_dump(config.run_dir / "raw_rollouts/step_1")
    recording = Recording(dump.header, dump.rollouts())

    async def replayed() -> list[Rollout]:
        async with rig(recording, tmp_path / "replay") as parts:
            await parts.finalize()
            return list(parts.finalized)

    for rollout in asyncio.run(replayed()):
        assert rollout.turn_rewards is not None
        assert rollout.turn_rewards.tolist()[::2] == [-0.25, 0.5]
