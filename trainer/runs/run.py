"""A run that has a slot: its configuration, progress and batches, its torch state on this rank, and its step in progress.

`trainer/step.py` trains the rows of an open step and ends its passes. Most steps have one pass; `trainer/updates/passes.py` plans
the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.run.changes import LearningRates
from counterpoint.run.trained import TrainedRun, TrainingConfig
from counterpoint.trainer.losses.contract import Loss
from counterpoint.trainer.losses.objectives import divisor
from counterpoint.trainer.model.exchange import ExpertGroup
from counterpoint.trainer.model.without_waiting import on_device
from counterpoint.trainer.optimizer import Optimizer, UpdateValues
from counterpoint.trainer.packer import environment_names, trained_tokens
from counterpoint.trainer.runs.shard_files import slice_of
from counterpoint.trainer.runs.slices import OtherSlices
from counterpoint.trainer.telemetry.step_times import StepTimes
from counterpoint.trainer.telemetry.token_export import TokenExport
from counterpoint.trainer.updates.columns import Columns
from counterpoint.trainer.updates.passes import Pass, columns_to_measure, plan_passes
from counterpoint.trainer.updates.schedule import scheduled
from counterpoint.trainer.updates.value_head import ValueHead
from counterpoint.transport.records import Batch

MEANS = ("loss", "entropy", "mismatch_kl", "importance_ratio/mean", "masked_share", "replayed_share")
"""Metrics that are means over trained tokens. Their sums are the first columns of the metric sums, which have one row for each
environment; the columns of `optional_means`, of the loss's own metrics, of the environment's own loss and the number of tokens
follow."""

WITH_AGGREGATE = ("entropy", "mismatch_kl")
"""Metrics whose value for the whole step has a name beside those of environments, too."""


LARGEST = 5
"""Samples that `OpenStep.largest_mismatches` returns at most."""


def optional_means(config: TrainingConfig) -> tuple[str, ...]:
    """Returns the names of further means, of a run with a reference or a value head."""
    names = ("reference_kl",) if config.reference is not None else ()
    return (*names, "value_loss", "value/mean", "return/mean") if config.value_head is not None else names


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
class Progress:
    """How far a run has been trained."""

    step: int = 0
    """The last step trained, which is the policy version of the weights."""
    total_tokens: int = 0
    total_samples: int = 0
    schedule_offset: int = 0
    """Added to a step's number for its position in the learning-rate schedule; not 0 after a copy that took that over."""
    batch: str = ""
    """The digest of the batch of `step`; empty where it is not known."""


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
    progress: Progress = field(default_factory=Progress)
    """Set by rank 0's discovered hooks to the step from which the run continues; all ranks then have it."""
    beginning: Path | None = None
    """The directory of the adapter with which the run begins, if it has no checkpoint; rank 0 decides it for all ranks."""
    created: bool = False
    """Whether the creation hooks have been called on this rank."""
    failure: str | None = None
    """Why the run could not be made on the ranks."""
    durable_step: int = 0
    """Acknowledged as durable: the batches up to this step will not be needed again."""
    session: int | None = None
    """The number sent with the last READY."""
    committed: int = 0
    """The last step that the orchestrator has reported as committed."""
    refusals: int = 0
    """Batches rejected because they were beyond the run's credit."""
    holder: str = ""
    """The process of the orchestrator of which `waiting` and `committed` are."""
    waiting: dict[int, Batch] = field(default_factory=dict)
    """Batches received and not yet trained, by step."""
    open_step: int | None = None
    """The step in progress: its batch is no longer in `waiting`, and not yet trained."""
    batch: str = ""
    """The digest of the batch of the open step, or of the one opened last."""
    waited: float = 0.0
    """Seconds for which the batch of the open step was awaited."""
    idle_since: float = 0.0
    """When the last step ended, or the run became ready."""

    optimizer: Optimizer = field(init=False, repr=False)
    """Its parameters are the run's; made by the learner's creation hook, as all that follows."""
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
    """Where its layers have the adapter of its reference policy; None if that has none."""
    mismatches: list[tuple[str, float]] = field(default_factory=list)
    """The rollouts of the last step with the largest mismatch KL over the trained tokens of a sample, the largest first."""
    step: OpenStep | None = None
    """The step in progress on this rank."""
    sent: list[set[int]] = field(default_factory=list)
    """By rank, the samples of the step that the rank has got; on rank 0."""
    saves: dict[str, int] = field(default_factory=dict)
    """By request, the step whose checkpoint a save waits for; on rank 0."""
    rates: LearningRates | None = None
    """The changes of its learning rate, once they were read; on rank 0."""
    held: dict[str, Tensor] | None = None
    """Between the first and the last update of a step: the state of before the step, in host memory."""

    @property
    def finished(self) -> bool:
        """Whether all its steps have been trained."""
        return self.progress.step >= self.config.last_step

    def scheduled(self, peak: float | None = None) -> UpdateValues:
        """Returns the values of the next step's updates, by the configured schedule; `peak` replaces the configured rate."""
        position = self.progress.step + 1 + self.progress.schedule_offset
        return scheduled(self.config.training, self.config.last_step, position, peak)

    def release(self) -> None:
        """Gives up the torch state, so that its memory is free before the next run of the slot is made."""
        for name in ("optimizer", "loss"):
            with suppress(AttributeError):  # not made
                delattr(self, name)
        self.shards = self.value_head = self.reference = self.held = None

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


@dataclass(slots=True)
class Ended:
    """What the passes of a step that have ended add up to, on all ranks, in the host's memory; the export on this one."""

    sums_EM: Tensor
    highest_E: Tensor
    mismatch_S: Tensor
    norms: list[float] = field(default_factory=list)
    """The norms of the gradient, one an update."""
    export: TokenExport = field(default_factory=TokenExport)


class OpenStep:
    """One run's step in progress on this rank: its batch, and the sums that accumulate beside the gradients."""

    def __init__(self, run: Run, batch: Batch, device: torch.device, export_directory: Path | None = None) -> None:
        """Opens the step of a batch that `packer.check` has passed.

        It has one pass over the batch, or more: a measurement, and several updates (`trainer/updates/passes.py`). With
        `export_directory`, every trained token is written there (`trainer/telemetry/token_export.py`).
        """
        config = run.config.training
        self.run = run
        self.batch = batch
        self.columns = Columns(batch, columns_to_measure(config), device)
        """What is measured before the first update."""
        self._trained = trained_tokens(batch)
        self._passes = deque(
            plan_passes(config, [sample.rollout_id for sample in batch.samples], self._trained, self.columns.names)
        )
        self.fault: str | None = None
        """Why the step must be refused; None otherwise. The samples of a step with a fault are no longer trained."""
        self.trained_rows: list[Sequence[int]] = []
        """The samples that this rank has trained in the current pass, row by row."""
        self.environments = environment_names(batch)
        self.means = (*MEANS, *optional_means(config), *(f"custom_loss/{name}" for name in run.loss.metrics))
        self.sums_EM = torch.zeros(len(self.environments), len(self.means) + 2, dtype=torch.float64, device=device)
        self.highest_E = torch.zeros(len(self.environments), dtype=torch.float64, device=device)
        self.mismatch_S = torch.zeros(len(batch.samples), dtype=torch.float64, device=device)
        """The sums of the mismatch over the trained tokens of each sample."""
        self.ended = Ended(*(torch.zeros_like(each, device="cpu") for each in self._sums))
        self._read: list[Tensor] = []
        """The sums of the current pass in the host's memory, once they are those of all ranks; none of a measurement."""
        self.export_directory = export_directory
        self.export = TokenExport() if export_directory is not None else None
        self.started = time.perf_counter()
        self.times = StepTimes()

    @property
    def current(self) -> Pass:
        """The current pass; an empty one in a step without a trained token, or after the last."""
        return self._passes[0] if self._passes else Pass((), 0)

    @property
    def is_last_pass(self) -> bool:
        """Whether no pass follows the current one."""
        return len(self._passes) <= 1

    @property
    def has_several_updates(self) -> bool:
        """Whether the weights may change before the last pass."""
        return self.run.config.training.updates_per_step > 1

    @property
    def samples(self) -> list[int]:
        """Indices of the samples of the current pass, each with a trained token, whether trained by now or not."""
        return list(self.current.samples)

    @property
    def trained_tokens(self) -> int:
        """The trained tokens of the current pass, on all ranks."""
        return self.current.trained_tokens

    @property
    def divisor(self) -> float:
        """What the loss of the current pass is divided by, on all ranks."""
        return divisor(self.run.config.training.loss, [self._trained[sample] for sample in self.current.samples])

    def loss_scales(self) -> tuple[float, Tensor]:
        """Returns the factors from a token's weight to that in a mean over tokens: of the current pass, `[E]` of environments.

        So that mean is the loss of the pass, or that of the environment's samples alone, whatever losses are divided by.
        """
        counts: dict[str, list[int]] = {name: [] for name in self.environments}
        for sample in self.current.samples:
            counts[self.batch.samples[sample].environment].append(self._trained[sample])
        config = self.run.config.training.loss
        own = [sum(each) / divisor(config, each) for each in counts.values()]
        return self.trained_tokens / self.divisor, on_device(
            torch.tensor(own, dtype=torch.float64), self.sums_EM.device
        )

    def largest_mismatches(self) -> list[tuple[str, float]]:
        """Returns the rollouts of the samples with the largest mismatch KL, over all passes that have ended, largest first."""
        sums, epochs = self.ended.mismatch_S.tolist(), self.run.config.training.epochs
        means = {sample: sums[sample] / (tokens * epochs) for sample, tokens in self._trained.items()}
        found = nlargest(LARGEST, means, key=means.__getitem__)
        return [(self.batch.samples[sample].rollout_id, means[sample]) for sample in found]

    @property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.sums_EM, self.highest_E, self.mismatch_S

    def read(self, norm: Tensor) -> tuple[Tensor, float]:
        """Copies the sums of the current pass to the host's memory, for `begin_next_pass`, with `norm`: the host waits once.

        Returns its `sums_EM`, and the norm.
        """
        sums = self._sums
        together = torch.cat([*(each.flatten() for each in sums), norm.to(self.sums_EM).reshape(1)]).cpu()
        *self._read, last = (
            part.view(shape)
            for part, shape in zip(
                together.split([*(each.numel() for each in sums), 1]), [*(each.shape for each in sums), ()], strict=True
            )
        )
        return self._read[0], float(last)

    def begin_next_pass(self) -> None:
        """Adds what the current pass has summed to the step's, and begins the next one."""
        if self._read:
            sums_EM, highest_E, mismatch_S = self._read
            self.ended.sums_EM += sums_EM
            torch.maximum(self.ended.highest_E, highest_E, out=self.ended.highest_E)
            self.ended.mismatch_S += mismatch_S
            self._read = []
        if self.export is not None and self.current.first_epoch:
            self.ended.export.extend(self.export)
        self._passes.popleft()
        self.begin_anew()

    def length(self, sample: int) -> int:
        """Tokens of a sample."""
        return int(self.batch.sample_offsets[sample + 1] - self.batch.sample_offsets[sample])

    def begin_anew(self) -> list[Sequence[int]]:
        """Drops what this rank has trained in this pass, gradients included; returns the rows to train again."""
        self.run.optimizer.zero_grad()
        if self.current.measures:
            self.columns.clear()
        self.sums_EM.zero_()
        self.highest_E.zero_()
        self.mismatch_S.zero_()
        self.export = TokenExport() if self.export is not None else None
        rows, self.trained_rows = self.trained_rows, []
        return rows
