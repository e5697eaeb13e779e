"""Where the time of one whole step went: a verdict that `replay` and `attribute` print, which measure only its boundary.

It is computed from the orchestrator's and the trainer's metrics of the step, so the dump must lie in its run's directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from job.history import History

BOUNDARY = ("merge", "records", "commit", "send", "malloc_trim")
"""The phases that a replay measures, and `send`, which was a phase in older runs."""

UNTOLD = "generating, judging and waiting"
"""The rest of a step in older runs, which timed only the phases of the boundary."""
TOLERANCE = 1e-3
"""The share of a step that rounding may leave unexplained."""

PREFIX = "phase/"


@dataclass(frozen=True, slots=True)
class WholeStep:
    """One step of one run; seconds throughout."""

    run_id: str
    step: int
    seconds: float
    """Since the step before, or since the session began to generate."""
    phases: dict[str, float]
    """The orchestrator's phases (`orchestrator/step/phases.py`), one after the other; the boundary is one. Their sum is
    `seconds`."""
    trainer: dict[str, float]
    """The trainer's phases of this step, which overlap the orchestrator's; empty if the step has not been trained."""

    @property
    def longest(self) -> str:
        """What takes most of the step."""
        return max(self.phases, key=lambda name: self.phases[name])

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self) | {"verdict": self.verdict}

    @property
    def verdict(self) -> str:
        """What bounds the step, and what a quicker boundary would gain."""
        share = self.phases["boundary"] / self.seconds
        most = f"{self.longest} takes most of it ({self.phases[self.longest] / self.seconds:.0%})"
        gain = f"A boundary that took no time at all would make the step {share:.1%} shorter."
        waited = self.trainer.get("wait")
        if waited is None:
            return f"{most}. {gain}"
        at_work = sum(self.trainer.values()) - waited
        slower = "the trainer waits for rollouts" if waited > at_work else "the trainer is busy most of the time"
        return f"{most}; {slower} ({waited:.2f} s of waiting, {at_work:.2f} s of work). {gain}"


def whole_step(dump: Path, step: int) -> WholeStep | None:
    """The step of the dump in `run_<id>/raw_rollouts/step_N`. None if the dump lies elsewhere, or if the step's metrics are
    missing or lack its duration."""
    run_dir = dump.absolute().parent.parent
    if dump.absolute().parent.name != "raw_rollouts" or not run_dir.name.startswith("run_"):
        return None
    history = History.of(run_dir.parent, run_dir.name.removeprefix("run_"))
    history.refresh()
    line = history.shipped.get(step)
    seconds = line and (line.get("wall_seconds") or history.seconds_of(step))  # older runs timed their boundary alone
    if line is None or not seconds:
        return None
    return WholeStep(history.run_id, step, seconds, _told(line, seconds), _phases(history.trained.get(step, {})))


def _told(line: Mapping[str, Any], seconds: float) -> dict[str, float]:
    phases = _phases(line)
    boundary = sum(phases.pop(name, 0.0) for name in BOUNDARY)
    untold = max(0.0, seconds - boundary - sum(phases.values()))
    before = {UNTOLD: untold} if untold > TOLERANCE * seconds else {}
    return {**before, **phases, "boundary": boundary}


def _phases(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        name.removeprefix(PREFIX): float(value)
        for name, value in line.items()
        if name.startswith(PREFIX) and isinstance(value, int | float)
    }


def in_words(found: WholeStep | None) -> str:
    """The last lines of `replay` and `attribute`."""
    if found is None:
        return (
            "  The time of the whole step is not known: the dump does not lie in its run's directory, or the metrics of its step "
            "are missing. The figures above are of its boundary alone."
        )
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.phases.items() if seconds >= 0.0005)
    lines = [f"  The whole step {found.step} of run {found.run_id} took {found.seconds:.2f} s: {parts}."]
    if found.trainer:
        beside = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.trainer.items())
        lines.append(f"  The trainer, at the same time: {beside}.")
    return "\n".join([*lines, f"  {found.verdict}"])
