"""The results of a run: the lines of its metrics after the last one delivered, each once, in order, also across restarts."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

from counterpoint.job.reading.metrics.metrics_lines import Follower, Line
from counterpoint.transport.files.untrusted import UntrustedFileError
from counterpoint.tune import result as keys
from counterpoint.tune.result import Result

logger = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Results that may wait for the tuner. Further lines stay in the file until there is room."""


class ResultLines:
    """The lines of one run."""

    def __init__(self, metrics_file: Path, last: Result) -> None:
        """`last` is the trial's last result: lines up to its step have been delivered."""
        self._follower = Follower(metrics_file)
        self.newest = int(last.get("step", 0))
        """The newest step that was read."""
        self._offset = int(last.get(keys.TRAINING_ITERATION, 0)) - self.newest
        """A result's `training_iteration` minus its step: not 0 in a run that has copied another."""
        self._total = float(last.get(keys.TIME_TOTAL_S, 0.0))
        self._previous = float(last.get("time", 0.0))
        self._waiting: deque[Line] = deque()
        self.started_at = 0.0
        """The time at which the present orchestrator was started; the time between two orchestrators is not the trial's."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def read(self) -> None:
        """Reads what was appended. A file that cannot be read now is read by a later call."""
        if len(self._waiting) > MOST_WAITING:
            return
        try:
            for line in self._follower.new_lines(lambda: None):  # of a file that was replaced, all lines again
                if line["step"] > self.newest:
                    self.newest = line["step"]
                    self._waiting.append(line)
        except (OSError, UntrustedFileError) as error:
            logger.warning("%s cannot be read now: %s", self._follower.path, error)

    def take(self) -> Result:
        """Returns the next result."""
        line = self._waiting.popleft()
        seconds = self._advance(line)
        return line | {
            keys.TRAINING_ITERATION: self.iteration_of(line["step"]),
            keys.TIME_THIS_ITER_S: seconds,
            keys.TIME_TOTAL_S: self._total,
            keys.TIMESTEPS_THIS_ITER: int(line.get("tokens/completion", 0)),
            keys.EPISODES_THIS_ITER: int(line.get("rollouts/completed", 0)),
            keys.DONE: False,  # the end is an event of its own: the last step must be durable first
        }

    def skip_to(self, step: int) -> None:
        """Drops the results of steps up to this one; their time still counts."""
        while self._waiting and self._waiting[0]["step"] <= step:
            self._advance(self._waiting.popleft())
        self.newest = max(self.newest, step)

    def count_from(self, step: int, iteration: int) -> None:
        """Makes the results after this step count on from an iteration: that of the state that the step took over."""
        self._offset = iteration - step

    def iteration_of(self, step: int) -> int:
        """Returns the iteration that the result of a step has."""
        return step + self._offset

    def _advance(self, line: Line) -> float:
        since = self._previous if line["time"] < self.started_at else max(self._previous, self.started_at)
        seconds = max(0.0, line["time"] - since) if since else 0.0
        self._previous = line["time"]
        self._total += seconds
        return seconds
