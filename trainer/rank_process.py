"""The command of each rank that `trainer/ranks.py` has torch's agent start (`python -m trainer.rank_process`)."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from cluster.launch import die_with_parent
from cluster.notify import notify, notify_ready
from trainer.config import TrainerConfig
from trainer.train import train


def _rank_main(file: Path) -> int:
    config = TrainerConfig.model_validate_json(file.read_bytes())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    die_with_parent(signal.SIGKILL, os.getppid())
    if os.environ["RANK"] != "0":
        return train(config, lambda: None)
    notify(f"MAINPID={os.getpid()}")
    code = train(config, notify_ready)
    notify(f"EXIT_STATUS={code}")
    return code


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1])))
