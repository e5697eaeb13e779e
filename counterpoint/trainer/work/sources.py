"""Where the items of a run come from, and what follows its updates."""

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
class Source:
    """The source of a run's items. Unless an asker makes them, each is a step: a contribution and a scheduled update."""

    publishes: Literal["updates", "saves", "nothing"]
    """What follows an update. With "updates": publication, metrics line and, at the interval and at the end, checkpoint. With
    "saves", only what gets a checkpoint is published, before it. With "nothing", none of them, and what fails is the answer."""
    commits: bool = False
    """Whether an item counts with its commit only, as what comes by the wire. It is acknowledged, and `BYE` ends the run."""
    make: Callable[[int], Batch | None] | None = None
    """Returns the batch of a step, and None after the last. If this is None, all that is asked for arrives."""
    line: Callable[[int, dict[str, MetricValue]], dict[str, MetricValue]] = lambda _, metrics: metrics
    """Returns what the metrics line of a step has, of all its metrics."""
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
"""The source of a run whose items come by the wire."""

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
