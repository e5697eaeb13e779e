"""The steps of a run, read from its orchestrator's and its trainer's metrics files as they grow.

Progress, summary, curves and `status` all read a run's metrics by this class.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from job.inspection.metrics_lines import Follower, Line, read_discarded, step_of
from job.inspection.no_difference import read_notice
from job.inspection.trained_lines import TrainedLines
from orchestrator.step.differences import Notice, show_command
from transport.files.untrusted import UntrustedFileError

READING_SECONDS = 60.0
"""Longest time for which one `refresh` reads the trainer's file: enough for some 30 GB."""

MAX_STEPS = 200_000
"""Most steps of a run that are kept. An orchestrator of ours writes fewer."""


@dataclass(slots=True)
class History:
    """The steps of one run: those that its orchestrator shipped and those that the trainer trained."""

    run_id: str
    steps: int | None = None
    """The configured number of steps; None if unknown."""
    shipped: dict[int, Line] = field(default_factory=dict)
    """The orchestrator's line of each step."""
    trained: dict[int, Line] = field(default_factory=dict)
    """The trainer's line of each step."""
    since: float = 0.0
    """When this invocation of the job began, in Unix seconds. Rates leave out earlier steps and the pause before it."""
    discarded: Line = field(default_factory=dict)
    """The report on the rollouts discarded since the last shipped step (`orchestrator.step.discarded.Report`); empty without
    one."""
    no_difference: Notice | None = None
    """That its newest groups show no difference to learn from, if so."""
    unreadable: str = ""
    """Why the last refresh could not read a part of the run, or how far it came; empty if it read everything."""
    _run_dir: Path = Path()
    _follower: Follower = field(default_factory=lambda: Follower(Path()))
    _trained_lines: TrainedLines = field(default_factory=lambda: TrainedLines(Path()))
    _known: set[int] = field(default_factory=set)
    """The shipped steps when the orchestrator's file was last read to its end: a replaced file has them again."""
    _generation: int = 0
    """Of the trainer's lines that were read, and how many those are."""
    _trained_count: int = 0

    @classmethod
    def of(
        cls,
        output_dir: Path,
        run_id: str,
        steps: int | None = None,
        since: float = 0.0,
        trained: TrainedLines | None = None,
    ) -> History:
        """Creates the history of `run_<id>` in a job's directory; it is empty until `refresh`.

        Give the histories of one job's runs one `trained`, so that they read the trainer's file once.
        """
        run_dir = output_dir / f"run_{run_id}"
        return cls(
            run_id,
            steps,
            since=since,
            _run_dir=run_dir,
            _follower=Follower(run_dir / "metrics.jsonl"),
            _trained_lines=trained or TrainedLines(output_dir),
        )

    def refresh(self, deadline: float = math.inf) -> list[Line]:
        """Reads what the files gained; returns the lines of the newly shipped steps.

        Past `deadline`, by the monotonic clock, it leaves the rest of the orchestrator's file to the next call (`is_behind`).
        """
        fresh: list[Line] = []
        self.unreadable, self.discarded = "", {}
        try:
            fresh = self._read_shipped(deadline)
            self._read_trained()
            self.unreadable = self._follower.unread or self._trained_lines.unread
            report = read_discarded(self._run_dir)
            self.no_difference = read_notice(self._run_dir)
        except (OSError, UntrustedFileError) as error:
            self.unreadable = str(error)
            return fresh
        if report.get("step") == self.step:
            self.discarded = report
        return fresh

    @property
    def is_behind(self) -> bool:
        """Whether the last refresh left a part of the orchestrator's file to the next one."""
        return bool(self._follower.unread)

    def _read_shipped(self, deadline: float) -> list[Line]:
        """Reads the lines that the orchestrator appended; returns the newly shipped steps."""
        if not self.is_behind:
            self._known = set(self.shipped)
        fresh: dict[int, Line] = {}
        for line in self._follower.new_lines(self.shipped.clear, deadline):
            if self._add(line, self.shipped) and line["step"] not in self._known:
                fresh[line["step"]] = line
        return list(fresh.values())

    def _read_trained(self) -> None:
        lines = self._trained_lines
        lines.refresh(time.monotonic() + READING_SECONDS)
        if lines.generation != self._generation:
            self.trained.clear()
            self._generation, self._trained_count = lines.generation, 0
        for _, raw in lines.lines_of(self.run_id, self._trained_count):
            self._trained_count += 1
            if line := step_of(raw):
                self._add(line, self.trained)

    def _add(self, line: Line, steps: dict[int, Line]) -> bool:
        """Adds the line of a step, unless it is another run's or there are too many; returns whether it did."""
        if line.get("run_id", self.run_id) != self.run_id or (len(steps) >= MAX_STEPS and line["step"] not in steps):
            return False
        steps[line["step"]] = line
        return True

    @property
    def advice_without_difference(self) -> str:
        """What to know and to do while its groups show no difference, with the command that shows examples; empty if they do."""
        if (notice := self.no_difference) is None:
            return ""
        shown = show_command(self._run_dir.parent, self.run_id)
        return f"{notice}. What to do: {notice.advice}. Three of the worst: {shown}"

    @property
    def step(self) -> int:
        """The newest shipped step; 0 before the first."""
        return max(self.shipped, default=0)

    @property
    def complete(self) -> bool:
        """Whether all configured steps are shipped and trained."""
        return self.steps is not None and min(self.step, max(self.trained, default=0)) >= self.steps

    @property
    def progress(self) -> str:
        """The newest shipped step and the number of steps: `7/20`, or `7/?` if the number is unknown.

        Of a run that trains on data the newest trained one: nothing ships its batches.
        """
        return f"{self.step or max(self.trained, default=0)}/{self.steps or '?'}"

    @property
    def last_shipped(self) -> Line:
        """The newest shipped step's line; empty before the first."""
        return self.shipped[max(self.shipped)] if self.shipped else {}

    @property
    def last_trained(self) -> Line:
        """The newest trained step's line; empty before the first."""
        return self.trained[max(self.trained)] if self.trained else {}

    def series(self, name: str) -> list[tuple[int, float]]:
        """Returns a metric's values as (step, value), from the file that has it. Steps without it are left out."""
        lines = self.shipped if any(name in line for line in self.shipped.values()) else self.trained
        return [(step, float(lines[step][name])) for step in sorted(lines) if lines[step].get(name) is not None]

    def seconds_of(self, step: int) -> float | None:
        """Returns the seconds that a shipped step took; None if unknown."""
        line = self.shipped.get(step)
        return None if line is None else _seconds(line, self.shipped.get(step - 1, {}))

    def tokens_per_second(self, steps: int | None = None) -> float | None:
        """Computes completion tokens per second over the last `steps` steps, or all steps, of this invocation.

        Pauses between two starts of the orchestrator are left out. None if no step's duration is known.
        """
        newest = sorted(self.shipped)[-steps - 1 if steps else None :]
        lines: list[Line] = [{}, *(self.shipped[step] for step in newest)]
        tokens, seconds = 0, 0.0
        for before, line in list(pairwise(lines))[-steps if steps else None :]:
            took = _seconds(line, before)
            if took is not None and line["time"] - took >= self.since:
                tokens += line.get("tokens/completion", 0)
                seconds += took
        return tokens / seconds if seconds > 0 else None


def _seconds(line: Line, before: Line) -> float | None:
    """The duration of a step in seconds; None if unknown.

    It counts from the step before, or from when the orchestrator began to generate if that is later.
    """
    known = [line["uptime_seconds"]] if "uptime_seconds" in line else []
    if before:
        known.append(line["time"] - before["time"])
    return min(known, default=None)
