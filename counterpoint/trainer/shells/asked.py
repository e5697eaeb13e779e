"""Carries out the items that an asker makes, one by one: contributions, updates, publications and saves.

Each has an answer, whether it succeeds or fails; a failure ends no run. Nothing else follows an update, except checkpoints of a
run that is driven over the wire.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

from counterpoint.run.items import UpdateValues
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.optimizer import KIND_OF, check_values
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.shells.shared import Shared
from counterpoint.trainer.taken_over import keep
from counterpoint.trainer.work.order import Due, Order
from counterpoint.trainer.work.sources import Item
from counterpoint.transport.records import Batch


class AskedShell:
    """The shell of runs whose items are asked for; it has the methods of `StepsShell`."""

    faults: ClassVar[tuple[type[Exception], ...]] = (Exception,)
    publishes_updates = False

    def __init__(self, shared: Shared, *, by_wire: bool) -> None:
        """An asker on the other side of a wire keeps its items since the last checkpoint, and asks again.

        So its runs have checkpoints at the interval and at the end, and their other contributions do not count alone once one has
        failed.
        """
        self._shared = shared
        self._by_wire = by_wire

    def publishes_first(self, run: Run) -> bool:
        """Returns False: what is published is asked for."""
        return False

    def order(self, run: Run) -> Order[Item]:
        """Returns the order of a run's items, from the last update on."""
        return Order(run.progress.item, time.monotonic())

    def make(self, run: Run) -> None:
        """Does nothing: all items arrive."""

    def batch(self, run: Run, number: int, due: Due[Item], batch: Batch) -> Batch:
        """Returns the batch as the run's next contribution."""
        return replace(batch, run_id=run.run_id, step=run.progress.step + 1)

    def finish(self, run: Run, item: Item, values: UpdateValues, spent: float) -> None:
        """Answers an item, whose samples are trained; their rows took `spent` seconds of all ranks. Raises any error."""
        began = time.perf_counter()
        found = self._answer(run, item)
        run.wire.spent = spent + (time.perf_counter() - began) * self._shared.learner.ranks.count
        self._shared.orders[run.slot].end(time.monotonic())
        if not item.answer.done():
            item.answer.set_result(found)

    def conclude(self) -> None:
        """Does nothing: each item is concluded when it is finished."""

    def fail(self, run: Run, item: Item, error: Exception) -> None:
        """Answers with the error."""
        contributes = item.batch is not None and not (item.objective and item.objective.forward_only)
        run.requests.spoiled |= self._by_wire and contributes
        self._shared.orders[run.slot].end(time.monotonic())
        if not item.answer.done():  # cancelled
            item.answer.set_exception(error)

    def poll(self, run: Run) -> bool:
        """Returns False, and does nothing: an asker alone says what happens to its run, and its items are no steps."""
        return False

    def begin_checkpoint(self, run: Run) -> None:
        """Begins a checkpoint of the last update, where the asker is at a wire; others ask for their saves."""
        if self._by_wire:
            self._shared.checkpoints.begin(run, published=False)

    def saved(self) -> None:
        """Does nothing."""

    def _answer(self, run: Run, item: Item) -> object:
        """Does what an asker wants beside a contribution, whose samples are trained; the last part gives the answer."""
        learner, slot, shared = self._shared.learner, run.slot, self._shared
        answer: object = None
        if not run.torch.intact:
            raise ValueError(f"an update of run {run.run_id} failed half-way: go on from the last save")
        if item.batch is not None:
            answer = learner.conclude(slot)
        run.requests.spoiled |= item.spoils
        if item.updates:
            answer = self._update(run, item)
        if item.publication is not None:
            assembled = learner.assemble(slot)
            with learner.kept_alive():
                answer = shared.broadcasters[slot].publish_as(item.publication, learner.loaded.model, run, assembled)
        if item.saves:
            shared.checkpoints.begin(run, published=False)
            shared.checkpoints.complete(run.run_id)
            answer = run.progress.step
            if item.saves == "kept" and run.progress.step:
                keep(shared.config.output_dir, run.run_id, run.progress.step)
        return answer

    def _update(self, run: Run, item: Item) -> dict[str, MetricValue]:
        shared = self._shared
        if run.requests.spoiled:  # by a client that asked for the update before it heard of the failure
            run.requests.spoiled = False
            shared.drop_contributions(run.slot)
            raise ValueError(
                f"a contribution since update {run.progress.step} has failed, so the others are dropped, too"
            )
        values = run.scheduled() if item.values is None else item.values
        check_values(values)
        if KIND_OF[type(values)] != run.torch.optimizer.kind:
            raise ValueError(f"values of {KIND_OF[type(values)]}; training.optimizer = {run.torch.optimizer.kind!r}")
        if not shared.learner.contributions.get(run.slot):
            raise ValueError(f"run {run.run_id} has no contribution since update {run.progress.step}")
        if run.finished:
            raise ValueError(f"run {run.run_id} is trained to its end, step {run.progress.step}")
        try:
            metrics = shared.learner.finish_step(run.slot, values)
            run.progress.item = shared.orders[run.slot].newest
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: the weights may be changed in part
                run.torch.intact = False
            raise
        if run.config.training.has_checkpoint(run.progress.step):
            self.begin_checkpoint(run)
        return metrics
