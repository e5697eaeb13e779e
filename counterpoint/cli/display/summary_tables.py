"""The summary of a job as tables: one for a single run, a row for each of several runs."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from counterpoint.job.number_format import duration, milliseconds, number, scientific
from counterpoint.job.reading.metrics import evaluations
from counterpoint.job.reading.metrics.history import RATE_STEPS
from counterpoint.job.reading.summary import Summary
from counterpoint.orchestrator.rollouts.failures import failures_in_words
from counterpoint.orchestrator.step.phases import phases_in_words
from counterpoint.transport.printable import printable, shortened
from counterpoint.transport.telemetry.agent_time import agents_in_words

LONGEST_TITLE = 100
"""Characters of the outcome in a table's title; a failure is printed above, in full."""

TEXT_COLUMNS = ("run", "ended")
OF_STEPS = ("reward", "tokens", "event loop lag", "time", "mismatch KL", "staleness")
"""Rows that say nothing of a run without a step."""

WORDS = {
    "inference_failed": "failed at inference",
    "cancelled": "cancelled as no longer wanted",
    "filtered": "of the completed filtered out, such as groups without difference",
}
"""What becomes of rollouts, where its name in the summary has to be guessed."""

NUMBER_COLUMNS = ("steps", "reward", "rollouts", "tokens/s", "lag p99", "lag max", "KL max", "staleness")


def print_summary(summary: Summary, files: dict[str, Path], console: Console) -> None:
    """Prints the table, remarks on each of several runs, and the paths of the files by their names."""
    if summary.get("runs", True):
        console.print(_table_of_runs(summary) if "runs" in summary else _table_of_run(summary))
    if "service" in summary:
        console.print(_table_of_service(summary))
    for run_id, run in summary.get("runs", {}).items():
        for remark in _remarks(run):
            console.print(f"  run {run_id}: {printable(remark)}", highlight=False, soft_wrap=True, markup=False)
    for name, path in files.items():
        console.print(f"  {name:<8} {path}", highlight=False, soft_wrap=True)


def _remarks(run: Summary) -> list[str]:
    """What has no column in the table of several runs."""
    failed, phases = failures_in_words(run["failures"]), phases_in_words(run["phase_seconds"])
    remarks = [
        run["outcome"] if ":" in run["outcome"] else None,
        *(f"evaluation {name}: {text}" for name, text in evaluations.in_words(run["evaluations"]).items()),
        f"failed rollouts: {failed}" if failed else None,
        f"such as: {run['failure_example']}" if run["failure_example"] else None,
        f"time: {phases}" if phases else None,
        f"agents: {agents}" if (agents := agents_in_words(run["agents"])) else None,
        run["discarded"],
        f"weights: {run['weights']}" if run["weights"] else None,
    ]
    return [remark for remark in remarks if remark]


def _title(summary: Summary) -> str:
    return f"Counterpoint: {escape(printable(shortened(summary['outcome'], LONGEST_TITLE)))}"


def _table_of_runs(summary: Summary) -> Table:
    """A row for each run. Steps: trained of wanted. Reward: mean of the first and of the last steps."""
    title = f"{_title(summary)}, {duration(summary['elapsed_seconds'])}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in (*TEXT_COLUMNS, *NUMBER_COLUMNS):
        is_text = column in TEXT_COLUMNS
        table.add_column(column, no_wrap=column != "ended", overflow="fold", justify="left" if is_text else "right")
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


def _table_of_service(summary: Summary) -> Table:
    """A row for each model of the Tinker SDK's clients, with its newest weights, and what was not answered."""
    service = summary["service"]
    table = Table(
        box=box.SIMPLE_HEAD, title=f"{_title(summary)}, {duration(summary['elapsed_seconds'])}", title_justify="left"
    )
    for column in ("model", "updates", "newest weights", "in"):
        table.add_column(column, overflow="fold", justify="right" if column == "updates" else "left")
    for name, model in service["models"].items():
        cells = (name, str(model["updates"]), model["weights"] or "not saved", model["directory"] or "-")
        table.add_row(*(Text(printable(each)) for each in cells))
    oldest = service["oldest"]
    late = f", the oldest {oldest['request']}, for {duration(oldest['seconds'])}" if oldest else ""
    table.caption = Text(printable(f"{service['updates']} updates; {service['pending']} requests pending{late}"))
    table.caption_justify = "left"
    return table


def _table_of_run(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=_title(summary), title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    for name, text in _rows_of_run(summary).items():
        if text is not None:
            table.add_row(name, Text(printable(text)))
    return table


def _rows_of_run(summary: Summary) -> dict[str, str | None]:
    reward, lag, kl = (summary[name] for name in ("reward", "event_loop_lag_seconds", "mismatch_kl"))
    steps, edge = summary["steps"], "step" if reward["edge_steps"] == 1 else f"{reward['edge_steps']} steps"
    rows = {
        "reward": f"{number(reward['first'])} (first {edge})  →  {number(reward['last'])} (last {edge})",
        **evaluations.in_words(summary["evaluations"]),
        "steps": f"{steps['trained']} trained, {steps['shipped']} sent to the trainer, of {steps['wanted'] or '?'}",
        "rollouts": ", ".join(f"{count} {WORDS.get(name, name)}" for name, count in summary["rollouts"].items()),
        "failed": failures_in_words(summary["failures"]) or None,
        "such as": summary["failure_example"],
        "tokens": f"{number(summary['tokens_per_second'], 0)} completion tokens/s, over the newest {RATE_STEPS} steps",
        "event loop lag": f"p50 {milliseconds(lag['p50'])}, p99 {milliseconds(lag['p99'])}, max {milliseconds(lag['max'])}",
        "time": phases_in_words(summary["phase_seconds"]) or None,
        "agents": agents_in_words(summary["agents"]) or None,
        "mismatch KL": f"max {scientific(kl['max'])}, mean {scientific(kl['mean'])}, of inference against trainer",
        "staleness": f"max {number(summary['staleness_max'], 0)} updates between the weights of a token and its training",
        "elapsed": duration(summary["elapsed_seconds"]) + (" in this session" if summary["resumed"] else ""),
        "discarded": summary["discarded"],
        "weights": summary["weights"],
    }
    return rows if steps["shipped"] else rows | dict.fromkeys(OF_STEPS)
