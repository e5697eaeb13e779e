"""The keys of a result: what a trainable reports, completed by what the tuner knows of it. As Ray Tune 1.x names them."""

from __future__ import annotations

import difflib
import math
from typing import Any

Result = dict[str, Any]
"""One report of a trial: metrics by name, nested dicts allowed, JSON values only."""

TRAINING_ITERATION = "training_iteration"
"""How many results the trial has reported, this one included; goes on counting after a restore."""
TIME_TOTAL_S = "time_total_s"
"""Seconds the trial has trained, over all its processes."""
TIME_THIS_ITER_S = "time_this_iter_s"
TIMESTEPS_TOTAL = "timesteps_total"
TIMESTEPS_THIS_ITER = "timesteps_this_iter"
EPISODES_TOTAL = "episodes_total"
EPISODES_THIS_ITER = "episodes_this_iter"
DEFAULT_METRIC = "_metric"
"""What a bare number that is reported is called."""
DONE = "done"
"""Whether the trainable says that it is complete."""
TRIAL_ID = "trial_id"
EXPERIMENT_ID = "experiment_id"
"""As Ray Tune calls what stays over the restores of a trial: the trial's id."""
EXPERIMENT_TAG = "experiment_tag"
SHOULD_CHECKPOINT = "should_checkpoint"
"""Set by a trainable in a result to ask for a checkpoint now."""


_ABOUT_THE_TRIAL = {
    "config",
    "date",
    "hostname",
    "node_ip",
    "pid",
    "timestamp",
    DONE,
    TRIAL_ID,
    EXPERIMENT_ID,
    EXPERIMENT_TAG,
}
_COUNTED = {
    TRAINING_ITERATION, TIME_TOTAL_S, TIME_THIS_ITER_S, TIMESTEPS_TOTAL, TIMESTEPS_THIS_ITER, EPISODES_TOTAL, EPISODES_THIS_ITER,
    "time_since_restore", "timesteps_since_restore", "iterations_since_restore",
}  # fmt: skip
"""What each result has, whatever the trainable reports."""


def lookup(result: Result, metric: str) -> Any:
    """The value of a metric, whose name may be a path through nested dicts (`"eval/reward"`); None where it is missing.

    A key that itself contains slashes wins over the path, since the metrics of a run are named so.
    """
    if metric in result:
        return result[metric]
    value: Any = result
    for part in metric.split("/"):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def number_in(result: Result | None, metric: str, *, finite: bool = True) -> float | None:
    """The number that a metric has; None if it is missing or no number, or, if it is to be `finite`, not that."""
    value = lookup(result or {}, metric)
    if isinstance(value, bool) or not isinstance(value, int | float) or (finite and not math.isfinite(value)):
        return None
    return value


def flattened(result: Result) -> Result:
    """The result without nesting: a nested value is named by its path (`"eval/reward"`)."""
    flat: Result = {}
    for key, value in result.items():
        if isinstance(value, dict):
            flat |= {f"{key}/{inner}": deep for inner, deep in flattened(value).items()}
        else:
            flat[key] = value
    return flat


def what_it_has(result: Result, metric: str) -> str:
    """Says for an error which metrics a result has instead of the one that is missing, and which is nearest to that."""
    names = [name for name in flattened(result) if name.partition("/")[0] not in _ABOUT_THE_TRIAL]
    near = difflib.get_close_matches(metric, names, n=1)
    listed = ", ".join(sorted(name for name in names if name not in _COUNTED)) or "no metric of its own"
    return f"the nearest is {near[0]!r}; it has {listed}" if near else f"it has {listed}"
