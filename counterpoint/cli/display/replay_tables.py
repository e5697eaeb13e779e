"""Replays and attributions of a dump as tables, and the time of the whole step in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from counterpoint.cli.display.blame_table import blame_table
from counterpoint.job.number_format import milliseconds
from counterpoint.job.replay.attribute import Attribution
from counterpoint.job.replay.replay import BASELINE, Replay
from counterpoint.job.replay.whole_step import WholeStep
from counterpoint.orchestrator.rollouts.dump import Dump
from counterpoint.run.loop_health.lag import LagDistribution


def print_replay(found: Replay, dump: Dump, console: Console) -> None:
    """Prints a row for each phase, and what made the loop late."""
    header = dump.header
    size = f"{header.rollouts} rollouts, {header.turns} turns, {found.nbytes / 1e6:,.0f} MB"
    console.print(f"{dump.directory}: {size}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("phase", "wall", "lag p50", "p99", "max"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for row in found.rows:
        table.add_row(row.phase, f"{row.seconds:.3f} s", *_lag_cells(row.lag))
    console.print(table)
    if found.slow_spots:
        console.print(blame_table(found.slow_spots))
    else:
        console.print(lateness(found), highlight=False, markup=False, soft_wrap=True)


def lateness(found: Replay) -> str:
    """Says how late the loop of a replay was in which no code was seen that made it so."""
    longest = max(row.lag.max for row in found.rows if row.phase != BASELINE)
    if longest < found.late_seconds:
        return f"  Nothing made the loop later than {milliseconds(found.late_seconds)}."
    return (
        f"  The loop was late by up to {milliseconds(longest)}, and no code was seen that made it so: other processes may have "
        f"taken the cores. Replay it on a quiet machine. Code is looked for from {milliseconds(found.late_seconds)} on."
    )


def attribution_table(found: Sequence[Attribution], dump: Dump) -> Table:
    """Builds a table with a row for each phase: alone, with all phases before it, and whether it blocks the loop."""
    table = Table(box=box.SIMPLE_HEAD, title=escape(str(dump.directory)), title_justify="left")
    for column in ("phase", "alone", "lag p50", "p99", "max", "with all before", "lag p50", "p99", "max", ""):
        table.add_column(column, justify="left" if column in ("phase", "") else "right", no_wrap=column == "")
    idle = found[0].idle
    table.add_row("idle", f"{idle.seconds:.3f} s", *_lag_cells(idle.lag))
    for each in found:
        alone, together = each.alone, each.together
        table.add_row(
            each.phase,
            f"{alone.seconds:.3f} s",
            *_lag_cells(alone.lag),
            f"{together.seconds:.3f} s",
            *_lag_cells(together.lag),
            "[red]blocks the loop[/red]" if each.blocks else "only takes time",
        )
    return table


def print_whole_step(step: WholeStep | None, console: Console) -> None:
    """Prints where the time of the whole step went. The boundary is a part of it."""
    console.print(describe_whole_step(step), highlight=False, markup=False, soft_wrap=True)


def describe_whole_step(step: WholeStep | None) -> str:
    """Describes where the time of the whole step went; None stands for an unknown step."""
    if step is None:
        return (
            "  The time of the whole step is not known: the dump does not lie in its run's directory, or the metrics of its step "
            "are missing. The figures above are of its boundary alone."
        )
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in step.phases.items() if seconds >= 0.0005)
    lines = [f"  The whole step {step.step} of run {step.run_id} took {step.seconds:.2f} s: {parts}."]
    if step.trainer:
        trainer = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in step.trainer.items())
        lines.append(f"  The trainer, at the same time: {trainer}.")
    return "\n".join([*lines, f"  {step.conclusion}"])


def _lag_cells(lag: LagDistribution) -> list[str]:
    """Median, 99th percentile and maximum."""
    return [milliseconds(value) for value in (lag.median, lag.p99, lag.max)]
