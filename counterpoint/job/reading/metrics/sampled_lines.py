"""A long metrics file as a whole, of which few lines are read: steps from all over it, and the trend of a metric.

A file of a terabyte costs as much as one of a megabyte. Each value is that of one step. A resume cuts a file before it
repeats steps; where a file has steps twice nevertheless, those before the later attempt are left out (`of_last_attempt`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from counterpoint.job.reading.metrics.metrics_lines import Line, step_of
from counterpoint.transport.files.untrusted import open_regular

USUAL_BYTES, MOST_BYTES = 2**13, 2**16
"""Bytes that are read at one place: at first, and at most if lines are long."""

TREND_POINTS, LEAST_STRIDE = 48, 2**8
"""Most points of a trend besides the newest step, and the least bytes between two."""


def sampled_steps(descriptor: int, places: Iterable[int], end: int) -> Iterator[tuple[int, Line]]:
    """Yields the first step behind each of the ascending places, with its line's offset; none twice, none from `end` on.

    A line at 0 is behind 0. A place without the whole line of a step behind it yields nothing.
    """
    size, newest = USUAL_BYTES, -1
    for place in places:
        if place < newest:  # the line behind it was yielded
            continue
        data = os.pread(descriptor, size, place)
        while (found := _first_line(data, place)) is None and len(data) == size < MOST_BYTES:
            size *= 2
            data = os.pread(descriptor, size, place)
        if found is None or place + found[0] >= end:
            continue
        newest = place + found[0]
        if line := step_of(data[slice(*found)]):
            yield newest, line


def of_last_attempt(steps: Iterable[tuple[int, Line]]) -> list[tuple[int, Line]]:
    """Returns the steps, in the order of their lines, without those that a later line repeats or takes back."""
    kept: list[tuple[int, Line]] = []
    least = math.inf
    for offset, line in reversed([*steps]):
        if line["step"] < least:
            kept.append((offset, line))
            least = line["step"]
    return kept[::-1]


class Trend:
    """A metric over a whole run: of steps that are evenly spread over its file, at most `TREND_POINTS`.

    The file is cut into stretches of equal size, twice as long whenever they are too many; the first step of each counts.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stride = LEAST_STRIDE
        self._end = self._place = 0
        """How far the file was known, and the first place behind which no line is known."""
        self._steps: dict[int, tuple[int, Line]] = {}
        """Offset, and step and value, by stretch."""

    def refresh(self, path: Path, end: int) -> None:
        """Reads on as far as `end`, where a line ends. Raises `OSError`, `UntrustedFileError`."""
        if end == self._end:
            return
        while end > TREND_POINTS * self._stride:
            self._stride *= 2
        before = [*self._steps.values()]
        places = range(-(-self._place // self._stride) * self._stride, end, self._stride)
        with open_regular(path) as file:
            found = [(offset, self._part(line)) for offset, line in sampled_steps(file.fileno(), places, end)]
        self._steps = {}
        for offset, line in [*before, *found]:
            self._steps.setdefault(offset // self._stride, (offset, line))
        # Behind a place near the end a line may begin that is not whole yet, or just at the end.
        self._place, self._end = max(self._place, max(self._steps, default=0) * self._stride, end - MOST_BYTES), end

    def values(self, newest: Line) -> list[float]:
        """Returns the values by step, ascending. `newest` is the line of the newest step; empty without one."""
        steps = of_last_attempt([*self._steps.values(), *([(self._end, newest)] if newest else [])])
        return [line[self._name] for _, line in steps if self._name in line]

    def _part(self, line: Line) -> Line:
        """What is kept of a line."""
        return {name: line[name] for name in ("step", self._name) if name in line}


def _first_line(data: bytes, place: int) -> tuple[int, int] | None:
    """The begin and the end, without its newline, of the first whole line of the bytes at a place; None without one."""
    begin = data.find(b"\n") + 1 if place else 0
    end = data.find(b"\n", begin) if begin or not place else -1
    return (begin, end) if end >= 0 else None
