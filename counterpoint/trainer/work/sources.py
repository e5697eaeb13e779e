"""The items of a run, and where they come from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from counterpoint.run.items import Objective, UpdateValues
from counterpoint.trainer.metrics import MetricValue
from counterpoint.transport.messages import ToOrchestrator
from counterpoint.transport.records import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """What is asked of a run under one number. Without a batch it has no contribution, and only what an asker wants follows."""

    batch: Batch | None = None
    objective: Objective | None = None
    """The objective of the contribution; None means the run's own."""
    spoils: bool = False
    """Whether it stands for a contribution that was refused before it came here."""
    updates: bool = False
    values: UpdateValues | None = None
    """The values of the update; None means those of the configured schedule."""
    publication: str | None = None
    """The name under which the weights are published then."""
    saves: Literal["", "newest", "kept"] = ""
    """Whether the state is saved then: as the newest checkpoint, or to be kept beyond newer ones."""
    answer: Future[Any] = field(default_factory=Future)
    """What an asker gets: the result of the last of these, or the error of the first that fails."""


@dataclass(frozen=True, slots=True)
class Data:
    """Data as the source of a run's steps, instead of an orchestrator (`counterpoint/trainer/sft/train.py`)."""

    make: Callable[[int], Batch | None]
    """Returns the batch of a step, and None after the last."""
    line: Callable[[int, dict[str, MetricValue]], dict[str, MetricValue]]
    """Returns the values of the metrics line from all metrics of a step."""
    on_saved: Callable[[], object]
    """Called when a checkpoint is durable."""


Sources = Mapping[str, Data | None]
"""The sources of runs without an orchestrator, by the runs' ids. None: this process asks for the run's items itself, and goes on
from its last save (`counterpoint/trainer/driven.py`)."""


class NoWire:
    """A `BatchReceiver` without an orchestrator."""

    rejected = 0

    def receive(self, timeout: float) -> None:
        """See `BatchReceiver`."""
        time.sleep(timeout)

    def take_invalid_batches(self) -> dict[str, str]:
        """See `BatchReceiver`."""
        return {}

    def send(self, run_id: str, message: ToOrchestrator) -> bool:
        """See `BatchReceiver`."""
        return True

    def close(self) -> None:
        """See `BatchReceiver`."""
