"""What `context_parallel` may be combined with."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.config import TrainerConfig


def test_groups_divide_the_ranks(tmp_path: Path) -> None:
    config = TrainerConfig(output_dir=tmp_path, model="m", processes=2, nodes=2, context_parallel=4, max_tokens=100)
    assert config.row_tokens == 400
    with pytest.raises(ValueError, match=r"context_parallel = 3 .* 4 ranks"):
        TrainerConfig(output_dir=tmp_path, model="m", processes=4, context_parallel=3)


def test_a_value_head_needs_whole_rows_and_whole_weights(tmp_path: Path) -> None:
    with_head = TrainingConfig.model_validate({"value_head": {}})
    adapter = TrainingConfig.model_validate({"value_head": {}, "lora": {}})
    config = TrainerConfig(output_dir=tmp_path, model="m", processes=2, context_parallel=2)
    assert "context_parallel = 2" in (config.refuses_value_head(adapter) or "")
    config = TrainerConfig(output_dir=tmp_path, model="m", processes=2, sharding=True)
    assert "sharding = true cannot train a value head beside full weights" in (
        config.refuses_value_head(with_head) or ""
    )
    assert config.refuses_value_head(adapter) is None
    assert config.refuses_value_head(TrainingConfig()) is None
