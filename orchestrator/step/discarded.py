"""Rollouts discarded since the last step: those of finalized groups that were dropped.

They are recorded with the next step, counted exactly, and logged rarely: an environment that always fails, or filters that
leave nothing, discard thousands a minute, and there may never be a next step. While every rollout fails, the pause after each
grows, so that failures do not use up the CPU.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from counterpoint.orchestrator.rollouts.failures import MAX_KINDS, OTHER, cause_of, failures_in_words, sum_failures
from counterpoint.orchestrator.scheduling.outcomes import DropReason
from counterpoint.orchestrator.step.step_metrics import additive_metrics
from counterpoint.run.config import ScheduleConfig
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.printable import clipped
from counterpoint.transport.records import Rollout

logger = logging.getLogger(__name__)

DISCARDED_FILE = "discarded.json"
"""The last report, in the run's directory, for other processes."""

DROPPED_FILE = "discarded.jsonl"
"""The file with the record of a rollout of the group that was dropped last, as in `rollouts.jsonl`."""

RECORDED_BATCHES = 64
"""Discarded rollouts, in batches, that one step records. Further ones are only counted."""

WARN_BATCHES = 8
"""Rollouts discarded since the last step, in batches, that are notable. The log repeats it whenever they have doubled."""

FAILING_GROUPS = 4
"""Groups in a row with only failed rollouts that are notable."""

REPORT_SECONDS = 2.0
"""The shortest time from one report to the next. Groups dropped meanwhile are in the next one."""

FAILURE_SECONDS = 60.0
"""Seconds from the line about a failure to the next line about the same cause. They double each time."""

PAUSE_SECONDS = (0.1, 10.0)
"""Pause after a failed rollout before another may start: the first and the longest."""

PAUSE_DOUBLES_AFTER_GROUPS = 8

LONGEST_REASON = 500
"""Characters of a report's reason in one line."""

_COUNTED = "unrecorded/"
_UNRECORDED = "rollouts/unrecorded"

_saving = threading.Lock()

Report = dict[str, Any]
"""`step`, `time`, `discarded` (a number), `reason`, `failure` (the commonest error since that step, in full), `notable`
(whether to show it) and the additive metrics so far."""


class DiscardedRollouts:
    """The discarded rollouts of one run."""

    def __init__(self, schedule: ScheduleConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._schedule = schedule
        self._clock = clock
        self.changed = asyncio.Event()
        """Set when a report is due."""
        self.rollouts: list[Rollout] = []
        """Rollouts for the next step's records."""
        self._totals: Counter[str] = Counter()
        """Metrics of all discarded rollouts, updated incrementally: a report must not iterate over thousands on the loop."""
        self._unrecorded: Counter[str] = Counter()
        self._number = self._unrecorded_number = 0
        self._step = 0
        self._reason = ""
        self._warn_at = WARN_BATCHES * schedule.rollouts_per_step
        self._failed_in_a_row = self._groups_failed_in_a_row = 0
        self._failures: dict[str, _Failures] = {}
        """The failures, by their cause."""

    # --- events ---

    def add(self, rollouts: Sequence[Rollout], dropped: DropReason, reason: str) -> None:
        """Counts a finalized group that is discarded, and notes why in its rollouts. `reason` is for a person."""
        for rollout in rollouts:
            rollout.dropped = dropped.value
        self.rollouts += rollouts
        self._totals.update(additive_metrics(rollouts))
        self._number += len(rollouts)
        self._reason = reason
        excess = len(self.rollouts) - RECORDED_BATCHES * self._schedule.rollouts_per_step
        if excess > 0:
            self._unrecorded.update(additive_metrics(self.rollouts[:excess]))
            self._unrecorded_number += excess
            del self.rollouts[:excess]
        if self._number >= self._warn_at:
            self._warn_at = 2 * self._number
            logger.warning(
                "%d rollouts have been discarded since step %d, and a batch has %d; the last: %s",
                self._number, self._step, self._schedule.rollouts_per_step, reason,
            )  # fmt: skip
        self.changed.set()

    def rollout_failed(self, error: str) -> float:
        """Logs and counts a rollout that its environment failed. Returns the seconds to wait before another may start."""
        self._failed_in_a_row += 1
        self._log_failure("rollout failed", error)
        first, longest = PAUSE_SECONDS
        doublings = self._failed_in_a_row // (PAUSE_DOUBLES_AFTER_GROUPS * self._schedule.group_size)
        return min(longest, first * 2.0 ** min(doublings, 32))

    def inference_failed(self, error: str) -> float:
        """Does as `rollout_failed`, of a rollout that inference failed.

        The pause does not grow: the pool has waited between its attempts, and the servers may be back at any time.
        """
        self._log_failure("a rollout got no answer from inference", error)
        return PAUSE_SECONDS[0]

    def _log_failure(self, what: str, error: str) -> None:
        cause = f"{what}: {cause_of(error)}"
        cause = cause if cause in self._failures or len(self._failures) < MAX_KINDS else OTHER
        now = self._clock()
        if (known := self._failures.get(cause)) is None:
            self._failures[cause] = _Failures(error, now + FAILURE_SECONDS)
            logger.warning("%s: %s", what, error)
            return
        known.number += 1
        known.since_step += 1
        if now >= known.due:
            known.seconds *= 2
            known.due = now + known.seconds
            logger.warning("%s, %d times for this reason so far: %s", what, known.number, known.error)

    def rollout_completed(self) -> float:
        """Resets the number of failures in a row. Returns the seconds to wait before another rollout may start.

        That is 0, unless every completed rollout fails when its group is finalized, such as by a reward that is no number.
        """
        self._failed_in_a_row = 0
        excess = self._groups_failed_in_a_row - FAILING_GROUPS
        first, longest = PAUSE_SECONDS
        return 0.0 if excess < 0 else min(longest, first * 2.0 ** min(excess // PAUSE_DOUBLES_AFTER_GROUPS, 32))

    def group_finalized(self, *, failed: bool) -> None:
        """Counts a group with completed rollouts. `failed`: finalizing failed them, and nothing is left of the group."""
        self._groups_failed_in_a_row = self._groups_failed_in_a_row + 1 if failed else 0

    def take(self, step: int) -> tuple[list[Rollout], Mapping[str, int]]:
        """Returns the rollouts to record with `step`, and the additive metrics of the others. Resets both."""
        taken = self.rollouts, self.counts()
        for known in self._failures.values():
            known.since_step = 0
        self.rollouts, self._totals, self._unrecorded = [], Counter(), Counter()
        self._number = self._unrecorded_number = 0
        self._step, self._reason = step, ""
        self._warn_at = WARN_BATCHES * self._schedule.rollouts_per_step
        return taken

    # --- reports ---

    def report(self) -> Report:
        """Returns the numbers since the last step, and why the last group was dropped."""
        commonest = max(self._failures.values(), key=lambda each: each.since_step, default=None)
        return {
            "step": self._step,
            "time": time.time(),
            "discarded": self._number,
            "reason": self._reason,
            "failure": commonest.error if commonest is not None and commonest.since_step else "",
            "notable": self._is_notable(),
            **self._totals,
        }

    def _is_notable(self) -> bool:
        many = self._number >= WARN_BATCHES * self._schedule.rollouts_per_step
        failing = self._failed_in_a_row >= FAILING_GROUPS * self._schedule.group_size
        return self._number > 0 and (many or failing or self._groups_failed_in_a_row >= FAILING_GROUPS)

    # --- checkpoint ---

    def counts(self) -> dict[str, int]:
        """Returns the counts to save with the rollouts, by name."""
        counted = {f"{_COUNTED}{name}": count for name, count in self._unrecorded.items()}
        return counted | ({_UNRECORDED: self._unrecorded_number} if counted else {})

    @property
    def completion_tokens(self) -> int:
        """The tokens that the model wrote in the discarded rollouts since the last step."""
        return self._totals["tokens/completion"]

    def restore(self, step: int, rollouts: Sequence[Rollout], counts: Mapping[str, int]) -> None:
        """Restores the discarded rollouts of a checkpoint of `step`."""
        self._step, self.rollouts = step, list(rollouts)
        self._unrecorded = Counter(
            {name.removeprefix(_COUNTED): count for name, count in counts.items() if name.startswith(_COUNTED)}
        )
        self._unrecorded_number = counts.get(_UNRECORDED, 0)
        self._totals = Counter(additive_metrics(self.rollouts))
        self._totals.update(self._unrecorded)
        self._number = len(self.rollouts) + self._unrecorded_number


@dataclass(slots=True)
class _Failures:
    """Failed rollouts of one cause."""

    error: str
    """The first one's error, in full."""
    due: float
    """The time of the next line."""
    seconds: float = FAILURE_SECONDS
    number: int = 1
    since_step: int = 1


def is_counted(name: str) -> bool:
    """Whether a checkpoint's count of that name is one of `DiscardedRollouts.counts`."""
    return name == _UNRECORDED or name.startswith(_COUNTED)


def with_unrecorded(line: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Returns a step's metrics line with unrecorded rollouts added to its sums (`DiscardedRollouts.take`)."""
    whole = dict(line)
    for name, count in counts.items():
        whole[name.removeprefix(_COUNTED)] = whole.get(name.removeprefix(_COUNTED), 0) + count
    return whole


def short_reason(report: Report) -> str:
    """Returns why the last group was dropped, in one line."""
    return clipped(" ".join(report["reason"].split()), LONGEST_REASON)


def in_words(report: Report) -> str:
    """Returns a report as one short line."""
    counted = {"failed": "failed", "inference_failed": "without an answer from inference", "filtered": "filtered"}
    kinds = ", ".join(
        f"{report[name]} {kind}" for key, kind in counted.items() if report.get(name := f"rollouts/{key}", 0)
    )
    shown = short_reason(report)
    failures = failures_in_words(sum_failures([report]))
    why = f"{shown}; all failures: {failures}" if failures else shown
    return (
        f"{report['discarded']} rollouts discarded since step {report['step']}{f' ({kinds})' if kinds else ''}: {why}"
    )


def save(report: Report, run_dir: Path, record: Callable[[], bytes] | None = None) -> None:
    """Writes the report for `counterpoint status` and the job's summary, unless a later one is there. Blocks.

    `record` encodes a rollout of the group that was dropped last. Without one, removes the file of an earlier one. A failure is
    only logged. Threads that save are not in the reports' order: on a busy machine an earlier one may be last.
    """
    path = run_dir / DISCARDED_FILE
    try:
        with _saving:
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # none yet, or none of ours
                if _place(orjson.loads(path.read_bytes())) > _place(report):
                    return
            if record is None:
                (run_dir / DROPPED_FILE).unlink(missing_ok=True)
            else:
                write_atomically(run_dir / DROPPED_FILE, record(), durable=False)
            write_atomically(path, orjson.dumps(report), durable=False)
    except OSError as error:
        logger.warning("%s cannot be written and is out of date: %s", path, error)


def _place(report: Report) -> tuple[int, int]:
    """Returns a number that rises with each report of a process. The file of another process is removed at the start."""
    return report["step"], report["discarded"]
