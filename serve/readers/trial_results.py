"""The results of one trial, followed as they are appended: its score at each iteration, thinned out so that memory is bounded."""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from typing import Any

from job.inspection.rollout_records import finite_number
from transport.files.appended_lines import AppendedLines
from transport.files.untrusted import UntrustedFileError, parse_json
from tune.callbacks.json_logger import RESULT_FILE
from tune.result import TRAINING_ITERATION, lookup

MOST_POINTS = 1_000
"""Points of one trial that are kept: beyond, every second one is dropped, and so on."""


class TrialResults:
    """The results in one trial's directory."""

    def __init__(self, directory: Path, metric: str) -> None:
        self._metric = metric
        self._lines = AppendedLines(directory / RESULT_FILE)
        self._begin()

    def _begin(self) -> None:
        self.iterations = array("q")
        self.scores = array("d")
        self._every = 1
        """Only results whose number is divisible by this are kept."""
        self._count = 0
        self.is_complete = False

    def advance(self, until: float) -> None:
        """Reads what was appended, until the moment `until` of `time.monotonic`. Raises `OSError` and `UntrustedFileError`."""
        self.is_complete = False
        for _, block in self._lines.new_blocks(self._begin):
            for line in block.splitlines():
                self._add(line)
            if time.monotonic() >= until:
                return
        self.is_complete = True

    def _add(self, line: bytes) -> None:
        try:
            result: dict[str, Any] = parse_json(line)
        except UntrustedFileError:
            return
        iteration, score = result.get(TRAINING_ITERATION), finite_number(lookup(result, self._metric))
        if type(iteration) is not int or not 0 <= iteration < 2**53 or score is None:
            return
        self._count += 1
        if self._count % self._every == 0:
            self.iterations.append(iteration)
            self.scores.append(score)
        if len(self.iterations) >= MOST_POINTS:
            self.iterations, self.scores = self.iterations[1::2], self.scores[1::2]
            self._every *= 2
