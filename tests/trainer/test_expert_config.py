"""What `expert_parallel` may be combined with; a job's `--dry-run` reads the same configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.config import TrainerConfig


def configure(directory: Path, model: dict[str, Any], **trainer: Any) -> TrainerConfig:
    (directory / "config.json").write_text(json.dumps(model))
    return TrainerConfig(output_dir=directory, model=str(directory), **trainer)


@pytest.mark.parametrize(
    "model",
    [{"num_experts": 8}, {"num_local_experts": 8}, {"text_config": {"n_routed_experts": 8}, "num_experts": None}],
)
def test_groups_divide_ranks_and_experts(tmp_path: Path, model: dict[str, Any]) -> None:
    config = configure(tmp_path, model, processes=2, nodes=2, expert_parallel=2)
    assert config.divided
    assert not config.sharded
    configure(tmp_path, model, processes=12, expert_parallel=4)
    with pytest.raises(ValueError, match=r"expert_parallel = 3 .* 4 ranks"):
        configure(tmp_path, model, processes=4, expert_parallel=3)
    with pytest.raises(ValueError, match=r"expert_parallel = 3 .* 8 experts"):
        configure(tmp_path, model, processes=3, expert_parallel=3)
    with pytest.raises(ValueError, match=r"sharding = true: .* 12 ranks .* 8 experts"):
        configure(tmp_path, model, processes=12, expert_parallel=4, sharding=True)


def test_a_dense_model_has_nothing_to_divide(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expert_parallel = 2, .* no experts; .*expert_parallel = 1"):
        configure(tmp_path, {"hidden_size": 8}, processes=2, expert_parallel=2)
    configure(tmp_path, {"hidden_size": 8}, processes=2)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        "[" * 10**5,
        '{"num_experts": "many"}',
        '{"num_experts": Infinity}',
        '{"num_experts": 8.9}',
        '{"num_experts": "8"}',
        '{"num_experts": true}',
        '{"num_experts": -8}',
        '{"text_config": 3}',
    ],
    ids=lambda content: content[:30],
)
def test_a_model_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"expert_parallel = 2: .*config.json "):
        TrainerConfig(output_dir=tmp_path, model=str(tmp_path), processes=2, expert_parallel=2)


def test_a_model_that_is_not_there_yet_is_checked_when_it_is_found(tmp_path: Path) -> None:
    config = TrainerConfig(output_dir=tmp_path, model="some/mixture", processes=2, expert_parallel=2)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no experts"):
        config.check_model(tmp_path)


def test_a_value_head_needs_whole_weights(tmp_path: Path) -> None:
    config = configure(tmp_path, {"num_experts": 8}, processes=2, expert_parallel=2)
    refusal = config.refuses_value_head(TrainingConfig.model_validate({"value_head": {}}))
    assert "expert_parallel = 2 cannot train a value head beside full weights" in (refusal or "")
    assert config.refuses_value_head(TrainingConfig.model_validate({"value_head": {}, "lora": {}})) is None
