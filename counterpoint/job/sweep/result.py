"""The progress and reward of a target, read from the end of its runs' metrics, for a worker's log and a sweep's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from counterpoint.job.directory import steps_of
from counterpoint.job.number_format import number
from counterpoint.job.reading.metrics.metrics_lines import step_of
from counterpoint.job.reading.summary import EDGE_STEPS
from counterpoint.job.sweep.targets import Target
from counterpoint.transport.process.child import last_lines


@dataclass(frozen=True, slots=True)
class RunResult:
    """The progress and reward of one run."""

    run_id: str
    step: int
    """The newest shipped step; 0 before the first."""
    steps: int | None
    """The configured number of steps; None before the run has begun."""
    reward: float | None
    """Mean of its last steps; None before the first."""


@dataclass(frozen=True, slots=True)
class TargetResult:
    """The results of a target's run, or of all runs of a target that is a job."""

    runs: Sequence[RunResult]

    @property
    def steps(self) -> str:
        """The steps so far: `7/20`; of several runs `7/20 5/20`."""
        return " ".join(f"{run.step}/{run.steps or '?'}" for run in self.runs) or "-"

    @property
    def reward(self) -> str:
        """The rewards: `0.912`; of several runs `0.912 0.871`."""
        return " ".join(number(run.reward) for run in self.runs) or "-"

    @property
    def description(self) -> str:
        """Steps and reward in words: `step 20/20, reward 0.912`."""
        return f"step {self.steps}, reward {self.reward}"


def result_of(target: Target) -> TargetResult:
    """Reads the present result from the target's directory. The cost does not grow with the length of its runs."""
    return TargetResult([_run_result(target, run_id) for run_id in target.run_ids])


def _run_result(target: Target, run_id: str) -> RunResult:
    # No step's are the first line, if reading began within it, the last, if it is not yet complete, and what others wrote.
    texts = last_lines(target.output_dir / f"run_{run_id}" / "metrics.jsonl", EDGE_STEPS)
    lines = [line for text in texts if (line := step_of(text.encode()))]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    return RunResult(
        run_id,
        step=lines[-1]["step"] if lines else 0,
        steps=steps_of(target.output_dir, run_id),
        reward=fmean(rewards) if rewards else None,
    )
