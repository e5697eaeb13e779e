"""A learner in this process with one run in its first slot, as a trainer would have it, and whole steps of that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.fair_share import FairShare
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs import checkpoint
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import Run, RunProgress
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.transport.records import Batch
from tests.trainer.conftest import make_run_config
from tests.trainer.orchestrator_end import write_run

ALONE = Ranks(0, 1, torch.device("cpu"), None)


class LoneRun:
    """The run of `learner`."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._shares = FairShare(learner.config.max_tokens, learner.ranks.count)

    @property
    def run(self) -> Run:
        return self.learner.runs[0]

    @property
    def model(self) -> nn.Module:
        return self.learner.loaded.model

    def train(self, batch: Batch) -> dict[str, MetricValue]:
        """A whole step."""
        step: Contribution | None = self.learner.open_step(0, batch)
        while step is not None:
            self._shares.add(0, 1.0, {sample: step.length(sample) for sample in step.samples})
            while self._shares.left(0):
                self.learner.train_rows(self._shares.rows())
            step = self.learner.next_pass(0, self.run.scheduled())
        return self.learner.finish_step(0, self.run.scheduled())

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of what is trained."""
        return {name: parameter.detach().clone() for name, parameter in self.run.torch.optimizer.parameters.items()}


def make_lone_run(
    output_dir: Path,
    model: Path,
    trainer: dict[str, Any] | None = None,
    *,
    resume: bool = False,
    ranks: Ranks = ALONE,
    **training: Any,
) -> LoneRun:
    """From the model as given, or with `resume` from the newest checkpoint; `training` are keys of `[training]`."""
    allowed = [kind] if ":" in (kind := training.get("loss", {}).get("kind", "")) else []
    config = TrainerConfig(
        output_dir=output_dir, model=str(model), threads=1, allowed_imports=allowed, **(trainer or {})
    )
    manager = MultiRunManager(output_dir, config.max_runs, config.seed)
    learner = Learner(config, ranks, manager)
    write_run(make_run_config(output_dir, model, **training))
    assert manager.discover_runs()
    if resume:
        manager.registry.in_slot(0).progress = RunProgress(step=checkpoint.newest_step(output_dir, "default"))
    learner.synchronize()
    assert manager.registry.in_slot(0).failure is None
    return LoneRun(learner)
