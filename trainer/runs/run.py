"""The torch state of one run in a slot, on every rank: its trainable parameters, optimizer and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from run.config import RunConfig
from trainer.losses.contract import Loss
from trainer.model.exchange import ExpertGroup
from trainer.optimizer import Optimizer
from trainer.runs.record import Progress
from trainer.runs.shard_files import slice_of
from trainer.runs.slices import OtherSlices
from trainer.updates.value_head import ValueHead


@dataclass(frozen=True, slots=True)
class Shards:
    """How the weights of a run are divided over ranks."""

    rank: int
    ranks: int
    """With different slices: files of a checkpoint."""
    rows: dict[str, int]
    """The rows of each divided weight, by name; this rank has those of `trainer/runs/shard_files.py: slice_of`."""
    parallel: dict[str, int]
    """For the experts' weights among them: the ranks of a group that divides them before the groups do."""
    write_others: Callable[[], OtherSlices]
    """On rank 0: makes the other ranks copy their part of a checkpoint, which they then write while training goes on."""
    experts: ExpertGroup | None = None
    """Set where only experts are divided: all other weights are whole, and their gradients have to be added over the ranks."""

    @property
    def own(self) -> dict[str, tuple[int, int]]:
        """Returns where this rank's slice of each divided weight begins and ends."""
        return {
            name: slice_of(rows, self.rank, self.ranks, self.parallel.get(name, 1)) for name, rows in self.rows.items()
        }

    @property
    def description(self) -> dict[str, Any]:
        """Returns what a checkpoint says of it, for JSON."""
        return {"ranks": self.ranks, "rows": self.rows} | ({"parallel": self.parallel} if self.parallel else {})


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
    shards: Shards | None = None
    """Set where the optimizer has this rank's slices of weights."""
    intact: bool = True
    """Whether the weights are those of `progress`. After an update that failed half-way they are not, and are never saved."""
    value_head: ValueHead | None = None
    """Its parameters are the optimizer's, too."""
    reference: nn.Module | None = None
    """The model of its reference policy; None without a reference, or where that is the base under the adapter."""
    reference_slot: int | None = None
    """Where its layers have the adapter of its reference policy; None if that has none."""
    mismatches: list[tuple[str, float]] = field(default_factory=list)
    """The rollouts of the last step with the largest mismatch KL over the trained tokens of a sample, the largest first."""
    held: dict[str, Tensor] | None = None
    """Between the first and the last update of a step: the state of before the step, in host memory."""

    @property
    def finished(self) -> bool:
        """Whether all its steps have been trained."""
        return self.progress.step >= self.config.steps

    def state(self) -> dict[str, Tensor]:
        """Returns the optimizer's state after the step of `progress`, also in the middle of the next step."""
        return self.optimizer.state() if self.held is None else self.held

    def hold(self) -> None:
        """Keeps a copy of the state, unless there is one: the first of several updates follows."""
        if self.held is None:
            self.held = {name: tensor.to("cpu", copy=True) for name, tensor in self.optimizer.state().items()}

    def restore(self) -> None:
        """Puts the copy back, if there is one: the run is as before the step."""
        if self.held is not None:
            self.optimizer.load_state(self.held)
            self.held = None
