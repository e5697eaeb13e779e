"""A checkpoint of a trial, as the runner, the schedulers and the executors speak of it: where it is and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from counterpoint.tune.result import Result


@dataclass(frozen=True)
class Checkpoint:
    """A durable state of a trial from which it, or another trial, can go on.

    For a process it is a directory; for a run of a job, a step whose weights and optimizer are durable in that run's directory.
    """

    PERSISTENT: ClassVar[str] = "persistent"
    """The `storage` of one that outlives its trial."""
    MEMORY: ClassVar[str] = "memory"
    """The `storage` of one that need not. It is a directory all the same: an object could be lost with its process."""

    trial_id: str
    """The trial whose state it is; not always the one that restores it."""
    iteration: int | float
    """The `training_iteration` of the last result before it. A user's executor may give any number."""
    path: str
    """The directory, absolute, or a URI that the executor understands."""
    result: Result = field(default_factory=dict)
    """The last result before it, from which its score is taken."""
