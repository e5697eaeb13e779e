"""What a sink gets: the metrics of a step, and the result of an evaluation; and what a sink is.

`counterpoint/job/tracking/feed.py` makes the rows, `counterpoint/job/tracking/tracking.py` gives them to a sink.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TrackedRow:
    """The metrics of one step: the orchestrator's by their names, the trainer's after `trainer/`."""

    run_id: str
    step: int
    time: float
    """The time of the row, in Unix seconds."""
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation. It comes after the row of the step that it evaluates."""

    run_id: str
    name: str
    step: int
    time: float
    values: dict[str, float]
    """The values, by names that begin with `evaluation/<name>/`."""


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """Which sink follows which job."""

    name: str
    """The name of its folder and its state in `tracking/`."""
    sink: Callable[[SinkSpec, str], Sink]
    """Makes the sink. The text tells this job from any other there, one that had the same directory before included."""
    job: Path
    """The directory of the job."""
    group: str
    """The name of the job, which groups its runs."""
    options: Mapping[str, Any]
    """The sink's table of `[tracking]`."""

    @property
    def directory(self) -> Path:
        """The sink's own, in `tracking/`; it exists."""
        return self.job / "tracking" / self.name


class Sink(ABC):
    """A system that keeps metrics. A thread of its own calls it: it may block and raise, and is then made anew."""

    @abstractmethod
    def last_step(self, run_id: str, saved: int) -> int:
        """Returns the last step of the run that it has for sure; 0 if none. `saved`: the last step that was flushed.

        It gets those after it, and so may meet a step again after a kill; it then keeps one of the two.
        """

    @abstractmethod
    def write(self, row: TrackedRow) -> None:
        """Takes a row. Steps of a run only rise, except after `rewind`."""

    @abstractmethod
    def write_evaluation(self, result: Evaluation) -> None:
        """Takes a result, at least once: after a kill perhaps again."""

    def rewind(self, run_id: str, step: int) -> bool:
        """The trainer trains this step and those after it again. Returns whether the sink will replace what it has of them."""
        return False

    def flush(self) -> None:  # noqa: B027 - most need none
        """Makes durable what it took, as far as it can."""

    def close(self) -> None:  # noqa: B027 - most need none
        """Ends it in order; nothing is written after this. May block until everything is sent."""
