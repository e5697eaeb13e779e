"""A run that has a slot: its configuration and progress, and its torch state on this rank.

What it is asked for is in its order (`counterpoint/trainer/work/order.py`), and what is in progress are its contributions
(`counterpoint/trainer/work/contribution.py`), which the learner has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from counterpoint.run.changes import LearningRates
from counterpoint.run.items import UpdateValues
from counterpoint.run.trained import TrainedRun
from counterpoint.trainer.losses.contract import Loss
from counterpoint.trainer.model.exchange import ExpertGroup
from counterpoint.trainer.optimizer import Optimizer
from counterpoint.trainer.runs.shard_files import slice_of
from counterpoint.trainer.runs.slices import OtherSlices
from counterpoint.trainer.updates.schedule import scheduled
from counterpoint.trainer.updates.value_head import ValueHead
from counterpoint.transport.messages import Answered


@dataclass(frozen=True, slots=True)
class Shards:
    """How the weights of a run are divided over ranks."""

    rank: int
    ranks: int
    """The ranks with different slices: files of a checkpoint."""
    rows: dict[str, int]
    """The rows of each divided weight, by name; this rank has those of `counterpoint/trainer/runs/shard_files.py: slice_of`."""
    parallel: dict[str, int]
    """The ranks of a group that divides experts' weights before the groups do, by name; no other weights."""
    write_others: Callable[[], OtherSlices]
    """Has the other ranks, on rank 0, copy their part of a checkpoint, which they then write while training goes on."""
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
class RunProgress:
    """How far a run has been trained."""

    step: int = 0
    """The last step trained, which is the policy version of the weights."""
    total_tokens: int = 0
    total_samples: int = 0
    schedule_offset: int = 0
    """Added to a step's number for its position in the learning-rate schedule; not 0 after a copy that took that over."""
    batch: str = ""
    """The digest of the batch of `step`; empty where it is not known."""
    item: int = 0
    """The number of the item whose update was `step`, where items are asked for (`counterpoint/trainer/shells/asked.py`)."""


@dataclass(slots=True, eq=False)
class TorchState:
    """What this rank has of a run in torch; made by the learner's creation hook."""

    optimizer: Optimizer = field(init=False, repr=False)
    """Its parameters are the run's."""
    loss: Loss = field(init=False, repr=False)
    shards: Shards | None = None
    """Set where the optimizer has this rank's slices of weights."""
    intact: bool = True
    """Whether the weights are those of `progress`. After an update that failed half-way they are not, and are never saved."""
    value_head: ValueHead | None = None
    """Its parameters are the optimizer's, too."""
    reference: nn.Module | None = None
    """The model of its reference policy; None without a reference, or where that is the base under the adapter."""
    reference_slot: int | None = None
    """The slot where its layers have the adapter of its reference policy; None if that has none."""
    held: dict[str, Tensor] | None = None
    """The state of before the step, between its first and its last update, in host memory."""

    def release(self) -> None:
        """Gives up the torch state, so that its memory is free before the next run of the slot is made."""
        for name in ("optimizer", "loss"):
            with suppress(AttributeError):  # not made
                delattr(self, name)
        self.shards = self.value_head = self.reference = self.held = None

    def newest(self) -> dict[str, Tensor]:
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


@dataclass(slots=True)
class WireState:
    """What the sessions with a run's orchestrator or driver keep of it (`counterpoint/trainer/work/sessions.py`)."""

    session: int | None = None
    """The number sent with the last READY."""
    refusals: int = 0
    """Batches rejected because they were beyond the run's credit."""
    holder: str = ""
    """The process of the orchestrator whose batches and commits are taken."""
    batch: str = ""
    """The digest of the batch that was taken last."""
    answers: dict[int, Answered] = field(default_factory=dict)
    """Answers to the newest items of a driven run, which may have been lost on their way."""
    spent: float = 0.0
    """The seconds of all ranks that the item has taken that was carried out last."""


@dataclass(slots=True)
class RequestState:
    """What a run is asked for, and is not done with; on rank 0."""

    saves: dict[str, int] = field(default_factory=dict)
    """The step whose checkpoint a save waits for, by request."""
    rates: LearningRates | None = None
    """The changes of its learning rate, once they were read."""
    spoiled: bool = False
    """Whether a contribution to the next update has failed, of a run that is driven over the wire: others do not count alone."""


@dataclass(slots=True, eq=False)
class Run:
    """One run in a slot, from its admission until it leaves. Nothing of it outlives that."""

    slot: int
    """The run's position among the trainer's `max_runs`."""
    run_id: str
    number: int
    """The number of the admission: two admissions of one run differ."""
    config: TrainedRun
    """The configuration with which the run is trained."""
    admitted_with: TrainedRun | None = None
    """The same as its file has it: a discovered hook may have set another scaling factor; on rank 0."""
    directory: int = 0
    """Inode of the run's directory at the admission; on rank 0."""
    descriptor: int | None = None
    """Open file descriptor of that directory: while it is open, no other directory gets the inode; on rank 0."""
    progress: RunProgress = field(default_factory=RunProgress)
    """Set by rank 0's discovered hooks to the step from which the run continues; all ranks then have it."""
    beginning: Path | None = None
    """The directory of the adapter with which the run begins, if it has no checkpoint; rank 0 decides it for all ranks."""
    created: bool = False
    """Whether the creation hooks have been called on this rank."""
    failure: str | None = None
    """Why the run could not be made on the ranks."""
    durable_step: int = 0
    """Acknowledged as durable: the batches up to this step will not be needed again."""
    mismatches: list[tuple[str, float]] = field(default_factory=list)
    """The rollouts of the last step with the largest mismatch KL over the trained tokens of a sample, the largest first."""
    torch: TorchState = field(default_factory=TorchState)
    wire: WireState = field(default_factory=WireState)
    requests: RequestState = field(default_factory=RequestState)

    @property
    def finished(self) -> bool:
        """Whether all its steps have been trained."""
        return self.progress.step >= self.config.last_step

    def scheduled(self, peak: float | None = None) -> UpdateValues:
        """Returns the values of the next step's updates, by the configured schedule; `peak` replaces the configured rate."""
        position = self.progress.step + 1 + self.progress.schedule_offset
        return scheduled(self.config.training, self.config.last_step, position, peak)
