"""Opponents in a whole daemon: their pools, what is refused, and what is left of their turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from counterpoint.inference.base import SamplingParameters
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.inference.pool.sources import OPERATOR_FILE
from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.evaluation.versions import serving_adapter
from counterpoint.orchestrator.opponents import opponents_of
from counterpoint.run.config import RunConfig
from counterpoint.run.opponents import OpponentConfig
from tests.orchestrator.daemons import STEPS, assert_whole, records_of
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.fake_inference import FakeInference, FakeServer, weight_update
from tests.support.polling import until

SAMPLING = SamplingParameters(temperature=1.0, max_tokens=4)
LORA: dict[str, Any] = {"training": {"lora": {}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "bse"},
        {"model": "run:"},
        {"model": "run:../x"},
        {"model": "http://"},
        {"model": "base", "protocol": "binary"},
        {"model": "run:two", "served_model": "x"},
    ],
)
def test_what_is_no_opponent_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        OpponentConfig.model_validate(fields)


@pytest.mark.parametrize(
    "fields", [{"model": "base"}, {"model": "run:two"}, {"model": "http://h:1", "protocol": "binary"}]
)
def test_an_opponent_survives_being_written_and_read(fields: dict[str, str]) -> None:
    opponent = OpponentConfig.model_validate(fields)
    assert OpponentConfig.model_validate_json(opponent.model_dump_json()) == opponent


@pytest.mark.parametrize(
    ("model", "said"), [("base", r"needs \[training.lora\]"), ("run:one", "is this run; use model.player")]
)
def test_an_opponent_that_is_the_policy_itself_is_refused(
    make_config: Callable[..., RunConfig], model: str, said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        make_config(opponents={"other": {"model": model}})


async def test_requests_name_the_opponents_model(
    make_config: Callable[..., RunConfig], inference: FakeInference, tmp_path: Path
) -> None:
    opponents = {
        "base": {"model": "base"},
        "rival": {"model": "run:two"},
        "fixed": {"model": inference.url, "protocol": "binary", "served_model": "judge"},
    }
    config = make_config(opponents=opponents, **LORA)
    async with opponents_of(config, InferencePool(config.inference)) as pools:
        for pool in pools.values():
            await pool.generate([1, 2], SAMPLING, affinity="0-0")
    assert [asked.model for asked in inference.asked] == [config.model, "two", "judge"]
    assert inference.unloaded == [], "another run's adapter is not ours to unload"


async def test_opponents_and_evaluations_use_the_servers_that_an_operator_added_and_none_that_is_drained(
    make_config: Callable[..., RunConfig], inference: FakeInference, tmp_path: Path
) -> None:
    async with FakeServer() as added:
        config = make_config(opponents={"base": {"model": "base"}}, **LORA)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.output_dir / OPERATOR_FILE).write_text(f"{added.url}\ndrain {inference.url}\n")
        update = weight_update(1)
        probe = {"version": 1, "token_ids": update.probe.token_ids, "digests": update.probe.digests}
        log_probabilities = [float(value) for value in update.probe.log_probabilities]
        (tmp_path / "probe.json").write_bytes(orjson.dumps(probe | {"log_probabilities": log_probabilities}))
        servers = InferencePool(config.inference, operator_file=config.output_dir / OPERATOR_FILE)
        async with opponents_of(config, servers) as pools, serving_adapter(config, servers, 1, tmp_path) as evaluated:
            for pool in (*pools.values(), evaluated):
                await until(lambda pool=pool: "serving" in [each.state for each in pool.status()], "a server")  # type: ignore[misc]
                for index in range(4):
                    await pool.generate([1, 2], SAMPLING, affinity=f"{index}-0")
    assert inference.asked == []
    assert added.answers["/counterpoint/v1/generate"] == 8


@pytest.mark.slow
def test_a_run_against_a_frozen_opponent(make_config: Callable[..., RunConfig], inference: FakeInference) -> None:
    environment = {"name": "toy", "kind": "tests.orchestrator.toy_environment:SelfPlay", "args": {"opponent": "frozen"}}
    frozen = {"model": inference.url, "protocol": "binary", "served_model": "frozen"}
    config = make_config(environments=[environment], opponents={"frozen": frozen})
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer:
        assert run(config, lambda: None) == 0
    assert_whole(config)
    asked = sum(request.model == "frozen" for request in inference.asked)
    records = records_of(config)
    completed = [record for record in records if record["outcome"] == "completed"]
    assert asked >= len(completed) > 0
    assert all([turn["opponent"] for turn in record["opponent_turns"]] == ["frozen"] for record in completed)
    assert all(set(record["player_advantages"]) == {"black", "white"} for record in completed)
    for batch in trainer.trained:
        advantages = {sample.rollout_id: set() for sample in batch.samples}  # type: dict[str, set[float]]
        for sample, start, stop in zip(batch.samples, batch.sample_offsets, batch.sample_offsets[1:], strict=False):
            trained = batch.advantages_T[start:stop][batch.loss_mask_T[start:stop] == 1]
            advantages[sample.rollout_id] |= set(trained.tolist())
        assert all(len(values) == 2 and sum(values) == pytest.approx(0, abs=1e-6) for values in advantages.values())
