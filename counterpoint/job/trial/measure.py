"""Reads what a branch has measured: the held-out rewards of each evaluation, and the tokens that it has spent until then.

An evaluation's line is written after its records (`orchestrator/evaluation/evaluations.py`), and after the metrics of the steps
before it. A guest may have written the files: only regular ones are read, and lines up to a limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from counterpoint.job.reading.rollouts.rollout_records import records_in, whole_number
from counterpoint.job.trial.decisions import ExampleKey, HeldOut, Side
from counterpoint.orchestrator.evaluation.lines import EVALUATIONS_FILE
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.untrusted import UntrustedFileError, object_in

_OF_SUCCESS = (0.0, 1.0)
"""The bounds of successes."""

_NEWEST_BYTES = 2**24
"""What is read of the end of a run's files: thousands of steps or results."""

_SHOWN_STEPS = 20
"""The newest steps from which a step's tokens are estimated."""


class _Lines:
    """The JSON objects of a growing file, which are kept."""

    def __init__(self, path: Path, newest_bytes: int | None = None) -> None:
        """Reads no more than `newest_bytes` of the file's end when it is met."""
        self._lines = AppendedLines(path, newest_bytes)
        self.kept: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Reads what was appended, and returns all. Raises `OSError`, and `UserError` for anything but a regular file."""
        try:
            for _, block in self._lines.new_blocks(self.kept.clear):
                self.kept += (line for text in block.splitlines() if (line := object_in(text)) is not None)
        except UntrustedFileError as error:
            raise UserError(str(error)) from None
        return self.kept


class BranchReader:
    """Reads one branch, from the evaluations that are not recorded yet."""

    def __init__(self, run_dir: Path, side: Side, evaluation: str, first: int, newest: int) -> None:
        """`first` is the step that it comes from, `newest` the last one of which a measurement is recorded."""
        self.side: Side = side
        self._run_dir, self._evaluation, self._first = run_dir, evaluation, first
        self._newest = newest
        self._trained, self._evaluated = _Lines(run_dir / "metrics.jsonl"), _Lines(run_dir / EVALUATIONS_FILE)
        self._known = -1
        """How many lines both had; -1 before the first look."""

    def read(self) -> bool:
        """Reads on, and returns whether the branch has made a step or an evaluation since the last call.

        Raises `UserError` and `OSError` for a file that cannot be read.
        """
        before = self._known
        evaluated = len(self._evaluated.read())
        self._known = evaluated + len(self._trained.read())  # after these, so that no step before them is missed
        return self._known != before

    def new(self) -> Iterator[HeldOut]:
        """Yields the evaluations that were read and not yet given. Raises `OSError` if records cannot be read.

        Where an environment does not say the bounds of its rewards, they are successes: 1 or 0.
        """
        for line in self._evaluated.kept:
            if not _is_of(line, self._evaluation) or (step := _step_of(line)) <= self._newest:
                continue
            self._newest = step
            bounds = tuple(line["reward_bounds"]) if line["reward_bounds"] else None
            rewards = self._rewards(step, None if bounds is not None else float(line["success"]))
            yield HeldOut(self.side, step, self.spent(step), rewards, bounds or _OF_SUCCESS)

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

    def spent(self, step: float = math.inf) -> int:
        """Returns the tokens of the branch until `step` was evaluated, or all that were read of."""
        own = [line for line in self._trained.kept if self._first < _step_of(line) <= step]
        own += [line for line in self._evaluated.kept if self._first <= _step_of(line) <= step]
        return sum(map(_tokens_of, own))


def fair_interval(run_dir: Path, evaluation: str) -> int | None:
    """Returns the steps of a run that take about twice as many tokens as one evaluation; None if it has not made both.

    Raises `OSError`, and `UserError` for a file that cannot be read.
    """
    results, steps = (_Lines(run_dir / name, _NEWEST_BYTES).read() for name in (EVALUATIONS_FILE, "metrics.jsonl"))
    evaluated = [_tokens_of(line) for line in results if _is_of(line, evaluation)]
    trained = [_tokens_of(line) for line in steps[-_SHOWN_STEPS:]]
    return max(1, round(2 * evaluated[-1] * len(trained) / sum(trained))) if evaluated and sum(trained) else None


def _is_of(line: dict[str, Any], evaluation: str) -> bool:
    return line.get("evaluation") == evaluation and "error" not in line


def _step_of(line: dict[str, Any]) -> int:
    """The step of a line; 0, which is before all of a branch's own, if it has none."""
    return whole_number(line.get("step")) or 0


def _tokens_of(line: dict[str, Any]) -> int:
    """The tokens of a step's or an evaluation's line, prompts included."""
    return sum(max(0, whole_number(line.get(f"tokens/{name}")) or 0) for name in ("prompt", "completion"))


def _mean(rewards: list[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known and len(known) == len(rewards) else None
