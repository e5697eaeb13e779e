"""The trainer: receives batches, trains them in step order, publishes the weights, and says what is durable.

`train` reads like a table of contents. A run is admitted when its orchestrator says `HELLO`: its configuration is read, its
state taken from the newest checkpoint, its weights published, and only then is it told `READY`. A batch is acknowledged when
its turn has come, so that at most `transport.credit` of them wait here. After each step: weights, metrics line, then (at the
interval and at the end) the checkpoint, and an acknowledgement that names as durable what the oldest of the checkpoints kept
covers. A kill between any two of these repeats the step on resume and loses nothing (`docs/contracts.md`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from safetensors import SafetensorError

from orchestrator.config import OrchestratorConfig
from trainer import checkpoint, ranks
from trainer.broadcast import Broadcaster
from trainer.config import TrainerConfig
from trainer.learner import Learner
from trainer.metrics import MetricsFile, MetricValue
from trainer.model import choose_device
from trainer.packer import InvalidBatch
from trainer.probe import BrokenWeights
from trainer.runs import Run, RunRefused, evict, read_run_config, refuse_config
from trainer.stop import StopRequest
from transport.base import BatchReceiver
from transport.messages import Acknowledged, Bye, Evicted, Hello, Ready, Rejected
from transport.open import open_receiver
from transport.records import Batch

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Longest wait for a message before looking at the stop request again."""

EVICTED = 3
"""Exit code; the orchestrator's is the same, so that a job's does not depend on which of them ends first."""

WAITING_REPORT_SECONDS = 30.0
"""Between log lines that say what is awaited."""


def train(config: TrainerConfig, on_ready: Callable[[], object]) -> int:
    """Runs the trainer until its run is done, it is told to stop, or it fails. Call it from the main thread.

    With `processes` above 1, this process only starts and watches that many ranks.

    Args:
        config: `model` is a directory.
        on_ready: called once the model is loaded and the wire is open.

    Returns:
        0 done, or stopped with a checkpoint; 1 failed; 2 bad configuration; 3 the run was evicted.
    """
    if (problem := _unusable(config)) is not None:
        logger.error("%s", problem)
        return 2
    if config.processes > 1 and not ranks.inside_torchrun():
        return ranks.launch(config, on_ready)
    with ExitStack() as stack:
        try:
            device = choose_device(config.device)
            stop = stack.enter_context(StopRequest())
            group = stack.enter_context(ranks.join(config, device))
            learner = Learner(config, group)
            if group.index > 0:
                learner.follow()
                return 0
            receiver = stack.enter_context(closing(open_receiver(config.transport, config.output_dir)))
        except (ValueError, OSError) as error:
            logger.error("%s", error)
            return 2
        on_ready()
        try:
            code = Trainer(config, learner, receiver).serve(stop)
        except (checkpoint.CheckpointError, BrokenWeights) as error:
            logger.error("%s", error)
            return 1
        except (OSError, SafetensorError) as error:
            logger.error("cannot write to %s: %s. What was published before is intact", config.output_dir, error)
            return 1
        learner.stop()
        return code


def _unusable(config: TrainerConfig) -> str | None:
    """What is wrong with the configuration or the directory, for a person; None when nothing is."""
    if config.max_runs > 1:
        return f"max_runs = {config.max_runs}: this version trains one run at a time; set max_runs = 1"
    if not config.resume and (found := checkpoint.holds_any(config.output_dir)) is not None:
        return (
            f"{found} is from an earlier training; --resume (in a file: resume = true) goes on from it, or use another "
            "output_dir"
        )
    try:
        (config.output_dir / "trainer").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"output_dir = {config.output_dir}: cannot be written: {error.strerror}"
    return None


class Trainer:
    """Rank 0's loop between the wire, the learner and the disk."""

    def __init__(self, config: TrainerConfig, learner: Learner, receiver: BatchReceiver) -> None:
        self._config = config
        self._learner = learner
        self._receiver = receiver
        self._metrics = MetricsFile(config.output_dir / "trainer" / "metrics.jsonl")
        self._broadcaster: Broadcaster | None = None
        self._evicted = False
        self._farewell_before: float | None = None
        """Deadline of the orchestrator's `BYE`, once everything is durable. One that missed the acknowledgement, killed at that
        very moment, has as long to come back as it would wait for us: `trainer_timeout_seconds` of its run."""
        if config.resume and (last := checkpoint.last_finished(config.output_dir)) is not None:
            self._expect_farewell(last, finished=True)
        self._idle_since = time.monotonic()
        self._reported = self._kept_alive = self._idle_since

    def serve(self, stop: StopRequest) -> int:
        """Until the run is finished or evicted, or `stop`; the exit code."""
        while not (stop.requested or self._evicted or self._over()):
            batch = self._next_batch()
            self._receive(0.0 if batch is not None else POLL_SECONDS)
            if batch is not None:
                self._train(batch)
        run = self._learner.run
        if run is not None and run.progress.step > checkpoint.newest_step(self._config.output_dir, run.run_id):
            self._make_durable(run)
        logger.info("the trainer ends%s", f" after step {run.progress.step} of {run.config.steps}" if run else "")
        return EVICTED if self._evicted else 0

    def _over(self) -> bool:
        if self._config.stay:
            return False
        return self._farewell_before is not None and time.monotonic() > self._farewell_before

    # --- messages ---

    def _receive(self, timeout: float) -> None:
        """Takes in every message that is there, waiting `timeout` seconds for the first."""
        received = self._receiver.receive(timeout)
        if received is None and timeout:
            self._report_waiting()
        while received is not None:
            run_id, message = received
            match message:
                case Hello():
                    self._on_hello(run_id)
                case Batch():
                    self._on_batch(run_id, message)
                case Bye():
                    self._on_bye(run_id)
            received = self._receiver.receive(0.0)

    def _on_hello(self, run_id: str) -> None:
        run = self._learner.run
        if run is not None and run.run_id != run_id:
            self._refuse(
                run_id, f"this trainer trains run {run.run_id!r}, and only one (max_runs = {self._config.max_runs})"
            )
            return
        if run is None:
            try:
                run = self._admit(run_id)
            except RunRefused as error:
                self._refuse(run_id, str(error))
                return
        self._receiver.send(run_id, Ready(run.progress.step + 1, self._config.transport.credit))
        if run.durable_step:
            self._receiver.send(run_id, Acknowledged(run.durable_step, run.durable_step))
        self._expect_farewell(run.config, run.finished)

    def _refuse(self, run_id: str, reason: str) -> None:
        logger.error("run %s is refused: %s", run_id, reason)
        self._receiver.send(run_id, Evicted(reason))

    def _admit(self, run_id: str) -> Run:
        run_config = read_run_config(self._config.output_dir, run_id)
        newest = checkpoint.newest_step(self._config.output_dir, run_id)
        try:
            run = self._learner.admit(run_id, run_config, newest)
        except RunRefused as error:
            refuse_config(self._config.output_dir, run_id, str(error))
            raise
        self._metrics.truncate(run_id, newest)
        self._broadcaster = Broadcaster(
            self._config.output_dir, run_id, self._config.model, self._config.keep_broadcasts
        )
        self._broadcaster.remove_beyond(newest or -1)
        self._publish(run)
        run.durable_step = self._durable_step(run)
        if run.finished:
            logger.info("run %s is trained to its end, step %d of %d", run_id, newest, run.config.steps)
        else:
            logger.info("run %s is ready for step %d of %d", run_id, newest + 1, run.config.steps)
        return run

    def _on_batch(self, run_id: str, batch: Batch) -> None:
        run = self._learner.run
        if run is None or run.run_id != run_id:
            logger.warning("a batch of step %d of run %s came before its READY; dropped", batch.step, run_id)
        elif batch.step <= run.progress.step:
            logger.info("step %d of run %s is trained already; dropped", batch.step, run_id)
            self._receiver.send(run_id, Acknowledged(batch.step, run.durable_step))
        elif batch.step > run.progress.step + (credit := self._config.transport.credit):
            reason = (
                f"step {batch.step}: this trainer trains step {run.progress.step + 1} next and holds {credit} batches"
            )
            logger.warning("run %s sends more than its credit: %s", run_id, reason)
            self._receiver.send(run_id, Rejected(batch.step, reason))
        else:
            run.waiting[batch.step] = batch

    def _on_bye(self, run_id: str) -> None:
        run = self._learner.run
        logger.info("the orchestrator of run %s left", run_id)
        if run is not None and run.run_id == run_id and run.finished:
            self._farewell_before = time.monotonic()

    def _report_waiting(self) -> None:
        now = time.monotonic()
        if now - self._kept_alive > ranks.HEARTBEAT_SECONDS:
            self._kept_alive = now
            self._learner.keep_alive()
        if now - self._reported > WAITING_REPORT_SECONDS:
            self._reported = now
            run = self._learner.run
            what = (
                "an orchestrator's HELLO"
                if run is None
                else f"the batch of step {run.progress.step + 1} of run {run.run_id}"
            )
            if run is not None and run.finished:
                what = f"the BYE of run {run.run_id}"
            logger.info("waiting for %s since %.0f s", what, now - self._idle_since)

    # --- training ---

    def _next_batch(self) -> Batch | None:
        run = self._learner.run
        return None if run is None or run.finished else run.waiting.pop(run.progress.step + 1, None)

    def _train(self, batch: Batch) -> None:
        run = self._learner.run
        assert run is not None
        waited = time.monotonic() - self._idle_since
        self._receiver.send(run.run_id, Acknowledged(batch.step, run.durable_step))
        try:
            metrics = self._learner.train(batch)
        except InvalidBatch as error:
            self._evict(run, f"step {batch.step}: {error}")
            return
        metrics["phase/wait"] = waited
        metrics["phase/broadcast"] = self._publish(run)
        self._report(run, metrics)
        if run.finished or batch.step % run.config.training.checkpoint_interval == 0:
            self._make_durable(run)
        self._expect_farewell(run.config, run.finished)
        self._idle_since = self._reported = self._kept_alive = time.monotonic()

    def _publish(self, run: Run) -> float:
        started = time.perf_counter()
        assert self._broadcaster is not None
        self._broadcaster.publish(
            self._learner.model, self._learner.replay, run.config.training.lora, run.progress.step
        )
        return time.perf_counter() - started

    def _report(self, run: Run, metrics: dict[str, MetricValue]) -> None:
        line: dict[str, MetricValue] = {"run_id": run.run_id, "step": run.progress.step, "time": time.time()}
        self._metrics.append(line | metrics)
        logger.info(
            "run %s step %d: loss %.4g, mismatch_kl %.3g, grad_norm %.3g, %.0f tokens/s",
            run.run_id, run.progress.step, metrics["loss"], metrics["mismatch_kl"], metrics["grad_norm"],
            metrics["tokens_per_second"],
        )  # fmt: skip

    def _make_durable(self, run: Run) -> None:
        checkpoint.save(run, self._config.output_dir, self._config.keep_checkpoints)
        run.durable_step = self._durable_step(run)
        self._receiver.send(run.run_id, Acknowledged(run.progress.step, run.durable_step))

    def _durable_step(self, run: Run) -> int:
        """What its checkpoints make durable: at the end all, before only what the oldest of them covers."""
        if run.finished:
            return run.progress.step
        return checkpoint.fallback_step(self._config.output_dir, run.run_id, self._config.keep_checkpoints)

    def _expect_farewell(self, config: OrchestratorConfig, finished: bool) -> None:
        self._farewell_before = time.monotonic() + config.trainer_timeout_seconds if finished else None

    def _evict(self, run: Run, reason: str) -> None:
        """Nothing more is taken from the run; what it has trained stays."""
        logger.error("run %s is evicted: %s", run.run_id, reason)
        evict(self._config.output_dir, run.run_id, reason)
        self._receiver.send(run.run_id, Evicted(reason))
        self._evicted = True
