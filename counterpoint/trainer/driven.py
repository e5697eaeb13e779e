"""A driven run: a program asks, one by one, for its contributions, updates, publications and saves.

It has a learner of its own, on one rank or several, and no orchestrator, wire or server. What is asked for happens before the
call returns. After a kill, or any other end, the run goes on from its last save: what was asked for since is asked for again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.run.items import Objective, UpdateValues
from counterpoint.run.trained import TrainedRun
from counterpoint.trainer import ranks
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.loop import Trainer
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.model.load import choose_device
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.runs import checkpoint
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.work.contribution import StepOutcome
from counterpoint.trainer.work.order import Order
from counterpoint.trainer.work.sources import Item, NoWire
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.records import Batch
from counterpoint.transport.validation import validate


class LocalRun:
    """The run, on rank 0; `drive` makes it."""

    def __init__(self, learner: Learner, run_id: str) -> None:
        """Has the run admitted, whose directory is there. Raises `ValueError` if it cannot be trained."""
        self._learner = learner
        self._trainer = Trainer(learner, NoWire(), {run_id: None})
        self._trainer.turn()
        registry = learner.manager.registry
        if (run := registry.taking(run_id)) is None:
            raise ValueError(registry.refused.get(run_id, f"run {run_id} has no slot"))
        self._run = run
        self._idle = ExitStack()
        """Keeps the other ranks from waiting in vain while nothing is asked for."""
        self._idle.enter_context(learner.kept_alive())

    @property
    def step(self) -> int:
        """How many updates the weights have had."""
        return self._run.progress.step

    @property
    def item(self) -> int:
        """The number of the item that was carried out last; after a resume, of the update that was saved last."""
        return self._order().done

    def ask(self, item: Item, number: int | None = None) -> Future[Any]:
        """Asks for an item, and has all items carried out that are due by their numbers; returns the item's answer.

        Items are numbered from 1, the contributions, updates, publications and saves below among them. Without a number it is the
        next. One whose predecessors are missing waits for them, until another is asked for under its number, which cancels its
        answer; one that was carried out before has the answer None.

        Raises `InvalidBatch`, with nothing asked for, and `ValueError` if the run has left its slot, the item was asked for
        before, or the run was saved without numbers of its items and nothing was asked for without a number since. After any
        other error, such as `KeyboardInterrupt`, `item` says after which to go on: an update that was made is not made again,
        and contributions since the last one, if they were dropped, are.
        """
        order = self._order()
        if item.batch is not None:
            try:
                validate(
                    replace(item.batch, run_id=self._run.run_id, step=self.step + 1), whole_routing=False
                )  # as a wire does
            except ValueError as error:
                raise InvalidBatch(str(error)) from error
        progress = self._run.progress
        if number is not None and progress.step and not progress.item:
            raise ValueError(
                f"item {number}: the {progress.step} updates that run {self._run.run_id} was saved with have no numbers, as an "
                "orchestrator, data or an older version trained them. Ask for further items without a number until the next "
                "update, or begin in another output_dir"
            )
        number = order.newest + 1 if number is None else number
        if number <= order.newest:
            if not item.answer.done():
                item.answer.set_result(None)
            return item.answer
        if item.answer.done():
            raise ValueError(f"item {number} was asked for under another number, or cancelled; make another `Item`")
        if (former := order.waiting.get(number)) not in (None, item):
            former.answer.cancel()
        order.ask(number, item)
        self._idle.close()
        try:
            while self._order().taken is not None or order.has_next:
                self._trainer.turn()
        except BaseException:
            self._interrupt(order)
            raise
        finally:
            self._idle.enter_context(self._learner.kept_alive())
        return item.answer

    def contribute(self, batch: Batch, objective: Objective | None = None) -> StepOutcome:
        """Adds the gradients of a batch, for the configured loss or `objective`, to those since the last update.

        The batch's own number and run do not count.

        Raises `InvalidBatch`: the batch is refused with nothing changed; or it failed while it was trained, and no contribution
        since the last update is left.
        """
        return self.ask(Item(batch, objective)).result()

    def update(self, values: UpdateValues | None = None) -> dict[str, MetricValue]:
        """Updates the weights by the gradients since the last update, with these values or those of the configured schedule.

        Raises:
            InvalidBatch: the gradient is not finite, or memory was lacking; no contribution is left.
            ValueError: there is no contribution, all steps of the run are trained, or the values are of another optimizer or none
                that it can use.
        """
        return self.ask(Item(updates=True, values=values)).result()

    def publish(self, name: str) -> Path:
        """Publishes the weights of the last update under a name until `release`; returns the directory, for servers.

        It then has these instead of former weights. Raises `BrokenWeights`, `OSError`, and `ValueError` for what is no name.
        """
        return self.ask(Item(publication=name)).result()

    def release(self, name: str) -> None:
        """Removes published weights, if there are any of that name. Raises `OSError`, and `ValueError` for what is no name."""
        self._trainer.shared.broadcasters[self._run.slot].release(name)

    def save(self) -> int:
        """Saves weights and optimizer of the last update, whether published or not; returns its step once it is durable.

        Raises `OSError` or `SafetensorError`; earlier saves are then intact.
        """
        return self.ask(Item(saves="newest")).result()

    def close(self) -> None:
        """Ends the run here. What was not saved is lost."""
        self._idle.close()
        self._trainer.close()
        for run in self._learner.manager.registry.at():  # that of a run which has left is closed
            if run.descriptor is not None:
                os.close(run.descriptor)

    def _order(self) -> Order[Item]:
        registry, run_id = self._learner.manager.registry, self._run.run_id
        if registry.taking(run_id) is not self._run:
            raise ValueError(registry.refused.get(run_id, f"run {run_id} has left its slot"))
        return self._trainer.shared.orders[self._run.slot]

    def _interrupt(self, order: Order[Item]) -> None:
        """Leaves what is carried out so that nothing counts twice, or is left out, when it is asked for again."""
        if order.taken is None:
            return
        if self._run.progress.item == order.newest:  # its update was made
            order.end(time.monotonic())
            return
        contributes = order.taken.batch is not None
        self._trainer.shared.drop(self._run.slot)
        if contributes:  # with it, all contributions since the last update were dropped
            order.done = self._run.progress.item


@contextmanager
def drive(config: TrainerConfig, described: TrainedRun) -> Iterator[LocalRun | None]:
    """Yields a run in a job's directory, with `config.resume` as it was saved last, and ends it after the block.

    Of several ranks each calls it; rank 0 drives, and the others yield None once that has ended.

    Raises `ValueError` for a run that cannot be trained, or a directory that holds a run where none is resumed.
    """
    if described.training.updates_per_step > 1:
        raise ValueError("training.updates_per_step: a driven run has the updates that are asked for; remove it")
    if not config.resume and (found := checkpoint.holds_any(config.output_dir)) is not None:
        raise ValueError(f"{found} is from an earlier training; set resume, or use another output_dir")
    with ranks.join(config, choose_device(config.device)) as group:
        learner = Learner(config, group, MultiRunManager(config.output_dir, config.max_runs, config.seed))
        if group.index > 0:
            learner.follow()
            yield None
            return
        control = run_directory(config.output_dir, described.run_id) / "control"
        control.mkdir(parents=True, exist_ok=True)
        table = described.model_dump(mode="json", exclude_none=True)
        write_atomically(control / "orch.toml", tomli_w.dumps(table).encode())
        with ExitStack() as stack:
            stack.callback(learner.stop)
            yield stack.enter_context(closing(LocalRun(learner, described.run_id)))
