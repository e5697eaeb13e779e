"""The results of evaluations as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from transport.printable import printable

if TYPE_CHECKING:
    from orchestrator.evaluation.result import EvaluationResult

COLUMNS = ("evaluation", "metric", "value", "95 % interval", "examples", "completed", "failed")


def evaluation_table(results: Sequence[EvaluationResult]) -> Table:
    """Returns a row for each metric, with those of single environments if an evaluation has several."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("evaluation", "metric") else "right", no_wrap=True)
    for result in results:
        several = len(result.config.environments) > 1
        shown = {name: each for name, each in result.estimates.items() if several or name in result.config.own_metrics}
        counts = [str(result.line[key]) for key in ("examples", "rollouts/completed", "rollouts/failed")]
        if not shown:
            table.add_row(printable(result.config.name), "no result", "", "", *counts)
        for position, (name, each) in enumerate(shown.items()):
            interval = "" if each.low is None or each.high is None else f"{each.low:.4g} to {each.high:.4g}"
            first = position == 0
            title = printable(result.config.name) if first else ""
            table.add_row(title, printable(name), f"{each.value:.4g}", interval, *(counts if first else ("", "", "")))
    return table
