"""The steps of a run, read from its orchestrator's and its trainer's metrics files as they grow.

Progress, summary, curves and `status` all read a run's metrics by this class.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.inference.checkpoint import is_delta
from counterpoint.job.reading.metrics.evaluations import Evaluated, EvaluationResults
from counterpoint.job.reading.metrics.metrics_lines import Follower, Line, is_number, read_discarded, step_of
from counterpoint.job.reading.metrics.trained_lines import TrainedLines
from counterpoint.orchestrator.early_warnings.watch import EarlyWarning, read_warnings
from counterpoint.orchestrator.step.differences import Notice, read_notice, show_command
from counterpoint.orchestrator.step.step_metrics import RESTORED_TOKENS
from counterpoint.trainer.telemetry.mismatch import SHOWN_STEPS, Jump, read_jump
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.untrusted import UntrustedFileError

READING_SECONDS = 60.0
"""Longest time for which one `refresh` reads the trainer's file: enough for some 30 GB."""

RATE_STEPS = 10
"""Steps over which tokens per second are computed."""

KEPT_STEPS = 1_000
"""The newest steps whose lines are all kept, and how many of the older ones are kept besides, evenly spread."""

NEWEST_TRAINED = 20_000
"""The newest lines of the trainer that are read of a file met anew."""

NEWEST_BYTES = 2**25
"""What is read of the end of an orchestrator's file that is met anew: some 20,000 steps."""


@dataclass(slots=True)
class LeftOut:
    """What is known of steps whose lines are not kept."""

    sums: Line = field(default_factory=dict)
    """The sum of each metric over these steps."""
    maxima: Line = field(default_factory=dict)
    """The maximum of each metric."""
    first: int = 0
    """The first of them."""
    began: float = math.inf
    """The earliest time, in Unix seconds."""

    def add(self, line: Line) -> None:
        """Adds a step."""
        for name, value in line.items():
            if is_number(value):
                self.sums[name] = self.sums.get(name, 0) + value
                self.maxima[name] = max(self.maxima.get(name, value), value)
        self.first = min(self.first or line["step"], line["step"])
        self.began = min(self.began, line["time"])


@dataclass(slots=True)
class History:
    """The steps of one run: those that its orchestrator shipped and those that the trainer trained."""

    run_id: str
    steps: int | None = None
    """The configured number of steps; None if unknown."""
    shipped: dict[int, Line] = field(default_factory=dict)
    """The orchestrator's line of each step that is kept."""
    trained: dict[int, Line] = field(default_factory=dict)
    """The trainer's line of each step that is kept."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """The lines that are not kept any more."""
    since: float = 0.0
    """The time when this invocation of the job began, in Unix seconds. Rates leave out earlier steps and the pause
    before it; what an earlier one discarded is no news."""
    discarded: Line = field(default_factory=dict)
    """The report on the rollouts discarded since the last shipped step (`orchestrator.step.discarded.Report`); empty without
    one."""
    no_difference: Notice | None = None
    """The notice that its newest groups show no difference to learn from, if there is one."""
    mismatch_jump: Jump | None = None
    """The newest step whose mismatch KL was far beyond that of the steps before, if there is a notice."""
    evaluations: EvaluationResults = field(default_factory=lambda: EvaluationResults(Path()))
    """The results of its evaluations."""
    new_results: list[Evaluated] = field(default_factory=list)
    """Those that ended in this invocation of the job and that the last refresh has read."""
    unreadable: str = ""
    """Why the last refresh could not read a part of the run, or how far it came; empty if it read everything."""
    _run_dir: Path = Path()
    _follower: Follower = field(default_factory=lambda: Follower(Path()))
    _trained_lines: TrainedLines = field(default_factory=lambda: TrainedLines(Path()))
    _known: int = 0
    """The newest shipped step when the orchestrator's file was last read to its end: a replaced file has the others again."""
    _seconds: dict[int, float] = field(default_factory=dict)
    """How long those shipped steps took that are kept and whose step before is not."""
    _generation: int = 0
    """The generation of the trainer's lines that were read, and how many those are."""
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
            evaluations=EvaluationResults(run_dir),
            _run_dir=run_dir,
            _follower=Follower(run_dir / "metrics.jsonl", NEWEST_BYTES),
            _trained_lines=trained or TrainedLines(output_dir),
        )

    @property
    def weights(self) -> Path | None:
        """The newest trained weights that a model can be loaded from; None before the first step, or once they are removed."""
        steps = published_steps(self._run_dir / "broadcast")
        paths = (self._run_dir / "broadcast" / f"step_{step}" for step in reversed(steps) if step)
        return next((path for path in paths if not is_delta(path)), None)

    def looking_commands(self, file: Path, names_run: bool, is_evaluated: bool) -> list[str]:
        """Returns what to look at its result with: its worst rollout, and its evaluations on the best or newest weights.

        `file` is the job's; `names_run` where the job has several.
        """
        one = f" --run {shlex.quote(self.run_id)}" if names_run else ""
        show = f"counterpoint show {shlex.quote(str(self.job))}{one} --worst"
        best = self.evaluations.best() if is_evaluated else None
        weights = None if not is_evaluated else best.path if best is not None else self.weights
        if weights is None:
            return [show]
        return [show, f"counterpoint eval {shlex.quote(str(file))}{one} --checkpoint {shlex.quote(str(weights))}"]

    def refresh(self, deadline: float = math.inf) -> list[Line]:
        """Reads what the files gained; returns the lines of the newly shipped steps.

        Past `deadline`, by the monotonic clock, it leaves the rest of the orchestrator's file to the next call (`is_behind`).
        """
        fresh: list[Line] = []
        self.unreadable, self.discarded, self.new_results = "", {}, []
        try:
            fresh = self._read_shipped(deadline)
            self._read_trained()
            self.unreadable = self._follower.unread or self._trained_lines.unread
            self.read_notices()
        except (OSError, UntrustedFileError) as error:
            self.unreadable = str(error)
        return fresh

    def read_notices(self) -> None:
        """Reads what lies beside the metrics: new results of evaluations, and the notices about the newest steps.

        Raises `OSError` and `UntrustedFileError`.
        """
        self.new_results = [result for result in self.evaluations.refresh() if result.time >= self.since]
        report = read_discarded(self._run_dir)
        notice = read_notice(self._run_dir)
        self.mismatch_jump = read_jump(self._run_dir.parent, self.run_id)
        # Until the orchestrator of this invocation begins, these are the files of one that was killed.
        self.no_difference = notice if notice is not None and notice.since >= self.since else None
        if report.get("step") == self.step and report.get("time", self.since) >= self.since:
            self.discarded = report

    @property
    def is_behind(self) -> bool:
        """Whether the last refresh left a part of the orchestrator's file to the next one."""
        return bool(self._follower.unread)

    def _read_shipped(self, deadline: float) -> list[Line]:
        """Reads the lines that the orchestrator appended; returns the newly shipped steps."""
        if not self.is_behind:
            self._known = self.step
        fresh: dict[int, Line] = {}
        for line in self._follower.new_lines(self._forget_shipped, deadline):
            if line.get("run_id", self.run_id) != self.run_id:
                continue
            step = line["step"]
            self.shipped[step] = line
            self._thin_shipped()
            if step > self._known:
                fresh[step] = line
        return list(fresh.values())

    def _forget_shipped(self) -> None:
        self.shipped.clear()
        self._seconds.clear()
        self.left_out = LeftOut()

    def _thin_shipped(self) -> None:
        for step in _surplus(self.shipped):
            if (next_took := self.seconds_of(step + 1)) is not None:
                self._seconds[step + 1] = next_took  # which cannot be computed without this line
            self._seconds.pop(step, None)
            self.left_out.add(self.shipped.pop(step))

    def _read_trained(self) -> None:
        lines = self._trained_lines
        lines.refresh(time.monotonic() + READING_SECONDS)
        if lines.generation != self._generation:
            self.trained.clear()
            self._generation, self._trained_count = lines.generation, 0
        self._trained_count = max(self._trained_count, lines.count_of(self.run_id) - NEWEST_TRAINED)
        for _, raw in lines.lines_of(self.run_id, self._trained_count):
            self._trained_count += 1
            if (line := step_of(raw)) and line.get("run_id", self.run_id) == self.run_id:
                self.trained[line["step"]] = line
                for step in _surplus(self.trained):
                    del self.trained[step]

    @property
    def job(self) -> Path:
        """The job's directory."""
        return self._run_dir.parent

    @property
    def advice_without_difference(self) -> str:
        """What to know and to do while its groups show no difference, with the command that shows examples; empty if they do."""
        if (notice := self.no_difference) is None:
            return ""
        shown = show_command(self._run_dir.parent, self.run_id)
        return f"{notice}. What to do: {notice.advice}. Three of the worst: {shown}"

    @property
    def early_warnings(self) -> list[EarlyWarning]:
        """Returns what goes wrong by the metrics so far, as the newest shipped step's line says."""
        return read_warnings(self.last_shipped)

    @property
    def shown_jump(self) -> Jump | None:
        """The notice of a jump of the mismatch KL, unless many steps have been trained since."""
        jump = self.mismatch_jump
        return jump if jump is not None and max(self.trained, default=0) < jump.step + SHOWN_STEPS else None

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
        """Returns the seconds that a shipped step took; None if unknown, or not kept."""
        if (line := self.shipped.get(step)) is None:
            return None
        return self._seconds.get(step, _seconds(line, self.shipped.get(step - 1, {})))

    @property
    def counted_from(self) -> int:
        """Returns the first step that is counted; above 1 if the file was too long to be read from its beginning."""
        return 1 if not self._follower.left_out else self.left_out.first or min(self.shipped, default=1)

    @property
    def counted(self) -> list[Line]:
        """Returns lines whose values sum up to those of all steps, and of the rollouts discarded since the last one."""
        return [self.left_out.sums, *self.shipped.values(), self.discarded]

    def tokens_per_second(self) -> float | None:
        """Computes completion tokens per second over the newest `RATE_STEPS` steps of this invocation, as all views show.

        Pauses between two starts of the orchestrator, and tokens from before them, are left out. None if no duration is known.
        """
        tokens = seconds = 0.0
        for step in sorted(self.shipped)[-RATE_STEPS:]:
            line, took = self.shipped[step], self.seconds_of(step)
            if took is not None and line["time"] - took >= self.since:
                tokens += line.get("tokens/completion", 0) - line.get(RESTORED_TOKENS, 0)
                seconds += took
        return tokens / seconds if seconds > 0 else None


def _surplus(steps: Mapping[int, Line]) -> list[int]:
    """Returns the steps that are to be dropped: once there are too many, every second of the older ones."""
    if len(steps) <= 3 * KEPT_STEPS:
        return []
    return sorted(steps)[1:-KEPT_STEPS:2]


def _seconds(line: Line, before: Line) -> float | None:
    """The duration of a step in seconds; None if unknown.

    It counts from the step before, or from when the orchestrator began to generate if that is later.
    """
    uptime: float | None = line.get("uptime_seconds")
    if not before:
        return uptime
    took: float = line["time"] - before["time"]
    if took < 0 and uptime is not None:  # the machine's clock was set back
        earlier = before.get("uptime_seconds", 0.0)
        return uptime - earlier if earlier < uptime else uptime
    return took if uptime is None else min(uptime, took)
