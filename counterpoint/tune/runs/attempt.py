"""One attempt at a trial that is a run: from the start of its orchestrator to its end. Nothing here waits.

`poll` looks at the process, the metrics and the answers to requests, and returns what has happened;
`counterpoint/tune/runs/executor.py` calls it.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from counterpoint.job.admin.orchestrator_process import OrchestratorProcess
from counterpoint.job.directory import orchestrator_of
from counterpoint.job.join import check_joins
from counterpoint.job.population.exploit import outcome, request_save
from counterpoint.job.reading.run_state import committed_steps
from counterpoint.run.config import RunConfig
from counterpoint.transport.configuration.toml_file import Table
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import on_one_line
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.executors.executor import Completed, Event, Failed, Reported, Saved, SaveFailed, Started, Stopped
from counterpoint.tune.result import Result
from counterpoint.tune.runs.exploit import CopyNote, TrialReset
from counterpoint.tune.runs.host_job import HostJob
from counterpoint.tune.runs.result_lines import ResultLines
from counterpoint.tune.runs.saved import SavedStep, forget_unnamed, newest_durable, write_saved

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
"""How long an attempt waits for the end of its run's earlier orchestrator, and for a job that is not ready."""

EXPLOIT_SECONDS = 600.0
"""Time limit for a copy, which takes the place of an update, and for a change of keys."""


class RunAttempt:
    """One orchestrator for one trial."""

    def __init__(
        self, trial_id: str, number: int, config: RunConfig, settings: Table, job: HostJob, last: Result
    ) -> None:
        """`last` is the trial's last result."""
        self.trial_id, self.number, self.config = trial_id, number, config
        self._settings, self._job = settings, job
        self._results = ResultLines(config.run_dir / "metrics.jsonl", last)
        self._process: OrchestratorProcess | None = None
        self._began = time.monotonic()
        self._started = self._wanted = self._leaving = self._complete = False
        self._exploit: TrialReset | None = None
        self._first: tuple[SavedStep | None, CopyNote | None, dict[str, Any]] | None = None
        self._exploit_until = 0.0
        self._failure: str | None = None
        self._save: tuple[Checkpoint, str] | None = None
        self.ended = False
        """Whether nothing more will come of it."""

    @property
    def holds_slot(self) -> bool:
        """Whether its run has, or is about to have, a slot of the trainer."""
        return not self._complete and not self.ended

    # --- what is asked ---

    def want(self) -> None:
        """Lets the next result be delivered."""
        self._wanted = True

    def save(self, checkpoint: Checkpoint) -> None:
        """Asks for a checkpoint: the trainer makes the run's newest step durable and keeps it."""
        request_id = ""
        if not self._complete:
            request_id = request_save(self.config.output_dir, self.config.run_id)
        self._save = checkpoint, request_id

    def exploit_first(self, source: SavedStep | None, note: CopyNote | None, changes: dict[str, Any]) -> None:
        """Copies another run and changes keys before anything is delivered, as soon as the run has joined."""
        self._first = source, note, changes

    def began_as_copy(self, source: SavedStep, note: CopyNote) -> None:
        """The run's first version is a copy."""
        self._results.count_from(0, _iteration_of(source, note))

    def change(self, config: RunConfig, settings: Table) -> None:
        """Takes the configuration that the run has from now on, and with which it would be started again."""
        self.config, self._settings = config, settings

    def exploit(self, source: SavedStep | None, note: CopyNote | None, changes: dict[str, Any]) -> None:
        """Asks for a copy and a change of keys. `Started` follows; steps of the old weights or values are not delivered."""
        self._wanted, self._started = False, False
        self._exploit = TrialReset(self.config.output_dir, self.config.run_id, source, note, changes)
        self._copied_iteration = _iteration_of(source, note) if source is not None and note is not None else 0
        self._exploit_until = time.monotonic() + EXPLOIT_SECONDS

    def leave(self) -> None:
        """Asks the run to end in order: it drains, commits and says BYE."""
        if not self._leaving and not self.ended:
            self._leaving = True
            if self._process is not None:
                self._process.terminate()

    def kill(self) -> None:
        """Kills the orchestrator at once, and waits for that."""
        if self._process is not None:
            self._process.kill()
        self.ended = True

    # --- what has happened ---

    def poll(self) -> list[Event]:
        """Returns what has happened since the last call, in order."""
        if self.ended:
            return []
        if self._process is None:
            return self._begin()
        self._process.poll()
        self._results.read()  # after the process, so that no line of one that has ended is missed
        if (code := self._process.code) is not None and not self._complete:
            self._complete = True
            # Results that wait for room are not read yet.
            step = max(self._results.newest, committed_steps(self.config))
            if not self._leaving and (code != 0 or step < self.config.steps - 1):
                refused = code == UserError.code
                error = self._process.error()
                if code == 0:
                    error = error.replace("exit code 0", f"exit code 0 after step {step} of {self.config.steps}", 1)
                return self._end(Failed(self.trial_id, self.number, error, may_recover=not refused))
        events = self._saved()
        if self._leaving:
            return events + self._left()
        return events + (self._deliver() if self._started else self._start())

    def _begin(self) -> list[Event]:
        if self._leaving:
            return self._left()
        holder = orchestrator_of(self.config.output_dir, self.config.run_id)
        obstacle = self._job.obstacle() if holder is None else f"its run's earlier orchestrator, process {holder.pid}"
        if obstacle is None:
            try:
                check_joins(self.config, self._job.directory)
                self._process = OrchestratorProcess(self.config, self._settings)
            except (UserError, OSError) as error:
                return self._end(
                    Failed(self.trial_id, self.number, on_one_line(f"its orchestrator cannot be started: {error}"))
                )
            self._results.started_at = self._process.started_at
        elif time.monotonic() - self._began > START_SECONDS:
            return self._end(Failed(self.trial_id, self.number, f"it waited {START_SECONDS:g} s in vain: {obstacle}"))
        return []

    def _start(self) -> list[Event]:
        """Waits for the orchestrator, then for the copy with which the attempt begins."""
        assert self._process is not None
        if not self._process.is_ready and not self._complete:
            return []
        if self._first is not None:
            first, self._first = self._first, None
            self.exploit(*first)
        if self._exploit is not None:
            is_over = self._exploit.is_over()
            problem = self._exploit_problem(self._exploit, is_over)
            if problem is not None and self._has_no_step_left():
                logger.warning("trial %s ends as it is: %s", self.trial_id, problem)
                self._exploit, self._started = None, True
                return [Started(self.trial_id, self.number)]
            if problem is not None:
                self._failure = problem
                self.leave()
                return []
            if not is_over:
                return []
            self._results.skip_to(self._exploit.last_old_step())
            if (copied_at := self._exploit.copied_at()) is not None:
                self._results.count_from(copied_at, self._copied_iteration)
            self._exploit = None
        self._started = True
        return [Started(self.trial_id, self.number)]

    def _has_no_step_left(self) -> bool:
        """Whether the run is over, or about to be: a copy takes the place of one step, and needs another after it."""
        ended_well = self._process is not None and self._process.code == 0
        return ended_well or self._results.newest >= self.config.steps - 1

    def _exploit_problem(self, exploit: TrialReset, is_over: bool) -> str | None:
        if is_over:
            refusal = exploit.refusal()
            return None if refusal is None else f"the copy or the change of its run was refused: {refusal}"
        if self._complete:
            return "its run ended before the copy of another was made"
        if time.monotonic() > self._exploit_until:
            return f"the copy or the change of its run was not carried out within {EXPLOIT_SECONDS:g} s"
        return None

    def _deliver(self) -> list[Event]:
        if not self._wanted:
            return []
        if self._results:
            self._wanted = False
            return [Reported(self.trial_id, self.number, self._results.take())]
        if self._complete:
            self._wanted = False
            return [Completed(self.trial_id, self.number)]
        return []

    def _left(self) -> list[Event]:
        if self._process is not None and not self._complete:
            return []
        if self._failure is not None:
            return self._end(Failed(self.trial_id, self.number, self._failure))
        return self._end(Stopped(self.trial_id, self.number))

    def _saved(self) -> list[Event]:
        if self._save is None:
            return []
        checkpoint, request_id = self._save
        job, run_id = self.config.output_dir, self.config.run_id
        answer = outcome(job, run_id, request_id) if request_id else None
        if answer is None and not self._complete:
            return []
        self._save = None
        step = answer.step if answer is not None and answer.step is not None else newest_durable(job, run_id)
        if (answer is not None and answer.outcome == "refused") or not step:
            reason = answer.reason if answer is not None else "the trainer has no durable step of it"
            return [SaveFailed(self.trial_id, self.number, f"run {run_id}: {reason}")]
        try:
            saved = SavedStep(str(job), run_id, step, self._results.iteration_of(step))
            write_saved(Path(checkpoint.path), saved)
            forget_unnamed(saved, Path(checkpoint.path).parent)
        except (OSError, UserError) as error:
            return [SaveFailed(self.trial_id, self.number, f"{checkpoint.path}: {error}")]
        return [Saved(self.trial_id, self.number, checkpoint)]

    def _end(self, event: Event) -> list[Event]:
        self.ended = True
        return [event]


def _iteration_of(source: SavedStep, note: CopyNote) -> int:
    return note.iteration if source.iteration is None else source.iteration
