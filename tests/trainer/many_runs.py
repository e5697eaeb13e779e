"""Several runs with adapters over one model, trained together or alone: what the tests of many runs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.lora.multi_lora import apply_lora_to_model
from counterpoint.trainer.lora.targets import is_target
from counterpoint.trainer.losses.contract import Loss, LossInputs, LossOutputs
from counterpoint.trainer.losses.load import load_loss
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.trainer.model.load import load_model
from counterpoint.trainer.model.router_replay import RouterReplay
from counterpoint.trainer.optimizer import Optimizer
from counterpoint.trainer.packer import ModelLimits
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.trainer.work.step import finish, train_row
from counterpoint.transport.records import Batch
from tests.trainer.conftest import make_run_config

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU, None)
STEPS = 20

MAX_RANK = 16
SLOTS = 6


class Bench:
    """A wrapped model and what a training step needs beside it."""

    def __init__(self, directory: Path, max_tokens: int = 48) -> None:
        self.directory = directory
        self.model: nn.Module = load_model(directory, "float32", CPU)
        self.layers: dict[str, MultiLora] = {}
        self.replay = RouterReplay(self.model)
        self.limits = ModelLimits(
            self.model.config.vocab_size, max_tokens, self.replay.layers, self.replay.experts, self.replay.top_k
        )

    def admit(
        self, slot: int, loss: Callable[[LossInputs], LossOutputs] | None = None, rate: float = 1e-3, **lora: object
    ) -> Run:
        """A run in a slot with an adapter that depends on the slot alone."""
        adapter = LoraConfig.model_validate(lora)
        config = make_run_config(
            self.directory,
            self.directory,
            STEPS,
            lora=adapter,
            learning_rate=rate,
            lr_schedule="linear",
            warmup_steps=2,
        )
        generator = torch.Generator().manual_seed(slot)
        self.layers = apply_lora_to_model(self.model, SLOTS, adapter, MAX_RANK)
        for name, layer in self.layers.items():
            if is_target(name, adapter):
                layer.admit(slot, adapter.rank, adapter.alpha, generator)
        run = Run(slot, f"run-{slot}", slot, config)
        run.torch.optimizer = Optimizer(self.parameters(slot))
        run.torch.loss = Loss(loss) if loss is not None else load_loss(config.training.loss)
        return run

    def parameters(self, slot: int) -> dict[str, nn.Parameter]:
        """Returns the parameters of slot `slot`, by layer and name."""
        return {
            f"{name}.{own}": parameter
            for name, layer in self.layers.items()
            for own, parameter in layer.adapter_parameters(slot).items()
        }

    def open(self, run: Run, batch: Batch) -> Contribution:
        """The run's step on `batch`."""
        return Contribution(run, batch, CPU)

    def train(self, row: Sequence[tuple[Contribution, Sequence[int]]]) -> None:
        """One row."""
        train_row(self.model, self.replay, self.limits, row)

    def train_together(self, steps: Sequence[Contribution]) -> Iterator[tuple[Contribution, dict[str, MetricValue]]]:
        """Rows of all steps' samples, one of each in turn as long as there is room; every step finishes when its last sample has
        been trained, while others still go on."""
        left = {step: list(step.samples) for step in steps}
        while left:
            row: dict[Contribution, list[int]] = {step: [] for step in left}
            room = self.limits.max_tokens
            for step in sorted(left, key=lambda step: -len(left[step])) * max(map(len, left.values())):
                lengths = step.batch.sample_offsets[1:] - step.batch.sample_offsets[:-1]
                if left[step] and lengths[left[step][0]] <= room:
                    room -= int(lengths[left[step][0]])
                    row[step].append(left[step].pop(0))
            self.train([(step, samples) for step, samples in row.items() if samples])
            for step in [step for step, samples in left.items() if not samples]:
                del left[step]
                yield step, finish([step], ALONE, step.run.scheduled())


def gradients(run: Run) -> dict[str, Tensor]:
    """Copies of what has accumulated."""
    return {
        name: parameter.grad.clone()
        for name, parameter in run.torch.optimizer.parameters.items()
        if parameter.grad is not None
    }
