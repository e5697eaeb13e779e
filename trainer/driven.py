"""A driven run: a program asks, one by one, for its contributions, updates, publications and saves.

It has a learner of its own, on one rank or several, and no orchestrator, wire or server. What is asked for happens before the
call returns. After a kill, or any other end, the run goes on from its last save: what was asked for since is asked for again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import tomli_w

from counterpoint.run.trained import TrainedRun
from counterpoint.trainer import ranks
from counterpoint.trainer.broadcast import Broadcaster
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.fair_share import FairShare
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.model.load import choose_device
from counterpoint.trainer.optimizer import KIND_OF, AdamW, UpdateValues
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.runs import checkpoint
from counterpoint.trainer.runs.checkpoints import Checkpoints
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import Progress, Run
from counterpoint.trainer.work.contribution import Objective, Outcome
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.records import Batch
from counterpoint.transport.telemetry.spans import SpanLog
from counterpoint.transport.validation import validate


class DrivenRun:
    """The run, on rank 0; `drive` makes it."""

    def __init__(self, learner: Learner, run: Run) -> None:
        """`learner` has made the run."""
        config = learner.config
        self._learner = learner
        self._run = run
        self._shares = FairShare(config.row_tokens, learner.ranks.rows)
        self._broadcaster = Broadcaster(
            learner.manager, config.output_dir, run.run_id, config.model, config.keep_broadcasts,
            precisions=config.server_dtypes,
        )  # fmt: skip
        self._checkpoints = Checkpoints(
            config.output_dir, config.keep_checkpoints, learner.kept_alive, lambda _: None,
            SpanLog(config.output_dir / "trainer" / "spans.jsonl", "trainer"),
        )  # fmt: skip
        self._idle = ExitStack()
        """Keeps the other ranks from waiting in vain while nothing is asked for."""
        self._idle.enter_context(learner.kept_alive())

    @property
    def step(self) -> int:
        """How many updates the weights have had."""
        return self._run.progress.step

    def contribute(self, batch: Batch, objective: Objective | None = None) -> Outcome:
        """Adds the gradients of a batch, for the configured loss or `objective`, to those since the last update.

        The batch's own number and run do not count.

        Raises `InvalidBatch`: the batch is refused with nothing changed; or it failed while it was trained, and no contribution
        since the last update is left.
        """
        with self._asked() as learner:
            slot, own = self._run.slot, replace(batch, run_id=self._run.run_id, step=self.step + 1)
            try:
                validate(own)  # as a wire does; another rank would end at what does not fit
            except ValueError as error:
                raise InvalidBatch(str(error)) from error
            step = learner.open_step(slot, own, objective)
            try:
                while True:
                    self._shares.add(slot, 1.0, {sample: step.length(sample) for sample in step.samples})
                    while self._shares.left(slot):
                        learner.train_rows(self._shares.rows())
                    if learner.next_pass(slot, self._run.scheduled()) is None:  # it has measured
                        return learner.conclude(slot)
            except BaseException:
                self._shares.remove(slot)
                learner.drop_step(slot)
                raise

    def update(self, values: UpdateValues | None = None) -> dict[str, MetricValue]:
        """Updates the weights by the gradients since the last update, with these values or those of the configured schedule.

        Raises:
            InvalidBatch: the gradient is not finite, or memory was lacking; no contribution is left.
            ValueError: there is no contribution, all steps of the run are trained, or the values are of another optimizer or none
                that it can use.
        """
        values = self._run.scheduled() if values is None else values
        _check(values)
        if KIND_OF[type(values)] != self._run.optimizer.kind:
            raise ValueError(f"values of {KIND_OF[type(values)]}; training.optimizer = {self._run.optimizer.kind!r}")
        if not self._learner.contributions.get(self._run.slot):
            raise ValueError(f"run {self._run.run_id} has no contribution since update {self.step}")
        if self._run.finished:
            raise ValueError(f"run {self._run.run_id} is trained to its end, step {self.step}")
        with self._asked() as learner:
            return learner.finish_step(self._run.slot, values)

    def publish(self, name: str) -> Path:
        """Publishes the weights of the last update under a name until `release`; returns the directory, for servers.

        It then has these instead of former weights. Raises `BrokenWeights`, `OSError`, and `ValueError` for what is no name.
        """
        with self._asked() as learner:
            assembled = learner.assemble(self._run.slot)
            with learner.kept_alive():
                return self._broadcaster.publish_as(name, learner.loaded.model, self._run, assembled)

    def release(self, name: str) -> None:
        """Removes published weights, if there are any of that name. Raises `OSError`, and `ValueError` for what is no name."""
        self._broadcaster.release(name)

    def save(self) -> int:
        """Saves weights and optimizer of the last update, whether published or not; returns its step once it is durable.

        Raises `OSError` or `SafetensorError`; earlier saves are then intact.
        """
        with self._asked():
            self._checkpoints.begin(self._run, published=False)
            self._checkpoints.complete()
        return self.step

    def close(self) -> None:
        """Ends the run here. What was not saved is lost."""
        self._idle.close()
        self._checkpoints.close()
        if self._run.descriptor is not None:
            os.close(self._run.descriptor)

    @contextmanager
    def _asked(self) -> Iterator[Learner]:
        """Raises `ValueError` if nothing can be asked for any more."""
        if not self._run.intact:
            raise ValueError(f"an update of run {self._run.run_id} failed half-way: go on from the last save")
        self._idle.close()
        try:
            yield self._learner
        finally:
            self._idle.enter_context(self._learner.kept_alive())


def _check(values: UpdateValues) -> None:
    """Raises `ValueError` for values that would put what is no number, or a step uphill, into the weights."""
    momenta = values.betas if isinstance(values, AdamW) else (values.momentum,)
    above_0 = (values.clip, values.eps) if isinstance(values, AdamW) else (values.clip,)
    fits = 0 <= values.rate < math.inf and 0 <= values.decay < math.inf
    if not (fits and all(0 <= each < 1 for each in momenta) and all(each > 0 for each in above_0)):
        raise ValueError(
            f"{values}: expected a rate and a decay of 0 or more, betas or a momentum from 0 to below 1, clip and eps above 0"
        )


@contextmanager
def drive(config: TrainerConfig, described: TrainedRun) -> Iterator[DrivenRun | None]:
    """Yields a run in a job's directory, with `config.resume` as it was saved last, and ends it after the block.

    Of several ranks each calls it; rank 0 drives, and the others yield None once that has ended.

    Raises `ValueError` for a run that cannot be trained, or a directory that holds a run where none is resumed.
    """
    training = described.training
    for name, is_set in {
        "updates_per_step": training.updates_per_step > 1,
        "start_from": training.start_from is not None,
        "reference": training.reference_is_start,
    }.items():
        if is_set:
            raise ValueError(
                f"training.{name} cannot be as it is in a driven run, which has no steps of its own; remove it"
            )
    if not config.resume and (found := checkpoint.holds_any(config.output_dir)) is not None:
        raise ValueError(f"{found} is from an earlier training; set resume, or use another output_dir")
    with ranks.join(config, choose_device(config.device)) as group:
        learner = Learner(config, group, MultiRunManager(config.output_dir, config.max_runs, config.seed))
        if group.index > 0:
            learner.follow()
            yield None
            return
        with ExitStack() as stack:
            stack.callback(learner.stop)
            yield stack.enter_context(closing(DrivenRun(learner, _admitted(learner, described))))


def _admitted(learner: Learner, described: TrainedRun) -> Run:
    """Writes the run's directory, and has it made on all ranks as it was saved last. Raises `ValueError`."""
    output_dir, run_id, manager = learner.config.output_dir, described.run_id, learner.manager
    control = run_directory(output_dir, run_id) / "control"
    for directory in (control, output_dir / "trainer"):
        directory.mkdir(parents=True, exist_ok=True)
    table = described.model_dump(mode="json", exclude_none=True)
    write_atomically(control / "orch.toml", tomli_w.dumps(table).encode())
    manager.discover_runs([run_id])
    if (slot := manager.registry.slot_of(run_id)) is None:
        raise ValueError(manager.registry.refused.get(run_id, f"run {run_id} has no slot"))
    run = manager.registry.in_slot(slot)
    run.progress = Progress(checkpoint.newest_step(output_dir, run_id))
    learner.synchronize()
    if run.failure is not None:
        raise ValueError(run.failure)
    return run
