"""The command of each rank, which torch's agent starts: `python -m counterpoint.trainer.rank_process FILE [--resume]`.

`FILE` has the trainer's configuration, complete: in TOML in a job (`counterpoint/job/workers.py`), else in JSON
(`counterpoint/trainer/launch.py`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.process.imports import trainer_imports
from counterpoint.transport.process.launch import die_with_parent
from counterpoint.transport.process.notify import notify, notify_failure, notify_ready

with trainer_imports():
    from counterpoint.trainer.ranks import is_follower
    from counterpoint.trainer.train import train

BAD_CONFIGURATION = 2
"""The exit code for a configuration that cannot be."""


def _rank_main(file: Path, resume: bool) -> int:
    text = file.read_text()
    config = TrainerConfig.model_validate(tomllib.loads(text) if file.suffix == ".toml" else json.loads(text))
    config = config.model_copy(update={"resume": config.resume or resume})
    try:
        return run_rank(config, lambda: train(config, notify_ready))
    except Exception as error:
        notify_failure(f"{type(error).__name__}: {error}")
        raise


def run_rank(config: TrainerConfig, lead: Callable[[], int]) -> int:
    """Calls `lead` as rank 0, else follows it, and tells the process that started the ranks how it ended.

    Returns the exit code. `lead` trains by `config` and returns its own.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    die_with_parent(signal.SIGKILL, os.getppid())
    if is_follower():
        code = train(config, lambda: None)
        if code == BAD_CONFIGURATION:  # rank 0 finds the same, but may be ended before it can say so
            notify(f"EXIT_STATUS={code}")
        return code
    notify(f"MAINPID={os.getpid()}")
    code = lead()
    notify(f"EXIT_STATUS={code}")
    return code


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1]), "--resume" in sys.argv[2:]))
