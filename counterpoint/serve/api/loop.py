"""`/jobs/{job}/runs/{run}/loop`: how late a run's event loop was, and which code made it late at each peak."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from counterpoint.job.reading.metrics.run_series import JobSeries, Window
from counterpoint.run.loop_health.blame_evidence import Kind
from counterpoint.run.loop_health.slow_spots import SlowSpot, slow_spots_of
from counterpoint.serve.api.runs import Series, WindowParameters, series_of
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.files.untrusted import UntrustedFileError
from counterpoint.transport.printable import printable

CURVES = ("event_loop_lag/median", "event_loop_lag/p99", "event_loop_lag/max")
LATE = "event_loop_late/n"
BY_KIND = {kind: f"event_loop_late/{kind}" for kind in Kind}

BLAMED = 5
"""Slow spots of a peak that are shown."""


class LoopParameters(WindowParameters):
    """Which run, and which part of it."""

    job: Identifier
    """The job's id."""
    run: Identifier
    """The run's id."""
    peaks: int = Field(default=10, ge=0, le=100)
    """Most steps whose blame is shown."""


class Blamed(Config):
    """One place that made the loop late (docs/debugging.md). Seconds are at least those shown."""

    kind: Kind
    """What the place did."""
    text: str
    """The event in words."""
    advice: str
    """What to do about it; empty if that is not known."""
    function: str
    """The innermost function of the project or its environment."""
    file: str
    """The file of the code."""
    line: int
    """The line that it was at."""
    inside: str
    """The function that ran within it."""
    callback: str
    """What the loop had called."""
    thread: str
    """The thread that held the GIL; empty if it was the loop's own."""
    seconds: float
    """How late it made the loop in this step, in all."""
    worst: float
    """The longest of these moments, in seconds."""
    count: int
    """The number of moments."""


class Peak(Config):
    """A step in which the loop was late."""

    step: int
    """The number of the step."""
    x: float
    """The place on the axis."""
    seconds: float
    """The longest lag in it."""
    blame: list[Blamed]
    """What made it late: code that has a name first, the user's before ours; empty if nothing was seen."""


class LoopHealth(Config):
    """The lag of a run's event loop."""

    series: list[Series]
    """Median, 99th percentile and maximum of each step, in seconds."""
    late: int
    """Late moments in the part that is shown."""
    seconds_by_kind: dict[Kind, float]
    """Their seconds, by what made them late."""
    peaks: list[Peak]
    """The steps with the longest lag, the longest first."""
    unreadable: str
    """Why the run's file cannot be read; empty if it can."""


@reads(
    "/jobs/{job}/runs/{run}/loop",
    "Shows how late a run's event loop was, and which code made it late in the worst steps.",
)
def loop_health(jobs: Jobs, parameters: LoopParameters) -> LoopHealth:
    """Answers `GET /jobs/{job}/runs/{run}/loop`."""
    job = jobs.get(parameters.job)
    job.run_directory(parameters.run)
    window = parameters.window
    with jobs.reading(job, JobSeries) as reader:
        series = reader.run(parameters.run, [*CURVES, LATE, *BY_KIND.values()])
        unreadable = reader.unreadable
        curves = [series_of(series, name, window) for name in CURVES]
        everything = Window(window.axis, window.begin, window.end, points=len(series.shipped) + 1)
        sums = {name: float(series.curve(name, everything).mean.sum()) for name in (LATE, *BY_KIND.values())}
        steps, x, lag = series.highest(CURVES[-1], window, parameters.peaks)
        peaks: list[Peak] = []
        for step, place, seconds in zip(steps.tolist(), x.tolist(), lag.tolist(), strict=True):
            try:
                worst = slow_spots_of([series.line_of_step(step)]).worst(BLAMED)
            except (OSError, UntrustedFileError) as error:
                worst, unreadable = [], str(error)
            peaks.append(Peak(step=step, x=place, seconds=seconds, blame=[_blamed(each) for each in worst]))
    return LoopHealth(
        series=curves,
        late=int(np.clip(sums[LATE], 0, 2**53)),
        seconds_by_kind={kind: sums[name] for kind, name in BY_KIND.items()},
        peaks=peaks,
        unreadable=printable(unreadable[:2000]),
    )


def _blamed(slow_spot: SlowSpot) -> Blamed:
    place = slow_spot.place
    return Blamed(
        kind=slow_spot.kind,
        text=_text(str(slow_spot)),
        advice=slow_spot.advice,
        function=_text(place.function),
        file=_text(place.file),
        line=int(place.line),
        inside=_text(place.inside),
        callback=_text(slow_spot.callback),
        thread=_text(slow_spot.thread),
        seconds=slow_spot.seconds,
        worst=slow_spot.worst,
        count=int(slow_spot.count),
    )


def _text(text: str) -> str:
    return printable(text[:500])


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (loop_health,)
