"""The end of a job in numbers: `summary.json` for programs, a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from job.history import History
from orchestrator.rollouts.failures import failures_in_words, sum_failures
from orchestrator.step.discarded import in_words
from orchestrator.step.phases import phases_in_words, sum_phases
from transport.printable import printable

SUMMARY_FILE = "summary.json"

EDGE_STEPS = 5
"""Reward is compared between this many steps at the start and at the end."""

MOST_POINTS = 100_000
"""That stand for the lags of one step, which are some ten a second: nearly three hours of them."""

LAG_QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
LAG_NAMES = ("min", "median", "p90", "p99", "max")

Summary = dict[str, Any]


def summarise(history: History, output_dir: Path, elapsed: float, outcome: str) -> Summary:
    """All numbers of a run. `elapsed`, in seconds, and the token rate are of this invocation, the others of the whole run, with
    what it has discarded since its last step. A number nobody measured is None."""
    rewards = [value for _, value in history.series("reward/mean")]
    mismatch = [value for _, value in history.series("mismatch_kl")]
    staleness = [value for _, value in history.series("staleness/max")]
    rollouts = {
        name: int(sum(line.get(f"rollouts/{name}", 0) for line in [*history.shipped.values(), history.discarded]))
        for name in ("completed", "failed", "inference_failed", "cancelled", "filtered")
    }
    lag = lag_quantiles(history)
    return {
        "outcome": outcome,
        "steps": {"shipped": history.step, "trained": max(history.trained, default=0), "wanted": history.steps},
        "reward": {
            "first": _mean(rewards[:EDGE_STEPS]),
            "last": _mean(rewards[-EDGE_STEPS:]),
            "edge_steps": EDGE_STEPS,
        },
        "rollouts": rollouts,
        "failures": sum_failures([*history.shipped.values(), history.discarded]),
        "discarded": in_words(history.discarded) if history.discarded.get("notable") else None,
        "tokens": {
            kind: int(sum(line.get(f"tokens/{kind}", 0) for line in [*history.shipped.values(), history.discarded]))
            for kind in ("prompt", "completion")
        },
        "tokens_per_second": history.tokens_per_second(),
        "event_loop_lag_seconds": lag,
        "phase_seconds": sum_phases(history.shipped.values()),
        "staleness_max": max(staleness, default=None),
        "mismatch_kl": {"max": max(mismatch, default=None), "mean": _mean(mismatch)},
        "elapsed_seconds": elapsed,
        "resumed": any(line["time"] < history.since for line in history.shipped.values()),
        "output_dir": str(output_dir),
    }


def summarise_runs(
    histories: Sequence[History], endings: Mapping[str, str], output_dir: Path, elapsed: float, outcome: str
) -> Summary:
    """All numbers of a job of several runs: each run's as `summarise` has them, with how it ended, under its id."""
    runs = {
        history.run_id: summarise(history, output_dir, elapsed, endings.get(history.run_id, "-"))
        for history in histories
    }
    return {"outcome": outcome, "elapsed_seconds": elapsed, "output_dir": str(output_dir), "runs": runs}


def lag_quantiles(history: History) -> dict[str, float | None]:
    """Median, 99th percentile and maximum of the event loop's lag over the whole run, in seconds.

    The files hold each step's quantiles and their count n, not every sample. A step's samples are put back as n points on the
    line through its quantiles, and the run's quantiles are those of all points; the maximum is exact.
    """
    points: list[np.ndarray[Any, Any]] = []
    for line in history.shipped.values():
        values = [line.get(f"event_loop_lag/{name}") for name in LAG_NAMES]
        count = int(line.get("event_loop_lag/n", 0))
        if count and None not in values:
            count = min(count, MOST_POINTS)
            points.append(np.interp((np.arange(count) + 0.5) / count, LAG_QUANTILES, np.array(values, dtype=float)))
    if not points:
        return {"p50": None, "p99": None, "max": None}
    pooled = np.concatenate(points)
    maximum = max(line.get("event_loop_lag/max", 0.0) for line in history.shipped.values())
    return {"p50": float(np.quantile(pooled, 0.5)), "p99": float(np.quantile(pooled, 0.99)), "max": float(maximum)}


def as_text(summary: Summary) -> bytes:
    """What `summary.json` holds."""
    return json.dumps(summary, indent=2).encode()


def print_summary(summary: Summary, files: dict[str, Path], console: Console) -> None:
    """The table, and where the files are."""
    console.print(_table_of_runs(summary) if "runs" in summary else _table_of_one(summary))
    for run_id, run in summary.get("runs", {}).items():
        failed = failures_in_words(run["failures"])
        for told in (
            run["outcome"] if ":" in run["outcome"] else None,
            f"failed rollouts: {failed}" if failed else None,
            f"time: {phases}" if (phases := phases_in_words(run["phase_seconds"])) else None,
            run["discarded"],
        ):
            if told:
                console.print(f"  run {run_id}: {printable(told)}", highlight=False, soft_wrap=True)
    for name, path in files.items():
        console.print(f"  {name:<8} {path}", highlight=False, soft_wrap=True)


def _table_of_runs(summary: Summary) -> Table:
    """A line for each run. Steps are those trained of those that it was to have; rewards those of the first and of the last
    steps."""
    title = f"Counterpoint: {summary['outcome']}, {duration(summary['elapsed_seconds'])}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in (
        "run",
        "ended",
        "steps",
        "reward",
        "rollouts",
        "tokens/s",
        "lag p99",
        "lag max",
        "KL max",
        "staleness",
    ):
        told = column in ("run", "ended")
        table.add_column(column, no_wrap=column != "ended", overflow="fold", justify="left" if told else "right")
    for run_id, run in summary["runs"].items():
        reward, lag = run["reward"], run["event_loop_lag_seconds"]
        table.add_row(
            run_id,
            run["outcome"].partition(":")[0],
            f"{run['steps']['trained']}/{run['steps']['wanted'] or '?'}",
            f"{number(reward['first'])} → {number(reward['last'])}",
            f"{run['rollouts']['completed']}",
            number(run["tokens_per_second"], 0),
            milliseconds(lag["p99"]),
            milliseconds(lag["max"]),
            scientific(run["mismatch_kl"]["max"]),
            number(run["staleness_max"], 0),
        )
    return table


def _table_of_one(summary: Summary) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_header=False, title=f"Counterpoint: {summary['outcome']}", title_justify="left"
    )
    table.add_column(style="dim")
    table.add_column()
    reward, lag, kl, rollouts = (
        summary[name] for name in ("reward", "event_loop_lag_seconds", "mismatch_kl", "rollouts")
    )
    edge, steps = reward["edge_steps"], summary["steps"]
    rows = {
        "reward": f"{number(reward['first'])} (first {edge} steps)  →  {number(reward['last'])} (last {edge} steps)",
        "steps": f"{steps['trained']} trained, {steps['shipped']} shipped, of {steps['wanted'] or '?'}",
        "rollouts": ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in rollouts.items()),
        "failed": failures_in_words(summary["failures"]) or None,
        "tokens": f"{number(summary['tokens_per_second'], 0)} completion tokens/s",
        "event loop lag": f"p50 {milliseconds(lag['p50'])}, p99 {milliseconds(lag['p99'])}, max {milliseconds(lag['max'])}",
        "time": phases_in_words(summary["phase_seconds"]) or None,
        "mismatch KL": f"max {scientific(kl['max'])}, mean {scientific(kl['mean'])}",
        "staleness": f"max {number(summary['staleness_max'], 0)}",
        "elapsed": duration(summary["elapsed_seconds"]) + (" in this session" if summary["resumed"] else ""),
        "discarded": summary["discarded"],
    }
    for name, text in rows.items():
        if text is None:
            continue
        table.add_row(name, text)
    return table


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def number(value: float | None, digits: int = 3) -> str:
    """`0.912`; a dash for what was not measured."""
    return "-" if value is None else f"{value:,.{digits}f}"


def scientific(value: float | None) -> str:
    """`1.2e-05`; a dash for what was not measured."""
    return "-" if value is None else f"{value:.1e}"


def milliseconds(seconds: float | None) -> str:
    """`3.1 ms`; a dash for what was not measured."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def duration(seconds: float) -> str:
    """`4 min 05 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
