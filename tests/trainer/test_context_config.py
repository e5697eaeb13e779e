"""What `context_parallel` may be combined with."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import TrainerConfig


def test_groups_divide_the_ranks(tmp_path: Path) -> None:
    config = TrainerConfig(output_dir=tmp_path, model="m", processes=2, nodes=2, context_parallel=4, max_tokens=100)
    assert config.row_tokens == 400
    with pytest.raises(ValueError, match="context_parallel = 3 does not divide the trainer's 4 ranks"):
        TrainerConfig(output_dir=tmp_path, model="m", processes=4, context_parallel=3)
