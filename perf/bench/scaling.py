"""Measures scaling: the step boundary's wall time and lag from 0.1 to 4 GB of rollouts.

    python -m perf.bench.scaling [--quick | --full]

Sizes that do not fit the memory are left out, with a message.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np

from job.replay.boundary import Recording
from job.replay.replay import BASELINE, BOUNDARY, Replay, Settings, on_daemons_loop, replay
from job.replay.synthesize import Shape, header_of, synthetic_rollouts
from orchestrator.rollouts.dump import open_dump, write_dump
from perf.bench.command import Size, show
from perf.figures import Case, Figure

ROLLOUTS = (14, 42, 136, 544)
"""The numbers of rollouts of 7.4 MB each."""
TIMES_THE_BYTES = 5
"""The memory that a replay needs over its rollouts' bytes: the dump, the record, the consumer's copy, and what is in transit."""


def measure(size: Size) -> list[Case]:
    """Measures the case `scaling`."""
    figures: list[Figure] = []
    measured: list[tuple[float, Replay]] = []
    for rollouts in ROLLOUTS[: size.pick(2, 3, 4)]:
        shape = Shape(rollouts, 32, 16_384, even=True)
        gigabytes = rollouts * 7.4e-3
        if TIMES_THE_BYTES * gigabytes * 1e9 > _available_bytes():
            figures.append(Figure(f"{gigabytes:.1f} GB left out: memory needed", TIMES_THE_BYTES * gigabytes, "GB"))
            continue
        found = _replay(shape)
        measured.append((found.nbytes / 1e9, found))
        figures += [
            Figure(f"{found.nbytes / 1e9:.2f} GB: wall", found.row(BOUNDARY).seconds, "s"),
            Figure(f"{found.nbytes / 1e9:.2f} GB: lag max", 1e3 * found.row(BOUNDARY).lag.max, "ms"),
        ]
    return [Case("scaling", figures + _bounds(measured))]


def _replay(shape: Shape) -> Replay:
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        write_dump(Path(directory) / "dump", header_of(shape), synthetic_rollouts(shape))
        dump = open_dump(Path(directory) / "dump")
        dump.populate()
        recording = Recording(dump.header, dump.rollouts())
        return on_daemons_loop(lambda: replay(recording, Settings(rounds=3, baseline_seconds=1.0)))


def _bounds(measured: list[tuple[float, Replay]]) -> list[Figure]:
    """Compares the largest with a line through the others, and its lag with the smallest's and the idle loop's.

    Nothing where there are too few sizes.
    """
    if len(measured) < 2:
        return []
    sizes = [size for size, _ in measured]
    walls = [found.row(BOUNDARY).seconds for _, found in measured]
    smallest, largest = measured[0][1].row(BOUNDARY).lag, measured[-1][1].row(BOUNDARY).lag
    idle = statistics.median(found.row(BASELINE).lag.max for _, found in measured)
    figures = [
        Figure("idle: lag max", 1e3 * idle, "ms"),
        Figure("lag p99 of the largest over the smallest's", largest.p99 / smallest.p99, "x", 2.0),
        Figure(
            "lag max of the largest over the smallest's and idle's", largest.max / max(smallest.max, idle), "x", 2.0
        ),
    ]
    if len(measured) > 2:
        slope, fixed = np.polyfit(sizes[:-1], walls[:-1], 1)
        line = fixed + slope * sizes[-1]
        figures.append(
            Figure(f"wall of {sizes[-1]:.1f} GB over a line through the others", float(walls[-1] / line), "x", 1.5)
        )
    return figures


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


if __name__ == "__main__":
    show(measure)
