"""The summary of a job in numbers: what `summary.json` holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.metrics.metrics_lines import Line
from counterpoint.job.reading.rollouts.failure_example import FailureExamples
from counterpoint.orchestrator.rollouts.failures import sum_failures
from counterpoint.orchestrator.step.discarded import in_words
from counterpoint.orchestrator.step.phases import sum_phases
from counterpoint.transport.telemetry.agent_time import agent_times

SUMMARY_FILE = "summary.json"

EDGE_STEPS = 5
"""Reward is compared between this many steps at the start and at the end; of fewer than twice as many, between the halves."""

LAG_QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
LAG_NAMES = tuple(f"event_loop_lag/{name}" for name in ("min", "median", "p90", "p99", "max"))

SHORTEST_LAG = 1e-9
"""Seconds below which two lags are taken for equal."""

ROLLOUT_OUTCOMES = ("completed", "failed", "inference_failed", "cancelled", "filtered")

Summary = dict[str, Any]


def summarize(
    history: History, output_dir: Path, elapsed: float, outcome: str, examples: FailureExamples | None = None
) -> Summary:
    """Computes all numbers of a run. A number that was not measured is None.

    `elapsed`, in seconds, and the token rate are of this invocation. The other numbers are of the whole run, including the
    rollouts discarded since its last step. `examples` is shared by the runs of a job.
    """
    rewards = [value for _, value in history.series("reward/mean")]
    edge = max(1, min(EDGE_STEPS, len(rewards) // 2))
    mismatch = [value for _, value in history.series("mismatch_kl")]
    staleness = [value for _, value in history.series("staleness/max")]
    counted, left_out = history.counted, history.left_out
    failures = sum_failures(counted)
    return {
        "outcome": outcome,
        "steps": {
            "shipped": history.step,
            "trained": max(history.trained, default=0),
            "wanted": history.steps,
            "counted_from": history.counted_from,
        },
        "reward": {
            "first": _mean(rewards[:edge]),
            "last": _mean(rewards[-edge:]),
            "edge_steps": edge,
        },
        "rollouts": _totals(counted, "rollouts", ROLLOUT_OUTCOMES),
        "failures": failures,
        "failure_example": (examples or FailureExamples(output_dir)).example(history, failures),
        "discarded": in_words(history.discarded) if history.discarded.get("notable") else None,
        "tokens": _totals(counted, "tokens", ("prompt", "completion")),
        "tokens_per_second": history.tokens_per_second(),
        "event_loop_lag_seconds": lag_quantiles(history),
        "phase_seconds": sum_phases(counted),
        "agents": agent_times(counted),
        "staleness_max": max([*staleness, *_known(left_out.maxima, "staleness/max")], default=None),
        "mismatch_kl": {"max": max(mismatch, default=None), "mean": _mean(mismatch)},
        "evaluations": history.evaluations.as_json(),
        "weights": None if history.weights is None else str(history.weights),
        "elapsed_seconds": elapsed,
        "resumed": any(
            began < history.since for began in (left_out.began, *(line["time"] for line in history.shipped.values()))
        ),
        "output_dir": str(output_dir),
    }


def summarize_runs(
    histories: Sequence[History], outcomes: Mapping[str, str], output_dir: Path, elapsed: float, outcome: str
) -> Summary:
    """Computes all numbers of a job of several runs: under each run's id those of `summarize`, with its outcome."""
    examples = FailureExamples(output_dir)
    runs = {
        history.run_id: summarize(history, output_dir, elapsed, outcomes.get(history.run_id, "-"), examples)
        for history in histories
    }
    return {"outcome": outcome, "elapsed_seconds": elapsed, "output_dir": str(output_dir), "runs": runs}


def lag_quantiles(history: History) -> dict[str, float | None]:
    """Computes median, 99th percentile and maximum of the event loop's lag over the whole run, in seconds.

    The files hold each step's quantiles and their count n, not every sample. A step's n samples are taken to lie evenly on the
    line through its quantiles, and the run's quantiles are those of all samples; the maximum is exact.
    """
    counts: list[int] = []
    steps: list[list[float]] = []
    for line in history.shipped.values():
        values = [line[name] for name in LAG_NAMES if name in line]
        count = line.get("event_loop_lag/n")
        if type(count) is int and count > 0 and len(values) == len(LAG_NAMES):
            counts.append(count)
            steps.append(values)
    if not steps:
        return {"p50": None, "p99": None, "max": None}
    edges = np.sort(np.array(steps, dtype=float))
    weights = np.outer(np.array(counts, dtype=float), np.diff(LAG_QUANTILES))
    maximum = max([values[-1] for values in steps] + _known(history.left_out.maxima, LAG_NAMES[-1]))
    return {"p50": _quantile(edges, weights, 0.5), "p99": _quantile(edges, weights, 0.99), "max": float(maximum)}


def _quantile(edges: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], quantile: float) -> float:
    """The quantile of weights that each lie evenly between two neighbours in a row of `edges`; found by halving an interval."""
    lower, width = edges[:, :-1], np.maximum(np.diff(edges), SHORTEST_LAG)
    low, high, wanted = edges.min(), edges.max(), quantile * weights.sum()
    while high - low > SHORTEST_LAG and low < (middle := (low + high) / 2) < high:
        if (weights * np.clip((middle - lower) / width, 0.0, 1.0)).sum() < wanted:
            low = middle
        else:
            high = middle
    return float(high)


def to_json(summary: Summary) -> bytes:
    """Formats the content of `summary.json`."""
    return json.dumps(summary, indent=2).encode()


def _totals(lines: Sequence[Line], prefix: str, names: Iterable[str]) -> dict[str, int]:
    """The sums of the metrics `prefix/name` over all lines, by name."""
    return {name: int(sum(line.get(f"{prefix}/{name}", 0) for line in lines)) for name in names}


def _known(line: Line, name: str) -> list[float]:
    return [line[name]] if name in line else []


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None
