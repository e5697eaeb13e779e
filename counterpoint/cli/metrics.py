"""`counterpoint metrics [WORD ...]`: prints every metric's two names, its unit and its meaning, from the tables of all processes.

The tables stand beside the code that sets the numbers; `PROCESSES` lists them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping

from counterpoint.job.serving.telemetry import SUPERVISOR
from counterpoint.job.sweep.telemetry import SWEEP
from counterpoint.orchestrator.telemetry.catalogue import ORCHESTRATOR
from counterpoint.trainer.telemetry.catalogue import TRAINER
from counterpoint.transport.errors import UserError
from counterpoint.transport.telemetry.metric import EVERYWHERE, LineName, Metric, Process
from counterpoint.tune.telemetry import TUNE

PROCESSES: tuple[Process, ...] = (ORCHESTRATOR, TRAINER, SUPERVISOR, SWEEP, TUNE)
"""All kinds of processes with an endpoint."""

USUAL_SERIES = Metric("", "gauge", "").most_series
"""How many combinations of labels a metric has unless its table says another number."""

LINK = re.compile(r"\[([^\]]*)\]\(([^)#]*)[^)]*\)")
"""A link to a page of docs/, in a meaning."""


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` if no metric has the words."""
    words = [word.casefold() for word in _parser().parse_args(arguments).words]
    sections = {heading: _having(words, rows) for heading, rows in _sections()}
    if not any(sections.values()):
        raise UserError(f"no metric has {' '.join(words)!r} in its names or its meaning; without words all are printed")
    for heading, rows in sections.items():
        if rows:
            print(f"{heading}\n\n" + "\n".join(rows) + "\n")
    return 0


def _sections() -> Iterator[tuple[str, list[str]]]:
    """A heading for each kind of process and each file of lines, with a text for each of its metrics."""
    yield "Every process", [_metric_text(metric) for metric in EVERYWHERE]
    for process in PROCESSES:
        labels = "; ".join(f"{label}, {meaning}" for label, meaning in process.labels.items())
        about = f"{process.title}. {process.about}" + (f" All have the labels: {labels}." if labels else "")
        in_lines = {line.metric for line in process.lines}
        yield about, [_metric_text(metric) for metric in process.metrics if metric not in in_lines]
        if process.lines:
            yield (
                f"{process.title}: {process.line_file}, a JSON object a line",
                [_line_text(line) for line in process.lines],
            )


def _having(words: list[str], rows: list[str]) -> list[str]:
    return [row for row in rows if all(word in row.casefold() for word in words)]


def _metric_text(metric: Metric) -> str:
    return f"  {_shown(metric, {})}\n      {_meaning(metric.help)}"


def _line_text(line: LineName) -> str:
    also = f"\n      {_shown(line.metric, line.labels)}" if line.metric else ""
    return f"  {line.pattern}{also}\n      {_meaning(line.help)}"


def _shown(metric: Metric, given: Mapping[str, str]) -> str:
    """The name for Prometheus with its labels, those that are `given` with their values."""
    labels = ",".join(f'{label}="{given[label]}"' if label in given else label for label in metric.labels)
    most = f", at most {metric.most_series} series" if metric.labels and metric.most_series != USUAL_SERIES else ""
    return metric.full_name + (f"{{{labels}}}" if labels else "") + f"  ({metric.kind}{most})"


def _meaning(text: str) -> str:
    return LINK.sub(r"docs/\2, \1", text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint metrics",
        description=(
            "Prints every number of metrics.jsonl and of Prometheus: its names, its kind and its meaning. "
            "The page docs/metrics.md says how to collect them."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="print only those with each WORD in a name or the meaning"
    )
    return parser
