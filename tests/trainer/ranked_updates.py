"""A learner on each of two real ranks that trains steps of several passes, for `test_several_updates.py`.

Run it as `torchrun --nproc-per-node=2 -m tests.trainer.ranked_updates DIRECTORY MODEL`. Rank R writes `rank_R.safetensors`, and
rank 0 `metrics.json`, too.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from counterpoint.trainer import ranks
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.runs.manager import MultiRunManager
from tests.trainer.conftest import make_batch, make_run_config
from tests.trainer.lone_run import LoneRun
from tests.trainer.orchestrator_end import write_run

MAX_TOKENS = 20

TRAINING: dict[str, Any] = {
    "lora": {"rank": 4},
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "momentum": 0.9,
    "loss": {"kind": "tests.trainer.test_several_updates:failing_later"},
    "updates_per_step": 4,
    "epochs": 2,
    "reference": {"reward_coefficient": 0.1},
}


def train(lone: LoneRun) -> list[dict[str, MetricValue]]:
    """Two steps, one whose second update is refused, and another one."""
    metrics = [lone.train(make_batch(number)) for number in (1, 2)]
    bad = make_batch(3)
    bad.advantages_T[bad.loss_mask_T == 1] = 9.0
    with suppress(InvalidBatch):
        lone.train(bad)
        raise AssertionError("the step was not refused")
    lone.learner.drop_step(0)
    return [*metrics, lone.train(make_batch(3))]


def main(directory: Path, model: str) -> None:
    config = TrainerConfig(
        output_dir=directory,
        model=model,
        processes=2,
        threads=1,
        max_tokens=MAX_TOKENS,
        allowed_imports=[TRAINING["loss"]["kind"]],
    )
    with ranks.join(config, torch.device("cpu")) as group:
        manager = MultiRunManager(directory, 1)
        one = Learner(config, group, manager)
        if group.index > 0:
            one.follow()
        else:
            write_run(make_run_config(directory, Path(model), **TRAINING))
            manager.discover_runs()
            one.synchronize()
            (directory / "metrics.json").write_text(json.dumps(train(LoneRun(one))))
            one.stop()
        save_file(one.runs[0].torch.optimizer.state(), directory / f"rank_{group.index}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
