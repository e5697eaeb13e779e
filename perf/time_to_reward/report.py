"""The comparison's result as tables: reward by tenths of the run, and time and rollouts until the thresholds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from perf.time_to_reward.measure import TENTHS

Figures = dict[str, Any]
"""`Outcome.figures` of one run of one side."""


_LABELS = {
    "start_up_seconds": "start-up, to the first rewards",
    "step_seconds": "wall of an update",
    "step_cpu_seconds": "CPU of an update",
    "wall_seconds": "wall of the whole command",
    "cpu_seconds": "CPU of the whole command",
    "others": "machine used by others",
}

_SLOWED = (
    "wall from the command",
    *(_LABELS[name] for name in ("start_up_seconds", "step_seconds", "step_cpu_seconds")),
)
"""The ends of the names of those rows that a competing load is shown for."""


def tables(runs: Sequence[Figures]) -> list[Table]:
    """Returns the tables of the runs without a competing load, each column a side: means of the rewards, medians of the times.

    If there are runs with one, too, the last table says by how much it slowed each side.
    """
    sides = list(dict.fromkeys(run["side"] for run in runs))
    quiet = [run for run in runs if not run["busy"]]
    slowed = [_slowed(runs, sides)] if len(quiet) < len(runs) else []
    return [_curves(quiet, sides), _times(quiet, sides), _processes(quiet, sides), *slowed]


def summary(runs: Sequence[Figures]) -> dict[str, Any]:
    """Returns the means and medians of the tables, by side."""
    found: dict[str, Any] = {}
    runs = [run for run in runs if not run["busy"]]
    for side in dict.fromkeys(run["side"] for run in runs):
        own = [run for run in runs if run["side"] == side]
        found[side] = {
            "tenths": [statistics.fmean(run["tenths"][part] for run in own) for part in range(TENTHS)],
            **{name: _median(own, read) for name, (read, _) in _rows(runs).items()},
        }
    return found


def _curves(runs: Sequence[Figures], sides: Sequence[str]) -> Table:
    table = Table(title="mean reward in each tenth of the run", box=box.SIMPLE)
    table.add_column("tenth")
    for side in sides:
        table.add_column(side, justify="right")
    for part in range(TENTHS):
        means = [statistics.fmean(run["tenths"][part] for run in runs if run["side"] == side) for side in sides]
        table.add_row(str(part + 1), *(f"{mean:.3f}" for mean in means))
    return table


def _times(runs: Sequence[Figures], sides: Sequence[str]) -> Table:
    table = Table(title="medians; in brackets over TRL's with transformers, pair by pair", box=box.SIMPLE)
    table.add_column("")
    for side in sides:
        table.add_column(side, justify="right")
    for name, (read, form) in _rows(runs).items():
        cells = []
        for side in sides:
            own = [run for run in runs if run["side"] == side]
            value = _median(own, read)
            ratio = _ratio(runs, side, read)
            shown = "never" if value is None else form.format(value)
            cells.append(shown if ratio is None or side == "trl" else f"{shown} ({ratio:.2f} x)")
        table.add_row(name, *cells)
    return table


def _processes(runs: Sequence[Figures], sides: Sequence[str]) -> Table:
    table = Table(title="CPU of an update by process, in ms: medians", box=box.SIMPLE)
    table.add_column("")
    for side in sides:
        table.add_column(side, justify="right")
    for process in dict.fromkeys(name for run in runs for name in run["step_cpu_seconds_of"]):
        cells = []
        for side in sides:
            own = [run["step_cpu_seconds_of"] for run in runs if run["side"] == side]
            has_it = any(process in seconds for seconds in own)
            cells.append(f"{1e3 * statistics.median(each.get(process, 0.0) for each in own):.1f}" if has_it else "")
        table.add_row(process, *cells)
    return table


def _slowed(runs: Sequence[Figures], sides: Sequence[str]) -> Table:
    """Returns what each side took beside the load, of its figures in wall time and the CPU of an update."""
    title = "beside a load that takes half of each core: medians; in brackets over without, and over TRL's beside it"
    table = Table(title=title, box=box.SIMPLE)
    table.add_column("")
    for side in sides:
        table.add_column(side, justify="right")
    own = {
        (side, busy): [run for run in runs if (run["side"], run["busy"]) == (side, busy)]
        for side in sides
        for busy in (False, True)
    }
    for name, (read, form) in _rows(runs).items():
        if not name.endswith(_SLOWED):
            continue
        cells = []
        for side in sides:
            busy, quiet = _median(own[side, True], read), _median(own[side, False], read)
            over_trl = _ratio([run for run in runs if run["busy"]], side, read)
            slower = "" if busy is None or quiet is None else f" ({busy / quiet:.2f} x)"
            beside = "" if over_trl is None or side == "trl" else f" ({over_trl:.2f} of TRL's)"
            cells.append("never" if busy is None else form.format(busy) + slower + beside)
        table.add_row(name, *cells)
    return table


def _rows(runs: Sequence[Figures]) -> dict[str, tuple[Callable[[Figures], float | None], str]]:
    """Returns how each figure is read and written, by its name."""
    rows: dict[str, tuple[Callable[[Figures], float | None], str]] = {}
    for threshold in (name.removeprefix("to_") for name in runs[0] if name.startswith("to_")):
        for name, label, form in (
            ("wall_seconds", "wall from the command", "{:.1f} s"),
            ("training_seconds", "wall from the first batch", "{:.1f} s"),
            ("cpu_seconds", "CPU from the command", "{:.1f} s"),
            ("rollouts", "rollouts", "{:.0f}"),
        ):
            rows[f"to {threshold}: {label}"] = (_reader(f"to_{threshold}", name), form)
    for name, form in (
        ("start_up_seconds", "{:.1f} s"),
        ("step_seconds", "{:.3f} s"),
        ("step_cpu_seconds", "{:.3f} s"),
        ("wall_seconds", "{:.1f} s"),
        ("cpu_seconds", "{:.1f} s"),
        ("others", "{:.0%}"),
    ):
        rows[_LABELS[name]] = (_reader(name), form)
    return rows


def _reader(*path: str) -> Callable[[Figures], float | None]:
    def read(run: Figures) -> float | None:
        value: Any = run
        for name in path:
            value = value[name]
        return None if value is None else float(value)

    return read


def _median(runs: Sequence[Figures], read: Callable[[Figures], float | None]) -> float | None:
    """Returns the median over the runs; None if any of them has no value."""
    values = [read(run) for run in runs]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def _ratio(runs: Sequence[Figures], side: str, read: Callable[[Figures], float | None]) -> float | None:
    """Returns the median over pairs of a side's figure divided by TRL's of the same round; None if any is missing."""
    ratios = []
    for own in (run for run in runs if run["side"] == side):
        others = [run for run in runs if run["side"] == "trl" and run["round"] == own["round"]]
        mine, theirs = read(own), read(others[0]) if others else None
        if mine is None or not theirs:
            return None
        ratios.append(mine / theirs)
    return statistics.median(ratios) if ratios else None
