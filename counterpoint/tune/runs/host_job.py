"""The job whose runs are the trials: it runs already, or is started for the experiment by `counterpoint run FILE`.

Its trainer and servers hold no state of the tuner. If the tuner is killed, a job that it started goes on for the lease of its
keeper (`docs/operations.md`); the next `start` takes it over, or starts it anew from its checkpoints.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from counterpoint.job.check import SAFE_PATH
from counterpoint.job.configuration.layers import variable
from counterpoint.job.directory import JOB_FILE, is_running, living_runs, runs_at_once
from counterpoint.job.processes_file import read_workers
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.exit_codes import describe_exit
from counterpoint.transport.process.parent_death import bound_command

logger = logging.getLogger(__name__)

STOP_SECONDS = 240.0
"""Time limit for a job to stop in order."""

LAST_LINES = 5
"""Last lines of the job's output that an error quotes."""

NEEDED = ("trainer", "inference_")
"""How the names begin of the workers that a guest needs. The job's own runs end, and the others it survives."""

LIVING_SECONDS = 1.0
"""How long a count of the living runs is taken for true."""


class HostJob:
    """A live job that trials join."""

    def __init__(self, directory: Path, file: Path | None = None, imports: Sequence[str] = ()) -> None:
        """`directory` is the job's; `file` is what to start it from, None for a job that somebody else runs.

        A job that is started allows its trials `imports`, and what its file allows if there are none.
        """
        self.directory = directory.absolute()
        self._file = file
        self._imports = list(imports)
        self._process: Child | None = None
        self._slots: int | None = None
        self._counted_at = -math.inf
        self._living: set[str] = set()

    @property
    def log_file(self) -> Path:
        """What the job printed: beside its directory, which it may move aside."""
        return self.directory.with_name(f"{self.directory.name}.job.log")

    def start(self) -> None:
        """Starts the job if it is the experiment's own; what an earlier process left is taken over."""
        if self._file is None or self._process is not None:
            return
        resume = ["--resume"] if (self.directory / JOB_FILE).exists() else []
        command = [
            sys.executable,
            "-m",
            "counterpoint.cli.main",
            "run",
            str(self._file),
            "--output_dir",
            str(self.directory),
            *resume,
        ]
        allowed = {variable("trainer.allowed_imports"): json.dumps(self._imports)} if self._imports else {}
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        # No guardian, which would kill the job's roles, too: they outlive it for the lease of their keeper.
        variables = {**os.environ, **SAFE_PATH, **allowed}
        self._process = Child(
            "the job", bound_command(command), environment=variables, log=self.log_file, guarded=False
        )
        logger.info("the job starts from %s; its output is in %s", self._file, self.log_file)

    def check(self) -> None:
        """Raises `UserError` if no run will ever be able to join: the job that was started has ended."""
        if self._process is not None and (code := self._process.code) is not None:
            output = "\n".join(self._process.last_lines(LAST_LINES))
            raise UserError(f"the job of the trials has ended: it {describe_exit(code)} ({self.log_file})\n{output}")

    def obstacle(self) -> str | None:
        """Returns why no run can join now, in words; None if runs can. Raises as `check`."""
        self.check()
        if not is_running(self.directory):
            return f"no job runs in {self.directory}"
        needed = [worker for worker in read_workers(self.directory) if worker["name"].startswith(NEEDED)]
        unready = [f"{worker['name']} ({worker['state']})" for worker in needed if worker["state"] != "ready"]
        if unready or not needed:
            return f"the job in {self.directory} is not ready: {', '.join(unready) or 'no process yet'}"
        return None

    def slots(self) -> int:
        """Returns how many runs the trainer takes at once. Raises `UserError` without a job."""
        if self._slots is None:
            self._slots = runs_at_once(self.directory)
        return self._slots

    def runs_of_others(self, ours: set[str]) -> int:
        """Counts the living runs, the job's own and guests, that are not `ours`. The count may be `LIVING_SECONDS` old."""
        now = time.monotonic()
        if now - self._counted_at > LIVING_SECONDS:
            self._counted_at, self._living = now, set(living_runs(self.directory))
        return len(self._living - ours)

    def stop(self) -> None:
        """Stops the job in order if the experiment started it; kills it after `STOP_SECONDS`."""
        process, self._process = self._process, None
        if process is not None and not process.stop(STOP_SECONDS):
            logger.warning("the job did not stop within %g s and was killed", STOP_SECONDS)
