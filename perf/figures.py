"""What a benchmark measured: named numbers, the bounds they are to keep, and how both are shown to people and machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich import box
from rich.table import Table

RATIOS = ("x", "")
"""Units of ratios, which mean the same on any machine."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of one case. A bound is a ratio or a difference within the same run wherever one can be had."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    """What it is to keep; None where it is there to be read beside others."""
    side: Literal["at most", "at least"] = "at most"
    slack: float = 3.0
    """How much wider the bound of a short measurement is."""

    @property
    def held(self) -> bool | None:
        """Whether the bound is kept; None without one."""
        if self.bound is None:
            return None
        return self.value <= self.bound if self.side == "at most" else self.value >= self.bound

    def gross(self) -> Figure:
        """See `Case.gross`."""
        if self.bound is None or self.unit not in RATIOS:
            return replace(self, bound=None)
        return replace(self, bound=self.bound * self.slack if self.side == "at most" else self.bound / self.slack)


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark's figures, in the order they are to be read."""

    name: str
    figures: Sequence[Figure]

    @property
    def held(self) -> bool:
        """Whether no bound is broken."""
        return all(figure.held is not False for figure in self.figures)

    def gross(self) -> Case:
        """With bounds that only a gross fault breaks: ratios, and those wider. For measurements too short to be exact."""
        return Case(self.name, [figure.gross() for figure in self.figures])

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Case:
        """What `as_json` gave. Raises `KeyError` or `TypeError` for anything else."""
        figures = [{name: value for name, value in figure.items() if name != "held"} for figure in fields["figures"]]
        return cls(fields["case"], [Figure(**figure) for figure in figures])

    def as_json(self) -> dict[str, Any]:
        """For machines: the same, `held` included."""
        return {
            "case": self.name,
            "held": self.held,
            "figures": [asdict(figure) | {"held": figure.held} for figure in self.figures],
        }

    def as_table(self) -> Table:
        """For people."""
        table = Table(box=box.SIMPLE_HEAD, title=self.name, title_justify="left")
        for column in ("figure", "measured", "bound", ""):
            table.add_column(column, justify="left" if column in ("figure", "") else "right")
        for figure in self.figures:
            bound = "" if figure.bound is None else f"{figure.side} {_shown(figure.bound, figure.unit)}"
            verdict = {None: "", True: "held", False: "[red]broken[/red]"}[figure.held]
            table.add_row(figure.name, _shown(figure.value, figure.unit), bound, verdict)
        return table


def _shown(value: float, unit: str) -> str:
    return f"{value:,.3g} {unit}".strip() if abs(value) < 1000 else f"{value:,.0f} {unit}".strip()
