"""The table of bias: every combination in lines, or a row for each advantage, loss and selection in markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from counterpoint.run.config import DISCOUNTED
from perf.bias.rows import ADVANTAGES, LOSSES, SELECTIONS, UNBIASED_ADVANTAGE, UNBIASED_LOSS, LossRow
from perf.bias.update import Case, Selection
from perf.bias.verdicts import verdict

STALENESS = (0, 1, 2)


def cell(advantage: str, loss: LossRow, staleness: int, selection: Selection) -> str:
    """Returns the verdict on a combination in words. Raises `ValueError` if a function fails."""
    if (advantage == "batch_standardised" and selection == "zero") or (
        advantage in DISCOUNTED and loss.config.mixes_tokens
    ):
        return "refused"  # by counterpoint/run/config.py
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


@dataclass(frozen=True, slots=True)
class Row:
    """A row of markdown: one thing beside others that add no bias."""

    label: str
    matters: str
    advantage: str = UNBIASED_ADVANTAGE
    loss: LossRow = UNBIASED_LOSS
    selection: Selection = "all"

    def __str__(self) -> str:
        cells = [cell(self.advantage, self.loss, staleness, self.selection) for staleness in STALENESS]
        return f"| {' | '.join([self.label, *cells, self.matters])} |"


TABLES = {
    "advantage": [Row(f"`{kind}`", matters, advantage=kind) for kind, matters in ADVANTAGES.items()],
    "loss": [Row(loss.label, loss.matters, loss=loss) for loss in LOSSES],
    "which rollouts": [Row(label, matters, selection=each) for each, (label, matters) in SELECTIONS.items()],
}
"""The rows of docs/algorithms.md, by the head of their first column."""


def markdown() -> Iterator[str]:
    """Yields the lines of the tables."""
    for head, rows in TABLES.items():
        yield f"| {head} | staleness 0 | staleness 1 | staleness 2 | when it matters |"
        yield "|---|---|---|---|---|"
        yield from map(str, rows)
        yield ""
