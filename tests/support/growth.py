"""By how much the CPU time of some work grows with its input: what a test of its complexity compares, since no time in seconds
holds on every machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TIMES_AS_LARGE = 8
"""Linear work then takes eight times as long, and work that grows with the square 64 times."""

LINEAR = 24.0
CONSTANT = 4.0
"""The most that work may take of an input that is so many times as large, as a multiple; far from what it does take."""

ATTEMPTS = 8
"""A machine may be busy with something else, or the garbage collector run; a fault is there every time."""


def assert_growth(make: Callable[[int], T], work: Callable[[T], object], size: int, at_most: float = LINEAR) -> None:
    """Fails if an input that is eight times as large takes more than `at_most` times the CPU time in the best of some attempts.

    Args:
        make: Makes an input of a size.
        work: What is measured.
        size: That of the smaller input. The work's fixed costs have to be small beside those of this one.
    """
    inputs = [make(size), make(TIMES_AS_LARGE * size)]
    best = [float("inf")] * 2
    for _ in range(ATTEMPTS):
        for which, each in enumerate(inputs):
            began = time.process_time()
            work(each)
            best[which] = min(best[which], time.process_time() - began)
        if best[1] <= at_most * best[0]:
            return
    raise AssertionError(
        f"{TIMES_AS_LARGE} times the input took {best[1] / best[0]:.1f} times as long: {best} s of CPU time"
    )
