"""What a run has lost since its last step: rollouts that failed or were filtered, whose groups will never ship.

They are recorded with the next step, counted truly however many they are, and said sparingly: an environment that always fails,
or filters that leave nothing, lose thousands a minute and may never let a step come. Where every rollout fails, the pause
after each grows, so that nothing spins.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from orchestrator.rollouts.failures import MAX_KINDS, OTHER, failures_in_words, kind_of, sum_failures
from orchestrator.step.step_metrics import additive_metrics
from run.config import ScheduleConfig
from transport.files.atomic import write_atomically
from transport.records import Rollout

logger = logging.getLogger(__name__)

DISCARDED_FILE = "discarded.json"
"""In the run's directory: the last report, for those who look from outside."""

RECORDED_BATCHES = 64
"""Lost rollouts, in batches, whose records one step keeps; further ones are only counted."""

WARN_BATCHES = 8
"""Rollouts lost since the last step, in batches, before it is said, and again in the log whenever they have doubled."""

FAILING_GROUPS = 4
"""Or so many groups of which every rollout failed, one after the other."""

REPORT_SECONDS = 2.0
"""Between two reports."""

FIRST_FAILURES = 5
"""Failed rollouts of each kind whose error is logged in full; then one every `FAILURE_SECONDS` stands for all."""

FAILURE_SECONDS = 10.0

PAUSE_SECONDS = (0.1, 10.0)
"""After a failed rollout, before another may start: the first, and the longest."""

PAUSE_DOUBLES_AFTER_GROUPS = 8

_COUNTED = "unrecorded/"
_UNRECORDED = "rollouts/unrecorded"

Report = dict[str, Any]
"""`step`, `time`, `discarded`, `reason`, `notable` (whether to speak of it) and the step's additive metrics so far."""


class DiscardedRollouts:
    """One run's. `tell` is called with a report when there is something to say, on the loop."""

    def __init__(
        self, schedule: ScheduleConfig, on_report: Callable[[Report], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._schedule = schedule
        self._on_report = on_report
        self._clock = clock
        self.rollouts: list[Rollout] = []
        """For the next step's records."""
        self._totals: Counter[str] = Counter()
        """Of all that are lost, kept as they come: thousands of rollouts are not to be walked on the loop for a report."""
        self._unrecorded: Counter[str] = Counter()
        self._number = self._unrecorded_number = 0
        self._step = 0
        self._reason = ""
        self._warn_at = WARN_BATCHES * schedule.rollouts_per_step
        self._reported_at = -REPORT_SECONDS
        self._failed_in_a_row = self._unlogged = 0
        self._failures: Counter[str] = Counter()
        self._logged_at = -FAILURE_SECONDS

    # --- what happens ---

    def add(self, rollouts: Sequence[Rollout], reason: str) -> None:
        """Counts a finalized group that is discarded."""
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
                "%d rollouts have been discarded since step %d, which ships %d; the last: %s",
                self._number, self._step, self._schedule.rollouts_per_step, reason,
            )  # fmt: skip
        if self._is_notable() and self._clock() - self._reported_at >= REPORT_SECONDS:
            self._reported_at = self._clock()
            self._on_report(self.report())

    def rollout_failed(self, error: str) -> float:
        """Logs and counts a rollout that its environment failed; returns the seconds to wait before another may start."""
        self._failed_in_a_row += 1
        self._log_failure("rollout failed", error)
        first, longest = PAUSE_SECONDS
        doublings = self._failed_in_a_row // (PAUSE_DOUBLES_AFTER_GROUPS * self._schedule.group_size)
        return min(longest, first * 2.0 ** min(doublings, 32))

    def inference_failed(self, error: str) -> float:
        """As `rollout_failed`, of a rollout that inference failed. The pause does not grow: the pool has waited between its
        attempts, and the servers may be back at any time."""
        self._log_failure("a rollout got no answer from inference", error)
        return PAUSE_SECONDS[0]

    def _log_failure(self, what: str, error: str) -> None:
        kind = kind_of(error)
        kind = kind if kind in self._failures or len(self._failures) < MAX_KINDS else OTHER
        self._failures[kind] += 1
        self._unlogged += 1
        if self._failures[kind] <= FIRST_FAILURES or self._clock() - self._logged_at >= FAILURE_SECONDS:
            others = f" (and {self._unlogged - 1} others since the last such line)" if self._unlogged > 1 else ""
            logger.warning("%s: %s%s", what, error, others)
            self._unlogged, self._logged_at = 0, self._clock()

    def rollout_completed(self) -> None:
        """So it is not true that everything fails."""
        self._failed_in_a_row = 0

    def take(self, step: int) -> tuple[list[Rollout], Mapping[str, int]]:
        """What `step` accounts for: rollouts to record, and the additive metrics of those that are not recorded. Begins anew."""
        taken = self.rollouts, self.counts()
        self.rollouts, self._totals, self._unrecorded = [], Counter(), Counter()
        self._number = self._unrecorded_number = 0
        self._step, self._reason = step, ""
        self._warn_at = WARN_BATCHES * self._schedule.rollouts_per_step
        return taken

    # --- what it comes to ---

    def report(self) -> Report:
        """What has been lost since the last step, in numbers, and why the last group was."""
        return {
            "step": self._step,
            "time": time.time(),
            "discarded": self._number,
            "reason": self._reason,
            "notable": self._is_notable(),
            **self._totals,
        }

    def _is_notable(self) -> bool:
        many = self._number >= WARN_BATCHES * self._schedule.rollouts_per_step
        return many or self._failed_in_a_row >= FAILING_GROUPS * self._schedule.group_size

    # --- checkpoint ---

    def counts(self) -> dict[str, int]:
        """What must be saved beside the rollouts, by name."""
        counted = {f"{_COUNTED}{name}": count for name, count in self._unrecorded.items()}
        return counted | ({_UNRECORDED: self._unrecorded_number} if counted else {})

    def restore(self, step: int, rollouts: Sequence[Rollout], counts: Mapping[str, int]) -> None:
        """Goes on with what a checkpoint of `step` holds."""
        self._step, self.rollouts = step, list(rollouts)
        self._unrecorded = Counter(
            {name.removeprefix(_COUNTED): count for name, count in counts.items() if name.startswith(_COUNTED)}
        )
        self._unrecorded_number = counts.get(_UNRECORDED, 0)
        self._totals = Counter(additive_metrics(self.rollouts))
        self._totals.update(self._unrecorded)
        self._number = len(self.rollouts) + self._unrecorded_number


def is_counted(name: str) -> bool:
    """Whether a checkpoint's count of that name is one of `DiscardedRollouts.counts`."""
    return name == _UNRECORDED or name.startswith(_COUNTED)


def with_unrecorded(line: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """A step's metrics line, which knows of the recorded rollouts, with the others in its sums (`DiscardedRollouts.take`)."""
    whole = dict(line)
    for name, count in counts.items():
        whole[name.removeprefix(_COUNTED)] = whole.get(name.removeprefix(_COUNTED), 0) + count
    return whole


def in_words(report: Report) -> str:
    """A report as one short line."""
    reason = " ".join(report["reason"].split())
    counted = {"failed": "failed", "inference_failed": "without an answer from inference", "filtered": "filtered"}
    kinds = ", ".join(
        f"{report[name]} {kind}" for key, kind in counted.items() if report.get(name := f"rollouts/{key}", 0)
    )
    shown = reason if len(reason) <= 300 else f"{reason[:300]}..."
    failures = failures_in_words(sum_failures([report]))
    why = f"{shown}; all failures: {failures}" if failures else shown
    return (
        f"{report['discarded']} rollouts discarded since step {report['step']}{f' ({kinds})' if kinds else ''}: {why}"
    )


def save(report: Report, run_dir: Path) -> None:
    """Writes it where `counterpoint status` and the job's summary find it, and nothing else depends on it: a failure is only
    logged. Blocks."""
    try:
        write_atomically(run_dir / DISCARDED_FILE, orjson.dumps(report))
    except OSError as error:
        logger.warning("%s cannot be written, and shows less than there is: %s", run_dir / DISCARDED_FILE, error)
