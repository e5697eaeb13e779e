"""Measures what a trial costs that does nothing: in processes of this machine, beside Ray Tune, and how that grows.

    python -m perf.bench.tune.trials [--quick | --full]

Each run is a process of its own (`perf/bench/tune/run_trials.py`), two trials at a time, with the usual loggers. Ray
Tune runs fewer trials, since each takes it a second or so, and its Ray has started before its time begins. Without Ray Tune
(`ray[tune]`, which developers have) its rows are left out, and a line says so.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass

from perf.bench.command import Size, show
from perf.figures import Case, Figure

TIMES = 10
"""So many times the trials of the first run are in the second."""


@dataclass(frozen=True)
class Run:
    """What one run of trials took."""

    count: int
    seconds: float
    peak: float
    """Bytes of the tuner's process."""

    @property
    def milliseconds(self) -> float:
        """The time of one trial."""
        return self.seconds / self.count * 1e3


def measure(size: Size) -> list[Case]:
    """Measures the case `tune-trials`, in a minute; half a minute when quick; an hour in full."""
    count = size.pick(20, 200, 1000)
    few, many = _run("ours", count), _run("ours", TIMES * count)
    reused = _run("ours", count, "reuse")
    figures = [
        Figure("trials", few.count, ""),
        Figure("a trial", few.milliseconds, "ms"),
        Figure("a trial, processes used anew", reused.milliseconds, "ms"),
    ]
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.tune") is None:
        print("tune-trials: Ray Tune is not installed (ray[tune]), so nothing is compared with it", file=sys.stderr)
    else:
        figures += _beside_ray(few, reused, size.pick(4, 20, 1000))
    growth = (many.peak - few.peak) / (many.count - few.count)
    return [
        Case(
            "tune-trials",
            [
                *figures,
                Figure("trials of the longer run", many.count, ""),
                Figure("its time a trial, over the shorter run's", many.milliseconds / few.milliseconds, "x", 1.5),
                Figure("memory of the tuner at its end", many.peak / 1e6, "MB"),
                Figure("memory for each further trial", growth / 1e3, "KB", 20.0, timed=False),
            ],
        )
    ]


def _beside_ray(few: Run, reused: Run, count: int) -> list[Figure]:
    plain, again = _run("ray", count), _run("ray", count, "reuse")
    return [
        Figure("Ray Tune: trials", count, ""),
        Figure("Ray Tune: a trial", plain.milliseconds, "ms"),
        Figure("Ray Tune: a trial, actors used anew", again.milliseconds, "ms"),
        Figure("Ray Tune's time a trial, over ours", plain.milliseconds / few.milliseconds, "x", 10.0, "at least"),
        Figure("the same, used anew", again.milliseconds / reused.milliseconds, "x", 10.0, "at least"),
    ]


def _run(kind: str, count: int, *flags: str) -> Run:
    command = [sys.executable, "-P", "-m", "perf.bench.tune.run_trials", kind, str(count), *flags]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {completed.returncode}:\n{completed.stderr[-4000:]}")
    fields = json.loads(completed.stdout.splitlines()[-1])
    return Run(count, fields["seconds"], fields["peak"])


if __name__ == "__main__":
    show(measure)
