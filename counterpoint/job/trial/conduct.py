"""Carries a trial out: makes and runs its two branches as guests of the live job, records what they measure, and ends them.

The branches die with this process. Whatever is killed, the same trial goes on when it is asked for again: recorded measurements
are decided on anew (`counterpoint/job/trial/decisions.py`), and a branch goes on from its newest commit. A branch that cannot go
on is an error, no verdict.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from counterpoint.job.admin.ask import NotAnswered, Refused
from counterpoint.job.admin.orchestrator_process import OrchestratorProcess
from counterpoint.job.branch import begin
from counterpoint.job.directory import is_running, orchestrator_of
from counterpoint.job.reading.run_state import all_committed
from counterpoint.job.trial.ask import changes_of
from counterpoint.job.trial.decisions import SIDES, HeldOut, Side, TrialDecisions, TrialVerdict
from counterpoint.job.trial.measure import BranchReader
from counterpoint.job.trial.record import TrialAsked, TrialRecord
from counterpoint.run.branches import origin_of
from counterpoint.run.config import RunConfig
from counterpoint.trainer.runs.control_files import MAX_CONFIG_BYTES
from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.files.untrusted import read_toml
from counterpoint.transport.printable import on_one_line

POLL_SECONDS = 0.2

STALL_SECONDS = 1800.0
"""How long a branch may make no step and no evaluation before the trial gives up for this time."""

LEFT_SECONDS = 60.0
"""How long a branch may be held by an orchestrator of an earlier process of the trial, which was killed."""

MOST_DEATHS = 5
"""How often a branch may die without a step between."""

AGAIN = "ask for the same trial again to go on"


def conduct(job: Path, record: TrialRecord, asked: TrialAsked, say: Callable[[str], None]) -> TrialVerdict:
    """Carries the trial out, and returns its verdict; at once, if there is one. Call it from the main thread.

    `say` is told of what happens. Raises `Refused` while another process carries it out, `UserError` if the job has ended or a
    branch cannot be made, and `NotAnswered` if a branch cannot go on, or makes nothing for `STALL_SECONDS`.
    """
    record.directory.mkdir(parents=True, exist_ok=True)
    try:
        lock = take_lock(record.directory / "lock", f"another process carries out {record.name} already")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise Refused(error.strerror) from None
    try:
        if (verdict := record.verdict) is not None:
            return verdict
        if record.asked is None:
            record.begin(asked)
        return _Trial(job, record, asked, say).run()
    finally:
        os.close(lock)


class _Branch:
    """One branch while this process carries the trial out."""

    def __init__(self, config: RunConfig, reader: BranchReader) -> None:
        self.config, self.reader = config, reader
        self.process: OrchestratorProcess | None = None
        self.is_complete = False
        self.deaths = 0
        """Since its last step."""
        self.waits_until = self.quiet_until = 0.0
        """When it has to have started, and when it has to have made something more."""


class _Trial:
    """One process's part of a trial."""

    def __init__(self, job: Path, record: TrialRecord, asked: TrialAsked, say: Callable[[str], None]) -> None:
        self._job, self._record, self._asked, self._say = job, record, asked, say
        self._decisions = TrialDecisions(asked.step, asked.tokens)

    def run(self) -> TrialVerdict:
        newest: dict[Side, int] = dict.fromkeys(SIDES, 0)
        for measured in self._record.measurements():
            newest[measured.side] = measured.step
            self._decisions.measured(measured)
        branches = {side: self._prepared(side, newest[side]) for side in SIDES}
        try:
            while (verdict := self._decisions.verdict) is None:
                if not is_running(self._job):
                    raise UserError(f"the job in {self._job} has ended; start it with --resume, and {AGAIN}")
                for side, branch in branches.items():
                    if not branch.is_complete:
                        self._look(side, branch)
                time.sleep(POLL_SECONDS)
            self._record.conclude(verdict)
        finally:
            _end([branch.process for branch in branches.values() if branch.process is not None])
        return verdict

    def _prepared(self, side: Side, newest: int) -> _Branch:
        name, asked = self._record.branch(side), self._asked
        directory = self._job / f"run_{name}"
        if origin_of(directory) is None:
            changes = changes_of(self._job, self._record, asked, side)
            config = begin.branch(self._job, asked.run, asked.step, name, changes)
        else:
            config = RunConfig.model_validate(read_toml(directory / "branch.toml", MAX_CONFIG_BYTES))
        return _Branch(config, BranchReader(directory, side, asked.evaluation, asked.step, newest))

    def _look(self, side: Side, branch: _Branch) -> None:
        """Starts a branch that does not run; else takes in what it has measured, and then its end, so that nothing is missed."""
        if branch.process is None:
            self._start(side, branch)
            return
        branch.process.poll()
        if branch.reader.has_moved():
            branch.deaths, branch.quiet_until = 0, time.monotonic() + STALL_SECONDS
            for measured in branch.reader.new():
                self._record.add(measured)
                self._take_in(measured)
        if branch.process.code is not None:
            self._ended(side, branch, branch.process)
        elif time.monotonic() > branch.quiet_until:
            logs = f"`counterpoint logs {branch.config.run_id}`"
            raise NotAnswered(
                f"run {branch.config.run_id} has made no step for {STALL_SECONDS:g} s; see {logs}, and {AGAIN}"
            )

    def _take_in(self, measured: HeldOut) -> None:
        before = self._decisions.interval
        self._decisions.measured(measured)
        if (now := self._decisions.interval) is not None and now != before:
            self._say(f"step {measured.step}: difference {now.estimate:+.4f} [{now.low:+.4f}, {now.high:+.4f}]")

    def _ended(self, side: Side, branch: _Branch, process: OrchestratorProcess) -> None:
        branch.process = None
        if process.code == 0 and all_committed(branch.config):
            branch.is_complete = True
            self._decisions.has_made_all_steps(side)
            return
        branch.deaths, branch.waits_until = branch.deaths + 1, 0.0
        if process.code == UserError.code or branch.deaths > MOST_DEATHS:
            raise NotAnswered(
                f"the branch {side} the change, run {branch.config.run_id}, cannot go on: {on_one_line(process.error())}; "
                f"remove the cause, and {AGAIN}"
            )

    def _start(self, side: Side, branch: _Branch) -> None:
        """Starts a branch's orchestrator once that of an earlier process has ended. Raises `Obstructed` if it does not."""
        name, now = branch.config.run_id, time.monotonic()
        branch.waits_until = branch.waits_until or now + LEFT_SECONDS
        if (holder := orchestrator_of(self._job, name)) is not None:
            if now > branch.waits_until:
                raise Obstructed(f"run {name} is held by process {holder.pid}; end it, and {AGAIN}")
            return
        self._say(f"run {name}, {side} the change, from step {self._asked.step} of run {self._asked.run}")
        branch.process = OrchestratorProcess(branch.config, branch.config.table())
        branch.quiet_until = now + STALL_SECONDS


def _end(processes: list[OrchestratorProcess]) -> None:
    """Ends orchestrators in order."""
    for process in processes:
        process.terminate()
    while any(process.code is None for process in processes):
        time.sleep(POLL_SECONDS)
        for process in processes:
            process.poll()  # kills it after its time limit
