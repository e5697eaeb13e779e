"""Owns the link to the trainer: sends batches within its credit and resends those that a reconnected trainer lacks.

`delivery.py` decides which message is due. A batch stays in memory until the trainer has it and as `batch.bin` until it is
durable, so that the sender can answer every `READY` with the batches from its `next_step` on. A rejection or an eviction ends
`run` with an exception.

Next in the reading order of `docs/architecture.md`: `counterpoint/trainer/loop.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from counterpoint.orchestrator import take_over
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.orchestrator.step.delivery import (
    ConflictError,
    Delivery,
    Due,
    MissingBatchError,
    SendBatch,
    SendCommit,
)
from counterpoint.run.batch_files import BATCH_FILE, KeptBatches
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.run.loop_health.watchdog import awaiting
from counterpoint.transport import codec
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.messages import (
    NO_LIMIT,
    PROTOCOL_VERSION,
    Acknowledged,
    Commit,
    Hello,
    HelloRefused,
    Offer,
    Published,
    Ready,
    Waiting,
)
from counterpoint.transport.outages import OpenOutage
from counterpoint.transport.records import Batch
from counterpoint.transport.telemetry.spans import SpanLog, now
from counterpoint.transport.wires.link import TrainerLink

logger = logging.getLogger(__name__)


class NoTrainerError(ConnectionError):
    """No trainer accepted the run in time."""

    def __init__(self, run_id: str, seconds: float, outage: OpenOutage | None) -> None:
        because = f": {outage}" if outage is not None else ""
        super().__init__(
            f"no trainer was ready for run {run_id!r} within trainer_timeout_seconds = {seconds:g}{because}; does it run, with "
            "the same output_dir and [transport]?"
        )


class Sender:
    """Sends one run's batches.

    `newest_step` is the last committed step (0 for none). Batches that are not durable are on disk. Calls `on_waiting` with the
    reason every few seconds while the trainer makes the run wait.
    """

    def __init__(
        self,
        link: TrainerLink,
        run_dir: Path,
        run_id: str,
        newest_step: int,
        largest_batch: int,
        on_waiting: Callable[[str], None] = lambda reason: None,
        spans: SpanLog | None = None,
        kept: KeptBatches | None = None,
    ) -> None:
        self._kept = kept or KeptBatches()
        self._link = link
        self._run_dir = run_dir
        self._epoch_is_kept = False
        self._rollouts_dir = run_dir / "rollouts"
        self._run_id = run_id
        self._largest_batch = largest_batch
        self._trainers_largest = NO_LIMIT
        """The limit of its last READY. It also holds while the trainer is away: a larger batch would meet it when it is back. A
        larger limit is known with the next READY."""
        self._delivery = Delivery(run_id, newest_step)
        self._in_memory: dict[int, Batch] = {}
        """The batches that the trainer does not have."""
        self._digests: dict[int, str] = {}
        """The digests of the batches that the trainer has, from the newest durable one on."""
        self._offered: dict[int, tuple[float, int]] = {}
        """The time of each one's offer, in Unix seconds, and its bytes."""
        self._spans = spans
        self._on_waiting = on_waiting
        self._waiting = ""
        """The trainer's last reason to make the run wait."""
        self.last_message_at = time.monotonic()
        """The time when the trainer's last message arrived, or this object was created, on the monotonic clock, in seconds."""
        self.had_trainer = False
        """Whether a READY has ever arrived."""
        self.published = -1
        """The newest published policy version, by the trainer's messages, or -1 before the first."""
        self.on_published: Callable[[], None] = lambda: None
        """Called when that has changed."""
        self._due = asyncio.Event()
        self._changed = asyncio.Condition()
        self.durable_step = 0

    @property
    def newest_step(self) -> int:
        """The last committed step."""
        return self._delivery.newest_step

    @property
    def unacknowledged(self) -> int:
        """Committed batches that the trainer has not acknowledged."""
        return self.newest_step - self._delivery.acknowledged if self.had_trainer else 0

    async def run(self) -> None:
        """Connects and serves the link until cancelled.

        Raises, in a group, `EvictedError`, `RejectedError`, `ConflictError`, `MissingBatchError`. Raises `ConfigurationError`
        for a damaged file of the epoch, and for a trainer of another version.
        """
        self._delivery.sizes |= await in_thread(_record_sizes, self._rollouts_dir)
        self._epoch = epoch = await in_thread(take_over.propose, self._run_dir)
        await self._link.start(Hello(self._run_id, self._delivery.gone, epoch.epoch, epoch.holder))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._send_as_due())

    async def wait_ready(self, patience: float) -> Ready:
        """Waits for the trainer's READY. Raises `NoTrainerError` after `patience` seconds without a message.

        A trainer that has no slot for the run yet repeats a message.
        """
        with awaiting("the trainer's READY", f"run {self._run_id}"):
            while (ready := self._delivery.session) is None:
                left = self.last_message_at + patience - time.monotonic()
                try:
                    async with asyncio.timeout(max(left, 0.0)), self._changed:
                        await self._changed.wait()
                except TimeoutError:
                    if time.monotonic() - self.last_message_at >= patience:
                        raise self.no_trainer(patience) from None
        return ready

    def no_trainer(self, patience: float) -> NoTrainerError:
        """Returns the error that no trainer was ready for `patience` seconds, with the reason that is known."""
        return NoTrainerError(self._run_id, patience, self._link.outage)

    async def wait_durable(self, step: int) -> None:
        """Waits until a checkpoint of the trainer covers `step`."""
        with awaiting(f"the trainer's checkpoint of step {step}", f"run {self._run_id}"):
            async with self._changed:
                await self._changed.wait_for(lambda: self.durable_step >= step)

    async def forget_up_to(self, step: int) -> None:
        """Treats `step` as durable: a checkpoint of the trainer covers it, though no message has reported it."""
        await self._settle(step)
        async with self._changed:
            self._changed.notify_all()

    def offer(self, batch: Batch, nbytes: int) -> None:
        """Accepts the batch of the next step, which is not committed yet. Does not wait until it is sent.

        It is sent once the trainer is connected and has credit. Raises `ConfigurationError` for a batch that is too large for
        either end.
        """
        self._check_size(batch.step, nbytes)
        self._delivery.offer(batch.step, nbytes)
        self._in_memory[batch.step] = batch
        self._offered[batch.step] = now(), nbytes
        self._due.set()

    def _check_size(self, step: int, nbytes: int) -> None:
        limits = {"this end": self._largest_batch, "the trainer": self._trainers_largest}
        where = min(limits, key=limits.__getitem__)
        if nbytes > limits[where]:
            raise ConfigurationError(
                f"the batch of step {step} takes {nbytes} bytes, and {where} takes at most {limits[where]} "
                "(transport.max_batch_bytes, or the machine's memory where that is less). Raise transport.max_batch_bytes at "
                "both ends, or lower schedule.rollouts_per_step, and resume: nothing of this step is committed, and the run "
                f"continues after step {self.newest_step}"
            )

    def commit(self, step: int) -> None:
        """Announces that the offered step is committed: the trainer may train it."""
        self._delivery.commit(step)
        self._due.set()

    async def close(self) -> None:
        """Announces the last commit, so that the trainer need not wait for a resume, and sends Bye. Safe to call twice."""
        if isinstance(due := self._delivery.next(), SendCommit):
            with suppress(ConnectionError):  # closed already, or failed, which `run` has reported
                await self._send(due)
        await self._link.close()

    async def _listen(self) -> None:
        while True:
            message = await self._link.receive()
            self.last_message_at = time.monotonic()
            if isinstance(message, HelloRefused):  # by a trainer of another version, as it is at every further attempt
                raise ConfigurationError(
                    f"the trainer refused the HELLO of this orchestrator, which has protocol {PROTOCOL_VERSION}: {message.reason}"
                )
            if isinstance(message, Ready):
                await self._check_history(message)
                if not self._epoch_is_kept:  # before anything is sent in it
                    await in_thread(take_over.keep, self._run_dir, self._epoch)
                    self._epoch_is_kept = True
            self._delivery.receive(message)
            match message:
                case Ready():
                    self._on_ready(message)
                case Waiting(reason):
                    self._on_waiting_message(reason)
                case Acknowledged(durable=durable):
                    await self._settle(durable)
                case Published(version):
                    self.published = version
                    self.on_published()
            self._due.set()
            async with self._changed:
                self._changed.notify_all()
            await self._forget_delivered()

    async def _check_history(self, ready: Ready) -> None:
        """Raises `ConflictError` if the trainer has another history: more steps, or another batch of the newest one."""
        self._delivery.check_history(ready)
        step = ready.next_step - 1
        if ready.batch and step not in self._digests:
            await self._note_digest(step)
        if ready.batch and self._digests.get(step, ready.batch) != ready.batch:
            raise ConflictError(
                f"the trainer has trained another batch of step {step} than that of {self._batch_file(step).parent}: another "
                "orchestrator has continued the run, and this directory is not the newest of it"
            )

    async def _note_digest(self, step: int) -> None:
        """Notes the digest of a batch in memory or on the disk. A durable one has none."""
        try:
            batch = self._in_memory.get(step)
            if batch is None:
                batch = await in_thread(codec.read_file, self._batch_file(step), self._largest_batch)
        except FileNotFoundError:
            return
        except CodecError as error:
            logger.warning("the trainer's batch of step %d cannot be compared: %s", step, error)
            return
        self._digests[step] = await in_thread(codec.digest_of, batch)

    def _on_ready(self, ready: Ready) -> None:
        again = self.newest_step - ready.next_step + 1
        logger.info(
            "the trainer is ready for step %d with credit %d%s",
            ready.next_step, ready.credit, f"; sending {again} batches again" if again else "",
        )  # fmt: skip
        self._waiting, self.had_trainer, self._trainers_largest = "", True, ready.max_batch_bytes
        self.published = ready.next_step - 1
        self.on_published()

    def _on_waiting_message(self, reason: str) -> None:
        if reason != self._waiting:
            self._waiting = reason
            logger.info("the trainer makes run %s wait: %s", self._run_id, reason)
        self._on_waiting(reason)

    async def _forget_delivered(self) -> None:
        for step in [step for step in self._in_memory if step <= self._delivery.acknowledged]:
            self._digests[step] = await in_thread(codec.digest_of, self._in_memory.pop(step))
            began, nbytes = self._offered.pop(step)
            if self._spans is not None:
                self._spans.record("deliver", began, now(), step=step, bytes=nbytes)

    async def _settle(self, durable: int) -> None:
        if durable > self.durable_step:
            self._link.durable_up_to(durable)
            await in_thread(self._kept.settle, self._rollouts_dir, self.durable_step + 1, durable)
            self._digests = {step: digest for step, digest in self._digests.items() if step >= durable}
            self.durable_step = durable
            self._delivery.forget_up_to(durable)

    async def _send_as_due(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            while (due := self._delivery.next()) is not None:
                await self._send(due)

    async def _send(self, due: Due) -> None:
        """Passes a due message to the link."""
        message: Offer | Commit = Commit(due.step, due.session)
        if isinstance(due, SendBatch):
            batch = self._in_memory.get(due.step)
            if batch is None:
                batch = await self._read(due)
            if batch is None:
                return
            message = Offer(batch, due.session)
        with awaiting(f"the link to take what is due of step {due.step}", f"run {self._run_id}"):
            await self._link.send(message)

    async def _read(self, due: SendBatch) -> Batch | None:
        """Reads the batch's file, or returns None if it is not due any more."""
        path = self._batch_file(due.step)
        try:
            batch = await in_thread(codec.read_file, path, self._largest_batch)
        except FileNotFoundError:
            if not self._delivery.is_due(due):
                return None
            raise MissingBatchError(
                f"the trainer asks for step {due.step} again, but {path} is gone: it was deleted once the trainer had "
                f"reported the step durable (up to {self.durable_step}). Resume the trainer from its newest checkpoint"
            ) from None
        except CodecError as error:
            raise MissingBatchError(
                f"the trainer asks for step {due.step} again, but its record is unusable: {error}"
            ) from error
        return batch if self._delivery.is_due(due) else None

    def _batch_file(self, step: int) -> Path:
        return self._rollouts_dir / f"step_{step}" / BATCH_FILE


def _record_sizes(rollouts_dir: Path) -> dict[int, int]:
    """Returns the bytes of the `batch.bin` files, by step."""
    files = {step: rollouts_dir / f"step_{step}" / BATCH_FILE for step in published_steps(rollouts_dir)}
    return {step: file.stat().st_size for step, file in files.items() if file.exists()}
