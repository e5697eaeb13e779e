"""Carrying a trial out: what ends it without a verdict, and that a recorded one stands."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from counterpoint.job.admin import orchestrator_process
from counterpoint.job.admin.ask import NotAnswered, Refused
from counterpoint.job.branch import begin, played
from counterpoint.job.branch.kept import StepNotKept
from counterpoint.job.branch.played import MOST_DEATHS
from counterpoint.job.directory import living_runs
from counterpoint.job.trial.conduct import conduct
from counterpoint.job.trial.decisions import SIDES, HeldOut, TrialVerdict
from counterpoint.job.trial.record import TrialAsked, TrialRecord
from counterpoint.run.branches import origin_of
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.json_lines import read_lines
from counterpoint.transport.files.lock import take_lock
from tests.job.branch.test_begin import FROM, with_trained
from tests.job.trial.test_ask import run as run

SPENDING = """
import json, signal, sys, time, tomllib
from pathlib import Path

ends = []
signal.signal(signal.SIGTERM, lambda *_: ends.append(time.monotonic()))
run = tomllib.loads(Path(sys.argv[1]).read_text())
directory = Path(run["output_dir"]) / ("run_" + run["run_id"])
for step in range(3, 500):
    with (directory / "metrics.jsonl").open("a") as file:
        print(json.dumps({"step": step, "tokens/prompt": 60, "tokens/completion": 40}), file=file)
    with (directory / "evaluations.jsonl").open("a") as file:
        print(json.dumps({"evaluation": "held", "step": step, "error": "the judge does not answer"}), file=file)
    if ends:
        raise SystemExit(143)
    time.sleep(0.02 if run["run_id"].endswith("-with") else 0.2)
raise SystemExit(2)
"""
"""An orchestrator whose evaluations fail, and which is quicker with the change."""


@dataclass
class Trial:
    """A trial of the job in which `run` was, which may be carried out."""

    run: RunConfig
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = self.run.output_dir
        self.asked = TrialAsked(run="old", step=FROM, changes={}, tokens=1000, evaluation="held", interval=3)
        self.record = TrialRecord(self.job, "trial")

    def conduct(self) -> TrialVerdict:
        return conduct(self.job, self.record, self.asked, self.said.append)


@pytest.fixture
def trial(run: RunConfig) -> Trial:
    return Trial(run)


@pytest.mark.slow
def test_in_a_job_that_has_ended_it_stays_to_go_on_with(trial: Trial) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match=r"has ended; start it with --resume.*give the same command again to go on"):
            trial.conduct()
        assert (trial.record.asked, trial.record.verdict) == (trial.asked, None)
    for side in SIDES:
        origin = origin_of(trial.job / f"run_trial-{side}")
        assert origin is not None
        assert (origin.run, origin.step) == ("old", FROM)


@pytest.mark.slow
def test_what_is_recorded_decides_and_the_verdict_stands(trial: Trial) -> None:
    trial.record.directory.mkdir(parents=True)
    for side, reward in [("with", 1.0), ("without", 0.0)]:
        rewards = {("reverse", index): reward for index in range(100)}
        trial.record.add(HeldOut(side, FROM + 1, 50, rewards, (0.0, 1.0)))  # type: ignore[arg-type]
    found = trial.conduct()
    assert (found.verdict, found.pairs, found.tokens) == ("better", 100, 100)
    (trial.record.directory / "measured.jsonl").unlink()
    assert trial.conduct() == found == trial.record.verdict


def test_one_process_at_a_time_carries_it_out(trial: Trial) -> None:
    trial.record.directory.mkdir(parents=True)
    lock = take_lock(trial.record.directory / "lock", "held")
    try:
        with pytest.raises(Refused, match="another process carries out trial already"):
            trial.conduct()
    finally:
        os.close(lock)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "starts"), [(2, 1), (1, MOST_DEATHS + 1)])
def test_a_branch_that_cannot_go_on_is_an_error_and_no_verdict(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, starts: int
) -> None:
    program = tmp_path / "orchestrator.py"
    program.write_text(f"print('counterpoint: error: the disk is full')\nraise SystemExit({code})\n")
    monkeypatch.setattr(orchestrator_process, "PROGRAM", (sys.executable, str(program)))
    monkeypatch.setattr(played, "is_running", lambda job: True)
    with pytest.raises(
        NotAnswered, match=rf"cannot go on: its orchestrator ended with exit code {code}.*the disk is full"
    ):
        trial.conduct()
    each = [sum(f"trial-{side}," in words for words in trial.said) for side in SIDES]
    assert max(each) == starts
    assert (trial.record.asked, trial.record.verdict) == (trial.asked, None)


@pytest.mark.slow
def test_each_branch_ends_with_its_half_of_the_tokens_also_when_no_evaluation_succeeds(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "orchestrator.py"
    program.write_text(SPENDING)
    monkeypatch.setattr(orchestrator_process, "PROGRAM", (sys.executable, str(program)))
    monkeypatch.setattr(played, "is_running", lambda job: True)
    found = trial.conduct()
    assert (found.verdict, found.reason, found.passes) == ("undecided", "the 1,000 tokens are used", 0)
    made = [
        sum(line["step"] > FROM for _, line in read_lines(trial.job / f"run_trial-{side}" / "metrics.jsonl"))
        for side in SIDES
    ]
    assert found.tokens == 100 * sum(made)
    assert min(made) >= 5
    assert len(trial.said) == 2, "neither was started again"
    (trial.record.directory / "verdict.json").unlink()
    assert trial.conduct() == found, "a process that was killed before it had recorded the verdict"
    assert len(trial.said) == 2


ORPHANED = """
import os, sys, time, tomllib
from pathlib import Path
from counterpoint.job.directory import lock_file_of
from counterpoint.transport.files.lock import take_lock

run = tomllib.loads(Path(sys.argv[1]).read_text())
lock = take_lock(lock_file_of(Path(run["output_dir"]), run["run_id"]), "taken")
killed = Path(run["output_dir"]) / "killed"
if not killed.exists():
    killed.touch()
    os.kill(os.getppid(), 9)
    time.sleep(1000)
"""
"""The beginning of an orchestrator whose guardian is killed, of one branch and once."""


@pytest.mark.slow
def test_a_branch_goes_on_whose_guardian_alone_was_killed(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "orchestrator.py"
    program.write_text(ORPHANED + SPENDING)
    monkeypatch.setattr(orchestrator_process, "PROGRAM", (sys.executable, str(program)))
    monkeypatch.setattr(played, "is_running", lambda job: True)
    found = trial.conduct()
    assert (found.verdict, found.reason) == ("undecided", "the 1,000 tokens are used")
    assert len(trial.said) == 3, "one was started again"
    assert living_runs(trial.job) == []


def move_on(run: RunConfig) -> None:
    """The run has step 3, and no longer keeps the step that was asked."""
    with_trained(run, FROM + 1)
    shutil.rmtree(run.run_dir / "checkpoints" / f"step_{FROM}")
    shutil.rmtree(run.output_dir / "trainer" / "old" / "checkpoints" / f"step_{FROM}")


@pytest.mark.slow
def test_a_trial_without_a_branch_is_asked_anew_when_its_step_is_not_kept_any_more(trial: Trial) -> None:
    trial.record.directory.mkdir(parents=True)
    trial.record.begin(trial.asked)
    move_on(trial.run)
    trial.asked = trial.asked.model_copy(update={"step": FROM + 1})
    with pytest.raises(UserError, match=r"the job in .* has ended"):
        trial.conduct()
    assert trial.record.asked == trial.asked
    assert {getattr(origin_of(trial.record.run_dir(side)), "step", None) for side in SIDES} == {FROM + 1}


@pytest.mark.slow
def test_a_newer_step_is_taken_if_the_run_removes_that_of_the_second_branch(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[str, int]]()

    def quick(job: Path, run_id: str, step: int, name: str, changes: dict[str, str]) -> RunConfig:
        if name == "trial-with" and step == FROM:
            move_on(trial.run)
        made.append((name, step))
        return branch(job, run_id, step, name, changes)

    branch = begin.branch
    monkeypatch.setattr(begin, "branch", quick)
    with pytest.raises(UserError, match=r"the job in .* has ended"):
        conduct(trial.job, trial.record, trial.asked, trial.said.append, of_newest=True)
    assert made == [(f"trial-{side}", step) for step in (FROM, FROM + 1) for side in SIDES]
    assert trial.record.asked == trial.asked.model_copy(update={"step": FROM + 1})
    assert {getattr(origin_of(trial.record.run_dir(side)), "step", None) for side in SIDES} == {FROM + 1}
    made.clear()
    with pytest.raises(UserError, match=r"the job in .* has ended"):
        conduct(trial.job, trial.record, trial.asked, trial.said.append, of_newest=True)
    assert made == [], "it is bound to the step of its branches"


@pytest.mark.slow
def test_a_trial_whose_second_branch_cannot_be_made_says_what_to_remove(trial: Trial) -> None:
    with pytest.raises(UserError, match=r"the job in .* has ended"):
        trial.conduct()
    for directory in (trial.record.run_dir("with"), trial.job / "trainer" / "trial-with"):
        shutil.rmtree(directory)
    move_on(trial.run)
    made = [trial.record.directory, trial.record.run_dir("without"), trial.job / "trainer" / "trial-without"]
    all_made = re.escape(", ".join(map(str, made)))
    trial.asked = trial.asked.model_copy(update={"step": FROM + 1})
    with pytest.raises(StepNotKept, match=rf"step {FROM} of run old was not kept.*remove {all_made}, or name"):
        trial.conduct()
    shutil.rmtree(trial.record.directory)
    with pytest.raises(UserError, match=rf"a branch of step {FROM}, and not of step {FROM + 1}: remove {all_made}"):
        trial.conduct()
    for directory in made:
        shutil.rmtree(directory)
    with pytest.raises(UserError, match=r"the job in .* has ended"):
        trial.conduct()
