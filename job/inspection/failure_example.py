"""One real error of the kind of failure that a run had most: kinds alone have neither a message nor a place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from job.inspection.history import History
from job.inspection.rollout_records import read_records
from orchestrator.rollouts.failures import PREFIX, kind_of
from transport.errors import UserError
from transport.files.atomic import published_steps
from transport.printable import printable, shortened

READ_SECONDS = 1.0
"""A step's records are read for so long."""

LONGEST = 300
"""Characters."""


def example_of_failure(job: Path, history: History, failures: Mapping[str, Mapping[str, int]]) -> str | None:
    """Returns an error of the most frequent kind of `failures` (`sum_failures`), of the newest step whose records have one.

    None if there is none that is kept, or none was found in time.
    """
    for environment, kinds in failures.items():
        name = f"{PREFIX}{environment}/{next(iter(kinds))}"
        rollouts = job / f"run_{history.run_id}" / "rollouts"
        with_it = [step for step in published_steps(rollouts) if name in history.shipped.get(step, {})]
        with suppress(UserError, OSError):
            return _found(job, history.run_id, with_it[-1], environment, next(iter(kinds))) if with_it else None
        return None
    return None


def _found(job: Path, run_id: str, step: int, environment: str, kind: str) -> str | None:
    until = time.monotonic() + READ_SECONDS
    for record in read_records(job, run_id, step):
        if record.environment == environment and record.error is not None and kind_of(record.error) == kind:
            return shortened(printable(" ".join(record.error.split())), LONGEST)
        if time.monotonic() > until:
            return None
    return None
