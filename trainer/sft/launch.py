"""Runs supervised fine-tuning in this process, or as several ranks, which this process starts and supervises.

It does not import torch, as `trainer/launch.py`, which starts the ranks.
"""

from __future__ import annotations

from pathlib import Path

from counterpoint.trainer.launch import run_ranks
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.transport.process.imports import trainer_imports


def run(config: SftConfig) -> int:
    """Trains until the last epoch's end, a stop signal, or a failure; returns the trainer's exit code.

    `config.model` is a directory. Call it from the main thread, once a process. Raises `ValueError` for a model whose experts
    cannot be divided and, with one rank, as `trainer.sft.train.run`; ranks log that, and the exit code is 2.
    """
    trainer = config.of_trainer
    trainer.check_model(Path(config.model))
    if trainer.processes > 1:
        given = config.model_copy(update={"trainer": trainer})  # each rank checks again that both name one model
        return run_ranks(trainer, "counterpoint.trainer.sft.rank_process", given, lambda: None)
    with trainer_imports():
        from counterpoint.trainer.sft.train import run
    return run(config)
