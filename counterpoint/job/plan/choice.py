"""Chooses what a trainer computes again in the backward pass: nothing if it fits, else the fewest layers with which it does."""

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
class LayerChoice:
    """What was chosen, and what a rank then needs; bytes."""

    value: bool | int
    """The value of `trainer.activation_checkpointing`."""
    of: int
    """Layers of the model."""
    needed: int
    room: int

    def __str__(self) -> str:
        """Says it in words."""
        if self.value is True:
            return "all layers are computed again, with their attention"
        return f"{int(self.value)} of {self.of} layers are computed again"

    def applied(self, trainer: TrainerConfig) -> TrainerConfig:
        """Returns the trainer with it."""
        return trainer.model_copy(update={"activation_checkpointing": self.value})


def choose(directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig], memory: int, room: int) -> LayerChoice:
    """Chooses for a trainer on GPUs of `memory` bytes, of which a rank may use `room`.

    Where no number of layers suffices, the least memory is chosen, whether that fits or not.
    Raises `ValueError` for a model that cannot be planned. None is chosen for one that has no layers to be computed again.
    """
    of = model_sizes(directory).layers

    def with_value(value: bool | int, given: TrainerConfig = trainer) -> LayerChoice:
        changed = LayerChoice(value, of, 0, room).applied(given)
        return LayerChoice(
            value, of, sum(rank_parts(directory, changed, runs, trainer.max_tokens, memory).values()), room
        )

    # Compiled layers need less, and seconds to be planned.
    for given in (trainer.model_copy(update={"compile": False}), trainer):
        none = with_value(False, given)
        if none.needed <= room:
            return none
    if of_longest_rows(directory, trainer, runs) is trainer:
        return none
    layers = fewest_layers(lambda layers: with_value(layers).needed <= room, of)
    return with_value(True if layers is None else layers)


def of_longest_rows(directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig]) -> TrainerConfig:
    """Returns the trainer with which the longest rows fit: all layers are computed again, if the model's can be."""
    every = trainer.model_copy(update={"activation_checkpointing": True})
    try:
        rank_parts(directory, every, runs, LEAST_TOKENS, None)
    except ValueError:
        return trainer
    return every


def fewest_layers(fits: Callable[[int], bool], layers: int) -> int | None:
    """Returns the least number, from 1 to `layers`, for which `fits` holds, which it does for all above; None if it is none."""
    found = 1 + bisect_left(range(1, layers + 1), True, key=fits)
    return found if found <= layers else None
