"""Owns the link to the trainer: sends batches within the trainer's credit and resends what a reconnected one lacks.

A batch is held in memory until it is acknowledged and as `batch.bin` until it is durable, so that any `READY` can be
answered with exactly the batches from its `next_step` on. What ends the run (rejected, evicted) ends `run` with an exception.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.threads import in_thread
from orchestrator.watchdog import awaiting
from transport import codec
from transport.base import TrainerLink
from transport.messages import Acknowledged, Bye, Evicted, Hello, Ready, Rejected, Waiting
from transport.records import Batch

logger = logging.getLogger(__name__)


class EvictedError(RuntimeError):
    """The trainer takes nothing more from this run; the message is its reason."""


class RejectedError(RuntimeError):
    """The trainer refused a message of ours: ours and its idea of a batch differ, which no retry mends."""


class NoTrainerError(ConnectionError):
    """No trainer took the run in time."""

    def __init__(self, run_id: str, seconds: float) -> None:
        super().__init__(
            f"no trainer was ready for run {run_id!r} within trainer_timeout_seconds = {seconds:g}; does it run, with the same "
            "output_dir and [transport]?"
        )


class MissingBatchError(RuntimeError):
    """The trainer asks for a step whose batch is gone, or that never was."""


class Sender:
    """`newest_step` is the last committed step (0 for none), whose batches up to the durable one are on disk. `on_waiting` hears
    why the trainer lets the run wait, every few seconds while it does."""

    def __init__(
        self,
        link: TrainerLink,
        run_dir: Path,
        run_id: str,
        newest_step: int,
        max_batch_bytes: int,
        on_waiting: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._link = link
        self._rollouts_dir = run_dir / "rollouts"
        self._run_id = run_id
        self._newest_step = newest_step
        self._max_batch_bytes = max_batch_bytes
        self._in_memory: dict[int, Batch] = {}
        self._unacknowledged: set[int] = set()
        self._on_waiting = on_waiting
        self._waiting = ""
        """Why the trainer last said that the run has to wait."""
        self.last_word = time.monotonic()
        """When the trainer last said anything, or this was made."""
        self._ready: Ready | None = None
        """The trainer's last READY; None while it is away."""
        self._next_step = 0
        self._flushing = asyncio.Lock()
        self._changed = asyncio.Condition()
        self.durable_step = 0

    @property
    def newest_step(self) -> int:
        """The last committed step."""
        return self._newest_step

    @property
    def unacknowledged(self) -> int:
        """Committed batches that the trainer has not acknowledged."""
        return self._newest_step - self._next_step + 1 + len(self._unacknowledged) if self._next_step else 0

    @property
    def had_trainer(self) -> bool:
        """Whether one has ever said READY."""
        return self._next_step > 0

    async def run(self) -> None:
        """Connects and serves the link until cancelled. Raises `EvictedError`, `RejectedError`, `MissingBatchError`."""
        await self._link.start(Hello(self._run_id, last_acknowledged=0))
        while True:
            message = await self._link.receive()
            self.last_word = time.monotonic()
            match message:
                case Ready():
                    self._on_ready(message)
                    await self._flush()
                case Waiting(reason):
                    self._on_let_wait(reason)
                case Acknowledged():
                    await self._on_acknowledged(message)
                    await self._flush()
                case Rejected(step, reason):
                    what = f"the batch of step {step}" if step is not None else "a message of ours"
                    raise RejectedError(f"the trainer rejected {what}: {reason}")
                case Evicted(reason):
                    raise EvictedError(f"the trainer evicted run {self._run_id!r}: {reason}")
                case Bye(reason):
                    self._ready = None
                    logger.warning("the trainer left%s; waiting for it to return", f": {reason}" if reason else "")
            async with self._changed:
                self._changed.notify_all()

    async def wait_ready(self, patience: float) -> Ready:
        """The trainer's READY. Raises `NoTrainerError` after `patience` seconds without a word from it; one that has no place for
        the run yet says so again and again."""
        with awaiting("the trainer's READY", f"run {self._run_id}"):
            while self._ready is None:
                left = self.last_word + patience - time.monotonic()
                try:
                    async with asyncio.timeout(max(left, 0.0)), self._changed:
                        await self._changed.wait()
                except TimeoutError:
                    if time.monotonic() - self.last_word >= patience:
                        raise NoTrainerError(self._run_id, patience) from None
        return self._ready

    async def wait_durable(self, step: int) -> None:
        """Until a checkpoint of the trainer covers `step`."""
        with awaiting(f"the trainer's checkpoint of step {step}", f"run {self._run_id}"):
            async with self._changed:
                await self._changed.wait_for(lambda: self.durable_step >= step)

    async def forget_up_to(self, step: int) -> None:
        """Takes `step` as durable: a checkpoint of the trainer covers it, though nobody was there to say so."""
        await self._settle(step)
        async with self._changed:
            self._changed.notify_all()

    async def submit(self, batch: Batch) -> None:
        """Takes over a committed batch and sends it as soon as the trainer is there and has credit; does not wait for that."""
        assert batch.step == self._newest_step + 1
        self._newest_step = batch.step
        self._in_memory[batch.step] = batch
        await self._flush()

    async def close(self) -> None:
        """Says Bye. Safe to call twice."""
        await self._link.close()

    def _on_ready(self, ready: Ready) -> None:
        if ready.next_step > self._newest_step + 1:
            raise MissingBatchError(
                f"the trainer has trained up to step {ready.next_step - 1}, but this run's newest committed step is "
                f"{self._newest_step}: its checkpoints are newer than ours; resume both from the same output directory"
            )
        again = self._newest_step - ready.next_step + 1
        logger.info(
            "the trainer is ready for step %d with credit %d%s",
            ready.next_step, ready.credit, f"; sending {again} batches again" if again else "",
        )  # fmt: skip
        self._ready, self._waiting = ready, ""
        self._next_step = ready.next_step
        self._unacknowledged.clear()

    def _on_let_wait(self, reason: str) -> None:
        self._ready = None
        if reason != self._waiting:
            self._waiting = reason
            logger.info("the trainer lets run %s wait: %s", self._run_id, reason)
        self._on_waiting(reason)

    async def _on_acknowledged(self, message: Acknowledged) -> None:
        self._unacknowledged.discard(message.step)
        self._in_memory.pop(message.step, None)
        self._link.acknowledged(message.step)
        await self._settle(message.durable)

    async def _settle(self, durable: int) -> None:
        if durable > self.durable_step:
            await in_thread(self._prune, self.durable_step + 1, durable)
            self.durable_step = durable

    def _prune(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self._batch_file(step).unlink(missing_ok=True)

    async def _flush(self) -> None:
        """Sends every committed batch that the trainer lacks and has credit for, in order."""
        async with self._flushing:
            while (
                self._ready is not None
                and self._next_step <= self._newest_step
                and len(self._unacknowledged) < self._ready.credit
            ):
                ready, step = self._ready, self._next_step
                batch = self._in_memory.get(step)
                if batch is None:
                    batch = await self._read(step)
                if ready is not self._ready or step != self._next_step:
                    continue  # It reconnected while we read: begin where it now stands.
                self._unacknowledged.add(step)
                self._next_step = step + 1
                with awaiting(f"the link to take the batch of step {step}", f"run {self._run_id}"):
                    await self._link.send(batch)

    async def _read(self, step: int) -> Batch:
        path = self._batch_file(step)
        try:
            return await in_thread(codec.read_file, path, self._max_batch_bytes)
        except FileNotFoundError:
            raise MissingBatchError(
                f"the trainer asks for step {step} again, but {path} is gone: it was deleted once the trainer had "
                f"reported the step durable (up to {self.durable_step}). Resume the trainer from its newest checkpoint"
            ) from None

    def _batch_file(self, step: int) -> Path:
        return self._rollouts_dir / f"step_{step}" / "batch.bin"
