"""Reads what a branch has measured: the held-out rewards of each evaluation, and the tokens that it has spent until then.

An evaluation's line is written after its records (`orchestrator/evaluation/evaluations.py`), and after the metrics of the steps
before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from counterpoint.job.reading.rollouts.rollout_records import records_in
from counterpoint.job.trial.decisions import ExampleKey, HeldOut, Side
from counterpoint.orchestrator.evaluation.lines import EVALUATIONS_FILE
from counterpoint.transport.files.json_lines import read_lines

_OF_SUCCESS = (0.0, 1.0)
"""The bounds of successes."""


class BranchReader:
    """Reads one branch, from the evaluations that are not recorded yet."""

    def __init__(self, run_dir: Path, side: Side, evaluation: str, first: int, newest: int) -> None:
        """`first` is the step that it comes from, `newest` the last one of which a measurement is recorded."""
        self._run_dir, self._side, self._evaluation, self._first = run_dir, side, evaluation, first
        self._newest = newest
        self._sizes = (-1, -1)

    def has_moved(self) -> bool:
        """Returns whether the branch has made a step or an evaluation since the last call."""
        before, self._sizes = self._sizes, (self._size("metrics.jsonl"), self._size(EVALUATIONS_FILE))
        return self._sizes != before

    def _size(self, name: str) -> int:
        path = self._run_dir / name
        return path.stat().st_size if path.exists() else -1

    def new(self) -> Iterator[HeldOut]:
        """Yields the evaluations since the last call. Raises `UserError` and `OSError` for a file that cannot be read.

        Where an environment does not say the bounds of its rewards, they are successes: 1 or 0.
        """
        for _, line in read_lines(self._run_dir / EVALUATIONS_FILE):
            if not _is_of(line, self._evaluation) or (step := line["step"]) <= self._newest:
                continue
            self._newest = step
            bounds = tuple(line["reward_bounds"]) if line["reward_bounds"] else None
            rewards = self._rewards(step, None if bounds is not None else float(line["success"]))
            yield HeldOut(self._side, step, self._spent(step), rewards, bounds or _OF_SUCCESS)

    def _rewards(self, step: int, success: float | None) -> dict[ExampleKey, float | None]:
        found: dict[ExampleKey, list[float | None]] = {}
        path = self._run_dir / "evaluations" / self._evaluation / f"step_{step}" / "rollouts.jsonl"
        for record in records_in(path):
            reward = record.reward if record.error is None else None
            if reward is not None and success is not None:
                reward = float(reward >= success)
            key = record.environment, int(record.fields["example_index"])
            found.setdefault(key, []).append(reward)
        return {key: _mean(rewards) for key, rewards in found.items()}

    def _spent(self, step: int) -> int:
        """The tokens of the branch until `step` was evaluated."""
        trained = (line for _, line in read_lines(self._run_dir / "metrics.jsonl"))
        evaluated = (line for _, line in read_lines(self._run_dir / EVALUATIONS_FILE))
        own = [line for line in trained if self._first < line.get("step", 0) <= step]
        own += [line for line in evaluated if self._first <= line.get("step", 0) <= step]
        return sum(map(_tokens_of, own))


def fair_interval(run_dir: Path, evaluation: str) -> int | None:
    """Returns the steps of a run that take about twice as many tokens as one evaluation; None if it has not made both."""
    evaluated = [_tokens_of(line) for _, line in read_lines(run_dir / EVALUATIONS_FILE) if _is_of(line, evaluation)]
    trained = [_tokens_of(line) for _, line in read_lines(run_dir / "metrics.jsonl")][-_SHOWN_STEPS:]
    return max(1, round(2 * evaluated[-1] * len(trained) / sum(trained))) if evaluated and sum(trained) else None


_SHOWN_STEPS = 20
"""The newest steps from which a step's tokens are estimated."""


def _is_of(line: dict[str, Any], evaluation: str) -> bool:
    return line.get("evaluation") == evaluation and "error" not in line


def _tokens_of(line: dict[str, Any]) -> int:
    """The tokens of a step's or an evaluation's line, prompts included."""
    counts = (line.get(f"tokens/{name}") for name in ("prompt", "completion"))
    return sum(int(count) for count in counts if isinstance(count, int | float))


def _mean(rewards: list[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known and len(known) == len(rewards) else None
