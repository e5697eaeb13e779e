"""Carries out the steps of a run: each item is a contribution and a scheduled update, of an orchestrator or of data.

Then follow the weights, the metrics line, and (at the interval and at the end) the checkpoint, which a thread writes while
training goes on. A step that fails ends its run.
"""

from __future__ import annotations

import logging
import math
import time
from typing import ClassVar, NamedTuple

from counterpoint.run.changes import JournalError
from counterpoint.run.items import UpdateValues
from counterpoint.trainer.broadcast import Assembled
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.runs.copies import CopyRefused, accepted
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.shells.shared import Shared
from counterpoint.trainer.telemetry.step_times import StepTimes
from counterpoint.trainer.work.order import Due, Order
from counterpoint.trainer.work.sources import Data, Item
from counterpoint.transport.records import Batch

logger = logging.getLogger(__name__)


class _Updated(NamedTuple):
    """A run whose step is not concluded yet."""

    run: Run
    metrics: dict[str, MetricValue]
    times: StepTimes
    closed: float
    """The time of the update, on the monotonic clock."""


class StepsShell:
    """The shell of runs of steps; without `data`, of those whose batches come by the wire.

    It has the methods of `AskedShell`, and the loop asks one or the other.
    """

    faults: ClassVar[tuple[type[Exception], ...]] = (InvalidBatch, JournalError)
    """The errors of an item that concern its run alone, unless they are fatal."""

    def __init__(self, shared: Shared, data: Data | None = None) -> None:
        self._shared = shared
        self._data = data
        self._updated: list[_Updated] = []

    @property
    def publishes_updates(self) -> bool:
        """Whether each update is published. Of data only those with a checkpoint are, before it: no server waits for others."""
        return self._data is None

    def publishes_first(self, run: Run) -> bool:
        """Returns whether a run's weights are published when it is admitted."""
        return self._data is None or run.progress.step > 0

    def order(self, run: Run) -> Order[Item]:
        """Returns the order of a run's items, from its progress on. What comes by the wire counts with its commit only."""
        committed = 0 if self._data is None else math.inf
        return Order(run.progress.step, time.monotonic(), committed=committed, last=run.config.last_step)

    def make(self, run: Run) -> None:
        """Has the next item made, of data; others arrive."""
        order = self._shared.orders[run.slot]
        number = order.newest + 1
        if self._data is None or number > order.last or number in order.waiting:
            return
        if (batch := self._data.make(number)) is not None:
            order.ask(number, Item(batch))
        else:
            order.last = order.newest

    def batch(self, run: Run, number: int, due: Due[Item], batch: Batch) -> Batch | None:
        """Returns the batch as the run's next contribution; None if a copy of another run took the place of its update.

        The checkpoint of a copy begins at once. Raises `InvalidBatch` or `CopyRefused`.
        """
        shared = self._shared
        if due.counts:
            shared.sessions.taken(run, number, batch)
        if accepted(shared.config.output_dir, run.run_id, number) is None:
            return batch
        if not due.counts:
            raise CopyRefused("another run's state takes its place")
        shared.drop_contributions(run.slot)
        copy = shared.learner.copy_step(run.slot, number)
        metrics: dict[str, MetricValue] = {"copied/run": copy.source, "copied/step": copy.source_step}
        self._conclude(run, metrics, None, time.monotonic(), durable=True)
        return None

    def finish(self, run: Run, item: Item, values: UpdateValues, spent: float) -> None:
        """Updates the run with these values; `conclude` follows. Raises one of `faults`."""
        times = self._shared.learner.times(run.slot)
        metrics = self._shared.learner.finish_step(run.slot, values)
        self._updated.append(_Updated(run, metrics, times, time.monotonic()))

    def conclude(self) -> None:
        """Does what follows the updates since the last call: the runs that end a step with one row are probed together."""
        updated, self._updated = self._updated, []
        probed = {} if self._data is not None else self._shared.probe([each.run for each in updated])
        for each in updated:
            self._conclude(*each, assembled=probed.get(each.run.slot))

    def fail(self, run: Run, item: Item, error: Exception) -> None:
        """Ends the run, of which an item has failed."""
        self._shared.evict(run, f"step {run.progress.step + 1}: {error}")

    def poll(self, run: Run) -> bool:
        """Carries out requests by files; returns whether there were any."""
        return self._shared.requests.poll(run, self._shared.orders[run.slot].newest)

    def begin_checkpoint(self, run: Run) -> None:
        """Begins a checkpoint of the run's newest step, if there is a published one to save."""
        if self._data is None or (run.torch.intact and run.progress.step and self._shared.publish(run)):
            self._shared.checkpoints.begin(run)

    def saved(self) -> None:
        """Notes that a checkpoint is durable."""
        if self._data is not None:
            self._data.on_saved()

    def _conclude(
        self,
        run: Run,
        metrics: dict[str, MetricValue],
        times: StepTimes | None,
        closed: float,
        assembled: Assembled | None = None,
        durable: bool = False,
    ) -> None:
        """Publishes and reports what a step has made of the run, and begins its checkpoint if it is due, or `durable`."""
        shared = self._shared
        order = shared.orders[run.slot]
        metrics["phase/wait"] = order.waited
        order.end(closed)
        run.progress.batch = run.wire.batch
        if self._data is None and not shared.publish(run, assembled=assembled):
            return
        shared.sessions.published(run)
        published = time.monotonic()
        metrics["phase/broadcast"] = published - closed
        self._report(run, metrics)
        if durable or run.finished or run.config.training.has_checkpoint(run.progress.step):
            self.begin_checkpoint(run)
            if shared.registry.taking(run.run_id) is None:  # its weights could not be published
                return
        shared.telemetry.end_step(run, times, order.waited, closed, published)
        shared.registry.advance(run.slot, time.monotonic())

    def _report(self, run: Run, metrics: dict[str, MetricValue]) -> None:
        step = run.progress.step
        line: dict[str, MetricValue] = {"run_id": run.run_id, "step": step, "time": time.time()}
        line |= metrics if self._data is None else self._data.line(step, metrics)
        self._shared.metrics.append(line)
        self._shared.endpoint.publish(run.run_id, line)
        if "copied/run" in metrics:
            logger.info(
                "run %s step %d: a copy of step %s of run %s",
                run.run_id, step, metrics["copied/step"], metrics["copied/run"],
            )  # fmt: skip
            return
        mismatch = f", mismatch_kl {line['mismatch_kl']:.3g}" if "mismatch_kl" in line else ""
        logger.info(
            "run %s step %d of %s: loss %.4g%s, grad_norm %.3g, %.0f tokens/s",
            run.run_id, step, run.config.last_step, line["loss"], mismatch, line["grad_norm"], line["tokens_per_second"],
        )  # fmt: skip
        if self._data is None:
            self._shared.mismatches.take(run.run_id, step, float(metrics["mismatch_kl"]), run.mismatches)
