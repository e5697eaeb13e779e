"""One attempt at a trial that is a run: its orchestrator's process, and the lines of metrics that become results.

Nothing here waits: `poll` looks at the process and at the file and returns what has happened. `tune/executors/runs.py` calls it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import orjson
import tomli_w

from cluster.exit_codes import describe_exit
from cluster.process import Command, Process, last_lines
from job.check import SAFE_PATH
from job.directory import orchestrator_of
from job.inspection.metrics_lines import Follower, Line
from job.run_state import exclusion_of
from run.config import RunConfig
from transport.configuration.toml_file import Table
from transport.files.atomic import published_steps, write_atomically
from transport.files.untrusted import UntrustedFileError
from tune.checkpoint import Checkpoint
from tune.executors.executor import Completed, Event, Failed, Reported, Saved, SaveFailed, Started, Stopped
from tune.result import (
    DONE,
    EPISODES_THIS_ITER,
    TIME_THIS_ITER_S,
    TIME_TOTAL_S,
    TIMESTEPS_THIS_ITER,
    TRAINING_ITERATION,
    Result,
)
from tune.runs.host_job import HostJob

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
"""How long an attempt waits for the end of its run's earlier orchestrator, and for a job that is starting."""

DRAIN_GRACE_SECONDS = 15.0
"""Added to a run's `shutdown_timeout_seconds`, after which an orchestrator that was asked to end is killed."""

MOST_WAITING = 10_000
"""Results that may wait for the tuner. Further lines stay in the file until there is room."""

ERROR_LINES = 20
"""Last lines of an orchestrator's output that an error quotes."""

CHECKPOINT_FILE = "run.json"
"""Names, in the directory of a checkpoint, the run and its step whose weights and optimizer the trainer has."""


class RunAttempt:
    """One orchestrator for one trial, from its start to its end."""

    def __init__(
        self, trial_id: str, number: int, config: RunConfig, settings: Table, job: HostJob, last: Result
    ) -> None:
        """`last` is the trial's last result: the lines up to its step have been delivered."""
        self.trial_id, self.number, self.config = trial_id, number, config
        self._settings, self._job = settings, job
        self.delivered = int(last.get(TRAINING_ITERATION, 0))
        """The step of the last result that the tuner has got."""
        self._total = float(last.get(TIME_TOTAL_S, 0.0))
        self._previous = float(last.get("time", 0.0))
        self._spawned_at = 0.0
        self._follower = Follower(config.run_dir / "metrics.jsonl")
        self._lines: deque[Line] = deque()
        self._process: Process | None = None
        self._began = time.monotonic()
        self._started = self._wanted = self._leaving = self._complete = False
        self._kill_at = 0.0
        self._save: Checkpoint | None = None
        self.ended = False
        """Whether nothing more will come of it."""

    @property
    def holds_slot(self) -> bool:
        """Whether its run has, or is about to have, a slot of the trainer."""
        return not self._complete and not self.ended

    @property
    def log_file(self) -> Path:
        """What its orchestrator prints."""
        return self.config.output_dir / f"orchestrator_{self.config.run_id}.log"

    @property
    def durable(self) -> int:
        """The newest step that a checkpoint of the trainer covers; 0 for none."""
        return max(published_steps(self.config.output_dir / "trainer" / self.config.run_id / "checkpoints"), default=0)

    def want(self) -> None:
        """Lets the next result be delivered."""
        self._wanted = True

    def save(self, checkpoint: Checkpoint) -> None:
        """Asks for a checkpoint: it is there once the trainer's covers the step of its iteration."""
        self._save = checkpoint

    def leave(self) -> None:
        """Asks the run to end in order: it drains, commits and says BYE."""
        if self._leaving or self.ended:
            return
        self._leaving = True
        if self._process is not None:
            self._process.terminate()
            self._kill_at = time.monotonic() + self.config.shutdown_timeout_seconds + DRAIN_GRACE_SECONDS

    def kill(self) -> None:
        """Kills the orchestrator at once, and waits for that."""
        if self._process is not None:
            self._process.kill()
            os.waitpid(self._process.guardian_pid, 0)
            self._close()
        self.ended = True

    def poll(self) -> list[Event]:
        """Returns what has happened since the last call, in order."""
        if self.ended:
            return []
        if self._process is None and not self._complete:
            return self._begin()
        code = None if self._complete else self._exit_code()  # before the lines, so that none is missed
        events: list[Event] = []
        if self._process is not None:
            events += self._read_notifications()
        self._read_lines()
        events += self._saved()
        if code is not None:
            self._close()
            if code != 0 and not self._leaving:
                return [*events, *self._end(Failed(self.trial_id, self.number, self._error(code)))]
            self._complete = True
        if self._leaving:
            self._kill_if_late()
            return [*events, *(self._end(Stopped(self.trial_id, self.number)) if self._complete else [])]
        return events + self._deliver()

    def _begin(self) -> list[Event]:
        if self._leaving:
            return self._end(Stopped(self.trial_id, self.number))
        holder = orchestrator_of(self.config.output_dir, self.config.run_id)
        obstacle = self._job.obstacle() if holder is None else f"its run's earlier orchestrator, process {holder.pid}"
        if obstacle is None:
            try:
                self._spawn()
            except OSError as error:
                return self._end(Failed(self.trial_id, self.number, f"its orchestrator cannot be started: {error}"))
        elif time.monotonic() - self._began > START_SECONDS:
            return self._end(Failed(self.trial_id, self.number, f"it waited {START_SECONDS:g} s in vain: {obstacle}"))
        return []

    def _spawn(self) -> None:
        file = self.config.output_dir / "roles" / f"orchestrator_{self.config.run_id}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, tomli_w.dumps(self._settings).encode())
        command = [sys.executable, "-m", "cli.main", "orchestrator", str(file), "--join", str(self.config.output_dir)]
        self._spawned_at = time.time()
        self._process = Process(
            Command(self.config.run_id, [*command, "--resume"], self.log_file, environment=SAFE_PATH)
        )

    def _read_notifications(self) -> list[Event]:
        assert self._process is not None
        if "READY" not in self._process.read_notifications() or self._started:
            return []
        self._started = True
        return [Started(self.trial_id, self.number)]

    def _read_lines(self) -> None:
        if len(self._lines) > MOST_WAITING:
            return
        try:
            _, lines = self._follower.new_lines()
        except (OSError, UntrustedFileError) as error:
            logger.warning("%s: its metrics cannot be read now: %s", self.config.run_id, error)
            return
        newest = self._lines[-1]["step"] if self._lines else self.delivered
        for line in lines:
            if line["step"] > newest:
                newest = line["step"]
                self._lines.append(line)

    def _deliver(self) -> list[Event]:
        if not self._wanted:
            return []
        if self._lines:
            self._wanted = False
            return [Reported(self.trial_id, self.number, self._result(self._lines.popleft()))]
        if self._complete:
            self._wanted = False
            return [Completed(self.trial_id, self.number)]
        return []

    def _result(self, line: Line) -> Result:
        """Completes a line of metrics. Time is that of the run's own clock; a time without an orchestrator does not count."""
        since = self._previous if line["time"] < self._spawned_at else max(self._previous, self._spawned_at)
        seconds = max(0.0, line["time"] - since) if since else 0.0
        self.delivered, self._previous = line["step"], line["time"]
        self._total += seconds
        return line | {
            TRAINING_ITERATION: line["step"],
            TIME_THIS_ITER_S: seconds,
            TIME_TOTAL_S: self._total,
            TIMESTEPS_THIS_ITER: int(line.get("tokens/completion", 0)),
            EPISODES_THIS_ITER: int(line.get("rollouts/completed", 0)),
            DONE: False,  # its end is an event of its own: the last step must be durable first
        }

    def _saved(self) -> list[Event]:
        if (wanted := self._save) is None:
            return []
        durable = self.durable
        if durable >= wanted.iteration:
            self._save = None
            try:
                return [Saved(self.trial_id, self.number, self._write(wanted, durable))]
            except OSError as error:
                return [SaveFailed(self.trial_id, self.number, f"{wanted.path}: {error}")]
        if self._complete or self.ended:
            self._save = None
            return [SaveFailed(self.trial_id, self.number, f"the run ended before step {wanted.iteration} was durable")]
        return []

    def _write(self, checkpoint: Checkpoint, step: int) -> Checkpoint:
        content = {"job": str(self.config.output_dir), "run_id": self.config.run_id, "step": step}
        Path(checkpoint.path).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(checkpoint.path) / CHECKPOINT_FILE, orjson.dumps(content))
        return checkpoint

    def _exit_code(self) -> int | None:
        assert self._process is not None
        pid, status = os.waitpid(self._process.guardian_pid, os.WNOHANG)
        if pid == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if code < 0 else code

    def _kill_if_late(self) -> None:
        if self._process is not None and time.monotonic() > self._kill_at:
            logger.warning("%s: its orchestrator did not end in time and is killed", self.config.run_id)
            self._kill_at = float("inf")
            self._process.kill()

    def _close(self) -> None:
        assert self._process is not None
        self._process.close()
        self._log_from = self._process.log_from
        self._process = None

    def _end(self, event: Event) -> list[Event]:
        self.ended = True
        return [event]

    def _error(self, code: int) -> str:
        exclusion = exclusion_of(self.config.run_dir)
        how = "; ".join([f"its orchestrator {describe_exit(code)}", *([exclusion] if exclusion else [])])
        output = "\n".join(last_lines(self.log_file, ERROR_LINES, self._log_from))
        return f"{how} ({self.log_file})\n{output}".rstrip()


def checkpoint_of(path: str) -> dict[str, Any]:
    """Returns what a checkpoint of a run names: `job`, `run_id` and `step`. Raises `OSError` and `UntrustedFileError`."""
    from transport.files.untrusted import read_json

    return read_json(Path(path) / CHECKPOINT_FILE, 2**16)
