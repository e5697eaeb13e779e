"""Draws reward and event-loop lag over the steps of one run or several."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from counterpoint.job.reading.metrics.history import History

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
REWARD, LAG, LAG_MAX = "#2563eb", "#0f766e", "#f59e0b"
RUNS = ("#2563eb", "#f59e0b", "#0f766e", "#db2777", "#7c3aed", "#65a30d", "#0891b2", "#b91c1c", "#a16207", "#475569")
"""The colours of the runs; with more runs than colours, some share one."""
SMOOTHING_STEPS = 5


def prepare() -> None:
    """Draws nothing, into memory: the first picture of a process imports the library and reads fonts for most of a second."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    figure.subplots().set_title(" ")
    figure.savefig(io.BytesIO())


def plot(histories: Sequence[History], path: Path, title: str) -> Path:
    """Draws the curves into `path` (PNG or SVG, by its suffix), a line for each run; returns `path`. Raises `OSError`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, facecolor="white", layout="constrained")
    reward_axes, lag_axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2]})
    if len(histories) == 1:
        _draw_one(histories[0], reward_axes, lag_axes)
    else:
        _draw_runs(histories, reward_axes, lag_axes)
    reward_axes.set_ylabel("reward")
    lag_axes.set_ylim(0, 1.3 * lag_axes.get_ylim()[1])  # room for the legend
    lag_axes.set_xlabel("step")
    for axes in (reward_axes, lag_axes):
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(colors=MUTED)
        axes.yaxis.label.set_color(INK)
        axes.xaxis.label.set_color(INK)
    reward_axes.legend(loc="lower right", frameon=False, labelcolor=INK, fontsize=9)
    reward_axes.set_title(title, loc="left", color=INK, fontweight="bold")
    figure.savefig(path)
    return path


def _draw_one(history: History, reward_axes: Any, lag_axes: Any) -> None:
    steps, rewards = _columns(history, "reward/mean")
    reward_axes.plot(steps, rewards, color=REWARD, alpha=0.35, linewidth=1, label="a step's mean")
    reward_axes.plot(steps, _smooth(rewards), color=REWARD, linewidth=2.2, label=f"mean of {SMOOTHING_STEPS} steps")
    for name, label, colour in (("p99", "99th percentile", LAG), ("max", "maximum", LAG_MAX)):
        steps, seconds = _columns(history, f"event_loop_lag/{name}")
        lag_axes.plot(steps, [1e3 * value for value in seconds], color=colour, linewidth=1.6, label=label)
    lag_axes.set_ylabel("event-loop lag, ms")
    lag_axes.legend(loc="upper left", ncols=2, frameon=False, labelcolor=INK, fontsize=9)


def _draw_runs(histories: Sequence[History], reward_axes: Any, lag_axes: Any) -> None:
    for history, colour in zip(histories, cycle(RUNS), strict=False):
        steps, rewards = _columns(history, "reward/mean")
        reward_axes.plot(steps, rewards, color=colour, alpha=0.2, linewidth=1)
        reward_axes.plot(steps, _smooth(rewards), color=colour, linewidth=2, label=history.run_id)
        steps, seconds = _columns(history, "event_loop_lag/p99")
        lag_axes.plot(steps, [1e3 * value for value in seconds], color=colour, linewidth=1.4)
    lag_axes.set_ylabel("event-loop lag, p99, ms")


def _columns(history: History, name: str) -> tuple[list[int], list[float]]:
    series = history.series(name)
    return [step for step, _ in series], [value for _, value in series]


def _smooth(values: list[float]) -> list[float]:
    """The mean of each value and those before it, at most `SMOOTHING_STEPS`."""
    windows = [values[max(0, end - SMOOTHING_STEPS) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
