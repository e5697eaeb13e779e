"""The trainer: receives the batches of its runs, trains them side by side, publishes weights, and writes checkpoints.

`Trainer.serve` reads like a table of contents. A run is admitted when its orchestrator has connected and a slot is free: its
state is loaded from the newest checkpoint, its weights are published, and only then `READY` is sent. A step is opened when its
batch is committed (some of it is computed before: `counterpoint/trainer/work/order.py`), trained in rows that it may share with
others, and finished by itself. Then follow the weights, the metrics line, and (at the interval and at the end) the checkpoint,
which a thread writes while training goes on. Once it is published, the steps that the oldest kept checkpoint makes durable are
acknowledged. A kill between any two of these repeats the step on resume and loses nothing (`docs/contracts.md`). An error of
one run ends that run alone. A run without an orchestrator has another source of items, and other things follow its updates
(`counterpoint/trainer/work/sources.py`).

Next in the reading order of `docs/architecture.md`: `counterpoint/trainer/work/step.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from safetensors import SafetensorError

from counterpoint.run.changes import JournalError
from counterpoint.run.trained import TrainedRun
from counterpoint.trainer.broadcast import Broadcaster
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.fair_share import FairShare, Row
from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.lora.adapter_file import keep_start, start_directory
from counterpoint.trainer.metrics import MetricsFile, MetricValue
from counterpoint.trainer.optimizer import KIND_OF, check_values
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.probe import BrokenWeights, ask, check_base
from counterpoint.trainer.runs import behind, checkpoint, control_files, copies
from counterpoint.trainer.runs.checkpoints import Checkpoints
from counterpoint.trainer.runs.copies import CopyRefused
from counterpoint.trainer.runs.record import TAKES_BATCHES, RunStage
from counterpoint.trainer.runs.requested import RunRequests
from counterpoint.trainer.runs.run import Run, RunProgress
from counterpoint.trainer.telemetry.endpoint import TrainerEndpoint
from counterpoint.trainer.telemetry.mismatch import COMPARED_STEPS, MismatchWatch
from counterpoint.trainer.telemetry.published import TrainerTelemetry
from counterpoint.trainer.telemetry.step_times import StepTimes
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.trainer.work.order import Due, Order
from counterpoint.trainer.work.sessions import Sessions
from counterpoint.trainer.work.sources import DRIVEN, ORCHESTRATED, Item, Source, Sources
from counterpoint.transport.files.atomic import DISK_FAULTS
from counterpoint.transport.process.notify import StatusLine
from counterpoint.transport.process.stop_requests import StopSignals
from counterpoint.transport.wires.base import BatchReceiver

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Longest wait for a message before checking for a stop request."""

WRITING_POLL_SECONDS = 0.05
"""The same while a checkpoint is being written: what it makes durable is acknowledged soon after."""

DISCOVERY_SECONDS, PROMPT_DISCOVERY_SECONDS = 1.0, 0.1
"""The times between two discoveries: when nothing is known to have changed, and after a `HELLO` or `BYE`."""

EVICTED = 3
"""Exit code, equal to the orchestrator's, so that a job's does not depend on which of them ends first."""

WAITING_REPORT_SECONDS = 30.0
"""The time between log lines about what is awaited."""


class Trainer:
    """Rank 0's loop between the wire, the learner and the disk."""

    def __init__(
        self, config: TrainerConfig, learner: Learner, receiver: BatchReceiver, sources: Sources | None = None
    ) -> None:
        """Registers its hooks with the learner's manager; with `resume`, reads which runs are finished."""
        self._config = config
        self._learner = learner
        self._manager = learner.manager
        self._registry = self._manager.registry
        self._sources = sources or {}
        self.orders: dict[int, Order[Item]] = {}
        """The orders by slot, of the runs whose items are taken."""
        self._sessions = Sessions(config, receiver, self._manager, self.orders)
        self._shares = FairShare(config.row_tokens, learner.ranks.count // config.context_parallel)
        self._metrics = MetricsFile(config.output_dir / "trainer" / "metrics.jsonl")
        self._mismatches = MismatchWatch(config.output_dir)
        self._telemetry = TrainerTelemetry(config.output_dir, config.max_runs, self._registry)
        self.checkpoints = Checkpoints(
            config.output_dir, config.keep_checkpoints, learner.kept_alive, self._on_durable, self._telemetry.spans
        )
        self.endpoint = TrainerEndpoint(config)
        """Replaced by the one that is served, if one is."""
        self._requests = RunRequests(config.output_dir, self.checkpoints)
        self._spent: defaultdict[int, float] = defaultdict(float)
        """The seconds of all ranks that the rows of each slot's item in progress have taken."""
        self.broadcasters: dict[int, Broadcaster] = {}
        """The broadcasters by slot; each writes one run's directory, and holds a tensor of its last probe."""
        self._status = StatusLine()
        self._discovered = 0.0
        self._slots_change = True
        """Whether a run is known to enter or leave a slot soon."""
        self._reported = self._kept_alive = time.monotonic()
        self._manager.register_discovered_hook(self._on_discovered)
        self._manager.register_forgotten_hook(self._on_forgotten)
        self._manager.register_directory_deleted_hook(self._on_directory_deleted)
        if config.resume:
            checkpoint.set_aside_deleted(config.output_dir)
            for finished in checkpoint.finished_runs(config.output_dir):
                self._registry.finished_before(finished.run_id, time.monotonic() + finished.trainer_timeout_seconds)

    def serve(self, stop: StopSignals) -> int:
        """Trains until the runs have ended, or `stop`; returns the exit code."""
        while not (stop.count or self._over()):
            self.turn()
        for slot, order in self.orders.items():  # no commit is heard from here on
            if order.taken is None:
                self.drop(slot)
        while self._open_slots:
            self._train_rows()
            self._finish_items()
        for run in self._learner.runs.values():
            self._begin_checkpoint(run)
        self.checkpoints.complete()
        steps = ", ".join(f"{run.run_id} at step {run.progress.step}" for run in self._learner.runs.values())
        logger.info("the trainer ends%s", f": {steps}" if steps else "")
        if stop.count and not self._over():
            return stop.exit_code
        return EVICTED if self._registry.all_evicted() else 0

    def turn(self) -> None:
        """Makes one pass of the loop."""
        self._receive()
        self.checkpoints.settle()
        self._discover_if_due()
        self._begin_items()
        self._train_rows()
        self._finish_items()
        work = {slot: (order.open, len(order.waiting)) for slot, order in self.orders.items()}
        self._telemetry.settle(work)
        self.endpoint.note(self._registry, self._sessions.outages, work)
        self._status.show(self._described())

    def close(self) -> None:
        """Ends the thread that writes checkpoints."""
        self.checkpoints.close()
        self._telemetry.close()

    def _over(self) -> bool:
        expected = self._config.stay or self._registry.queue or self._sessions.has_news or self.checkpoints.busy
        return not expected and (self._registry.over(time.monotonic()) or self._have_no_more())

    def _have_no_more(self) -> bool:
        """Returns whether all runs without an orchestrator are refused, which nobody mends, or have had their last items."""
        slots = {run_id: self._registry.slot_of(run_id) for run_id in self._sources}
        return bool(slots) and all(
            run_id in self._registry.refused if slot is None else slot in self.orders and self.orders[slot].is_over
            for run_id, slot in slots.items()
        )

    def _receive(self) -> None:
        self._make_items()
        orders = self.orders.items()
        has_work = any(each.taken is not None or each.has_next or self._shares.left(slot) for slot, each in orders)
        longest = WRITING_POLL_SECONDS if self.checkpoints.busy else POLL_SECONDS
        patience = 0.0 if has_work else min(max(self._discovery_due() - time.monotonic(), 0.0), longest)
        for run, reason in self._sessions.receive(patience):
            self._evict(run, reason)
        if not has_work:
            self._report_waiting()

    def _make_items(self) -> None:
        """Has the next item of each run made whose items do not come by themselves."""
        for run in self._registry.at(RunStage.TRAINING):
            make, order = self._source(run).make, self.orders[run.slot]
            number = order.newest + 1
            if make is not None and number <= order.last and number not in order.waiting:
                if (batch := make(number)) is not None:
                    order.ask(number, Item(batch))
                else:
                    order.last = order.newest

    # --- admission and leaving ---

    def _discovery_due(self) -> float:
        prompt = self._slots_change or self._sessions.has_news
        return self._discovered + (PROMPT_DISCOVERY_SECONDS if prompt else DISCOVERY_SECONDS)

    def _discover_if_due(self) -> None:
        now = time.monotonic()
        if now < self._discovery_due():
            return
        self._slots_change = False
        if self._manager.discover_runs({*self._registry.present(now), *self._sources}):
            self._learner.synchronize()
            for run in self._registry.at(RunStage.ADMITTED):
                if run.failure is None:
                    self._admit(run)
                else:
                    self._manager.refuse_run(run.slot, run.failure)
                    self._slots_change = True
        for run in self._registry.at(RunStage.TRAINING, RunStage.FINISHED):
            self._poll(run)
        self._sessions.answer()
        self._discovered = time.monotonic()

    def _on_discovered(self, slot: int, run_id: str, config: TrainedRun) -> None:
        run = self._registry.in_slot(slot)
        (self._config.output_dir / "trainer").mkdir(exist_ok=True)  # it may have been mounted since the start
        self.checkpoints.complete(run_id)  # of its former slot
        run.progress = RunProgress(checkpoint.newest_step(self._config.output_dir, run_id))
        run.failure = behind.refusal(self._config.output_dir, run, self._registry.durable(run_id))
        if run.failure is None:
            self._requests.start(run)

    def _on_forgotten(self, slot: int, run_id: str) -> None:
        self._sessions.forget(run_id)
        self.drop(slot)
        self._telemetry.left(run_id)
        self.broadcasters.pop(slot, None)
        self.endpoint.forget(run_id)
        if self._manager.is_deleted(slot):
            self._on_directory_deleted(run_id)
            self._registry.end(run_id, RunStage.DELETED)
            self._sessions.deleted(self._registry.in_slot(slot))
        else:
            if slot in self._learner.runs:
                self.checkpoints.begin(self._learner.runs[slot])
            if control_files.eviction(self._config.output_dir, run_id) is not None:
                self._registry.end(run_id, RunStage.EVICTED)
            logger.info("run %s has left its slot", run_id)
        self.orders.pop(slot, None)  # last: a checkpoint that was waited for has asked for it

    def _on_directory_deleted(self, run_id: str) -> None:
        logger.info("the directory of run %s was deleted: the run ends", run_id)
        self.checkpoints.complete(run_id)
        checkpoint.set_aside(self._config.output_dir, run_id)

    def _admit(self, run: Run) -> None:
        step, steps = run.progress.step, run.config.last_step
        self.broadcasters[run.slot] = Broadcaster(
            self._manager, self._config.output_dir, run.run_id, self._config.model, self._config.keep_broadcasts,
            self._config.whole_broadcast_every, self._config.server_dtypes,
        )  # fmt: skip
        self._metrics.truncate(run.run_id, step)
        self._mismatches.begin(run.run_id, step, self._metrics.newest(run.run_id, "mismatch_kl", COMPARED_STEPS))
        if not self._has_own_base(run):
            return
        self._keep_start(run)  # first: once version 0 is there, batches are generated that must be trained from it
        source = self._source(run)
        published = source.publishes == "updates" or (source.publishes == "saves" and step > 0)
        if published and not self._publish(run, anew=True):
            return
        run.durable_step = self._durable_step(run)
        done, last = (step, run.config.last_step) if not source.asked else (run.progress.item, math.inf)
        committed = 0 if source.commits else math.inf
        self.orders[run.slot] = Order(done, time.monotonic(), committed=committed, last=last)
        self._sessions.admit(run)
        if run.finished:
            logger.info("run %s is trained to its end, step %d of %s", run.run_id, step, steps)
        else:
            logger.info("run %s is ready for step %d of %s", run.run_id, step + 1, steps)

    def _has_own_base(self, run: Run) -> bool:
        """Returns whether this model can be the one over which the run's adapter was trained so far; else the run leaves."""
        learner, step = self._learner, run.progress.step
        adapter, key = run.beginning, f"training.lora.start_from = {str(run.beginning)!r}"
        if step:  # of a driven run the directory may hold other weights than those of its step
            has_own = run.config.training.lora is not None and self._source(run).publishes == "updates"
            adapter = self.broadcasters[run.slot].directory / f"step_{step}" if has_own else None
            key = f"trainer.model = {self._config.model!r}, which goes on from {str(adapter)!r}"
        if adapter is None:
            return True
        try:
            assembled, loaded = learner.assemble(run.slot), learner.loaded
            answers = assembled.answers if assembled else ask(loaded.model, run.slot)
        except Exception as error:
            if is_fatal(error):
                raise
            logger.warning("run %s: the probe of its adapter failed", run.run_id, exc_info=True)
            self._evict(run, f"the probe of its adapter failed: {error!r}")
            return False
        try:
            check_base(adapter, answers)
        except (OSError, ValueError) as error:
            self._manager.refuse_run(run.slot, f"{key}: {error}")
            self._slots_change = True
            return False
        return True

    def _keep_start(self, run: Run) -> None:
        """Makes a new run independent of where its first adapter is from."""
        training, output_dir = run.config.training, self._config.output_dir
        lora = training.lora
        starts = run.beginning is not None or training.reference_is_start
        if lora is None or not starts or run.progress.step or run.beginning == start_directory(output_dir, run.run_id):
            return
        with self._learner.kept_alive():
            keep_start(output_dir, run.run_id, lora, self._config.model, self._manager.modules, run.slot)

    def _evict(self, run: Run, reason: str) -> None:
        """Evicts a run; what it has trained is kept."""
        self.drop(run.slot)
        self.orders.pop(run.slot, None)
        self._manager.evict_run(run.slot, reason)
        self._sessions.send_away(run.run_id, reason)
        self._slots_change = True

    def _poll(self, run: Run) -> None:
        """Carries out requests by files. An asker alone says what happens to its run, and its items are no steps."""
        if not self._source(run).asked:
            self._requests.poll(run, self.orders[run.slot].newest)

    # --- items ---

    def _source(self, run: Run) -> Source:
        return self._sources.get(run.run_id) or (DRIVEN if run.config.driven else ORCHESTRATED)

    @property
    def _open_slots(self) -> list[int]:
        """The slots of which an item is carried out."""
        return [slot for slot, order in sorted(self.orders.items()) if order.taken is not None]

    def _begin_items(self) -> None:
        for run in self._registry.at(*TAKES_BATCHES):
            order = self.orders[run.slot]
            due = order.next(time.monotonic())
            if due.drops:
                self._drop_contributions(run.slot)
            if due.item is not None:
                try:
                    self._begin(run, order.done + 1, due, due.item)
                except (InvalidBatch, CopyRefused) as error:
                    if due.counts:
                        self._fail(run, due.item, error)
                    else:  # the commit may be of another batch
                        logger.debug("run %s: step %d begins with its commit: %s", run.run_id, order.done + 1, error)
                        order.refuse()

    def _begin(self, run: Run, number: int, due: Due[Item], item: Item) -> None:
        """Opens the contribution of an item, if it has one. Raises `InvalidBatch` or `CopyRefused`."""
        if (batch := item.batch) is None:
            return
        if self._source(run).asked:
            batch = replace(batch, run_id=run.run_id, step=run.progress.step + 1)
        else:
            if due.counts:
                self._sessions.taken(run, number, batch)
            if self._requests.copy_at(run, number) is not None:
                if not due.counts:
                    raise CopyRefused("another run's state takes its place")
                self._drop_contributions(run.slot)
                self._copy(run, number)
                return
        if not due.has_begun:
            self._share(run, self._learner.open_step(run.slot, batch, item.objective))

    def _fail(self, run: Run, item: Item, error: Exception) -> None:
        """Answers an asker with what has failed; another run ends by it."""
        if self._source(run).asked:
            contributes = item.batch is not None and not (item.objective and item.objective.forward_only)
            run.spoiled |= self._source(run).checkpoints and contributes
            self.orders[run.slot].end(time.monotonic())
            if not item.answer.done():  # cancelled
                item.answer.set_exception(error)
        else:
            self._evict(run, f"step {run.progress.step + 1}: {error}")

    def _share(self, run: Run, step: Contribution) -> None:
        """Gives the samples of the step's current pass to the rows."""
        lengths = {each: step.length(each) for each in step.samples}
        self._shares.add(run.slot, run.config.training.weight, lengths, run.config.share)

    def _copy(self, run: Run, step: int) -> None:
        """Takes over another run's state in place of the open step's update, and begins its checkpoint at once."""
        copy = self._learner.copy_step(run.slot, step)
        self._conclude(run, {"copied/run": copy.source, "copied/step": copy.source_step}, durable=True)

    def _train_rows(self) -> None:
        rows = self._shares.rows()
        if any(rows):
            began = time.perf_counter()
            self._learner.train_rows(rows)
            self._spend(rows, time.perf_counter() - began)
            self.endpoint.rows_trained(sum(map(bool, rows)))

    def _spend(self, rows: Sequence[Row], seconds: float) -> None:
        """Divides the time of rows among the runs that share them, by tokens."""
        tokens: defaultdict[int, int] = defaultdict(int)
        for slot, samples in (part for row in rows for part in row):
            step = self._learner.contributions[slot][-1]
            tokens[slot] += sum(map(step.length, samples))
        for slot, count in tokens.items():
            self._spent[slot] += seconds * self._learner.ranks.count * count / sum(tokens.values())

    def _finish_items(self) -> None:
        for slot in [slot for slot in self._open_slots if not self._shares.left(slot)]:
            run, item = self._registry.in_slot(slot), self.orders[slot].taken
            assert item is not None
            try:
                self._finish(run, item)
            except Exception as error:
                asked = self._source(run).asked
                if is_fatal(error) or not (asked or isinstance(error, InvalidBatch | JournalError)):
                    raise
                self._fail(run, item, error)

    def _finish(self, run: Run, item: Item) -> None:
        """Ends a pass over the samples of an item, and after the last does what follows."""
        learner, slot = self._learner, run.slot
        values = run.scheduled(self._requests.learning_rate(run, run.progress.step + 1))
        if item.batch is not None and (step := learner.next_pass(slot, values)) is not None:
            self._share(run, step)
            return
        spent = self._spent.pop(slot, 0.0)
        if not self._source(run).asked:
            times = learner.times(slot)
            self._conclude(run, learner.finish_step(slot, values), times)
        else:
            began = time.perf_counter()
            found = self._answer(run, item)
            run.spent = spent + (time.perf_counter() - began) * learner.ranks.count
            self.orders[slot].end(time.monotonic())
            if not item.answer.done():
                item.answer.set_result(found)

    def _answer(self, run: Run, item: Item) -> object:
        """Does what an asker wants beside a contribution, whose samples are trained; the last part gives the answer."""
        learner, slot = self._learner, run.slot
        answer: object = None
        if not run.intact:
            raise ValueError(f"an update of run {run.run_id} failed half-way: go on from the last save")
        if item.batch is not None:
            answer = learner.conclude(slot)
        run.spoiled |= item.spoils
        if item.updates:
            answer = self._answer_update(run, item)
        if item.publication is not None:
            assembled = learner.assemble(slot)
            with learner.kept_alive():
                answer = self.broadcasters[slot].publish_as(item.publication, learner.loaded.model, run, assembled)
        if item.saves:
            self.checkpoints.begin(run, published=False)
            self.checkpoints.complete(run.run_id)
            answer = run.progress.step
            if item.saves == "kept" and run.progress.step:
                copies.keep(self._config.output_dir, run.run_id, run.progress.step)
        return answer

    def _answer_update(self, run: Run, item: Item) -> dict[str, MetricValue]:
        if run.spoiled:  # by a client that asked for the update before it heard of the failure
            run.spoiled = False
            self._drop_contributions(run.slot)
            raise ValueError(
                f"a contribution since update {run.progress.step} has failed, so the others are dropped, too"
            )
        values = run.scheduled() if item.values is None else item.values
        check_values(values)
        if KIND_OF[type(values)] != run.optimizer.kind:
            raise ValueError(f"values of {KIND_OF[type(values)]}; training.optimizer = {run.optimizer.kind!r}")
        if not self._learner.contributions.get(run.slot):
            raise ValueError(f"run {run.run_id} has no contribution since update {run.progress.step}")
        if run.finished:
            raise ValueError(f"run {run.run_id} is trained to its end, step {run.progress.step}")
        try:
            metrics = self._learner.finish_step(run.slot, values)
            run.progress.item = self.orders[run.slot].newest
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: the weights may be changed in part
                run.intact = False
            raise
        if self._source(run).checkpoints and run.progress.step % run.config.training.checkpoint_interval == 0:
            self.checkpoints.begin(run, published=False)
        return metrics

    def _conclude(
        self, run: Run, metrics: dict[str, MetricValue], times: StepTimes | None = None, durable: bool = False
    ) -> None:
        """Publishes and reports what a step has made of the run, and begins its checkpoint if it is due, or `durable`."""
        started, order, source = time.monotonic(), self.orders[run.slot], self._source(run)
        metrics["phase/wait"] = order.waited
        order.end(started)
        run.progress.batch = run.batch
        if source.publishes == "updates" and not self._publish(run):
            return
        self._sessions.published(run)
        published = time.monotonic()
        metrics["phase/broadcast"] = published - started
        self._report(run, metrics)
        if durable or run.finished or run.progress.step % run.config.training.checkpoint_interval == 0:
            self._begin_checkpoint(run)
            if self._registry.taking(run.run_id) is None:  # its weights could not be published
                return
        self._telemetry.end_step(run, times, order.waited, started, published)
        self._registry.advance(run.slot, time.monotonic())

    def _begin_checkpoint(self, run: Run) -> None:
        if self._source(run).checkpoints:
            self.checkpoints.begin(run, published=False)
            return
        publishes = self._source(run).publishes
        if publishes == "updates" or (publishes == "saves" and run.intact and run.progress.step and self._publish(run)):
            self.checkpoints.begin(run)

    def drop(self, slot: int) -> None:
        """Drops the item that is in progress in a slot, if there is one."""
        order = self.orders.get(slot)
        if order is not None and (item := order.drop()) is not None and item.batch is not None:
            self._drop_contributions(slot)

    def _drop_contributions(self, slot: int) -> None:
        self._shares.remove(slot)
        self._spent.pop(slot, None)
        self._learner.drop_step(slot)

    # --- the disk ---

    def _publish(self, run: Run, anew: bool = False) -> bool:
        """Publishes the weights; returns False if it failed, and the run leaves. `anew` first removes later versions."""
        broadcaster = self.broadcasters[run.slot]
        try:
            assembled = self._learner.assemble(run.slot)
            with self._learner.kept_alive():
                if anew:
                    self._requests.note_published(run)
                    broadcaster.remove_beyond(run.progress.step or -1)
                learner = self._learner
                broadcaster.publish(learner.loaded.model, run, assembled)
        except BrokenWeights as error:
            self._evict(run, str(error))
            return False
        except OSError as error:
            alone = self._config.max_runs == 1
            if error.errno in DISK_FAULTS and (alone or broadcaster.is_on_disk_of_job):
                raise
            if not self._manager.is_deleted(run.slot):  # not writable, or about to be deleted
                self._evict(run, f"version {run.progress.step} of its weights cannot be published: {error}")
            self._slots_change = True
            return False
        except Exception as error:
            if is_fatal(error) or isinstance(error, SafetensorError):
                raise
            logger.warning("run %s cannot be published", run.run_id, exc_info=True)
            self._evict(run, f"version {run.progress.step} of its weights cannot be published: {error}")
            return False
        return True

    def _report(self, run: Run, metrics: dict[str, MetricValue]) -> None:
        step, source = run.progress.step, self._source(run)
        line: dict[str, MetricValue] = {"run_id": run.run_id, "step": step, "time": time.time()}
        line |= source.line(step, metrics)
        self._metrics.append(line)
        self.endpoint.publish(run.run_id, line)
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
        if source.commits:
            self._mismatches.take(run.run_id, step, float(metrics["mismatch_kl"]), run.mismatches)

    def _on_durable(self, run_id: str) -> None:
        """Acknowledges what a new checkpoint makes durable, and answers who waited for it, unless its run has left."""
        if (run := self._registry.taking(run_id)) is None:
            return
        run.durable_step = self._durable_step(run)
        self._sessions.durable(run)
        # The orchestrator of a finished run hears of the end only now, and has the whole time for its BYE.
        self._registry.advance(run.slot, time.monotonic())
        self._requests.forget(run)
        self._poll(run)
        self._source(run).on_saved()

    def _durable_step(self, run: Run) -> int:
        """Returns the step up to which batches are durable: at the end the last, before that of the oldest kept checkpoint."""
        newest = self.checkpoints.newest(run.run_id)
        return newest if newest >= run.config.last_step else self.checkpoints.fallback(run.run_id)

    def _described(self) -> str:
        runs = [
            f"{each.run_id} step {each.progress.step}/{each.config.last_step}" for each in self._learner.runs.values()
        ]
        parts = [", ".join(runs) or "waiting for a run", self._sessions.outages.describe()]
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
