"""Measures a population at the trainer: eight adapters beside each other against one run with the same load, and the memory.

    python -m perf.bench.tune.population [--quick | --full]

As `perf/bench/multi_run.py`, with twice as many runs: the trainer's own manager, learner and fair share, a dense model of 80 MB.
A job of its own for each run would hold the base model as often; that figure is the sum of tensors that were measured here.
"""

from __future__ import annotations

from perf.bench.command import Size, show
from perf.bench.multi_run import measure_runs
from perf.figures import Case

POPULATION = 8


def measure(size: Size) -> list[Case]:
    """Measures the cases of speed and of memory."""
    return measure_runs(POPULATION, size)


if __name__ == "__main__":
    show(measure)
