"""A whole trainer in this process, over a wire of lists: a pass is a call, a death an exception at a chosen file operation.

The orchestrators are played by the wire: each run has committed the batches up to `committed[run_id]` and sends what the trainer
has room for.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.loop import Trainer
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import Run
from counterpoint.transport.messages import Acknowledged, Bye, Commit, Evicted, Hello, Ready, ToOrchestrator, Waiting
from counterpoint.transport.records import Batch
from tests.support.polling import DEADLINE_SECONDS
from tests.trainer.conftest import make_batch, make_run_config
from tests.trainer.lone_run import ALONE
from tests.trainer.orchestrator_end import write_run

RUNS = ("loser", "third", "winner")
STEPS = 6


class Wire:
    """The trainer's end, and all orchestrators."""

    rejected = 0

    def __init__(self, committed: dict[str, int]) -> None:
        self.committed = committed
        self.evicted: dict[str, str] = {}
        self.waiting: dict[str, str] = {}
        self._arriving: deque[tuple[str, Hello | Batch | Commit | Bye]] = deque(
            (run_id, Hello(run_id, 0)) for run_id in committed
        )
        self._sent: dict[str, int] = {}
        self._acknowledged: dict[str, int] = {}
        self._session: dict[str, int] = {}

    def receive(self, timeout: float) -> tuple[str, Hello | Batch | Commit | Bye] | None:
        for run_id, session in self._session.items():
            limit = min(self.committed[run_id], self._acknowledged[run_id] + 2)
            for step in range(self._sent[run_id] + 1, limit + 1):
                self._arriving += [(run_id, Commit(step, session)), (run_id, make_batch(step, run_id=run_id))]
                self._sent[run_id] = step
        return self._arriving.popleft() if self._arriving else None

    def take_invalid_batches(self) -> dict[str, str]:
        return {}

    def send(self, run_id: str, message: ToOrchestrator) -> bool:
        match message:
            case Ready(next_step, _, session):
                self._sent[run_id] = self._acknowledged[run_id] = next_step - 1
                self._session[run_id] = session
            case Acknowledged(step):
                self._acknowledged[run_id] = max(step, self._acknowledged.get(run_id, 0))
            case Evicted(reason):
                self.evicted[run_id] = reason
            case Waiting(reason):
                self.waiting[run_id] = reason
        return True

    def say(self, run_id: str, message: Hello | Bye) -> None:
        """An orchestrator comes or goes."""
        self._arriving.append((run_id, message))
        if isinstance(message, Bye):
            self._session.pop(run_id, None)

    def offer(self, batch: Batch) -> None:
        """Sends a batch that is not committed."""
        self._arriving.append((batch.run_id, batch))
        self._sent[batch.run_id] = batch.step

    def commit(self, run_id: str, step: int) -> None:
        """Says that what was sent up to this step is committed."""
        self._arriving.append((run_id, Commit(step, self._session[run_id])))

    def acknowledged(self, run_id: str) -> int:
        """The last step that the trainer has acknowledged in this session."""
        return self._acknowledged[run_id]

    def close(self) -> None:
        """Nothing is open."""


class Life:
    """One process of the trainer, from its start to its death."""

    waits_for_the_disk = True
    """Whether a turn ends when the checkpoints that it has begun are written."""

    def __init__(self, output_dir: Path, model: Path, committed: dict[str, int], **config: Any) -> None:
        """`ranks` in `config` are those of rank 0; without, it is alone."""
        ranks: Ranks = config.pop("ranks", ALONE)
        resume = (output_dir / "trainer").exists()
        (output_dir / "trainer").mkdir(exist_ok=True)
        given = {"threads": 1, "max_runs": 3, "max_tokens": 64, "keep_broadcasts": 9, "resume": resume} | config
        self.config = TrainerConfig(output_dir=output_dir, model=str(model), **given)
        self.manager = MultiRunManager(output_dir, self.config.max_runs, self.config.seed)
        self.learner = Learner(self.config, ranks, self.manager)
        self.wire = Wire(committed)
        self.trainer = Trainer(self.learner, self.wire)

    def turn(self) -> None:
        """One pass of the trainer's loop, with a discovery; then the disk is waited for."""
        self.trainer._discovered = 0.0
        self.trainer.turn()
        if self.waits_for_the_disk:
            self.trainer.shared.checkpoints.complete()

    def turn_until(self, condition: Callable[[], bool], what: str) -> None:
        """Passes until the condition holds."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"in vain for {what}; evicted: {self.wire.evicted}"
            self.turn()

    def until_step(self, **steps: int) -> None:
        """Until these runs are trained up to these steps."""
        self.turn_until(lambda: all(self.step_of(run_id) >= step for run_id, step in steps.items()), f"steps {steps}")

    def step_of(self, run_id: str) -> int:
        """-1 without a slot."""
        run = self.manager.registry.taking(run_id)
        return run.progress.step if run is not None else -1

    def run(self, run_id: str) -> Run:
        slot = self.manager.registry.slot_of(run_id)
        assert slot is not None
        return self.learner.runs[slot]

    def close(self) -> None:
        """Gives back what a dead process would not hold."""
        self.trainer.close()
        for run in self.manager.registry.at():
            if run.descriptor is not None:
                os.close(run.descriptor)


@contextmanager
def life(output_dir: Path, model: Path, committed: dict[str, int], **config: Any) -> Iterator[Life]:
    """A life that ends with the block."""
    one = Life(output_dir, model, committed, **config)
    try:
        yield one
    finally:
        one.close()


def write_member(output_dir: Path, model: Path, run_id: str, steps: int = STEPS, **training: Any) -> RunConfig:
    """The directory of a run with an adapter."""
    training = {"lora": {"rank": 2, "target_modules": ["q_proj", "down_proj"]}, **training}
    config = make_run_config(output_dir, model, steps=steps, **training).model_copy(update={"run_id": run_id})
    write_run(config)
    return config


def write_population(output_dir: Path, model: Path, **training: Any) -> None:
    """The directories of `RUNS`, with learning rates of their own."""
    for number, run_id in enumerate(RUNS, 1):
        write_member(output_dir, model, run_id, **{"learning_rate": number * 1e-3, **training})


def broadcast(output_dir: Path, run_id: str, step: int) -> dict[str, Tensor]:
    return load_file(output_dir / f"run_{run_id}" / "broadcast" / f"step_{step}" / "adapter_model.safetensors")


def saved_state(output_dir: Path, run_id: str, step: int) -> dict[str, Tensor]:
    """The tensors of a checkpoint, without the generators'."""
    tensors = load_file(output_dir / "trainer" / run_id / "checkpoints" / f"step_{step}" / "state.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("random.")}


class Death(BaseException):
    """The process is killed here."""


class Deaths:
    """Counts file operations, and kills before the one that is due. The dead do nothing more: each further operation raises, so
    that no clean-up of a living process runs."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.due: int | None = None
        self.dead = False
        self._lock = threading.Lock()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Counts from now on."""
        for name in ("replace", "rename", "link", "unlink", "rmdir", "mkdir", "writev"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **more: Any) -> Any:
            with self._lock:  # the trainer's loop and the thread that writes its checkpoints
                if self.dead:
                    raise Death
                number = len(self.seen)
                self.seen.append(f"{name} {arguments[-1] if name in ('replace', 'rename', 'link') else arguments[0]}")
                if number == self.due:
                    self.dead = True
                    raise Death
            return real(*arguments, **more)

        return operation


def no_links(source: object, target: object, **_: object) -> None:
    """`os.link` of a disk without links."""
    raise OSError(errno.EPERM, "Operation not permitted", str(target))
