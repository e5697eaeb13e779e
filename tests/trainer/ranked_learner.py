"""A learner on each of two real ranks whose collective calls have eight seconds, for `test_ranks.py`: rank 0 writes for longer.

Run it as `torchrun --nproc-per-node=2 -m tests.trainer.ranked_learner DIRECTORY MODEL`.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from tests.support.polling import wait_until
from trainer import ranks
from trainer.config import TrainerConfig
from trainer.learner import Learner
from trainer.runs.manager import MultiRunManager

TIMEOUT = 8.0


def main(directory: Path, model: str) -> None:
    ranks.COLLECTIVE_TIMEOUT = timedelta(seconds=TIMEOUT)
    config = TrainerConfig(output_dir=directory, model=model, processes=2, threads=1)
    device = torch.device("cpu")
    await_both(directory, "started", int(os.environ["RANK"]))
    with ranks.join(config, device) as group:
        one = Learner(config, group, MultiRunManager(directory, 1))
        one.heartbeat_seconds = TIMEOUT / 16
        await_both(directory, "loaded", group.index)
        if group.index > 0:
            one.follow()
        else:
            with one.kept_alive():
                time.sleep(1.5 * TIMEOUT)  # the disk is slow
            one.stop()
        (directory / f"rank_{group.index}").touch()


def await_both(directory: Path, stage: str, rank: int) -> None:
    """Until both have come so far: one may have taken longer to load."""
    (directory / f"{stage}_{rank}").touch()
    wait_until(lambda: len(list(directory.glob(f"{stage}_*"))) == 2, "the other rank")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
