"""A learner on each of two real ranks that may be silent for eight seconds, for `test_ranks.py`: rank 0 writes for longer.

In the end the other one is stopped.

Run it as `torchrun --nproc-per-node=2 -m tests.trainer.ranked_learner DIRECTORY MODEL`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from counterpoint.trainer import ranks
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.transport.files.atomic import write_atomically
from tests.support.freezing import freeze
from tests.support.polling import wait_until

TIMEOUT = 8.0


def main(directory: Path, model: str) -> None:
    ranks.ROLL_CALL_SECONDS = 1.0
    config = TrainerConfig(output_dir=directory, model=model, processes=2, threads=1, rank_silence_seconds=TIMEOUT)
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
        if group.index == 0:
            (directory / "silence").write_text(silence_of_the_other(directory, group))
        else:
            write_atomically(directory / "process", str(os.getpid()).encode())
            wait_until((directory / "silence").exists, "what the other rank says")


def silence_of_the_other(directory: Path, group: Ranks) -> str:
    """What this rank says of the other one while that is stopped."""
    file = directory / "process"
    wait_until(file.exists, "the process of the other rank")
    process = int(file.read_text())
    freeze(process)
    try:
        with pytest.raises(RuntimeError) as caught:
            group.agree(torch.zeros(1))
    finally:
        os.kill(process, signal.SIGCONT)
    assert is_fatal(caught.value), "no run is to blame"
    return group.silence(caught.value)


def await_both(directory: Path, stage: str, rank: int) -> None:
    """Until both have come so far: one may have taken longer to load."""
    (directory / f"{stage}_{rank}").touch()
    wait_until(lambda: len(list(directory.glob(f"{stage}_*"))) == 2, "the other rank")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
