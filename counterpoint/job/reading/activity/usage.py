"""What the processes of a job take of their machine, over time, as `usage.jsonl` grows."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Literal

import numpy as np

from counterpoint.job.reading.metrics.downsample import downsample, rounded
from counterpoint.job.reading.rollouts.rollout_records import finite_number
from counterpoint.job.reading.rollouts.view import name_of
from counterpoint.job.serving.usage_file import MOST_BYTES, USAGE_FILE
from counterpoint.transport.config import Config
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.untrusted import object_in

POINTS = 300
MOST_SAMPLES, MOST_NAMES = 20_000, 64

Figure = Literal["cpu", "memory", "gpu_memory", "gpu"]


class UsageSeries(Config):
    """One figure of one process, with its descendants, or of one GPU."""

    figure: Figure
    """`cpu` in cores, `memory` and `gpu_memory` in bytes, `gpu` as the share of time in which a GPU was used."""
    name: str
    """The process, or the number of the GPU."""
    time: list[float]
    """Unix seconds, ascending."""
    value: list[float | None]
    """The value, or the mean of a stretch."""


class UsageReader:
    """Follows a job's `usage.jsonl`. One caller at a time (`Jobs.reading`)."""

    def __init__(self, directory: Path) -> None:
        self._lines = AppendedLines(directory / USAGE_FILE, MOST_BYTES)
        self._samples = deque[tuple[float, dict[tuple[Figure, str], float]]](maxlen=MOST_SAMPLES)

    def read(self) -> list[UsageSeries]:
        """Returns the figures as they are now. Raises as `AppendedLines`."""
        for _, block in self._lines.new_blocks(self._samples.clear):
            for raw in block.splitlines():
                self._add(raw)
        keys = [*dict.fromkeys(key for _, values in self._samples for key in values)][: 4 * MOST_NAMES]
        return [self._series(figure, name) for figure, name in sorted(keys)]

    def _add(self, raw: bytes) -> None:
        if (line := object_in(raw)) is None:
            return
        time, workers, gpus = finite_number(line.get("time")), line.get("workers"), line.get("gpus")
        if time is None or not isinstance(workers, dict) or not isinstance(gpus, dict):
            return
        values: dict[tuple[Figure, str], object] = {
            ("gpu", name): share for name, share in [*gpus.items()][:MOST_NAMES]
        }
        for name, taken in [*workers.items()][:MOST_NAMES]:
            figures: tuple[Figure, ...] = ("cpu", "memory", "gpu_memory")
            values |= {(figure, name): taken.get(figure) for figure in figures if isinstance(taken, dict)}
        known = {key: number for key, value in values.items() if (number := finite_number(value)) is not None}
        self._samples.append((time, known))

    def _series(self, figure: Figure, name: str) -> UsageSeries:
        points = sorted((time, values[figure, name]) for time, values in self._samples if (figure, name) in values)
        times, values = np.array(points).T
        curve = downsample(times, values, POINTS)
        return UsageSeries(figure=figure, name=name_of(name), time=curve.x.tolist(), value=rounded(curve.mean))
