"""Chooses how many layers a trainer computes again in the backward pass: none if it fits, else the fewest with which it does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from counterpoint.job.plan.dry_run import model_sizes
from counterpoint.job.plan.trainer_memory import LEAST_TOKENS, rank_parts
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and what a rank then needs; bytes."""

    layers: int
    """Layers that are computed again, the first ones."""
    of: int
    """Layers of the model."""
    needed: int
    room: int

    @property
    def value(self) -> bool | int:
        """The value of `trainer.activation_checkpointing`."""
        return self.layers == self.of if self.layers in (0, self.of) else self.layers

    def applied(self, trainer: TrainerConfig) -> TrainerConfig:
        """Returns the trainer with it."""
        return trainer.model_copy(update={"activation_checkpointing": self.value})


def choose(directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig], memory: int, room: int) -> Choice:
    """Chooses for a trainer on GPUs of `memory` bytes, of which a rank may use `room`: all layers where no fewer suffice.

    Raises `ValueError` for a model that cannot be planned. None is chosen for one that has no layers to be computed again.
    """
    of = model_sizes(directory).layers

    def with_layers(layers: int, given: TrainerConfig = trainer) -> Choice:
        changed = Choice(layers, of, 0, room).applied(given)
        return Choice(layers, of, sum(rank_parts(directory, changed, runs, trainer.max_tokens, memory).values()), room)

    # Compiled layers need less, and seconds to be planned.
    for given in (trainer.model_copy(update={"compile": False}), trainer):
        none = with_layers(0, given)
        if none.needed <= room:
            return none
    if of_longest_rows(directory, trainer, runs) is trainer:
        return none
    return with_layers(fewest_layers(lambda layers: with_layers(layers).needed <= room, of))


def of_longest_rows(directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig]) -> TrainerConfig:
    """Returns the trainer with which the longest rows fit: all layers are computed again, if the model's can be."""
    every = trainer.model_copy(update={"activation_checkpointing": True})
    try:
        rank_parts(directory, every, runs, LEAST_TOKENS, None)
    except ValueError:
        return trainer
    return every


def fewest_layers(fits: Callable[[int], bool], layers: int) -> int:
    """Returns the least number from 1 on for which `fits` holds, which it does for all above; `layers` if it is none below."""
    return 1 + bisect_left(range(1, layers), True, key=fits)
