"""Runs supervised fine-tuning in this process, or as several ranks, which this process starts and supervises.

`python -m counterpoint.trainer.sft.launch FILE` is the command of each rank, for torch's agent: `FILE` has the configuration,
complete, in JSON. Rank 0 alone reads the data. The process above the ranks does not import torch, as in
`counterpoint/trainer/launch.py`.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from counterpoint.trainer.launch import run_ranks
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.transport.process.imports import trainer_imports
from counterpoint.transport.process.notify import notify_ready

logger = logging.getLogger("counterpoint.trainer.sft")


def run(config: SftConfig) -> int:
    """Trains until the last epoch's end, a stop signal, or a failure; returns the trainer's exit code.

    `config.model` is a directory. Call it from the main thread, once a process. Raises `ValueError` for a model whose experts
    cannot be divided and, with one rank, as `trainer.sft.train.run`; ranks log that, and the exit code is 2.
    """
    trainer = config.of_trainer
    trainer.check_model(Path(config.model))
    if trainer.processes > 1:
        given = config.model_copy(update={"trainer": trainer})  # each rank checks again that both name one model
        return run_ranks(trainer, "counterpoint.trainer.sft.launch", given, lambda: None)
    with trainer_imports():
        from counterpoint.trainer.sft.train import run
    return run(config)


def _rank_main(file: Path) -> int:
    with trainer_imports():
        from counterpoint.trainer.rank_process import BAD_CONFIGURATION, run_rank
        from counterpoint.trainer.sft.train import run
    config = SftConfig.model_validate(json.loads(file.read_bytes()))

    def lead() -> int:
        try:
            return run(config, notify_ready)
        except ValueError as error:
            logger.error("%s", error)
            return BAD_CONFIGURATION

    return run_rank(config.of_trainer, lead)


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1])))
