"""Carries a trial out: makes and plays its two branches as guests of the live job, records what they measure, and decides.

A branch whose half of the tokens is used is ended, while the other one goes on. The branches die with this process.
Whatever is killed, the same trial goes on when it is asked for again: recorded measurements are decided on anew
(`counterpoint/job/trial/decisions.py`), and a branch goes on from its newest commit (`counterpoint/job/branch/played.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from counterpoint.job.admin.ask import alone
from counterpoint.job.branch import begin
from counterpoint.job.branch.kept import StepNotKept, kept_of
from counterpoint.job.branch.played import PlayedBranch, made_config, play
from counterpoint.job.trial.ask import changes_of
from counterpoint.job.trial.decisions import SIDES, Side, TrialDecisions, TrialVerdict
from counterpoint.job.trial.measure import BranchReader
from counterpoint.job.trial.record import TrialAsked, TrialRecord
from counterpoint.run.branches import origin_of
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import remove_directory

STALL_SECONDS = 1800.0
"""How long a branch may make no step and no evaluation before the trial gives up for this time."""


MOST_STEPS = 8
"""Steps that are branched, one after another, until a run that goes on has kept one for both branches."""


def conduct(
    job: Path, record: TrialRecord, asked: TrialAsked, say: Callable[[str], None], *, of_newest: bool = False
) -> TrialVerdict:
    """Carries the trial out, and returns its verdict; at once, if there is one. Call it from the main thread.

    `say` is told of what happens. `of_newest`: nobody has named the step that is asked, so that a newer one may be taken as long
    as there is no branch. Raises `Refused` while another process carries it out, `UserError` if the job has ended or a
    branch cannot be made, and `NotAnswered` if a branch cannot go on, or makes nothing for `STALL_SECONDS`.
    """
    with alone(record.directory / "lock", f"another process carries out {record.name} already"):
        if (verdict := record.verdict) is not None:
            return verdict
        known, is_begun = record.asked, record.is_begun
        if known is None or not is_begun:
            record.begin(known := asked)
        known, branches = _branches(job, record, known, of_newest and not is_begun)
        return _Trial(job, record, known, branches, say).run()


def _branches(
    job: Path, record: TrialRecord, asked: TrialAsked, may_be_newer: bool
) -> tuple[TrialAsked, dict[Side, RunConfig]]:
    """Makes the branches that were not made. Returns them, and what holds: a newer step if the run has removed the one asked.

    Raises `StepNotKept` if it may not be newer, or the run was quicker each time, and `UserError` for branches of another step.
    """
    left = MOST_STEPS
    while True:
        made = dict[Side, RunConfig]()
        try:
            for side in SIDES:
                made[side] = _branch(job, record, asked, side)
            return asked, made
        except StepNotKept as error:
            left -= 1
            if may_be_newer:
                for config in made.values():
                    remove_directory(config.run_dir)
                    remove_directory(job / "trainer" / config.run_id)
            elif record.is_begun:
                raise StepNotKept(
                    f"{error}. To try the change from another step, remove {_directories(job, record)}, or name a step by --step"
                ) from None
            if not (may_be_newer and left):
                raise
        asked = asked.model_copy(update={"step": kept_of(job, asked.run).check(None)})
        record.begin(asked)


def _branch(job: Path, record: TrialRecord, asked: TrialAsked, side: Side) -> RunConfig:
    """Returns a branch, which is made unless it was. Raises `StepNotKept`, and `UserError` for one of another step."""
    directory = record.run_dir(side)
    if (origin := origin_of(directory)) is None:
        return begin.branch(job, asked.run, asked.step, record.branch(side), changes_of(job, record, asked, side))
    if origin.step == asked.step:
        return made_config(directory)
    raise UserError(
        f"{directory} is a branch of step {origin.step}, and not of step {asked.step}: remove {_directories(job, record)}"
    )


def _directories(job: Path, record: TrialRecord) -> str:
    """The directories of a trial, for people."""
    runs = [record.run_dir(side) for side in SIDES]
    trained = [job / "trainer" / record.branch(side) for side in SIDES]
    return ", ".join(str(each) for each in (record.directory, *runs, *trained) if each.exists())


class _Trial:
    """One process's part of a trial."""

    def __init__(
        self,
        job: Path,
        record: TrialRecord,
        asked: TrialAsked,
        branches: Mapping[Side, RunConfig],
        say: Callable[[str], None],
    ) -> None:
        self._job, self._record, self._asked, self._branches, self._say = job, record, asked, branches, say
        self._decisions = TrialDecisions(asked.step, asked.tokens)

    def run(self) -> TrialVerdict:
        newest: dict[Side, int] = dict.fromkeys(SIDES, 0)
        for measured in self._record.measurements():
            newest[measured.side] = measured.step
            self._decisions.measured(measured)
        asked, record = self._asked, self._record
        readers = [
            BranchReader(record.run_dir(side), side, asked.evaluation, asked.step, newest[side]) for side in SIDES
        ]
        branches = {reader.side: self._branch(reader) for reader in readers}

        def is_decided() -> bool:
            for side, branch in branches.items():
                if branch.has_ended:
                    self._decisions.ended(side)
            return self._decisions.verdict is not None

        play(self._job, [*branches.values()], is_decided)
        for reader in readers:
            reader.read()
            self._decisions.spent(reader.side, reader.spent())
        verdict = self._decisions.verdict
        assert verdict is not None
        record.conclude(verdict)
        return verdict

    def _branch(self, reader: BranchReader) -> PlayedBranch:
        asked, side = self._asked, reader.side
        return PlayedBranch(
            self._branches[side],
            partial(self._has_moved, reader),
            partial(self._decisions.is_to_end, side),
            STALL_SECONDS,
            lambda name: self._say(f"run {name}, {side} the change, from step {asked.step} of run {asked.run}"),
        )

    def _has_moved(self, reader: BranchReader) -> bool:
        """Records what a branch has measured, and notes what it has used. Returns whether it has made a step or an evaluation."""
        if not reader.read():
            return False
        for measured in reader.new():
            self._record.add(measured)
            before = self._decisions.interval
            self._decisions.measured(measured)
            if (now := self._decisions.interval) is not None and now != before:
                self._say(f"step {measured.step}: difference {now.estimate:+.4f} [{now.low:+.4f}, {now.high:+.4f}]")
        self._decisions.spent(reader.side, reader.spent())
        return True
