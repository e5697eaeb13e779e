"""The evaluations of a run: of each the first and the newest result, and the version that is kept as the best.

They are read from `evaluations.jsonl` as it grows. Console, summary, `status`, the page's curves, sinks and `counterpoint.read`
take a line's result from `result_in`. A guest may write anything into its run's files, so every value is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from counterpoint.job.number_format import number
from counterpoint.job.reading.metrics.metrics_lines import is_number
from counterpoint.orchestrator.evaluation.lines import EVALUATIONS_FILE, MOST_FAILED
from counterpoint.orchestrator.evaluation.weights import BEST, BEST_FILE
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.untrusted import UntrustedFileError, object_in, read_json
from counterpoint.transport.printable import clipped

NEWEST_BYTES = 2**24
"""What is read of the end of a file that is met anew: some thousand results."""

_MOST_EVALUATIONS = 64
"""The evaluations that are kept, and the metrics of each that are shown."""

_MOST_METRICS, _LONGEST_NAME = 1000, 200
"""The metrics of one result, and the characters of the name of one, or of an evaluation."""

_LONGEST_ERROR = 300
"""Longest error text that is kept, in characters."""

_MAX_BYTES = 2**20
"""The size of `best.json`."""


@dataclass(frozen=True, slots=True)
class EstimateInterval:
    """An estimate with its 95 % interval; None where there is none."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return number(self.value)
        return f"{number(self.value)} [{number(self.low)}, {number(self.high)}]"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One result of an evaluation."""

    name: str
    step: int
    time: float
    """The time when it ended, in Unix seconds."""
    metrics: Mapping[str, EstimateInterval]
    """Those over all environments of the evaluation: `reward/mean`, `pass@k`. Empty where nothing was measured."""
    error: str = ""
    """Why it could not be played; empty if it was."""
    failed: str = ""
    """How many of its rollouts failed and why, where those decide the result; else empty."""
    every: Mapping[str, EstimateInterval] = field(default_factory=dict)
    """All, with those of single environments."""

    @property
    def values(self) -> dict[str, float]:
        """All numbers, by the names of curves: `evaluation/sums/pass@1`, and its interval's with `/low` and `/high`."""
        parts = ((metric, part, value) for metric, each in self.every.items() for part, value in asdict(each).items())
        return {
            f"evaluation/{self.name}/{metric}" + ("" if part == "value" else f"/{part}"): float(value)
            for metric, part, value in parts
            if value is not None
        }

    def __str__(self) -> str:
        measured = ", ".join(f"{_in_words(metric)} {each}" for metric, each in self.metrics.items())
        shown = measured or self.error or _without_result(self.failed)
        return f"evaluation {self.name} of step {self.step}: {shown}{_after(self.failed)}"


@dataclass(frozen=True, slots=True)
class Best:
    """The version whose weights are kept as the best."""

    evaluation: str
    step: int
    path: Path


class EvaluationResults:
    """The results of one run's evaluations."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lines = AppendedLines(run_dir / EVALUATIONS_FILE, NEWEST_BYTES)
        self.first: dict[str, Evaluated] = {}
        self.newest: dict[str, Evaluated] = {}

    def refresh(self) -> list[Evaluated]:
        """Reads what the file gained; returns the new results. Raises `OSError` and `UntrustedFileError`."""
        fresh: list[Evaluated] = []
        for _, block in self._lines.new_blocks(self._forget):
            for text in block.splitlines():
                result = result_in(text)
                if result is None or (result.name not in self.first and len(self.first) >= _MOST_EVALUATIONS):
                    continue
                self.first.setdefault(result.name, result)
                self.newest[result.name] = result
                fresh.append(result)
        return fresh

    def _forget(self) -> None:
        self.first.clear()
        self.newest.clear()

    def best(self) -> Best | None:
        """Returns the version that `keep_best` has kept; None without one that can be read."""
        for step in reversed(published_steps(self._run_dir / BEST)):
            path = self._run_dir / BEST / f"step_{step}"
            try:
                evaluation = read_json(path / BEST_FILE, _MAX_BYTES).get("evaluation")
            except (OSError, UntrustedFileError):
                continue
            if isinstance(evaluation, str):
                return Best(evaluation, step, path)
        return None

    @property
    def figure(self) -> tuple[str, float] | None:
        """The newest pass@k of the first evaluation, or its reward: the metric and its value; None without a result."""
        return _figure(next(iter(self.newest.values()), None))

    @property
    def headline(self) -> str:
        """The figure in words: `pass@1 0.069`; empty without a result."""
        return f"{_in_words(figure[0])} {number(figure[1])}" if (figure := self.figure) is not None else ""

    @property
    def curve(self) -> str:
        """The name of the figure's metric in `metrics.jsonl`: `evaluation/sums/pass@1`; empty while there never was a figure."""
        figure = self.figure or _figure(next(iter(self.first.values()), None))
        return f"evaluation/{next(iter(self.newest))}/{figure[0]}" if figure is not None else ""

    def as_json(self) -> dict[str, Any]:
        """Returns each evaluation's first and newest result and its best version, by its name, for programs."""
        best = self.best()
        return {
            name: {
                "first": _as_json(self.first[name]),
                "newest": _as_json(newest),
                "best": {"step": best.step, "path": str(best.path)}
                if best is not None and best.evaluation == name
                else None,
            }
            for name, newest in self.newest.items()
        }


def _figure(result: Evaluated | None) -> tuple[str, float] | None:
    if result is None or not result.metrics:
        return None
    metric = next((name for name in result.metrics if name != "reward/mean"), "reward/mean")
    return metric, result.metrics[metric].value


def in_words(evaluations: Mapping[str, Any]) -> dict[str, str]:
    """Returns of each evaluation in `as_json` how its metrics changed: `pass@1 0.025 → 0.069 [0.015, 0.261]`."""
    return {name: _change(**fields) for name, fields in evaluations.items()}


def _change(first: Mapping[str, Any], newest: Mapping[str, Any], best: Mapping[str, Any] | None) -> str:
    is_one, failed = first["step"] == newest["step"], newest.get("failed", "")
    changes = []
    for metric, fields in newest["metrics"].items():
        before = "" if is_one or metric not in first["metrics"] else f"{number(first['metrics'][metric]['value'])} → "
        changes.append(f"{_in_words(metric)} {before}{EstimateInterval(**fields)}")
    steps = f"step {newest['step']}" if is_one else f"steps {first['step']} and {newest['step']}"
    kept = f"; best step {best['step']}, {best['path']}" if best is not None else ""
    return f"{', '.join(changes) or _without_result(failed)} ({steps}){kept}{_after(failed)}"


def _as_json(result: Evaluated) -> dict[str, Any]:
    metrics = {name: {"value": each.value, "low": each.low, "high": each.high} for name, each in result.metrics.items()}
    return {"step": result.step, "metrics": metrics} | ({"failed": result.failed} if result.failed else {})


def _after(failed: str) -> str:
    return f"; {failed}" if failed else ""


def _without_result(failed: str) -> str:
    return "failed" if failed else "no result"


def _in_words(metric: str) -> str:
    return "reward" if metric == "reward/mean" else metric


def result_in(text: bytes) -> Evaluated | None:
    """Returns the result in a line of `evaluations.jsonl`; None for what is none."""
    if (line := object_in(text)) is None:
        return None
    name, step, time, metrics = (line.get(key) for key in ("evaluation", "step", "time", "metrics"))
    error = clipped(line["error"], _LONGEST_ERROR) if isinstance(line.get("error"), str) else ""
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or type(step) is not int:
        return None
    if not isinstance(time, int | float) or not is_number(time) or not (isinstance(metrics, dict) or error):
        return None
    # An older version called a pass@k of which no rollout completed 0.
    measured = metrics if isinstance(metrics, dict) and line.get("rollouts/completed") != 0 else {}
    found = ((metric, _interval(fields)) for metric, fields in measured.items() if len(metric) <= _LONGEST_NAME)
    every = dict(islice(((metric, each) for metric, each in found if each is not None), _MOST_METRICS))
    own = (each for each in every.items() if each[0] == "reward/mean" or each[0].startswith("pass@"))
    failed = _failed(line) if isinstance(metrics, dict) else ""
    return Evaluated(name, step, float(time), dict(islice(own, _MOST_EVALUATIONS)), error, failed, every)


def _failed(line: Mapping[str, Any]) -> str:
    """Says how many rollouts failed, with the commonest error, if they are more than few."""
    failed, completed = (line.get(f"rollouts/{name}") for name in ("failed", "completed"))
    if not isinstance(failed, int) or not isinstance(completed, int) or failed <= MOST_FAILED * (failed + completed):
        return ""
    failures = line.get("failures")
    error = next(iter(failures), "") if isinstance(failures, dict) else ""
    return f"{failed:,} of {failed + completed:,} rollouts failed{_because(error)}"


def _because(error: str) -> str:
    return f": {clipped(error, _LONGEST_ERROR)}" if error else ""


def _interval(fields: object) -> EstimateInterval | None:
    if not isinstance(fields, dict):
        return None
    value, low, high = (fields[name] if is_number(fields.get(name)) else None for name in ("value", "low", "high"))
    return None if value is None else EstimateInterval(value, low, high)
