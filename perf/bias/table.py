"""The table of bias: every combination in lines, or one row for each advantage, loss and selection in markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from perf.bias.rows import ADVANTAGES, LOSSES, SELECTIONS, UNBIASED_ADVANTAGE, UNBIASED_LOSS, LossRow
from perf.bias.update import Case, Selection
from perf.bias.verdicts import verdict

STALENESS = (0, 1, 2)


def cell(advantage: str, loss: LossRow, staleness: int, selection: Selection) -> str:
    """Returns the verdict on a combination in words. Raises `ValueError` if a function fails."""
    if advantage == "batch_standardised" and selection == "zero":
        return "refused"  # counterpoint/run/config.py refuses this filter beside it
    return str(verdict(Case(advantage, loss.config, staleness, selection)))


def lines(advantages: Iterable[str], losses: Iterable[LossRow]) -> Iterator[str]:
    """Yields a line for every combination of these with every staleness and selection."""
    every = list(losses)
    for advantage in advantages:
        for staleness in STALENESS:
            for selection in SELECTIONS:
                for loss in every:
                    found = cell(advantage, loss, staleness, selection)
                    yield f"{advantage} | {loss.label.replace('`', '')} | staleness {staleness} | {selection} | {found}"


def row(label: str, advantage: str, loss: LossRow, selection: Selection, matters: str) -> str:
    """Returns a row of markdown: the verdict at each staleness, and when it matters."""
    cells = [cell(advantage, loss, staleness, selection) for staleness in STALENESS]
    return f"| {' | '.join([label, *cells, matters])} |"


def advantage_row(kind: str, matters: str) -> str:
    """Returns the row of an advantage, beside the loss that adds no bias."""
    return row(f"`{kind}`", kind, UNBIASED_LOSS, "all", matters)


def loss_row(loss: LossRow) -> str:
    """Returns the row of a loss, beside the advantage that adds no bias."""
    return row(loss.label, UNBIASED_ADVANTAGE, loss, "all", loss.matters)


def selection_row(selection: Selection) -> str:
    """Returns the row of a selection of rollouts, beside the advantage and the loss that add no bias."""
    label, matters = SELECTIONS[selection]
    return row(label, UNBIASED_ADVANTAGE, UNBIASED_LOSS, selection, matters)


def markdown() -> Iterator[str]:
    """Yields the lines of the three tables of docs/algorithms.md."""
    tables = (
        ("advantage", (advantage_row(*each) for each in ADVANTAGES.items())),
        ("loss", map(loss_row, LOSSES)),
        ("which rollouts", map(selection_row, SELECTIONS)),
    )
    for head, rows in tables:
        yield f"| {head} | staleness 0 | staleness 1 | staleness 2 | when it matters |"
        yield "|---|---|---|---|---|"
        yield from rows
        yield ""
