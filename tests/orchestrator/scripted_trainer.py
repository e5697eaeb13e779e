"""The trainer's end of the real wire without a model: it takes batches in order, publishes a broadcast for each, and can be
killed and brought back at its last checkpoint.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import orjson

from counterpoint.transport.config import TransportConfig
from counterpoint.transport.files.atomic import publish_directory, published_steps, remove_directory
from counterpoint.transport.messages import Acknowledged, Bye, Commit, Evicted, Hello, Ready, Rejected, ToOrchestrator
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.base import BatchReceiver
from counterpoint.transport.wires.open import open_receiver
from tests.support.fake_inference import PROBE_TOKENS, probe_answer
from tests.support.polling import wait_until


class ScriptedTrainer:
    """A context manager: a thread that trains until left. A checkpoint every `durable_every` steps, and at the last one."""

    def __init__(
        self,
        output_dir: Path,
        run_id: str,
        steps: int,
        *,
        transport: TransportConfig | None = None,
        checkpoint: int = 0,
        durable_every: int = 2,
        train_seconds: float = 0.0,
        answer: Callable[[Batch], ToOrchestrator | None] = lambda batch: None,
    ) -> None:
        self._output_dir, self._run_id, self._steps = output_dir, run_id, steps
        self._transport = transport or TransportConfig()
        self._broadcasts = output_dir / f"run_{run_id}" / "broadcast"
        self._durable_every = durable_every
        self._train_seconds = train_seconds
        self._answer = answer
        self._stopping = threading.Event()
        self.checkpoint = self.newest = checkpoint
        self.trained: list[Batch] = []
        """In this life, in order."""
        self._waiting: dict[int, Batch] = {}
        self._committed = 0
        self.hellos = self.byes = 0

    @property
    def steps_trained(self) -> list[int]:
        return [batch.step for batch in self.trained]

    def __enter__(self) -> ScriptedTrainer:
        for step in published_steps(self._broadcasts):
            if step > self.checkpoint:
                remove_directory(self._broadcasts / f"step_{step}")
        self._thread = threading.Thread(target=self._run, name="scripted-trainer")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def wait_for_step(self, step: int, seconds: float = 60.0) -> None:
        """Until `step` is trained."""
        wait_until(lambda: self.newest >= step, f"step {step}", seconds)

    def _run(self) -> None:
        receiver = open_receiver(self._transport, self._output_dir)
        try:
            while not self._stopping.is_set():
                received = receiver.receive(0.01)
                if received is None:
                    continue
                run_id, message = received
                match message:
                    case Hello():
                        self.hellos += 1
                        self._publish(self.checkpoint)
                        self._waiting, self._committed = {}, 0
                        receiver.send(run_id, Ready(self.newest + 1, credit=2, session=secrets.randbits(62)))
                        if self.checkpoint:
                            receiver.send(run_id, Acknowledged(self.checkpoint, self.checkpoint))
                    case Batch():
                        self._waiting[message.step] = message
                    case Commit(step):
                        self._committed = step
                    case Bye():
                        self.byes += 1
                self._take_committed(receiver, run_id)
        finally:
            receiver.close()

    def _take_committed(self, receiver: BatchReceiver, run_id: str) -> None:
        for step in sorted(self._waiting):
            if step <= self._committed:
                batch = self._waiting.pop(step)
                receiver.send(run_id, self._answer(batch) or self._train(batch))

    def _train(self, batch: Batch) -> Acknowledged | Rejected | Evicted:
        if batch.step == self.newest + 1:
            time.sleep(self._train_seconds)
            self.trained.append(batch)
            self.newest = batch.step
            self._publish(batch.step)
            if batch.step % self._durable_every == 0 or batch.step == self._steps:
                self.checkpoint = batch.step
        return Acknowledged(batch.step, self.checkpoint)

    def _publish(self, version: int) -> None:
        directory = self._broadcasts / f"step_{version}"
        if version in published_steps(self._broadcasts):
            return
        answer = probe_answer(version, PROBE_TOKENS)
        probe = {"version": version, "token_ids": PROBE_TOKENS, "log_probabilities": answer}
        with publish_directory(directory) as partial:
            (partial / "probe.json").write_bytes(orjson.dumps(probe))
        for step in published_steps(self._broadcasts)[:-3]:
            remove_directory(self._broadcasts / f"step_{step}")
