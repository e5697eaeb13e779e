"""Measures a trainer's loop with many tiny runs, 16 to 1,024, beside one run with as many tokens.

`perf.bench multi-run` shows it, and `perf.gpu many-adapters` on a GPU. Both are the trainer's own loop in this process, with
adapters on a small model, `TOKENS` a run and step. In place of the wire are the runs' orchestrators, which send a batch and its
commit once the version before is published. A step is all of the loop until each run has its next version, less the
publications: rows, updates, metrics, spans, and looks for runs and requests. The publications are compared with it, and the
checkpoints of all runs, which are made after one of the steps. The prompts of the runs differ, since one run would compute a
common one once.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from counterpoint.trainer.learner import Learner
from counterpoint.trainer.loop import Trainer
from counterpoint.trainer.model import shared_prompts
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.transport.messages import Bye, Commit, Evicted, Hello, Published, Ready, ToOrchestrator
from counterpoint.transport.records import Batch
from perf.step_speed import Settings, configurations, random_batch, write_model

TOKENS = 128
DEADLINE_SECONDS = 300.0
"""The longest that a step, or the admission of all runs, may take."""


SETTINGS = Settings(
    "two-layers", "cpu", groups=1, group_size=1, prompt=TOKENS // 2, completion=TOKENS // 2, shortest=TOKENS // 2,
    steps=1_000_000, row_tokens=2048, lora_rank=4,
)  # fmt: skip
"""The model and the tokens of a run's step on a CPU; `perf.gpu` has others."""


def beside_one(settings: Settings, count: int, rounds: int, directory: Path, *, saves: bool = True) -> Found:
    """Measures `count` runs beside one, in so many rounds after a smaller one, which fills caches.

    `settings` are of a run's step. Without `saves` no checkpoint is written.
    """
    transformers_logging.disable_progress_bar()
    model = write_model(directory / "model", settings)
    with (
        closing(_Loop(directory / "one", model, settings, 1)) as one,
        closing(_Loop(directory / "many", model, settings, count)) as many,
    ):
        one.admit(1)
        many.admit(count // 2)
        one.step(min(count, settings.row_tokens // (settings.prompt + settings.completion)))
        many.step(1)
        before = tensor_bytes()
        many.admit(count)
        steps = [(one.step(count), many.step(1)) for _ in range(rounds)]
        further = (tensor_bytes() - before) / (count - count // 2)
        return Found(steps, many.checkpoints() if saves else _Seconds(), many.state_bytes, further)


@dataclass(slots=True)
class _Seconds:
    """The time that something took."""

    wall: float = 0.0
    cpu: float = 0.0
    """The CPU seconds of all threads of this process."""


@dataclass(slots=True)
class _Step(_Seconds):
    """A step of all runs, less the publications."""

    published: _Seconds = field(default_factory=_Seconds)


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of many runs beside one."""

    steps: list[tuple[_Step, _Step]]
    """A step of the one, and of the many."""
    checkpoints: _Seconds
    state_bytes: int
    """The bytes of a run's adapter and optimizer."""
    further: float
    """The bytes of all tensors that a further run adds."""


@contextmanager
def _added_to(seconds: _Seconds) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        seconds.wall += time.perf_counter() - wall
        seconds.cpu += time.process_time() - cpu


class _Orchestrators:
    """The other ends of the wire, as the trainer's receiver: what they send is in memory."""

    rejected = 0

    def __init__(self) -> None:
        self.sessions: dict[str, int] = {}
        self.published: dict[str, int] = {}
        """The version of each run that the trainer has named last."""
        self._sent: deque[tuple[str, Hello | Batch | Commit]] = deque()

    def connect(self, run_id: str) -> None:
        """Sends the run's `HELLO`."""
        self._sent.append((run_id, Hello(run_id, 0)))

    def ship(self, batch: Batch) -> None:
        """Sends a batch, which is committed."""
        self._sent += (batch.run_id, batch), (batch.run_id, Commit(batch.step, self.sessions[batch.run_id]))

    def receive(self, timeout: float) -> tuple[str, Hello | Batch | Commit] | None:
        """See `BatchReceiver`."""
        return self._sent.popleft() if self._sent else None

    def take_invalid_batches(self) -> dict[str, str]:
        """See `BatchReceiver`."""
        return {}

    def send(self, run_id: str, message: ToOrchestrator) -> bool:
        """See `BatchReceiver`."""
        match message:
            case Ready(session=session):
                self.sessions[run_id] = session
            case Published(step):
                self.published[run_id] = step
            case Evicted(reason) | Bye(reason):
                raise RuntimeError(f"run {run_id} is sent away: {reason}")
        return True

    def close(self) -> None:
        """See `BatchReceiver`."""


def tensor_bytes() -> int:
    """Returns the bytes of all tensors, without the masks of the newest rows, which attention keeps."""
    shared_prompts._blocks.cache_clear()
    gc.collect()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for each in gc.get_objects()
        if issubclass(type(each), Tensor)
        for storage in [each.untyped_storage()]
    }
    return sum(storages.values())


class _Loop:
    """A trainer's loop."""

    def __init__(self, directory: Path, model: Path, settings: Settings, slots: int) -> None:
        self._directory, self._settings, self._orchestrators = directory, settings, _Orchestrators()
        self._run, config = configurations(model, directory, settings)
        directory.mkdir()
        ranks, manager = Ranks(0, 1, torch.device(settings.device), None), MultiRunManager(directory, slots)
        self._learner = Learner(config.model_copy(update={"max_runs": slots}), ranks, manager)
        self._trainer = Trainer(self._learner, self._orchestrators)
        self._publications = _Seconds()
        self._time("probe")
        self._time("publish")

    def admit(self, runs: int) -> None:
        """Admits runs until there are so many."""
        for number in range(len(self._orchestrators.sessions), runs):
            run_id = f"run-{number}"
            control = run_directory(self._directory, run_id) / "control"
            control.mkdir(parents=True)
            own = self._run.model_copy(update={"run_id": run_id})
            (control / "orch.toml").write_text(tomli_w.dumps(own.model_dump(mode="json", exclude_none=True)))
            self._orchestrators.connect(run_id)
        self._turn_until(lambda: len(self._orchestrators.sessions) == runs, "the admission of all runs")

    def _time(self, name: str) -> None:
        """Adds the time of a method of what the loop's parts share to that of the publications."""
        method: Any = getattr(self._trainer.shared, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with _added_to(self._publications):
                return method(*args, **kwargs)

        setattr(self._trainer.shared, name, timed)

    def step(self, samples: int) -> _Step:
        """Trains, publishes and reports the next step of every run, of so many samples each."""
        found, newest = _Step(), self._orchestrators.published
        self._publications = found.published
        due = {run_id: newest.get(run_id, 0) + 1 for run_id in self._orchestrators.sessions}
        for number, (run_id, step) in enumerate(due.items()):
            batch = random_batch(replace(self._settings, groups=samples), number + step * len(due), run_id)
            self._orchestrators.ship(replace(batch, step=step))
        with _added_to(found):
            self._turn_until(lambda: due.items() <= newest.items(), "a step of all runs")
            if self._settings.device == "cuda":
                torch.cuda.synchronize()
        found.wall -= found.published.wall
        found.cpu -= found.published.cpu
        return found

    def checkpoints(self) -> _Seconds:
        """Writes a checkpoint of every run."""
        found = _Seconds()
        with _added_to(found):
            for run in self._learner.runs.values():
                assert self._trainer.shared.checkpoints.begin(run)
            self._trainer.shared.checkpoints.complete()
        return found

    @property
    def state_bytes(self) -> int:
        """The bytes of the first run's adapter and optimizer."""
        return sum(tensor.nbytes for tensor in self._learner.runs[0].torch.optimizer.state().values())

    def _turn_until(self, reached: Callable[[], bool], what: str) -> None:
        due = time.monotonic() + DEADLINE_SECONDS
        while not reached():
            self._trainer.turn()
            if time.monotonic() > due:
                raise TimeoutError(f"{what} took more than {DEADLINE_SECONDS:g} s")

    def close(self) -> None:
        """Ends the loop's threads."""
        self._trainer.close()
