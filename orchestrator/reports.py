"""A run's reports while it goes on: to the supervisor, the watchdog, its log and files. It decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

from counterpoint.orchestrator import metrics
from counterpoint.orchestrator.activity import RunActivity
from counterpoint.orchestrator.decisions import DecisionLog
from counterpoint.orchestrator.metrics import MetricsLine
from counterpoint.orchestrator.rollouts import branching
from counterpoint.orchestrator.rollouts.failures import most_frequent, sum_failures
from counterpoint.orchestrator.scheduling.lossless import SaidOfStaleness
from counterpoint.orchestrator.step import discarded
from counterpoint.orchestrator.step.discarded import LONGEST_REASON
from counterpoint.orchestrator.step.shares import ShortfallLog
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.run.loop_health.watchdog import Watchdog
from counterpoint.transport.outages import Outages
from counterpoint.transport.printable import clipped
from counterpoint.transport.process.notify import StatusLine

logger = logging.getLogger(__name__)


class Reports:
    """The status of one run, its outages, activity and decisions, and the watchdog."""

    def __init__(self, config: RunConfig, waiting_for: Callable[[], str]) -> None:
        """`waiting_for` tells the watchdog what the run waits for."""
        self._config = config
        self._status = self._evaluation = ""
        self._status_line = StatusLine()
        self._shortfalls = ShortfallLog()
        self._lossless, self._branching = SaidOfStaleness(), branching.SaidOfBranches()
        self.outages = Outages(self._send_status)
        self.watchdog = Watchdog(config.stall_warning_seconds, config.stall_timeout_seconds, waiting_for, self.outages)
        self.activity = RunActivity(config.run_dir, config.run_id, self.outages)
        self.decisions = DecisionLog(config.run_dir)

    def set_status(self, status: str) -> None:
        """Shows another status."""
        self._status = status
        self._send_status()

    def _send_status(self) -> None:
        """Sends the status and the outages to the supervisor. Any thread calls it."""
        parts = [part for part in (self._status, self._evaluation, self.outages.describe()) if part]
        self._status_line.show("; ".join(parts))

    def evaluating(self, words: str) -> None:
        """Shows the progress of an evaluation, or with an empty text that none is in progress."""
        if words != self._evaluation:
            self._evaluation = words
            self._send_status()

    def waiting(self, reason: str) -> None:
        """The trainer has no room for a batch."""
        self.watchdog.progress()
        self.set_status(f"waiting for the trainer: {reason}")

    def step_committed(self, line: MetricsLine) -> None:
        """A step is committed, with these metrics."""
        metrics.log_step(line, self._config.steps)
        self._shortfalls.take(line)
        for said in (self._lossless, self._branching):
            if news := said.news(line):
                logger.warning("%s", news)
        self.set_status(f"step {line['step']} of {self._config.steps}")

    async def discarded(self, report: discarded.Report, record: Callable[[], bytes] | None) -> None:
        """Saves, in a thread, the report of a step's discarded rollouts so far, with the `record` of one of them."""
        if report["notable"]:
            kind = most_frequent(sum_failures([report]))
            self.watchdog.failing = kind and clipped(report["failure"] or f"{kind}; {report['reason']}", LONGEST_REASON)
            self.set_status(f"step {report['step']} of {self._config.steps}; {discarded.in_words(report)}")
        await in_thread(discarded.save, report, self._config.run_dir, record)
