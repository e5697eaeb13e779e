"""A contribution: samples with a loss, which are added to a run's gradients, and the sums beside these on this rank.

`counterpoint/trainer/work/step.py` trains its rows and ends its passes. The step of an orchestrated run is one contribution and
one update. A configuration may ask for several passes over its samples, such as `updates_per_step = 4`, with an update after
each (`counterpoint/trainer/updates/passes.py`). A program may ask for several contributions before an update
(`counterpoint/trainer/driven.py`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from counterpoint.run.items import RESULTS, Objective
from counterpoint.run.loss import LossConfig
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.losses.graph import load_graph
from counterpoint.trainer.losses.load import load_loss
from counterpoint.trainer.losses.objectives import divisor
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.model.without_waiting import on_device
from counterpoint.trainer.packer import InvalidBatch, environment_names, trained_tokens
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.telemetry.step_times import StepTimes
from counterpoint.trainer.telemetry.token_export import TokenExport
from counterpoint.trainer.updates.columns import Columns
from counterpoint.trainer.updates.passes import Pass, columns_to_measure, optional_inputs, plan_passes
from counterpoint.transport.records import Batch, Float32Array

MEANS = ("loss", "entropy", "mismatch_kl", "importance_ratio/mean", "masked_share", "replayed_share")
"""Metrics that are means over trained tokens. Their sums are the first columns of the metric sums, which have one row for each
environment. The columns of `optional_means`, of the loss's metrics, of the environment's loss and the number of tokens follow.
"""

WITH_AGGREGATE = ("entropy", "mismatch_kl")
"""Metrics that also have a name for the value of the whole step, beside those of environments."""


MOST_LAG = 16
"""Staleness from which on samples are not told apart."""

LARGEST = 5
"""Samples that `Contribution.largest_mismatches` returns at most."""


def optional_means(config: TrainingConfig) -> tuple[str, ...]:
    """Returns the names of further means, of a run with a reference or a value head."""
    names = ("reference_kl",) if config.reference is not None else ()
    return (*names, "value_loss", "value/mean", "return/mean") if config.value_head is not None else names


WEIGHTS, TARGETS, INPUT = "weights", "targets", "inputs."
"""Columns that come beside a batch. The last begins the names of those for its loss."""

MOST_TARGETS = 256
"""Values of a token in a given column at most."""


def given_columns(objective: Objective, batch: Batch, vocabulary: int) -> dict[str, Tensor]:
    """Returns the columns of an objective. Raises `InvalidBatch` for one that does not fit the batch."""
    given = {WEIGHTS: (objective.weights, "float32"), TARGETS: (objective.targets, "int32")}
    given |= {INPUT + name: (each.data, each.dtype) for name, each in objective.inputs.items()}
    found, tokens = dict[str, Tensor](), len(batch.token_ids_T)
    for name, (data, kind) in given.items():
        dtype = np.dtype(kind)
        width, left = divmod(len(data), max(1, tokens) * dtype.itemsize)
        if left or width > MOST_TARGETS:
            raise InvalidBatch(
                f"{name} has {len(data)} bytes; expected {dtype.itemsize} for each of {tokens} tokens, or up to {MOST_TARGETS} "
                "times as many"
            )
        if data:
            column_TK = torch.from_numpy(np.frombuffer(bytearray(data), dtype).reshape(tokens, width))
            found[name] = column_TK if width > 1 else column_TK[:, 0]
    for name, column_T in found.items():
        if not bool(column_T.isfinite().all()):
            raise InvalidBatch(f"{name} are not all finite numbers")
    if WEIGHTS in found and found[WEIGHTS].shape[1:] != (found[TARGETS].shape[1:] if TARGETS in found else ()):
        raise InvalidBatch(f"{WEIGHTS} are not as many as {TARGETS}")
    if TARGETS in found and not bool(((found[TARGETS] >= 0) & (found[TARGETS] < vocabulary)).all()):
        raise InvalidBatch(f"{TARGETS} are not all below the model's vocabulary of {vocabulary}")
    if objective.divisor is not None and not 0 < objective.divisor < math.inf:
        raise InvalidBatch(f"divisor = {objective.divisor}: expected a number above 0")
    return found


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a contribution, on rank 0."""

    metrics: dict[str, MetricValue]
    columns: dict[str, Float32Array]
    """Results by a name of `RESULTS`, `[T]` each, or empty if nobody asked for them."""


@dataclass(slots=True)
class EndedPasses:
    """The sums of a step's ended passes, on all ranks, in the host's memory, and the export on this one."""

    sums_EM: Tensor
    highest_E: Tensor
    sums_SW: Tensor
    norms: list[float] = field(default_factory=list)
    """The norms of the gradient, one an update."""
    export: TokenExport = field(default_factory=TokenExport)


class Contribution:
    """Samples of one run in progress on this rank: their batch, and the sums that accumulate beside the gradients."""

    def __init__(
        self,
        run: Run,
        batch: Batch,
        device: torch.device,
        export_directory: Path | None = None,
        objective: Objective | None = None,
        given: Mapping[str, Tensor] | None = None,
        together: list[Contribution] | None = None,
    ) -> None:
        """Begins with a batch that `packer.check` has passed.

        It has one pass over the batch, or more: measurements, and several updates (`counterpoint/trainer/updates/passes.py`).
        With `export_directory`, it writes every trained token there (`counterpoint/trainer/telemetry/token_export.py`). `given`
        are the columns of `objective`. `together` are the run's contributions since its last update, which this one joins.

        Raises `ValueError` for a loss that cannot be loaded.
        """
        config = run.config.training
        self.run = run
        self.batch = batch
        self.together = [self] if together is None else together
        self.objective = objective = objective or Objective()
        self.loss_config = config.loss if objective.loss is None else LossConfig.model_validate(objective.loss)
        self.loss = (
            run.torch.loss if objective.loss is None else load_loss(self.loss_config, optional_inputs(run.config))
        )
        if objective.graph:
            self.loss = load_graph(objective.graph)
        given = given or {}
        self.width = given[TARGETS][0].numel() if TARGETS in given else 1
        """The number of each token's targets."""
        if self.width > 1 and (refusal := self._refuses_several()):
            raise InvalidBatch(f"{TARGETS} has {self.width} of each token, and {refusal}: expected one")
        self.columns = Columns(
            batch, columns_to_measure(config), device, RESULTS if objective.returns else (), given, self.width
        )
        """The columns measured before the first update, those given beside the batch, and the returned ones."""
        self.is_concluded = False
        """Whether its sums are those of all ranks, in `ended`."""
        self.sent: list[set[int]] = []
        """The samples that each rank has, on rank 0."""
        self._trained = trained_tokens(batch)
        self._passes = deque(
            plan_passes(config, [sample.rollout_id for sample in batch.samples], self._trained, self.columns.names)
        )
        self.fault: str | None = None
        """Why the step must be refused, or None. The samples of a step with a fault are no longer trained."""
        self.trained_rows: list[Sequence[int]] = []
        """The samples that this rank has trained in the current pass, row by row."""
        self.environments = environment_names(batch)
        self.means = (*MEANS, *optional_means(config), *(f"custom_loss/{name}" for name in self.loss.metrics))
        self.sums_EM = torch.zeros(len(self.environments), len(self.means) + 2, dtype=torch.float64, device=device)
        self.highest_E = torch.zeros(len(self.environments), dtype=torch.float64, device=device)
        self.sums_SW = torch.zeros(len(batch.samples), 3, dtype=torch.float64, device=device)
        """The sums over the trained tokens of each sample: of the mismatch, of the importance weights, and of their squares."""
        self.ended = EndedPasses(*(torch.zeros_like(each, device="cpu") for each in self.sums))
        self.export_directory = export_directory
        self.export = TokenExport() if export_directory is not None else None
        self.started = time.perf_counter()
        self.times = StepTimes()

    def _refuses_several(self) -> str:
        """Returns why a token cannot have several targets, or an empty text if it can."""
        config, loss = self.run.config.training, self.loss_config
        if loss.kind != "sft" or loss.normalisation != "token" or self.loss.uses_entropy or loss.kl_coefficient:
            return "only a sum of plain likelihoods takes several"
        return "the run measures its tokens before it trains them" if columns_to_measure(config) else ""

    def inputs(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Returns the objective's inputs for the loss, of the trained tokens of `samples`, by name."""
        found = {name: self.columns.of(INPUT + name, samples) for name in self.objective.inputs}
        return {name: values_P for name, values_P in found.items() if values_P is not None}

    @property
    def current(self) -> Pass:
        """The current pass, or an empty one in a step without a trained token, or after the last."""
        return self._passes[0] if self._passes else Pass((), 0)

    @property
    def is_last_pass(self) -> bool:
        """Whether no pass follows the current one."""
        return len(self._passes) <= 1

    @property
    def measures_next(self) -> bool:
        """Whether a measurement follows the current pass."""
        return len(self._passes) > 1 and self._passes[1].measures

    @property
    def trained_samples(self) -> list[int]:
        """Indices of all samples with a trained token, of any pass."""
        return list(self._trained)

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
        """The divisor of the current pass's loss, on all ranks."""
        if self.objective.divisor is not None:
            return self.objective.divisor
        return divisor(self.loss_config, [self._trained[sample] for sample in self.current.samples])

    def loss_scales(self) -> tuple[float, Tensor]:
        """Returns the factors from a token's weight to that in a mean over tokens: of the current pass, `[E]` of environments.

        So that mean is the loss of the pass, or that of the environment's samples alone, whatever divides losses.
        """
        counts: dict[str, list[int]] = {name: [] for name in self.environments}
        for sample in self.current.samples:
            counts[self.batch.samples[sample].environment].append(self._trained[sample])
        own = [sum(each) / divisor(self.loss_config, each) for each in counts.values()]
        return self.trained_tokens / self.divisor, on_device(
            torch.tensor(own, dtype=torch.float64), self.sums_EM.device
        )

    def largest_mismatches(self) -> list[tuple[str, float]]:
        """Returns the rollouts of the samples with the largest mismatch KL, over all passes that have ended, largest first."""
        sums, epochs = self.ended.sums_SW[:, 0].tolist(), self.run.config.training.epochs
        means = {sample: sums[sample] / (tokens * epochs) for sample, tokens in self._trained.items()}
        found = nlargest(LARGEST, means, key=means.__getitem__)
        return [(self.batch.samples[sample].rollout_id, means[sample]) for sample in found]

    def weights_by_lag(self) -> dict[int, tuple[int, float, float]]:
        """Returns trained tokens, and the sums of their importance weights and of the squares, by the staleness of their samples.

        All passes that have ended count. From `MOST_LAG` on all are together.
        """
        found: dict[int, tuple[int, float, float]] = {}
        for sample, tokens in self._trained.items():
            lag = min(MOST_LAG, self.batch.step - self.batch.samples[sample].policy_version)
            before = found.get(lag, (0, 0.0, 0.0))
            own = tokens * self.run.config.training.epochs, *self.ended.sums_SW[sample, 1:].tolist()
            found[lag] = before[0] + own[0], before[1] + own[1], before[2] + own[2]
        return found

    @property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of the current pass, on the device."""
        return self.sums_EM, self.highest_E, self.sums_SW

    def take(self, sums: Sequence[Tensor]) -> None:
        """Takes over the sums of the current pass over all ranks, from the host's memory."""
        sums_EM, highest_E, sums_SW = sums
        self.ended.sums_EM += sums_EM
        torch.maximum(self.ended.highest_E, highest_E, out=self.ended.highest_E)
        self.ended.sums_SW += sums_SW
        if self.export is not None and self.current.first_epoch:
            self.ended.export.extend(self.export)

    def begin_next_pass(self) -> None:
        """Begins the next pass: the current one has been measured, or has updated the weights."""
        self._passes.popleft()
        self._clear()
        self.trained_rows = []

    def length(self, sample: int) -> int:
        """Tokens of a sample."""
        return int(self.batch.sample_offsets[sample + 1] - self.batch.sample_offsets[sample])

    def begin_anew(self) -> list[tuple[Contribution, Sequence[int]]]:
        """Drops the work of this rank for the next update, gradients included, of all of the run's contributions to it.

        Returns the rows to train again.
        """
        self.run.torch.optimizer.zero_grad()
        again: list[tuple[Contribution, Sequence[int]]] = []
        for each in {id(each): each for each in (*self.together, self)}.values():
            each._clear()
            again += [(each, row) for row in each.trained_rows]
            each.trained_rows = []
        return again

    def _clear(self) -> None:
        self.columns.clear(self.samples if self.current.measures else None)
        for sums in self.sums:
            sums.zero_()
        self.export = TokenExport() if self.export is not None else None


def read(steps: Iterable[Contribution], *others: Tensor) -> list[float]:
    """Has contributions `take` the sums of their passes over all ranks, and returns scalars beside them.

    The host waits once for the device. The first scalars are the sums of the losses, one for each contribution.
    """
    steps = list(steps)
    tensors = [*(each for step in steps for each in step.sums), *others]
    together = torch.cat([each.to(torch.float64).flatten() for each in tensors]).cpu()
    parts = [
        part.view(each.shape)
        for part, each in zip(together.split([each.numel() for each in tensors]), tensors, strict=True)
    ]
    for index, step in enumerate(steps):
        step.take(parts[3 * index : 3 * index + 3])
    losses = [float(parts[3 * index][:, 0].sum()) for index in range(len(steps))]
    return [*losses, *map(float, parts[3 * len(steps) :])]
