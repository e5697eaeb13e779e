"""One real error of the kind of failure that a run had most: kinds alone have neither a message nor a place."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.rollouts.rollout_records import RolloutRecord, records_file
from counterpoint.orchestrator.rollouts.failures import PREFIX, kind_of
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular, parse_json
from counterpoint.transport.printable import clipped, printable

READ_SECONDS = 0.5
"""The records of all runs are read for so long."""

READ_BYTES = 16 * 2**20
"""So much is read of the records of all runs."""

MAX_LINE_BYTES = 256 * 2**10
"""Longer lines are passed over: an object that is parsed may take twenty times its bytes."""

LONGEST_COMPARED = 2000
"""Characters of an error by which its kind is found."""

LONGEST = 300
"""Characters that are shown."""


class FailureExamples:
    """Finds errors in the records of a job's runs. One limit of time and one of bytes hold for all runs together."""

    def __init__(self, job: Path, read_bytes: int = READ_BYTES) -> None:
        self._job = job
        self._left = read_bytes
        self._until = time.monotonic() + READ_SECONDS

    def example(self, history: History, failures: Mapping[str, Mapping[str, int]]) -> str | None:
        """Returns an error of the most frequent kind of `failures` (`sum_failures`), of the newest step that counts one.

        None if no such error is kept, or none was found within the limits.
        """
        if not failures:
            return None
        environment, kinds = next(iter(failures.items()))
        kind = next(iter(kinds))
        name = f"{PREFIX}{environment}/{kind}"
        rollouts = self._job / f"run_{history.run_id}" / "rollouts"
        with_it = [step for step in published_steps(rollouts) if name in history.shipped.get(step, {})]
        if not with_it:
            return None
        return self._found(records_file(self._job, history.run_id, with_it[-1]), environment, kind)

    def _found(self, path: Path, environment: str, kind: str) -> str | None:
        try:
            for record in self._records(path):
                error = (record.error or "")[:LONGEST_COMPARED]
                if error and record.environment == environment and kind_of(error) == kind:
                    return clipped(printable(" ".join(error.split())), LONGEST)
        except (UntrustedFileError, OSError):
            pass
        return None

    def _records(self, path: Path) -> Iterator[RolloutRecord]:
        """Yields the records of short lines, until a limit is reached."""
        skips = False
        with open_regular(path) as file:
            while self._left > 0 and time.monotonic() < self._until and (line := file.readline(MAX_LINE_BYTES)):
                self._left -= len(line)
                if line.endswith(b"\n") and not skips:
                    yield RolloutRecord(parse_json(line))
                skips = not line.endswith(b"\n")
