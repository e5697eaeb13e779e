"""Where the time of one whole step went. `replay` and `attribute`, which measure only its boundary, print it last.

It is computed from the orchestrator's and the trainer's metrics of the step, so the dump must lie in its run's directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from counterpoint.job.reading.metrics.history import History

BOUNDARY = ("merge", "records", "commit", "send", "malloc_trim")
"""The phases that a replay measures, and `send`, which was a phase in older runs."""

UNTIMED = "generating, finalizing and waiting"
"""The rest of a step in older runs, which timed only the phases of the boundary."""

TOLERANCE = 1e-3
"""The share of a step that rounding may leave unexplained."""

PREFIX = "phase/"


@dataclass(frozen=True, slots=True)
class WholeStep:
    """One step of one run; durations in seconds."""

    run_id: str
    step: int
    seconds: float
    """The step's duration: since the step before, or since the orchestrator began to generate."""
    phases: dict[str, float]
    """The orchestrator's phases (`orchestrator/step/phases.py`), one after the other; the boundary is one. Their sum is
    `seconds`."""
    trainer: dict[str, float]
    """The trainer's phases of this step, which overlap the orchestrator's; empty if the step has not been trained."""

    @property
    def longest(self) -> str:
        """The name of the longest phase."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def conclusion(self) -> str:
        """What bounds the step, and how much a quicker boundary would save, in words."""
        share = self.phases["boundary"] / self.seconds
        most = f"{self.longest} takes most of it ({self.phases[self.longest] / self.seconds:.0%})"
        gain = f"A boundary that took no time at all would make the step {share:.1%} shorter."
        waited = self.trainer.get("wait")
        if waited is None:
            return f"{most}. {gain}"
        worked = sum(self.trainer.values()) - waited
        slower = "the trainer waits for rollouts" if waited > worked else "the trainer is busy most of the time"
        return f"{most}; {slower} ({waited:.2f} s of waiting, {worked:.2f} s of work). {gain}"

    def as_json(self) -> dict[str, Any]:
        """Returns the step for programs."""
        return asdict(self) | {"verdict": self.conclusion}


def whole_step(dump: Path, step: int) -> WholeStep | None:
    """Reads the step of the dump in `run_<id>/raw_rollouts/step_N`.

    Returns None if the dump lies elsewhere, or if the step's metrics are missing or lack its duration.
    """
    run_dir = dump.absolute().parent.parent
    if dump.absolute().parent.name != "raw_rollouts" or not run_dir.name.startswith("run_"):
        return None
    history = History.of(run_dir.parent, run_dir.name.removeprefix("run_"))
    history.refresh()
    line = history.shipped.get(step)
    seconds = line and (line.get("wall_seconds") or history.seconds_of(step))  # older runs timed their boundary alone
    if line is None or not seconds:
        return None
    trainer = _phases(history.trained.get(step, {}))
    return WholeStep(history.run_id, step, seconds, _phases_of_step(line, seconds), trainer)


def _phases_of_step(line: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """The orchestrator's phases, with those of the boundary summed, and the untimed rest of the step."""
    phases = _phases(line)
    boundary = sum(phases.pop(name, 0.0) for name in BOUNDARY)
    untimed = max(0.0, seconds - boundary - sum(phases.values()))
    before = {UNTIMED: untimed} if untimed > TOLERANCE * seconds else {}
    return {**before, **phases, "boundary": boundary}


def _phases(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        name.removeprefix(PREFIX): float(value)
        for name, value in line.items()
        if name.startswith(PREFIX) and isinstance(value, int | float)
    }
