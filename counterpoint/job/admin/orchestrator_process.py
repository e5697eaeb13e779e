"""The orchestrator of a run as a child process that dies with whoever started it. Nothing here waits, but for a kill."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import tomli_w

from counterpoint.job.check import SAFE_PATH
from counterpoint.job.reading.run_state import exclusion_of
from counterpoint.run.config import RunConfig
from counterpoint.transport.configuration.toml_file import Table
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.printable import on_one_line
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.exit_codes import describe_exit

logger = logging.getLogger(__name__)

DRAIN_GRACE_SECONDS = 15.0
"""Added to a run's `shutdown_timeout_seconds`, after which an orchestrator that was asked to end is killed."""

ERROR_LINES = 20
"""Last lines of an orchestrator's output that an error quotes."""

SEARCHED_LINES = 200
"""Last lines of it in which the reason of its end is searched."""

REASON = re.compile(r"^(?:counterpoint: error: |\S+ \S+ (?:ERROR|CRITICAL) +)")
"""How a line of its output begins that says why it ends; the lines below may belong to it."""


PROGRAM: tuple[str, ...] = (sys.executable, "-m", "counterpoint.cli.main", "orchestrator")


class OrchestratorProcess:
    """`counterpoint orchestrator FILE --join DIRECTORY --resume`, below a guardian."""

    def __init__(self, config: RunConfig, settings: Table) -> None:
        """Starts it; `settings` become its file. Raises `OSError`."""
        self._config = config
        file = config.output_dir / "roles" / f"orchestrator_{config.run_id}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, tomli_w.dumps(settings).encode())
        command = [*PROGRAM, str(file), "--join", str(config.output_dir), "--resume"]
        self.started_at = time.time()
        variables = {**os.environ, **SAFE_PATH, "PYTHONUNBUFFERED": "1"}
        self._process = Child(config.run_id, command, environment=variables, log=self.log_file, notifies=True)
        self._kill_at = math.inf
        self.is_ready = False
        """Whether it has begun with rollouts."""
        self.code: int | None = None
        """The exit code once it has ended."""

    @property
    def log_file(self) -> Path:
        """What it prints."""
        return self._config.output_dir / f"orchestrator_{self._config.run_id}.log"

    def poll(self) -> None:
        """Notices readiness and the end, and kills it if it was asked to end too long ago."""
        if self.code is not None:
            return
        self.code, self.is_ready = self._process.code, self._process.is_ready
        if self.code is not None:
            self._process.close()
        elif time.monotonic() > self._kill_at:
            logger.warning("%s: its orchestrator did not end in time and is killed", self._config.run_id)
            self._kill_at = math.inf
            self._process.kill_soon()

    def terminate(self) -> None:
        """Asks it to end in order: to drain, to commit, and to say BYE."""
        if self.code is None:
            self._process.signal(signal.SIGTERM)
            self._kill_at = time.monotonic() + self._config.shutdown_timeout_seconds + DRAIN_GRACE_SECONDS

    def kill(self) -> None:
        """Kills it, and waits for that."""
        self._process.close()
        self.code = self._process.code

    def error(self) -> str:
        """Describes how it ended, for a person: signal or code, why it or its configuration is refused, and its last output."""
        assert self.code is not None
        exclusion = exclusion_of(self._config.run_dir)
        reason = exclusion or (self._reason() if self.code == UserError.code else "")
        how = "; ".join([f"its orchestrator {describe_exit(self.code)}", *([reason] if reason else [])])
        output = "\n".join(self._process.last_lines(ERROR_LINES))
        return f"{how} ({self.log_file})\n{output}".rstrip()

    def _reason(self) -> str:
        """Why it took its configuration for wrong, on one line; empty if it did not say."""
        lines = self._process.last_lines(SEARCHED_LINES)
        for number, line in reversed([*enumerate(lines)]):
            if (found := REASON.match(line)) is not None:
                return on_one_line("\n".join([line[found.end() :], *lines[number + 1 :]]))
        return ""
