"""Learners on real ranks that share rows, for `test_context.py`: what they compute, beside one plain rank, as JSON.

Run it as `torchrun --nproc-per-node=N -m tests.trainer.context_learner DIRECTORY DENSE MIXTURE [SCENARIO ...]`. Two ranks share
each row and have the whole model each; of four, two share a row and all share the model.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.trainer.lone_run import ALONE
from tests.trainer.sharded_learner import train_all
from trainer import ranks
from trainer.config import TrainerConfig


def main(directory: Path, dense: Path, mixture: Path, *only: str) -> None:
    ranks.COLLECTIVE_TIMEOUT = timedelta(seconds=60)
    models = {"dense": dense, "moe": mixture}
    count = int(os.environ["WORLD_SIZE"])
    shared: dict[str, Any] = {"sharding": count > 2, "context_parallel": 2}
    config = TrainerConfig(output_dir=directory, model=str(dense), processes=count, threads=1, **shared)
    with ranks.join(config, torch.device("cpu")) as group:
        found = {"shared": train_all(directory, models, group, list(only), **shared)}
        index = group.index
    if index == 0:
        found["plain"] = train_all(directory, models, ALONE, list(only))
        (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
