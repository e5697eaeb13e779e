"""Carries a trial out: makes and runs its two branches as guests of the live job, records what they measure, and ends them.

A branch whose half of the tokens is used is ended, while the other one goes on. The branches die with this process.
Whatever is killed, the same trial goes on when it is asked for again: recorded measurements are decided on anew
(`counterpoint/job/trial/decisions.py`), and a branch goes on from its newest commit. A branch that cannot go on is an
error, no verdict.
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
from counterpoint.job.branch.kept import StepNotKept
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
from counterpoint.transport.files.lock import LockHolder, take_lock
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
        known = record.asked
        if known is None or not record.is_begun:
            record.begin(known := asked)
        return _Trial(job, record, known, say).run()
    finally:
        os.close(lock)


class _Branch:
    """One branch while this process carries the trial out."""

    def __init__(self, config: RunConfig, reader: BranchReader) -> None:
        self.config, self.reader = config, reader
        self.process: OrchestratorProcess | None = None
        self.has_ended = False
        """Whether it has made all its steps, or has used its half of the tokens and runs no more."""
        self._is_ending = False
        self.deaths = 0
        """Since its last step."""
        self.waits_until = self.quiet_until = 0.0
        """When it has to have started, and when it has to have made something more."""

    def end(self) -> None:
        """Asks its process to end in order, once: a second time would end it at once."""
        if self.process is not None and not self._is_ending:
            self._is_ending = True
            self.process.terminate()


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
            while self._decisions.verdict is None:
                if not is_running(self._job):
                    raise UserError(f"the job in {self._job} has ended; start it with --resume, and {AGAIN}")
                for side, branch in branches.items():
                    if not branch.has_ended:
                        self._look(side, branch)
                time.sleep(POLL_SECONDS)
        finally:
            _end([*branches.values()])
        for side, branch in branches.items():
            self._decisions.spent(side, branch.reader.spent())
        verdict = self._decisions.verdict
        self._record.conclude(verdict)
        return verdict

    def _prepared(self, side: Side, newest: int) -> _Branch:
        asked, directory = self._asked, self._record.run_dir(side)
        if (origin := origin_of(directory)) is None:
            config = self._begun(side)
        elif origin.step != asked.step:
            raise UserError(
                f"{directory} is a branch of step {origin.step}, and not of step {asked.step}: remove {self._made()}"
            )
        else:
            config = RunConfig.model_validate(read_toml(directory / "branch.toml", MAX_CONFIG_BYTES))
        return _Branch(config, BranchReader(directory, side, asked.evaluation, asked.step, newest))

    def _begun(self, side: Side) -> RunConfig:
        """Begins a branch. Raises `StepNotKept`, and says what to remove if the other branch is bound to that step."""
        asked, name = self._asked, self._record.branch(side)
        changes = changes_of(self._job, self._record, asked, side)
        try:
            return begin.branch(self._job, asked.run, asked.step, name, changes)
        except StepNotKept as error:
            if not self._record.is_begun:
                raise
            raise StepNotKept(
                f"{error}. To try the change from another step, remove {self._made()}, or name a step by --step"
            ) from None

    def _made(self) -> str:
        """The directories of this trial, for people."""
        runs = [self._record.run_dir(side) for side in SIDES]
        trained = [self._job / "trainer" / self._record.branch(side) for side in SIDES]
        return ", ".join(str(each) for each in (self._record.directory, *runs, *trained) if each.exists())

    def _look(self, side: Side, branch: _Branch) -> None:
        """Takes in what a branch has measured and used, and then its end, so that nothing is missed.

        Starts a branch that does not run and has tokens left; ends one that has used its half.
        """
        process, name = branch.process, branch.config.run_id
        holder = orchestrator_of(self._job, name) if process is None else None
        if process is not None:
            process.poll()
        if branch.reader.has_moved():
            branch.deaths, branch.quiet_until = 0, time.monotonic() + STALL_SECONDS
            for measured in branch.reader.new():
                self._record.add(measured)
                self._take_in(measured)
            self._decisions.spent(side, branch.reader.spent())
        if process is None:
            self._start(side, branch, holder)
        elif process.code is not None:
            self._ended(side, branch, process)
        elif self._decisions.is_to_end(side):
            branch.end()
        elif time.monotonic() > branch.quiet_until:
            raise NotAnswered(
                f"run {name} has made no step for {STALL_SECONDS:g} s; see `counterpoint logs {name}`, and {AGAIN}"
            )

    def _take_in(self, measured: HeldOut) -> None:
        before = self._decisions.interval
        self._decisions.measured(measured)
        if (now := self._decisions.interval) is not None and now != before:
            self._say(f"step {measured.step}: difference {now.estimate:+.4f} [{now.low:+.4f}, {now.high:+.4f}]")

    def _ended(self, side: Side, branch: _Branch, process: OrchestratorProcess) -> None:
        branch.process = None
        if self._decisions.is_to_end(side) or (process.code == 0 and all_committed(branch.config)):
            self._end_of(side, branch)
            return
        branch.deaths, branch.waits_until = branch.deaths + 1, 0.0
        if process.code == UserError.code or branch.deaths > MOST_DEATHS:
            raise NotAnswered(
                f"the branch {side} the change, run {branch.config.run_id}, cannot go on: {on_one_line(process.error())}; "
                f"remove the cause, and {AGAIN}"
            )

    def _end_of(self, side: Side, branch: _Branch) -> None:
        branch.has_ended = True
        self._decisions.ended(side)

    def _start(self, side: Side, branch: _Branch, holder: LockHolder | None) -> None:
        """Starts a branch's orchestrator once that of an earlier process has ended. Raises `Obstructed` if it does not."""
        name, now = branch.config.run_id, time.monotonic()
        branch.waits_until = branch.waits_until or now + LEFT_SECONDS
        if holder is not None:
            if now > branch.waits_until:
                raise Obstructed(f"run {name} is held by process {holder.pid}; end it, and {AGAIN}")
        elif self._decisions.is_to_end(side):
            self._end_of(side, branch)
        else:
            self._say(f"run {name}, {side} the change, from step {self._asked.step} of run {self._asked.run}")
            branch.process = OrchestratorProcess(branch.config, branch.config.table())
            branch.quiet_until = now + STALL_SECONDS


def _end(branches: list[_Branch]) -> None:
    """Ends orchestrators in order."""
    for branch in branches:
        branch.end()
    processes = [branch.process for branch in branches if branch.process is not None]
    while any(process.code is None for process in processes):
        time.sleep(POLL_SECONDS)
        for process in processes:
            process.poll()  # kills it after its time limit
