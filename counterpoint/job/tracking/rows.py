"""What a sink gets: the metrics of a step, and the result of an evaluation; and what a sink is.

`counterpoint/job/tracking/feed.py` makes the rows, `counterpoint/job/tracking/sink_process.py` gives them to a sink.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Row:
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
class Target:
    """What a sink is created for."""

    job: Path
    """The directory of the job."""
    directory: Path
    """The sink's own, in `tracking/`; it exists."""
    group: str
    """The name of the job, which groups its runs."""
    identity: str
    """Random text that tells this job at this sink from any other, one that had the same directory before included."""
    options: Mapping[str, Any]
    """The sink's table of `[tracking]`."""


class Sink(Protocol):
    """A system that keeps metrics. It lives in a process of its own: it may block, raise and exit, and is then replaced.

    **The truth about what it has is the sink's**, not ours: after a kill it says its last step, and gets those after it.
    """

    def last_step(self, run_id: str) -> int:
        """Returns the last step that it has of the run; 0 if none."""

    def write(self, row: Row) -> None:
        """Takes a row. Steps of a run only rise, except after `rewind`."""

    def write_evaluation(self, result: Evaluation) -> None:
        """Takes a result, at least once: after a kill perhaps again."""

    def rewind(self, run_id: str, step: int) -> bool:
        """The trainer trains this step and those after it again. Returns whether the sink will replace what it has of them."""

    def flush(self) -> None:
        """Makes durable what it took, as far as it can."""

    def close(self) -> None:
        """Ends it in order. Nothing is written after this."""
