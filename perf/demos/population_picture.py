"""The picture of a population: the rewards of all trials over their steps, who copied whom, and the learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

SMOOTHED_STEPS = 4


@dataclass(frozen=True)
class TrialCurve:
    """One trial: its results by step."""

    name: str
    status: str
    steps: list[int]
    rewards: list[float]
    learning_rates: list[float]
    temperatures: list[float]
    copies: list[tuple[int, str]] = field(default_factory=list)
    """The step after which it went on as a copy, and the name of the trial that it copied."""


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and those before it, `SMOOTHED_STEPS` in all."""
    return [fmean(values[max(0, position - SMOOTHED_STEPS + 1) : position + 1]) for position in range(len(values))]


def draw(searches: Sequence[tuple[str, Sequence[TrialCurve]]], file: Path) -> Path:
    """Draws a column for each search: rewards above, learning rates below. Returns the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(searches), figsize=(12, 7), sharex=True, sharey="row", squeeze=False)
    for column, (title, trials) in enumerate(searches):
        colours = dict(zip([trial.name for trial in trials], pyplot.colormaps["tab10"].colors, strict=False))
        for trial in trials:
            above, below = axes[0][column], axes[1][column]
            above.plot(trial.steps, smoothed(trial.rewards), color=colours[trial.name], label=trial.name, linewidth=1.5)
            below.plot(
                trial.steps, trial.learning_rates, color=colours[trial.name], drawstyle="steps-post", linewidth=1.5
            )
            for step, winner in trial.copies:
                _mark(above, trial.steps, smoothed(trial.rewards), step, colours[winner], winner)
                _mark(below, trial.steps, trial.learning_rates, step, colours[winner], winner)
        axes[0][column].set_title(title)
        axes[1][column].set_yscale("log")
        axes[1][column].set_xlabel("step of the run")
    axes[0][0].set_ylabel(f"reward, mean of {SMOOTHED_STEPS} steps")
    axes[1][0].set_ylabel("learning rate")
    axes[0][0].legend(title="trial", fontsize="small", ncols=2)
    figure.text(
        0.01, 0.01, "A dot is a copy; its colour and number are those of the trial that was copied.", fontsize="small"
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


def _mark(axis: Any, steps: Sequence[int], values: Sequence[float], step: int, colour: Any, winner: str) -> None:
    position = list(steps).index(step)
    axis.plot([step], [values[position]], "o", color=colour, markersize=8, markeredgecolor="black", zorder=3)
    axis.annotate(winner, (step, values[position]), textcoords="offset points", xytext=(0, 8), ha="center", fontsize=8)
