"""Trains a recorded step again, and compares what comes of it with what the run has kept of that step.

On the machine and software that trained it the two are the same, bit for bit. Elsewhere numbers are added in another order, and
the weights may differ by a small share of the step's update (`BOUNDS`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from counterpoint.inference.digest import Digest
from counterpoint.trainer.again.kept import Kept, NotKept, metrics_line
from counterpoint.trainer.again.learner import RunAgain
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.runs import shard_files
from counterpoint.trainer.taken_over import durable_directories
from counterpoint.transport.codec import digest_of

logger = logging.getLogger(__name__)

BOUNDS = {"float32": 0.01, "bfloat16": 0.1}
"""The largest distance of weights that another machine, version of torch, or number of ranks or threads explains, by the model's
precision: in shares of the length of the step's update."""

MOST_NAMED = 10
"""Tensors that a result names at most."""

_OF_TIME = ("tokens_per_second", "phase/train")

CHECKPOINT, METRICS = "weights and optimizer, of the trainer's checkpoint", "metrics, of trainer/metrics.jsonl"
BATCHES = "batches, of receipts and checkpoint"


@dataclass(slots=True)
class StepAgain:
    """The result of a step that was trained again."""

    run: str
    step: int
    first: int
    """The step of the checkpoint that training began with."""
    bound: float
    deterministic: bool
    """Whether it was trained with `trainer.deterministic`, and so again."""
    compared: dict[str, bool] = field(default_factory=dict)
    """What was compared with the record, and whether it is the same bit for bit."""
    batches: dict[int, str] = field(default_factory=dict)
    """The digests of the batches that were trained, by step."""
    different: list[str] = field(default_factory=list)
    """The first tensors and metrics that differ."""
    distance: float | None = None
    """Between the weights trained again and those recorded, in shares of the length of the step's update; without a checkpoint of
    the step that of the gradient's norm, in shares of it."""

    @property
    def is_equal(self) -> bool:
        """Whether all is the same, bit for bit."""
        return all(self.compared.values())

    @property
    def is_within(self) -> bool:
        """Whether the weights are the same within the bound for another machine, of the same batches."""
        near = self.distance is not None and self.distance <= self.bound
        return self.is_equal or (near and self.compared.get(BATCHES, True))

    def values(self) -> dict[str, Any]:
        """Returns the result as plain values, for JSON."""
        return asdict(self) | {"equal": self.is_equal, "within": self.is_within}

    def text(self) -> str:
        """Returns the result for a person."""
        lines = [f"{what}: {'the same, bit for bit' if same else 'different'}" for what, same in self.compared.items()]
        lines += [f"different: {', '.join(self.different)}"] if self.different else []
        lines += ["trained with trainer.deterministic = true, and so again"] if self.deterministic else []
        since = f"from the trainer's checkpoint of step {self.first}" if self.first else "from the run's beginning"
        verdict = "bit-equal"
        if not self.is_equal:
            apart = "at an unknown distance" if self.distance is None else f"{self.distance:.2g} of its update apart"
            verdict = f"{apart}; the bound for another machine is {self.bound:g}"
        return "\n".join([*lines, f"run {self.run}, step {self.step}, trained again {since}: {verdict}"])


def train_again(config: TrainerConfig, kept: Kept, directory: Path) -> tuple[StepAgain, dict[str, Digest]]:
    """Trains the kept step again, in `directory`, and compares its checkpoint and metrics.

    Also returns the digests of its weights, by precision. Raises `NotKept`, and `ValueError` if the model cannot be loaded.
    """
    again = RunAgain(config, kept, directory)
    metrics: dict[str, MetricValue] = {}
    before: dict[str, Tensor] = {}
    dtype = str(next(again.learner.loaded.model.parameters()).dtype).removeprefix("torch.")
    result = StepAgain(kept.run_id, kept.step, kept.first, BOUNDS[dtype], config.deterministic)
    for step in range(kept.first + 1, kept.step + 1):
        logger.info("training step %d of run %s again", step, kept.run_id)
        batch = kept.batch(step)
        result.batches[step] = digest_of(batch)
        if step == kept.step:
            before = again.weights()
        try:
            metrics = again.train(batch)
        except InvalidBatch as error:
            raise NotKept(f"step {step} of run {kept.run_id} cannot be trained again: {error}") from error
    _compare_metrics(result, metrics, metrics_line(kept))
    if (place := durable_directories(kept.output_dir, kept.run_id).get(kept.step)) is not None:
        recorded, batch_then = _state(place)
        if batch_then:
            result.compared[BATCHES] = batch_then == result.batches[kept.step]
        _compare_tensors(result, again.run.torch.newest(), recorded, before)
    return result, again.digests()


def _compare_metrics(result: StepAgain, metrics: Mapping[str, MetricValue], recorded: Mapping[str, Any] | None) -> None:
    if recorded is None:
        return
    names = [name for name in metrics if name in recorded and name not in _OF_TIME]
    apart = [name for name in names if metrics[name] != recorded[name]]
    result.compared[METRICS] = not apart
    result.different += apart[:MOST_NAMED]
    if isinstance(norm := recorded.get("grad_norm"), float) and norm:
        result.distance = abs(float(metrics["grad_norm"]) - norm) / norm


def _compare_tensors(
    result: StepAgain, again: Mapping[str, Tensor], recorded: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> None:
    trained = {name: tensor for name, tensor in recorded.items() if not name.startswith("random.")}
    if again.keys() != trained.keys() or any(again[name].shape != tensor.shape for name, tensor in trained.items()):
        raise NotKept(
            f"the checkpoint of step {result.step} is of another model, adapter or optimizer than the one before"
        )
    apart = [name for name, tensor in trained.items() if not torch.equal(again[name].cpu(), tensor)]
    result.compared[CHECKPOINT] = not apart
    result.different += apart[:MOST_NAMED]
    difference, update = 0.0, 0.0
    for name, tensor_before in before.items():
        own, then = again[f"master.{name}"].cpu().double(), trained[f"master.{name}"].double()
        difference += float((own - then).square().sum())
        update += float((then - tensor_before.double()).square().sum())
    result.distance = 0.0 if not difference else (difference / update) ** 0.5 if update else float("inf")


def _state(place: Path) -> tuple[dict[str, Tensor], str]:
    """Reads a checkpoint's tensors, and the digest of the batch that it has trained last. Raises `NotKept`."""
    try:
        description = json.loads((place / "state.json").read_text())
        return shard_files.read(place, description.get("shards"), None), str(description["progress"]["batch"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise NotKept(f"the checkpoint {place} cannot be read: {error}") from error
