"""Trains the steps of one run again, in this process, by the trainer's own learner, from a kept checkpoint on.

A run of several ranks is trained by one, and runs that shared rows are trained alone: their sums are then added in another order.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from counterpoint.inference.digest import Digest, digests_of
from counterpoint.run.changes import LearningRates
from counterpoint.trainer.again.kept import Kept, NotKept
from counterpoint.trainer.broadcast import own_memory
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.fair_share import FairShare, Row
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.lora.multi_lora import digest_adapter
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.model.load import choose_device
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs import control_files
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import Run, RunProgress
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.transport.records import Batch


class RunAgain:
    """A run after the step of a kept checkpoint."""

    def __init__(self, config: TrainerConfig, kept: Kept, directory: Path) -> None:
        """Loads the model and the checkpoint. `config` is that of the run's trainer, `directory` an empty one to work in.

        Raises:
            NotKept: the checkpoint cannot be used, or the run not be trained as it was.
            ValueError: the model cannot be loaded.
        """
        kept.lay_out(directory)
        alone = {"processes": 1, "nodes": 1, "sharding": False, "context_parallel": 1, "expert_parallel": 1}
        config = config.model_copy(update={"output_dir": directory, "max_tokens": config.row_tokens} | alone)
        self.kept = kept
        manager = MultiRunManager(directory, config.max_runs, config.seed)
        self.learner = Learner(config, Ranks(0, 1, choose_device(config.device), None), manager)
        self._rates = LearningRates(control_files.run_directory(kept.output_dir, kept.run_id))
        manager.discover_runs()
        if (slot := manager.registry.slot_of(kept.run_id)) is None:
            reason = manager.registry.refused.get(kept.run_id, "it has no control/orch.toml")
            raise NotKept(f"run {kept.run_id} cannot be trained again: {reason}")
        found = manager.registry.in_slot(slot)
        found.progress = RunProgress(kept.first)
        self.learner.synchronize()
        if found.descriptor is not None:
            os.close(found.descriptor)
        if found.failure is not None:
            raise NotKept(f"run {kept.run_id} cannot be trained again: {found.failure}")
        self.run: Run = found

    def train(self, batch: Batch) -> dict[str, MetricValue]:
        """Trains a whole step; returns its metrics. Raises `InvalidBatch`."""
        slot, values = self.run.slot, self.run.scheduled(self._rate())
        step: Contribution | None = self.learner.open_step(slot, batch)
        while step is not None:
            for row in self.rows(step):
                self.learner.train_rows([row])
            step = self.learner.next_pass(slot, values)
        return self.learner.finish_step(slot, values)

    def rows(self, step: Contribution) -> list[Row]:
        """Returns the rows of a step's current pass, as a trainer plans them that has no other run."""
        shares = FairShare(self.learner.config.row_tokens, 1)
        shares.add(self.run.slot, 1.0, {each: step.length(each) for each in step.samples})
        rows: list[Row] = []
        while shares.left(self.run.slot):
            rows += shares.rows()
        return rows

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns copies of what is trained, float32, in the host's memory."""
        optimizer = self.run.torch.optimizer
        return {name: optimizer.master(name).to("cpu", copy=True) for name in optimizer.parameters}

    def digests(self) -> dict[str, Digest]:
        """Returns the digests of the weights that a broadcast of them has, by precision."""
        manager, precisions = self.learner.manager, self.learner.config.server_dtypes
        if self.run.config.training.lora is None:
            return digests_of(own_memory(self.learner.loaded.model.state_dict()), precisions)
        tensors = {
            name: tensor.cpu().clone().contiguous()
            for name, tensor in manager.get_state_dict_for_run(self.run.slot).items()
        }
        return digest_adapter(tensors, manager.scaling_factors[self.run.slot], precisions)

    def _rate(self) -> float:
        rate = self._rates.at(self.run.progress.step + 1)
        return self.run.config.training.learning_rate if rate is None else rate
