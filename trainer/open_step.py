"""One run's step in progress on one rank: its passes over the batch, and what they add up to beside the gradients.

`trainer/step.py` trains its rows and ends its passes. Most steps have one pass; `trainer/updates/passes.py` plans the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path

import torch
from torch import Tensor

from run.config import TrainingConfig
from trainer.losses.objectives import divisor
from trainer.packer import environment_names, trained_tokens
from trainer.runs.run import Run
from trainer.telemetry.step_times import StepTimes
from trainer.telemetry.token_export import TokenExport
from trainer.updates.columns import Columns
from trainer.updates.passes import Pass, columns_to_measure, plan_passes
from transport.records import Batch

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


@dataclass(slots=True)
class Ended:
    """What the passes of a step that have ended add up to, on all ranks; the export on this one."""

    sums_EM: Tensor
    highest_E: Tensor
    mismatch_S: Tensor
    norms: list[float] = field(default_factory=list)
    """The norms of the gradient, one an update."""
    learning_rate: float = 0.0
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
        self.ended = Ended(self.sums_EM.clone(), self.highest_E.clone(), self.mismatch_S.clone())
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
        return self.trained_tokens / self.divisor, torch.tensor(own, dtype=torch.float64, device=self.sums_EM.device)

    def largest_mismatches(self) -> list[tuple[str, float]]:
        """Returns the rollouts of the samples with the largest mismatch KL, over all passes that have ended, largest first."""
        sums, epochs = self.ended.mismatch_S.tolist(), self.run.config.training.epochs
        means = {sample: sums[sample] / (tokens * epochs) for sample, tokens in self._trained.items()}
        found = nlargest(LARGEST, means, key=means.__getitem__)
        return [(self.batch.samples[sample].rollout_id, means[sample]) for sample in found]

    def begin_next_pass(self) -> None:
        """Adds what the current pass has summed to the step's, and begins the next one."""
        self.ended.sums_EM += self.sums_EM
        torch.maximum(self.ended.highest_E, self.highest_E, out=self.ended.highest_E)
        self.ended.mismatch_S += self.mismatch_S
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
