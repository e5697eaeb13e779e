"""A branch that a command plays beside the runs of a live job: its orchestrator is a child of that command, and ends with it.

Whatever is killed, the branch goes on from its newest commit: an orchestrator that dies is started again, and a later call of
the same command takes the branch up. A branch that cannot go on is an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from counterpoint.job.admin.ask import NotAnswered, Refused
from counterpoint.job.admin.orchestrator_process import OrchestratorProcess
from counterpoint.job.directory import is_running, living_runs, orchestrator_of, runs_at_once
from counterpoint.job.reading.run_state import all_committed
from counterpoint.run.config import RunConfig
from counterpoint.trainer.runs.control_files import MAX_CONFIG_BYTES
from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.files.lock import LockHolder
from counterpoint.transport.files.untrusted import read_toml
from counterpoint.transport.printable import on_one_line

POLL_SECONDS = 0.2

LEFT_SECONDS = 60.0
"""How long a branch may be held by an orchestrator whose guardian, or whose command, was killed."""

MOST_DEATHS = 5
"""How often a branch may die without anything new between."""

AGAIN = "give the same command again to go on"


def require_running(job: Path) -> None:
    """Raises `UserError` unless the job runs."""
    if not is_running(job):
        raise UserError(
            f"the job in {job} has ended; start it with --resume, with --stay true too if its own runs are done, and {AGAIN}"
        )


def check_places(job: Path, places: int) -> None:
    """Raises `Refused` unless the job's trainer takes so many runs more."""
    living, most = living_runs(job), runs_at_once(job)
    if len(living) + places > most:
        raise Refused(
            f"trainer.max_runs = {most}, and {len(living)} runs are alive ({', '.join(living)}): there is no place for {places} "
            "more. Start the job with a larger number, or end a run"
        )


def made_config(run_dir: Path) -> RunConfig:
    """Returns the configuration of a branch that was made. Raises `OSError` and `ValueError` if it cannot be read."""
    return RunConfig.model_validate(read_toml(run_dir / "branch.toml", MAX_CONFIG_BYTES))


class PlayedBranch:
    """One branch while this process plays it."""

    def __init__(
        self,
        config: RunConfig,
        has_moved: Callable[[], bool],
        is_to_end: Callable[[], bool],
        patience: float,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        """Starts nothing yet.

        `has_moved` takes in what the branch has made, and returns whether there was anything new, for which it may take
        `patience` seconds. `is_to_end` says that it is to play no more. `say` is told of each start.
        """
        self.config = config
        self._has_moved, self._is_to_end, self._patience, self._say = has_moved, is_to_end, patience, say
        self._process: OrchestratorProcess | None = None
        self.has_ended = False
        """Whether it has made all its steps, or was to end and runs no more."""
        self._is_ending = False
        self._deaths = 0
        """Since something new."""
        self._waits_until = time.monotonic() + LEFT_SECONDS
        """When it has to have started."""
        self._quiet_until = math.inf
        """When it has to have made something more."""

    def look(self) -> None:
        """Takes in what it has made, and then its end, so that nothing is missed; starts it, or has it end.

        Raises `NotAnswered` if it cannot go on, and `Obstructed` if an earlier process does not let go of it.
        """
        process, name = self._process, self.config.run_id
        holder = orchestrator_of(self.config.output_dir, name) if process is None else None
        if process is not None:
            process.poll()
        if self._has_moved():
            self._deaths, self._quiet_until = 0, time.monotonic() + self._patience
        if process is None:
            self._start(holder)
        elif process.code is not None:
            self._note_end(process)
        elif self._is_to_end():
            self.end()
        elif time.monotonic() > self._quiet_until:
            raise NotAnswered(
                f"run {name} has made no step for {self._patience:,.0f} s; see `counterpoint logs {name}`, and whether the "
                f"trainer has a slot for it (trainer.max_runs), and {AGAIN}"
            )

    def _start(self, holder: LockHolder | None) -> None:
        """Starts its orchestrator once that of an earlier process has ended."""
        name, now = self.config.run_id, time.monotonic()
        if holder is not None:
            if now > self._waits_until:
                raise Obstructed(f"run {name} is held by process {holder.pid}; end it, and {AGAIN}")
        elif self._is_to_end():
            self.has_ended = True
        else:
            self._say(name)
            self._process = OrchestratorProcess(self.config, self.config.table())
            self._quiet_until = now + self._patience

    def _note_end(self, process: OrchestratorProcess) -> None:
        self._process = None
        if self._is_to_end() or (process.code == 0 and all_committed(self.config)):
            self.has_ended = True
            return
        self._deaths, self._waits_until = self._deaths + 1, time.monotonic() + LEFT_SECONDS
        if process.code == UserError.code or self._deaths > MOST_DEATHS:
            raise NotAnswered(
                f"run {self.config.run_id} cannot go on: {on_one_line(process.error())}; remove the cause, and {AGAIN}"
            )

    def end(self) -> None:
        """Asks its process to end in order, once: a second time would end it at once."""
        if self._process is not None and not self._is_ending:
            self._is_ending = True
            self._process.terminate()

    def is_alive(self) -> bool:
        """Returns whether its process still runs, which is killed when it takes too long to end."""
        if self._process is not None:
            self._process.poll()
        return self._process is not None and self._process.code is None


def play(job: Path, branches: Sequence[PlayedBranch], is_done: Callable[[], bool]) -> None:
    """Plays branches side by side until `is_done`, and ends them. Call it from the main thread.

    Raises `UserError` once the job does not run, and as `PlayedBranch.look`. An exception of a signal's handler ends them, too.
    """
    try:
        while not is_done():
            require_running(job)
            for branch in branches:
                if not branch.has_ended:
                    branch.look()
            time.sleep(POLL_SECONDS)
    finally:
        for branch in branches:
            branch.end()
        while [branch for branch in branches if branch.is_alive()]:  # each is looked at, so that each is killed in time
            time.sleep(POLL_SECONDS)
