"""The steps of one run as columns of numbers: four bytes for each step of each metric that was asked for.

`run_series.py` fills two for each run that is looked at, of its orchestrator's and its trainer's lines. A line is checked as
`counterpoint/job/reading/metrics/metrics_lines.py`:`step_of` checks it, and of two lines of a step the later one counts, as in
`counterpoint/job/reading/metrics/history.py`: so the page draws what `status` prints.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from counterpoint.job.reading.metrics.metrics_lines import LARGEST, SHORTEST_BYTES, is_number
from counterpoint.transport.files.untrusted import object_in

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MISSING = float("nan")

MAX_STEPS = 200_000
"""Steps that are kept. Once there are so many, every second one of the older half is dropped."""

MOST_SEEN = 2_000
"""Names of metrics that are noted."""

LONGEST_NAME = 200
"""Characters. Nobody can ask for a longer one."""


class StepTable:
    """The steps of one run, in the order of their lines."""

    def __init__(self, run_id: str, names: Collection[str]) -> None:
        self.run_id = run_id
        self.names = frozenset(names)
        self.seen: set[str] = set()
        """Names of the metrics that any step has, whether they were asked for or not."""
        self._columns = {name: array("f") for name in sorted(self.names)}
        self._steps, self._times, self._offsets = array("q"), array("d"), array("q")
        self._order: Integers | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def nbytes(self) -> int:
        """Bytes that the columns take."""
        return len(self) * (24 + 4 * len(self._columns))

    def clear(self) -> None:
        """Removes all steps."""
        self.__init__(self.run_id, self.names)  # type: ignore[misc]

    def add(self, raw: bytes, offset: int) -> None:
        """Adds a line, which begins at `offset` in its file. One that is not of a step of this run is left out."""
        if len(raw) >= SHORTEST_BYTES and (line := object_in(raw)) is not None:
            self.add_line(line, offset)

    def add_line(self, values: dict[str, Any], offset: int) -> None:
        """Adds a line that was parsed."""
        step, time = values.get("step"), values.get("time")
        if type(step) is not int or not 0 <= step < LARGEST or not is_number(time):
            return
        run_id = values.get("run_id", self.run_id)
        if run_id != self.run_id and (isinstance(run_id, str) or is_number(run_id)):
            return
        if len(self) >= MAX_STEPS:
            self._thin()
        self._steps.append(step)
        self._times.append(time)  # type: ignore[arg-type]
        self._offsets.append(offset)
        if len(self.seen) < MOST_SEEN:
            new = (name for name in values.keys() - self.seen if len(name) <= LONGEST_NAME and is_number(values[name]))
            self.seen.update(islice(new, MOST_SEEN - len(self.seen)))
        for name, column in self._columns.items():
            column.append(_number(values.get(name)))
        self._order = None

    def steps(self) -> Integers:
        """Returns the steps, ascending, each once."""
        return np.array(self._steps, dtype=np.int64)[self._rows()]

    def times(self) -> Floats:
        """Returns when each of `steps` ended, in Unix seconds."""
        return np.array(self._times, dtype=np.float64)[self._rows()]

    def offsets(self) -> Integers:
        """Returns where in the file the line of each of `steps` begins."""
        return np.array(self._offsets, dtype=np.int64)[self._rows()]

    def values(self, name: str) -> Floats:
        """Returns a metric's value in each of `steps`, to seven digits; NaN where there is none."""
        if name not in self._columns:
            return np.full(len(self._rows()), MISSING)
        return np.array(self._columns[name], dtype=np.float64)[self._rows()]

    def has(self, name: str) -> bool:
        """Whether any step has the metric."""
        return bool(np.isfinite(self.values(name)).any())

    def _thin(self) -> None:
        """Drops rows whose step has a newer one, and every second one of the older half of the others."""
        rows = self._rows()
        kept = np.append(rows[: len(rows) // 2 : 2], rows[len(rows) // 2 :])
        columns: list[array[Any]] = [self._steps, self._times, self._offsets, *self._columns.values()]
        for column in columns:
            column[:] = array(column.typecode, np.array(column)[kept].tobytes())

    def _rows(self) -> Integers:
        """The newest row of each step, ascending by step."""
        if self._order is None:
            steps = np.array(self._steps, dtype=np.int64)
            order = np.argsort(steps, kind="stable")
            is_newest = np.append(steps[order][1:] != steps[order][:-1], True)[: len(steps)]
            self._order = order[is_newest]
        return self._order


def _number(value: Any) -> float:
    return value if is_number(value) else MISSING
