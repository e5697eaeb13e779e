"""The steps of one run as rows: the orchestrator's line and the trainer's line of a step together, in the order of steps.

The two lines of a step come at different times. A row waits for both; it goes without one that will not come, because a later
step has its line, or because the job is over. A trainer that resumes at an older checkpoint trains steps again and replaces their
lines; `rewound` then names the first of them. Pure: `counterpoint/job/tracking/follow.py` reads the files.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from counterpoint.job.reading.metrics.evaluations import result_in
from counterpoint.job.reading.metrics.metrics_lines import is_number, step_of
from counterpoint.job.tracking.rows import Evaluation, TrackedRow
from counterpoint.transport.files.appended_lines import Line
from counterpoint.transport.files.place import Place

REMEMBERED_STEPS = 256
"""Steps whose lines' checksums are kept, to notice that one was trained again."""

MOST_NAMES = 2000
LONGEST_NAME = 200


@dataclass(slots=True)
class Feed:
    """What has been read of one run and has not been sent."""

    run_id: str
    last: int = 0
    """The last step that the sink has."""
    orchestrated: bool = False
    """Whether the run has an orchestrator; supervised fine-tuning has none."""
    checksums: dict[int, int] = field(default_factory=dict)
    """The checksums of the trainer's lines of the last steps."""
    rewound: int | None = None
    """The first step that was trained again and whose first training the sink has."""
    shipped: dict[int, dict[str, Any]] = field(default_factory=dict)
    trained: dict[int, dict[str, Any]] = field(default_factory=dict)
    results: list[tuple[Place, Evaluation]] = field(default_factory=list)
    _top_shipped: int = 0
    _top_trained: int = 0

    def add_shipped(self, text: bytes) -> None:
        """Takes a line of the orchestrator's."""
        values = step_of(text)
        if values and self._is_wanted(values["step"]):
            self.shipped[values["step"]] = values
        self._top_shipped = max(self._top_shipped, values.get("step", 0))

    def add_trained(self, text: bytes, values: dict[str, Any]) -> None:
        """Takes a line of the trainer's for this run."""
        step, checksum = values["step"], zlib.crc32(text)
        if step <= self.last and self.checksums.get(step, checksum) != checksum:
            self.rewound = step if self.rewound is None else min(step, self.rewound)
        self._top_trained = max(self._top_trained, step)
        if self._is_wanted(step):
            self.trained[step] = values | {"checksum": checksum}

    def add_result(self, line: Line) -> None:
        """Takes a line of `evaluations.jsonl`."""
        if (result := result_in(line.text)) is not None:
            found = Evaluation(self.run_id, result.name, result.step, result.time, result.values)
            self.results.append((line.place, found))

    def forget_trained(self) -> None:
        """The trainer's file was replaced, and is read again."""
        self.trained.clear()
        self._top_trained = 0

    def forget_shipped(self) -> None:
        """The orchestrator's file was replaced, or is read again."""
        self.shipped.clear()
        self._top_shipped = 0

    def settle_rewind(self, replaced: bool) -> None:
        """Goes on after a rewind: from its first step, if the sink replaces what it has, else with the new steps only."""
        first, self.rewound = self.rewound, None
        if first is None:
            return
        if replaced:
            self.last = first - 1
            self.checksums = {step: value for step, value in self.checksums.items() if step < first}
            return
        again = [step for step in self.trained if step <= self.last]
        self.checksums |= {step: self.trained.pop(step)["checksum"] for step in again}

    def rows(self, over: bool) -> Iterator[TrackedRow]:
        """Yields the rows that are complete, and forgets them. `over`: no line will follow."""
        for step in sorted(self.shipped.keys() | self.trained.keys()):
            if not over and not self._is_complete(step):
                return
            shipped, trained = self.shipped.pop(step, None), self.trained.pop(step, None)
            if step <= self.last:
                continue
            if trained is not None:
                self.checksums[step] = trained["checksum"]
                while len(self.checksums) > REMEMBERED_STEPS:
                    del self.checksums[min(self.checksums)]
            self.last = step
            yield _row(self.run_id, step, shipped, trained)

    def due_results(self, over: bool) -> Iterator[Evaluation]:
        """Yields the results of the steps whose rows were sent, and forgets them."""
        due = [each for each in self.results if over or each[1].step <= self.last]
        self.results = [each for each in self.results if each not in due]
        yield from (result for _, result in due)

    def _is_wanted(self, step: int) -> bool:
        return step > self.last or (self.rewound is not None and step >= self.rewound)

    def _is_complete(self, step: int) -> bool:
        if step in self.shipped:
            return step in self.trained or self._top_trained > step
        return not self.orchestrated or self._top_shipped > step


def _row(run_id: str, step: int, shipped: dict[str, Any] | None, trained: dict[str, Any] | None) -> TrackedRow:
    """Evaluations are left out of the orchestrator's line: they are sent as results of the step that they evaluate."""
    values: dict[str, float] = {}
    times: list[float] = []
    for prefix, line in (("", shipped), ("trainer/", trained)):
        for name, value in (line or {}).items():
            if name == "time":
                times.append(float(value))
            elif _is_metric(name) and is_number(value) and len(values) < MOST_NAMES:
                values[prefix + name] = float(value)
    return TrackedRow(run_id, step, max(times), values)


def _is_metric(name: str) -> bool:
    return name not in ("step", "checksum") and not name.startswith("evaluation/") and len(name) <= LONGEST_NAME
