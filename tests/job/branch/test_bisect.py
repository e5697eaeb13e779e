"""What a bisection says before it begins, and what it says if it cannot; `tests/whole_job/test_bisect.py` plays a whole one."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from counterpoint.cli.main import main
from counterpoint.job.admin.ask import NotThere
from counterpoint.job.branch import bisect
from counterpoint.job.branch.configuration import branched_config
from counterpoint.job.branch.kept import StepNotKept
from counterpoint.job.directory import lock_file_of
from counterpoint.run.config import RunConfig
from counterpoint.trainer.runs.control_files import eviction
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.lock import take_lock
from tests.job.branch.test_begin import FROM, record_batches, with_trained, write_commits, write_original
from tests.support.jobs import shipped_line, write_lines


@pytest.fixture
def fallen(tmp_path: Path) -> RunConfig:
    """A run whose reward falls at step 5, of which the trainer has a checkpoint of step 2."""
    config = with_trained(write_original(tmp_path, tmp_path / "model"), FROM)
    write_commits(config, 4, 5)
    record_batches(config, 3, 4, 5)
    rewards = [0.9, 0.8, 0.9, 0.8, 0.1]
    lines = [shipped_line(step, 100.0 + step) | {"reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    (config.run_dir / "metrics.jsonl").unlink()
    write_lines(config.run_dir / "metrics.jsonl", lines)
    return config


def test_what_it_takes_is_said_and_nothing_is_begun(fallen: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    job = fallen.output_dir
    assert main(["bisect", "old", "--good", "1", "--bad", "5", "--steps", "2", "--job", str(job)]) == 0
    said = capsys.readouterr().out
    assert "reward/mean went bad at step 5 of run old: it was 0.9, and became 0.1" in said
    assert "8 rollouts of steps 3 to 4 may have done it" in said, "turns of step 4 are two steps old at most"
    assert "at most 4 branches after step 4" in said
    assert "up to 2 a branch, 8 in all; that are played: 2 a branch, 8 in all" in said
    assert "--start begins it" in said
    assert not list(job.glob("run_old-*"))


def test_steps_since_the_last_good_value_are_suspect_where_the_metric_has_gaps(fallen: RunConfig) -> None:
    """An environment's metrics exist only at steps that have trained it."""
    metric = "guess/reward/mean"
    lines = [shipped_line(step, 100.0 + step) | {"staleness/max": 1} for step in range(1, 6)]
    for step, reward in {1: 0.8, 3: 0.9, 5: 0.1}.items():
        lines[step - 1][metric] = reward
    (fallen.run_dir / "metrics.jsonl").unlink()
    write_lines(fallen.run_dir / "metrics.jsonl", lines)
    plan = bisect.plan(fallen.output_dir, "old", metric, 1, 5, 1)
    assert (plan.first, plan.last) == (3, 4)
    assert {each.partition("-")[0] for each in plan.suspects} == {"3", "4"}


def test_the_branches_of_a_run_with_a_long_id_have_names(fallen: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(bisect.plan(fallen.output_dir, "old", "reward/mean", 1, 5, 1), run_id="r" * 64)

    def refuse(job: Path, run_id: str, step: int, name: str, *more: object) -> None:
        raise UserError(branched_config(job, "old", step, name, {}).run_id)

    monkeypatch.setattr(bisect, "is_running", lambda job: True)
    monkeypatch.setattr(bisect, "branch", refuse)
    with pytest.raises(UserError, match=r"^r{50}-bisect-1$"):
        bisect.carry_out(plan, print)


def test_steps_that_were_not_kept_are_named(fallen: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    (fallen.run_dir / "rollouts" / "step_3" / "batch.bin").unlink()
    with pytest.raises(StepNotKept, match="train steps 3 to 4 again"):
        bisect.plan(fallen.output_dir, "old", "reward/mean", 1, 5, 1)
    assert main(["bisect", "old", "--good", "1", "--bad", "5", "--job", str(fallen.output_dir)]) == 3
    capsys.readouterr()


def test_a_job_that_does_not_run_and_a_branch_that_cannot_join_say_so(
    fallen: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = bisect.plan(fallen.output_dir, "old", "reward/mean", 1, 5, 1)
    with pytest.raises(UserError, match="does not run"):
        bisect.carry_out(plan, print)
    monkeypatch.setattr(bisect, "is_running", lambda job: True)
    with pytest.raises(NotThere, match="holds no job"):
        bisect.carry_out(plan, print)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["start", "_measured"])
def test_a_bisection_that_is_ended_evicts_its_branch(
    fallen: RunConfig, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, moment: str
) -> None:
    def ended(*_: object) -> None:
        signal.raise_signal(number)
        signal.raise_signal(number)  # as `timeout` and a terminal that closes send it

    monkeypatch.setattr(bisect, "is_running", lambda job: True)
    monkeypatch.setattr(bisect, "start", lambda *_: None)
    monkeypatch.setattr(bisect, moment, ended)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended_with:
        sys.exit(main(["bisect", "old", "--good", "1", "--bad", "5", "--start", "--job", str(fallen.output_dir)]))
    assert ended_with.value.code == 128 + number
    assert eviction(fallen.output_dir, "old-bisect-1")
    assert not (fallen.output_dir / "run_old-bisect-2").exists()
    assert signal.getsignal(number) is before


def test_branches_that_an_earlier_bisection_left_alive_are_named(
    fallen: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    job = fallen.output_dir
    locks = []
    for name in ("old-bisect-2", "old-bisect-2-bisect-1", "older-bisect-1"):
        (job / f"run_{name}" / "control").mkdir(parents=True)
        locks.append(take_lock(lock_file_of(job, name), "taken"))
    try:
        assert main(["bisect", "old", "--good", "1", "--bad", "5", "--job", str(job)]) == 0
    finally:
        for lock in locks:
            os.close(lock)
    said = capsys.readouterr().out
    (command,) = (line.partition("counterpoint ")[2] for line in said.splitlines() if "is alive" in line)
    assert command == f"stop old-bisect-2 --job {job} --evict bisected"
    assert main(command.split()) == 0, "it has ended by now"
    assert eviction(job, "old-bisect-2") == "bisected"
