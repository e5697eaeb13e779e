"""What a bisection says before it begins, and what it says if it cannot; `tests/whole_job/test_bisect.py` plays a whole one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from counterpoint.cli.main import main
from counterpoint.job.admin import orchestrator_process
from counterpoint.job.admin.ask import Refused
from counterpoint.job.branch import bisect, played
from counterpoint.job.branch.bisection import Narrowed
from counterpoint.job.branch.configuration import branched_config
from counterpoint.job.branch.kept import StepNotKept
from counterpoint.job.branch.played import PlayedBranch
from counterpoint.job.directory import lock_file_of
from counterpoint.run.branches import BRANCH_FILE
from counterpoint.run.config import RunConfig
from counterpoint.trainer.runs.control_files import evict
from counterpoint.trainer.work.batch_parts import part
from counterpoint.transport import codec
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import publish_directory, remove_directory
from counterpoint.transport.files.lock import take_lock
from tests.job.branch.test_begin import FROM, record_batches, with_trained, write_commits, write_original
from tests.support.jobs import shipped_line, write_lines
from tests.trainer.conftest import make_batch


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
    (tmp_path / "job.json").write_text('{"trainer": {"max_runs": 2}}')
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

    monkeypatch.setattr(played, "is_running", lambda job: True)
    monkeypatch.setattr(bisect, "branch", refuse)
    with pytest.raises(UserError, match=r"^r{50}-bisect-1$"):
        bisect.carry_out(plan, print)


def test_steps_that_were_not_kept_are_named(fallen: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    (fallen.run_dir / "rollouts" / "step_3" / "batch.bin").unlink()
    with pytest.raises(StepNotKept, match="train steps 3 to 4 again"):
        bisect.plan(fallen.output_dir, "old", "reward/mean", 1, 5, 1)
    assert main(["bisect", "old", "--good", "1", "--bad", "5", "--job", str(fallen.output_dir)]) == 3
    capsys.readouterr()


def test_a_step_of_one_rollout_cannot_be_left_out(fallen: RunConfig) -> None:
    remove_directory(fallen.run_dir / "rollouts" / "step_4")
    with publish_directory(fallen.run_dir / "rollouts" / "step_4") as directory:
        codec.write_file(directory / "batch.bin", part(make_batch(4, run_id="old"), [2]))
    with pytest.raises(UserError, match=r"step 4 has trained rollout 4-2 alone, .* branch from step 3"):
        bisect.plan(fallen.output_dir, "old", "reward/mean", 1, 5, 1)


@pytest.mark.parametrize(("found", "code"), [(("3-1",), 0), ((), 1)])
def test_how_to_remove_the_branches_is_said_at_the_end(
    fallen: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: tuple[str, ...],
    code: int,
) -> None:
    job = fallen.output_dir
    for name in ("old-bisect-1", "old-bisect-2", "old-bisect-notes", "other"):
        with_trained(fallen.model_copy(update={"run_id": name}), 2)
        (job / f"run_{name}").mkdir()
        (job / f"run_{name}" / BRANCH_FILE).write_text('{"run": "old", "step": 2, "trained": 2}')
    monkeypatch.setattr(bisect, "carry_out", lambda *_: Narrowed(found))
    assert main(["bisect", "old", "--good", "1", "--bad", "5", "--start", "--job", str(job)]) == code
    (command,) = (
        line.partition("needed: ")[2] for line in capsys.readouterr().out.splitlines() if "stay on the disk" in line
    )
    subprocess.run(command, shell=True, check=True, timeout=60)
    assert not [*job.rglob("*old-bisect-[0-9]*")]
    assert {path.name for path in job.glob("run_*")} == {"run_old", "run_old-bisect-notes", "run_other"}


def test_a_job_that_does_not_run_is_said_before_a_branch_is_made(fallen: RunConfig) -> None:
    with pytest.raises(UserError, match="has ended; start it with --resume"):
        bisect.carry_out(bisect.plan(fallen.output_dir, "old", "reward/mean", 1, 5, 1), print)
    assert not list(fallen.output_dir.glob("run_old-*"))


def test_a_job_without_a_place_for_a_branch_is_said_before_one_is_made(live: RunConfig) -> None:
    job = live.output_dir
    locks = [take_lock(lock_file_of(job, name), "taken") for name in ("old", "other")]
    try:
        with pytest.raises(
            Refused, match=r"trainer\.max_runs = 2, and 2 runs are alive \(old, other\): .* no place for 1 more"
        ):
            bisect.carry_out(bisect.plan(job, "old", "reward/mean", 1, 5, 1), print)
    finally:
        for lock in locks:
            os.close(lock)
    assert not list(job.glob("run_old-*"))


PLAYING = """
import json, sys, time, tomllib
from pathlib import Path

run = tomllib.loads(Path(sys.argv[1]).read_text())
directory = Path(run["output_dir"]) / ("run_" + run["run_id"])
(directory / "control").mkdir(exist_ok=True)
if (directory / "waits").exists():
    time.sleep(1000)
origin = json.loads((directory / "branch.json").read_bytes())
line = {"step": origin["step"] + 1, "time": 1.0, "staleness/max": 1}
line["reward/mean"] = 0.8 if "4-3" in origin["without"] else 0.1
with (directory / "metrics.jsonl").open("a") as file:
    print(json.dumps(line), file=file)
time.sleep(1000)
"""
"""An orchestrator that plays a step, without rollout 4-3 a good one; in a directory with a file `waits`, nothing."""


@pytest.fixture
def live(fallen: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunConfig:
    """The job of the fallen run, which seems to run; its branches' orchestrators are `PLAYING`."""
    program = tmp_path / "orchestrator.py"
    program.write_text(PLAYING)
    monkeypatch.setattr(orchestrator_process, "PROGRAM", (sys.executable, str(program)))
    monkeypatch.setattr(played, "is_running", lambda job: True)
    return fallen


@pytest.mark.slow
def test_the_same_bisection_goes_on_with_what_was_played(live: RunConfig) -> None:
    """Ended after its first branch, it plays the others alone; asked once more, none. Another run's branches do not count."""
    job, said = live.output_dir, list[str]()
    plan = bisect.plan(job, "old", "reward/mean", 1, 5, 1)

    class Ended(Exception):
        pass

    def end(words: str) -> None:
        raise Ended(words)

    with pytest.raises(Ended, match="run old-bisect-1, without 4 rollouts"):
        bisect.carry_out(plan, end)
    found = bisect.carry_out(plan, said.append)
    assert found.rollouts == ("4-3",)
    assert [words.split(",")[0] for words in said] == [f"run old-bisect-{number}" for number in range(1, 5)]
    names = sorted(each.name for each in job.glob("run_old-bisect-*"))
    assert len(names) == 4
    assert bisect.carry_out(plan, print) == found
    assert sorted(each.name for each in job.glob("run_old-bisect-*")) == names
    origin = job / "run_old-bisect-1" / BRANCH_FILE
    origin.write_text(origin.read_text().replace('"run":"old"', '"run":"older"'))
    said.clear()
    assert bisect.carry_out(plan, said.append) == found
    assert said[0].startswith("run old-bisect-5, without 4 rollouts")
    evict(job, "old-bisect-5", "not this one")
    assert bisect.carry_out(plan, said.append) == found
    assert (job / "run_old-bisect-6").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_bisection_that_is_ended_ends_its_branch_which_goes_on_later(
    live: RunConfig, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    job, looks = live.output_dir, list[PlayedBranch]()

    def look(branch: PlayedBranch) -> None:
        if not looks:
            (branch.config.run_dir / "waits").touch()
        looks.append(branch)
        original(branch)
        if len(looks) == 2:
            signal.raise_signal(number)
            signal.raise_signal(number)  # as `timeout` and a terminal that closes send it

    original = PlayedBranch.look
    monkeypatch.setattr(PlayedBranch, "look", look)
    before = signal.getsignal(number)
    asked = ["bisect", "old", "--good", "1", "--bad", "5", "--start", "--job", str(job)]
    with pytest.raises(SystemExit) as ended_with:
        sys.exit(main(asked))
    assert ended_with.value.code == 128 + number
    assert not looks[-1].is_alive()
    assert signal.getsignal(number) is before
    assert [each.name for each in job.glob("run_old-bisect-*")] == ["run_old-bisect-1"]
    (job / "run_old-bisect-1" / "waits").unlink()
    assert main(asked) == 0
    assert len([*job.glob("run_old-bisect-*")]) == 4
