"""The sources of a run's items, and the actions after its updates."""

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
    """A run's work under one number. Without a batch it has no contribution, and only the asker's other wishes follow."""

    batch: Batch | None = None
    objective: Objective | None = None
    """The objective of the contribution, or None for the run's."""
    spoils: bool = False
    """Whether it stands for a contribution that was refused earlier."""
    updates: bool = False
    values: UpdateValues | None = None
    """The values of the update, or None for those of the configured schedule."""
    publication: str | None = None
    """The name under which the weights are published then."""
    saves: Literal["", "newest", "kept"] = ""
    """Whether the state is saved then: as the newest checkpoint, or to be kept beyond newer ones."""
    answer: Future[Any] = field(default_factory=Future)
    """The asker's answer: the result of the last of these, or the error of the first that fails."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a run's items. Unless an asker makes them, each is a step: a contribution and a scheduled update."""

    publishes: Literal["updates", "saves", "nothing"]
    """The actions after an update. With "updates": publication, metrics line and, at the interval and at the end, checkpoint.
    With "saves", only a step with a checkpoint is published, before it. With "nothing", none of them, and a failure is the
    answer."""
    commits: bool = False
    """Whether an item counts only with its commit, as items from the wire do. It is acknowledged, and `BYE` ends the run."""
    make: Callable[[int], Batch | None] | None = None
    """Returns the batch of a step, and None after the last. If this is None, all items arrive from askers."""
    line: Callable[[int, dict[str, MetricValue]], dict[str, MetricValue]] = lambda _, metrics: metrics
    """Returns the values of the metrics line from all metrics of a step."""
    on_saved: Callable[[], object] = lambda: None
    """Called when a checkpoint is durable."""
    asked: bool = False
    """Whether an asker makes the items, each of which has an answer, whether it succeeds or fails."""
    checkpoints: bool = False
    """Whether an asked run has checkpoints at the interval and at the end: its asker keeps the items since, and asks again."""


ORCHESTRATED = Source("updates", commits=True)
"""The source of a run with an orchestrator. Others make items of data (`counterpoint/trainer/sft/train.py`), or take an asker's
(`counterpoint/trainer/driven.py`)."""

DRIVEN = Source("nothing", asked=True, checkpoints=True)
"""The source of a run with items from the wire."""

Sources = Mapping[str, Source]
"""The sources of runs without an orchestrator, by the runs' ids."""


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
