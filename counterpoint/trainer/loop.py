"""The trainer: receives the batches of its runs, trains them side by side, publishes weights, and writes checkpoints.

`Trainer.turn` reads like a table of contents. A run is admitted when its orchestrator has connected and a slot is free: its state
is loaded from the newest checkpoint, its weights are published, and only then `READY` is sent
(`counterpoint/trainer/shells/entrance.py`). A step is opened when its batch is committed (some of it is computed before:
`counterpoint/trainer/work/order.py`), trained in rows that it may share with others, and finished by itself. What follows is the
work of one of two shells over this loop: that of steps (`counterpoint/trainer/shells/steps.py`), or that of items which are asked
for one by one (`counterpoint/trainer/shells/asked.py`). Once a checkpoint is durable, the steps that the oldest kept one makes
durable are acknowledged. A kill between any two of these repeats the step on resume and loses nothing (`docs/contracts.md`). An
error of one run ends that run alone.

Next in the reading order of `docs/architecture.md`: `counterpoint/trainer/work/step.py`.
"""

from __future__ import annotations

import logging
import time

from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.runs import checkpoint
from counterpoint.trainer.runs.copies import CopyRefused
from counterpoint.trainer.runs.record import TAKES_BATCHES, RunStage
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.shells.asked import AskedShell
from counterpoint.trainer.shells.entrance import Entrance
from counterpoint.trainer.shells.shared import Shared
from counterpoint.trainer.shells.steps import StepsShell
from counterpoint.trainer.telemetry.endpoint import TrainerEndpoint
from counterpoint.trainer.work.order import Due
from counterpoint.trainer.work.sources import Item, Sources
from counterpoint.transport.process.notify import StatusLine
from counterpoint.transport.process.stop_requests import StopSignals
from counterpoint.transport.telemetry.start_phases import OVER, enter
from counterpoint.transport.wires.base import BatchReceiver

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Longest wait for a message before checking for a stop request."""

WRITING_POLL_SECONDS = 0.05
"""The same while a checkpoint is being written: what it makes durable is acknowledged soon after."""

DISCOVERY_SECONDS, PROMPT_DISCOVERY_SECONDS = 1.0, 0.1
"""The times between two discoveries: when nothing is known to have changed, and after a `HELLO` or `BYE`."""

DISCOVERY_SHARE, LONGEST_PAUSE_SECONDS = 0.1, 5.0
"""The share of its time that the loop spends on discoveries without news, at which a thousand runs take long, unless the times
between them became longer than these seconds."""

EVICTED = 3
"""Exit code, equal to the orchestrator's, so that a job's does not depend on which of them ends first."""

WAITING_REPORT_SECONDS = 30.0
"""The time between log lines about what is awaited."""


class Trainer:
    """Rank 0's loop between the wire, the learner and the disk."""

    def __init__(
        self,
        learner: Learner,
        receiver: BatchReceiver,
        sources: Sources | None = None,
        endpoint: TrainerEndpoint | None = None,
    ) -> None:
        """Registers its hooks with the learner's manager; with `resume`, reads which runs are finished.

        Without `endpoint` nothing is shown to Prometheus.
        """
        config = self._config = learner.config
        self._learner = learner
        self._registry = learner.manager.registry
        self._sources = sources or {}
        shared = self.shared = Shared(learner, receiver, endpoint or TrainerEndpoint(config), self._on_durable)
        self._orchestrated, self._driven = StepsShell(shared), AskedShell(shared, by_wire=True)
        self._shells: dict[str, StepsShell | AskedShell] = {
            run_id: AskedShell(shared, by_wire=False) if data is None else StepsShell(shared, data)
            for run_id, data in self._sources.items()
        }
        """The shells of the runs without an orchestrator."""
        self._entrance = Entrance(shared, self._shell)
        self._status = StatusLine()
        self._discovered = self._look_seconds = 0.0
        self._reported = self._kept_alive = time.monotonic()
        if config.resume:
            checkpoint.set_aside_deleted(config.output_dir)
            for finished in checkpoint.finished_runs(config.output_dir):
                self._registry.finished_before(finished.run_id, time.monotonic() + finished.trainer_timeout_seconds)

    def _shell(self, run: Run) -> StepsShell | AskedShell:
        return self._shells.get(run.run_id) or (self._driven if run.config.driven else self._orchestrated)

    def serve(self, stop: StopSignals) -> int:
        """Trains until the runs have ended, or `stop`; returns the exit code."""
        shared = self.shared
        while not (stop.count or self._over()):
            self.turn()
        for slot, order in shared.orders.items():  # no commit is heard from here on
            if order.taken is None:
                shared.drop(slot)
        while shared.open_slots:
            self._train_rows()
            self._finish_items()
        for run in self._learner.runs.values():
            self._shell(run).begin_checkpoint(run)
        shared.checkpoints.complete()
        steps = ", ".join(f"{run.run_id} at step {run.progress.step}" for run in self._learner.runs.values())
        logger.info("the trainer ends%s", f": {steps}" if steps else "")
        if stop.count and not self._over():
            return stop.exit_code
        return EVICTED if self._registry.all_evicted() else 0

    def turn(self) -> None:
        """Makes one pass of the loop."""
        shared = self.shared
        self._receive()
        shared.checkpoints.settle()
        self._discover_if_due()
        self._begin_items()
        self._train_rows()
        self._finish_items()
        work = {slot: (order.open, len(order.waiting)) for slot, order in shared.orders.items()}
        shared.telemetry.settle(work)
        shared.endpoint.note(self._registry, shared.sessions.outages, work)
        self._status.show(self._described())

    def close(self) -> None:
        """Ends the thread that writes checkpoints."""
        self.shared.checkpoints.close()
        self.shared.telemetry.close()

    def _over(self) -> bool:
        shared = self.shared
        expected = self._config.stay or self._registry.queue or shared.sessions.has_news or shared.checkpoints.busy
        return not expected and (self._registry.over(time.monotonic()) or self._have_no_more())

    def _have_no_more(self) -> bool:
        """Returns whether all runs without an orchestrator are refused, which nobody mends, or have had their last items."""
        slots, orders = {run_id: self._registry.slot_of(run_id) for run_id in self._sources}, self.shared.orders
        return bool(slots) and all(
            run_id in self._registry.refused if slot is None else slot in orders and orders[slot].is_over
            for run_id, slot in slots.items()
        )

    def _receive(self) -> None:
        for run in self._registry.at(RunStage.TRAINING):
            self._shell(run).make(run)
        shared = self.shared
        orders = shared.orders.items()
        has_work = any(each.taken is not None or each.has_next or shared.shares.left(slot) for slot, each in orders)
        longest = WRITING_POLL_SECONDS if shared.checkpoints.busy else POLL_SECONDS
        patience = 0.0 if has_work else min(max(self._discovery_due() - time.monotonic(), 0.0), longest)
        for run, reason in shared.sessions.receive(patience):
            shared.evict(run, reason)
        if not has_work:
            self._report_waiting()

    # --- runs ---

    def _discovery_due(self) -> float:
        prompt = self.shared.slots_change or self.shared.sessions.has_news
        longer = min(self._look_seconds / DISCOVERY_SHARE, LONGEST_PAUSE_SECONDS)
        return self._discovered + (PROMPT_DISCOVERY_SECONDS if prompt else max(DISCOVERY_SECONDS, longer))

    def _discover_if_due(self) -> None:
        now = time.monotonic()
        if now < self._discovery_due():
            return
        self.shared.slots_change = False
        has_news = self._entrance.discover({*self._registry.present(now), *self._sources})
        for run in self._registry.at(RunStage.TRAINING, RunStage.FINISHED):
            has_news |= self._shell(run).poll(run)
        self.shared.sessions.answer()
        self._discovered = time.monotonic()
        if not has_news:
            self._look_seconds = self._discovered - now

    def _on_durable(self, run_id: str) -> None:
        """Acknowledges what a new checkpoint makes durable, and answers who waited for it, unless its run has left."""
        if (run := self._registry.taking(run_id)) is None:
            return
        shared, shell = self.shared, self._shell(run)
        run.durable_step = shared.checkpoints.durable_step(run)
        shared.sessions.durable(run)
        # The orchestrator of a finished run hears of the end only now, and has the whole time for its BYE.
        self._registry.advance(run.slot, time.monotonic())
        shared.requests.forget(run)
        shell.poll(run)
        shell.saved()

    # --- items ---

    def _begin_items(self) -> None:
        for run in self._registry.at(*TAKES_BATCHES):
            order = self.shared.orders[run.slot]
            due = order.next(time.monotonic())
            if due.drops:
                self.shared.drop_contributions(run.slot)
            if due.item is not None:
                try:
                    self._begin(run, order.done + 1, due, due.item)
                except (InvalidBatch, CopyRefused) as error:
                    if due.counts:
                        self._shell(run).fail(run, due.item, error)
                    else:  # the commit may be of another batch
                        logger.debug("run %s: step %d begins with its commit: %s", run.run_id, order.done + 1, error)
                        order.refuse()

    def _begin(self, run: Run, number: int, due: Due[Item], item: Item) -> None:
        """Opens the contribution of an item, if it has one. Raises `InvalidBatch` or `CopyRefused`."""
        batch = None if item.batch is None else self._shell(run).batch(run, number, due, item.batch)
        if batch is not None and not due.has_begun:
            self.shared.share(run, self._learner.open_step(run.slot, batch, item.objective))

    def _train_rows(self) -> None:
        rows = self.shared.shares.rows()
        if any(rows):
            enter("first update")
            began = time.perf_counter()
            self._learner.train_rows(rows)
            self.shared.spend(rows, time.perf_counter() - began)
            self.shared.endpoint.rows_trained(sum(map(bool, rows)))

    def _finish_items(self) -> None:
        shared = self.shared
        for slot in [slot for slot in shared.open_slots if not shared.shares.left(slot)]:
            run, item = self._registry.in_slot(slot), shared.orders[slot].taken
            assert item is not None
            shell = self._shell(run)
            try:
                self._finish(shell, run, item)
            except Exception as error:
                if is_fatal(error) or not isinstance(error, shell.faults):
                    raise
                shell.fail(run, item, error)
        for shell in (self._orchestrated, *self._shells.values()):
            shell.conclude()

    def _finish(self, shell: StepsShell | AskedShell, run: Run, item: Item) -> None:
        """Ends a pass over the samples of an item; the last is the shell's."""
        values = run.scheduled(self.shared.requests.learning_rate(run, run.progress.step + 1))
        if item.batch is not None and (step := self._learner.next_pass(run.slot, values)) is not None:
            self.shared.share(run, step)
        else:
            shell.finish(run, item, values, self.shared.take_spent(run.slot))
            enter(OVER)

    # --- words ---

    def _described(self) -> str:
        runs = [
            f"{each.run_id} step {each.progress.step}/{each.config.last_step}" for each in self._learner.runs.values()
        ]
        parts = [", ".join(runs) or "waiting for a run", self.shared.sessions.outages.describe()]
        return "; ".join(filter(None, parts))

    def _report_waiting(self) -> None:
        now = time.monotonic()
        if now - self._kept_alive > self._learner.heartbeat_seconds:
            self._kept_alive = now
            self._learner.keep_alive()
        if now - self._reported > WAITING_REPORT_SECONDS:
            self._reported = now
            awaited = [
                f"the BYE of run {run.run_id}" if run.finished else f"step {run.progress.step + 1} of run {run.run_id}"
                for run in self._learner.runs.values()
            ]
            logger.info("waiting for %s", ", ".join(awaited) or "a run")
