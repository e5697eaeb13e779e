"""The torch state of one run in a slot, on every rank: its trainable parameters, optimizer and loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from run.config import RunConfig
from trainer.losses.contract import Loss
from trainer.optimizer import Optimizer
from trainer.runs.record import Progress


@dataclass(slots=True)
class Run:
    """One run in training. Everything else about it is in its record (`trainer/runs/record.py`)."""

    slot: int
    """Its slot among the trainer's `max_runs`."""
    run_id: str
    config: RunConfig
    optimizer: Optimizer
    loss: Loss
    progress: Progress = field(default_factory=Progress)
    """The same object as in the run's record."""
    intact: bool = True
    """Whether the weights are those of `progress`. After an update that failed half-way they are not, and are never saved."""

    @property
    def finished(self) -> bool:
        """Whether all its steps have been trained."""
        return self.progress.step >= self.config.steps
