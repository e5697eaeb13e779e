"""What every rank holds and does alike: the model, the run being trained, and the two commands, admit and train.

Rank 0 is led by the wire (`trainer/train.py`) and leads the others: each command goes to all ranks first and is then carried out
by all, so that collective calls inside meet. A command is msgpack, `{"kind": ...}`; a batch travels as its own wire frames.
"""

from __future__ import annotations

import logging
from itertools import accumulate, pairwise
from pathlib import Path

import msgpack
import torch

from orchestrator.config import OrchestratorConfig
from trainer import checkpoint
from trainer.config import TrainerConfig
from trainer.lora import attach_adapter
from trainer.loss import load_loss
from trainer.metrics import MetricValue
from trainer.model import load_model, trainable_parameters
from trainer.optimizer import Optimizer
from trainer.packer import InvalidBatch, ModelLimits, check
from trainer.ranks import Ranks
from trainer.router_replay import RouterReplay
from trainer.runs import Run, RunRefused
from trainer.step import train_step
from transport import codec
from transport.atomic import as_bytes_view
from transport.records import Batch

logger = logging.getLogger(__name__)


class Learner:
    """One rank's part. The methods that take a command's arguments are called on rank 0; the other ranks call `follow`."""

    def __init__(self, config: TrainerConfig, ranks: Ranks) -> None:
        """Loads the model.

        Raises:
            ValueError: it cannot be loaded, or its router cannot be replayed.
        """
        torch.manual_seed(config.seed)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self.ranks = ranks
        self.model = load_model(config.model, config.dtype, ranks.device)
        self.replay = RouterReplay(self.model) if config.router_replay else None
        self.limits = ModelLimits(
            vocabulary=self.model.config.vocab_size,
            max_tokens=config.max_tokens,
            layers=self.replay.layers if self.replay else 0,
            experts=self.replay.experts if self.replay else 0,
            top_k=self.replay.top_k if self.replay else 0,
        )
        self.run: Run | None = None

    def admit(self, run_id: str, run_config: str, resume_step: int) -> Run:
        """Takes a run in, on every rank, at its checkpoint of `resume_step` (0: from the model as given).

        Raises:
            RunRefused: the configuration does not fit the model.
            CheckpointError: the checkpoint cannot be used.
        """
        self._command({"kind": "admit", "run_id": run_id, "config": run_config, "resume_step": resume_step})
        return self._admit(run_id, run_config, resume_step)

    def train(self, batch: Batch) -> dict[str, MetricValue]:
        """Trains the run on a batch, on every rank, and returns the metrics.

        Raises:
            InvalidBatch: the batch cannot be trained; the run is as before.
        """
        check(batch, self.limits)
        if self.ranks.count > 1:
            frames = [as_bytes_view(frame) for frame in codec.encode(batch)]
            self._command({"kind": "train", "sizes": [frame.nbytes for frame in frames]})
            self.ranks.share(b"".join(frames))
        return self._train(batch)

    def keep_alive(self) -> None:
        """Lets the other ranks know that there is nothing to do, before their wait for a command runs out."""
        self._command({"kind": "wait"})

    def stop(self) -> None:
        """Lets the other ranks end."""
        self._command({"kind": "stop"})

    def follow(self) -> None:
        """On every rank but 0: carries out rank 0's commands until it says stop."""
        while True:
            command = msgpack.unpackb(self.ranks.share(None))
            match command["kind"]:
                case "admit":
                    self._follow_admit(command["run_id"], command["config"], command["resume_step"])
                case "train":
                    frames = _split(self.ranks.share(None), command["sizes"])
                    self._follow_train(codec.decode(frames, self.config.transport.max_batch_bytes))
                case "stop":
                    return

    def _follow_admit(self, run_id: str, run_config: str, resume_step: int) -> None:
        try:
            self._admit(run_id, run_config, resume_step)
        except (RunRefused, checkpoint.CheckpointError) as error:  # rank 0 meets the same and acts on it
            logger.debug("rank %d: %s", self.ranks.index, error)

    def _follow_train(self, batch: Batch) -> None:
        try:
            self._train(batch)
        except InvalidBatch as error:  # as above
            logger.debug("rank %d: %s", self.ranks.index, error)

    def _command(self, command: dict[str, object]) -> None:
        if self.ranks.count > 1:
            self.ranks.share(msgpack.packb(command))

    def _admit(self, run_id: str, run_config: str, resume_step: int) -> Run:
        config = OrchestratorConfig.model_validate_json(run_config)
        training = config.training
        try:
            loss = load_loss(training.loss)
            if training.lora is not None:
                attach_adapter(self.model, training.lora, self.config.seed)
        except ValueError as error:
            raise RunRefused(str(error)) from error
        optimizer = Optimizer(trainable_parameters(self.model), training, config.steps)
        run = Run(0, run_id, config, optimizer, loss)
        if resume_step:
            checkpoint.load(run, self.config.output_dir, resume_step)
        self.run = run
        return run

    def _train(self, batch: Batch) -> dict[str, MetricValue]:
        assert self.run is not None
        return train_step(
            self.model, self.replay, self.limits, self.run, batch, self.ranks, self._export_directory(self.run)
        )

    def _export_directory(self, run: Run) -> Path | None:
        exported = run.config.training.token_export
        return self.config.output_dir / "trainer" / "tokens" / run.run_id if exported else None


def _split(data: bytes, sizes: list[int]) -> list[memoryview]:
    view = memoryview(data)
    ends = [0, *accumulate(sizes)]
    return [view[start:end] for start, end in pairwise(ends)]
