"""The figures of a benchmark: named numbers and their bounds, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich import box
from rich.table import Table

from perf.noise import TOO_NOISY
from perf.stalls import Stalls

RATIOS = ("x", "")
"""Units of ratios, which mean the same on any machine."""

Verdict = Literal["held", "broken", "too noisy"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of one case. A bound is a ratio or a difference within the same run wherever one can be had."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    """The largest or smallest value allowed; None for a figure that others are compared with."""
    side: Literal["at most", "at least"] = "at most"
    slack: float = 3.0
    """The factor by which a short measurement widens the bound."""
    timed: bool = True
    """Whether it depends on time, so that other processes change it. Bytes and counts do not."""
    idle_share: float = 0.0
    """The share of a lag that an idle loop of the same run has: the machine's own."""
    rounds: tuple[float, ...] = ()
    """The same of each round, where the figure is that of the median round or of the best one."""
    unstalled: float | None = None
    """The same less the times in which the machine stood still (`perf/stalls.py`); None if it is not known."""
    again: float | None = None
    """The same of a second measurement, which follows one that broke a bound; None without one."""

    @property
    def held(self) -> bool | None:
        """Whether the bound is kept; None without one."""
        return None if self.bound is None else self._keeps(self.value, self.bound)

    @property
    def varies(self) -> bool:
        """Whether more than a quarter of the rounds keep the bound, so that they are no evidence that it is broken."""
        if self.bound is None or not self.rounds:
            return False
        kept = sum(self._keeps(value, self.bound) for value in self.rounds)
        return kept > len(self.rounds) / 4

    @property
    def stalled(self) -> bool:
        """Whether it keeps its bound without the times in which the machine stood still."""
        return self.bound is not None and self.unstalled is not None and self._keeps(self.unstalled, self.bound)

    @property
    def kept_again(self) -> bool:
        """Whether the second measurement keeps the bound, so that the two together are no evidence that it is broken."""
        return self.bound is not None and self.again is not None and self._keeps(self.again, self.bound)

    def _keeps(self, value: float, bound: float) -> bool:
        return value <= bound if self.side == "at most" else value >= bound

    def gross(self) -> Figure:
        """See `Case.gross`."""
        if self.bound is None or self.unit not in RATIOS:
            return replace(self, bound=None)
        return replace(self, bound=self.bound * self.slack if self.side == "at most" else self.bound / self.slack)


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark's figures, in the order of the table."""

    name: str
    figures: Sequence[Figure]
    noise: float | None = None
    """Share of the machine's CPU that other processes took meanwhile, from 0 to 1; None if it was not measured."""
    stall_seconds: float | None = None
    """The time in which the machine stood still meanwhile; None if it was not recorded."""

    @property
    def held(self) -> bool:
        """Whether no bound is broken. A figure that is too noisy breaks none."""
        return all(self.verdict(figure) != "broken" for figure in self.figures)

    def verdict(self, figure: Figure) -> Verdict | None:
        """Returns the verdict on one of its figures; None without a bound. Noise can only break a bound, never make one hold.

        It is too noisy to judge if other processes took too much of the machine, if too much of a lag is the machine's own, if
        too many of the figure's rounds keep it, if it is kept without the times in which the machine stood still, or if a
        second measurement keeps it.
        """
        if figure.held is None:
            return None
        if figure.held:
            return "held"
        noisy = (
            max(self.noise or 0.0, figure.idle_share) > TOO_NOISY
            or figure.varies
            or figure.stalled
            or figure.kept_again
        )
        return "too noisy" if figure.timed and noisy else "broken"

    def beside(self, unstalled: Case, stalls: Stalls) -> Case:
        """Returns the case with the figures of `unstalled`, which is the same case less the stalls of the machine, as theirs."""
        if not stalls.recorded:
            return self
        pairs = zip(self.figures, unstalled.figures, strict=True)
        figures = [replace(figure, unstalled=other.value) for figure, other in pairs]
        return replace(self, figures=figures, stall_seconds=stalls.seconds)

    def measured_again(self, second: Case) -> Case:
        """Returns the case with the figures of `second`, a second measurement of it, beside its own of the same names.

        It may lack some: sizes for which there was no memory are left out.
        """
        found = {figure.name: figure.value for figure in second.figures}
        return replace(self, figures=[replace(figure, again=found.get(figure.name)) for figure in self.figures])

    def gross(self) -> Case:
        """Returns the case with bounds for a short measurement: on ratios only, and wider by `slack`."""
        return replace(self, figures=[figure.gross() for figure in self.figures])

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Case:
        """Returns the case of a result of `as_json`. Raises `KeyError` or `TypeError` for anything else."""
        found = ("held", "verdict")
        figures = [{name: value for name, value in figure.items() if name not in found} for figure in fields["figures"]]
        read = [Figure(**figure | {"rounds": tuple(figure["rounds"])}) for figure in figures]
        return cls(fields["case"], read, fields["noise"], fields["stall_seconds"])

    def as_json(self) -> dict[str, Any]:
        """Returns the case as JSON, with `held` and the verdict of each figure."""
        return {
            "case": self.name,
            "held": self.held,
            "noise": self.noise,
            "stall_seconds": self.stall_seconds,
            "figures": [
                asdict(figure) | {"held": figure.held, "verdict": self.verdict(figure)} for figure in self.figures
            ],
        }

    def as_table(self) -> Table:
        """Returns the case as a table."""
        said = [] if self.noise is None else [f"other processes took {self.noise:.0%} of the machine's CPU meanwhile"]
        if self.stall_seconds is not None:
            said.append(f"the machine stood still for {1e3 * self.stall_seconds:,.3g} ms")
        caption = "; ".join(said) or None
        table = Table(
            box=box.SIMPLE_HEAD, title=self.name, title_justify="left", caption=caption, caption_justify="left"
        )
        for column in ("figure", "measured", "bound", ""):
            table.add_column(column, justify="left" if column in ("figure", "") else "right")
        for figure in self.figures:
            bound = "" if figure.bound is None else f"{figure.side} {_shown(figure.bound, figure.unit)}"
            verdict = self.verdict(figure) or ""
            shown = {"broken": "[red]broken[/red]", "too noisy": "[yellow]too noisy[/yellow]"}
            measured = _shown(figure.value, figure.unit)
            if verdict in shown and figure.again is not None:
                measured += f", again {_shown(figure.again, figure.unit)}"
            table.add_row(figure.name, measured, bound, shown.get(verdict, verdict))
        return table


def _shown(value: float, unit: str) -> str:
    return f"{value:,.3g} {unit}".strip() if abs(value) < 1000 else f"{value:,.0f} {unit}".strip()
