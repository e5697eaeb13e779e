"""What a target has come to so far, read from the end of its runs' metrics: for a worker's log and for the table of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import orjson

from cluster.process import last_lines
from job.directory import steps_of
from job.inspection.summary import EDGE_STEPS
from job.number_format import number
from job.sweep.targets import Target


@dataclass(frozen=True, slots=True)
class RunResult:
    """Of one run."""

    run_id: str
    step: int
    """The newest one it has shipped; 0 before the first."""
    steps: int | None
    """How many it is to have; None before it has begun."""
    reward: float | None
    """Mean of its last steps."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of a target: its one run's, or those of a job's runs."""

    runs: Sequence[RunResult]

    @property
    def steps(self) -> str:
        """`7/20`; of several runs `7/20 5/20`."""
        return " ".join(f"{run.step}/{run.steps or '?'}" for run in self.runs) or "-"

    @property
    def reward(self) -> str:
        """`0.912`; of several runs `0.912 0.871`."""
        return " ".join(number(run.reward) for run in self.runs) or "-"

    @property
    def in_words(self) -> str:
        """`step 20/20, reward 0.912`."""
        return f"step {self.steps}, reward {self.reward}"


def result_of(target: Target) -> Result:
    """What the target's directory says now. Costs the same however long its runs are."""
    return Result([_run_result(target, run_id) for run_id in target.run_ids])


def _run_result(target: Target, run_id: str) -> RunResult:
    lines = []
    for text in last_lines(target.output_dir / f"run_{run_id}" / "metrics.jsonl", EDGE_STEPS):
        try:
            lines.append(orjson.loads(text))
        except orjson.JSONDecodeError:
            continue  # the first one cut off by where we began to read, or the last one as it is being written
    rewards = [line["reward/mean"] for line in lines if line.get("reward/mean") is not None]
    return RunResult(
        run_id,
        step=lines[-1]["step"] if lines else 0,
        steps=steps_of(target.output_dir, run_id),
        reward=fmean(rewards) if rewards else None,
    )
