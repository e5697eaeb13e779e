"""`counterpoint try` in a real job finds a change that does harm, whatever is killed in the middle: the command, the trainer, a
branch's orchestrator, the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from counterpoint.job.directory import is_running, living_runs, orchestrator_of
from counterpoint.job.reading.rollouts.rollout_records import read_records
from counterpoint.job.trial.ask import trial_name
from counterpoint.job.trial.decisions import SIDES, HeldOut, TrialDecisions
from counterpoint.job.trial.record import TrialRecord
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import published_steps
from counterpoint.verify.report import SOUND
from counterpoint.verify.run import verify
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.running_job import RunningJob, settings, steps_of
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ENVIRONMENTS = [{"name": "reverse", "kind": "reverse-text"}]


def write_job(directory: Path, server: ServerProcess) -> Path:
    """One run without an end, with two evaluations, and places for two more. By so few examples, a change that does all the harm
    that it can is found after four comparisons, so that something can be killed before."""
    job = settings(directory / "output", max_restarts=3, server=server, steps=10_000)
    job["trainer"] |= {"max_runs": 3, "keep_checkpoints": 10}
    own = job["orchestrator"]
    own |= {"run_id": "main", "environments": ENVIRONMENTS, "keep_checkpoints": 10}
    own["schedule"] |= {"max_inflight_rollouts": 16}
    own["training"] = {"learning_rate": 1e-4, "checkpoint_interval": 2, "lora": {"rank": 8}}
    held = [{"name": "reverse", "kind": "reverse-text", "args": {"seed": 1}}]
    own["evaluations"] = [
        {"name": name, "interval": 1000, "examples": 8, "environments": held} for name in ("held", "other")
    ]
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(job))
    return file


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "counterpoint.cli.main", "try", *words]


def play(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    return done.returncode, done.stdout, done.stderr


def trial_of(output: Path, evaluation: str) -> tuple[TrialRecord, tuple[str, ...]]:
    """The trial of a learning rate that does harm, by an evaluation, and what is asked for it."""
    changes = {"training.learning_rate": "0.1"}
    record = TrialRecord(output, trial_name("main", changes, 1_000_000, None, evaluation))
    words = [f"{key}={value}" for key, value in changes.items()]
    asked = ("main", *words, "--tokens", "1M", "--evaluation", evaluation, "--job", str(output), "--json")
    return record, asked


def measured(record: TrialRecord) -> Iterator[HeldOut]:
    if (record.directory / "measured.jsonl").exists():
        yield from record.measurements()


def drawn(output: Path, run_id: str) -> dict[int, int]:
    """The examples of the groups that a branch has trained, by the groups' numbers."""
    steps = published_steps(output / f"run_{run_id}" / "rollouts")
    records = [record.fields for step in steps for record in read_records(output, run_id, step)]
    return {record["group_id"]: record["example_index"] for record in records}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, adapter_server: ServerProcess) -> Iterator[list[RunningJob]]:
    """The job of these tests, which has kept a step; one that is resumed is appended."""
    directory = tmp_path_factory.mktemp("trials")
    jobs = [RunningJob(write_job(directory, adapter_server), directory / "output")]
    try:
        kept = directory / "output" / "trainer" / "main" / "checkpoints" / "step_4" / "STABLE"
        jobs[0].wait_for("a kept step", kept.exists)
        yield jobs
    finally:
        for job in jobs:
            job.end()


def assert_sound(record: TrialRecord, printed: str) -> None:
    """Asserts that the change was found to do harm, by the recorded measurements, each of which is there once."""
    found, verdict = json.loads(printed), record.verdict
    assert (found["try"], found["verdict"], found["difference"]["high"] < -0.02) == (record.name, "worse", True), (
        printed
    )
    decisions = TrialDecisions(found["asked"]["step"], found["asked"]["tokens"])
    for each in record.measurements():
        decisions.measured(each)
    assert decisions.verdict is not None
    assert verdict is not None
    assert verdict == replace(decisions.verdict, tokens=verdict.tokens)
    assert verdict.tokens >= decisions.verdict.tokens, "and what was used until both branches had ended"
    keys = [(each.side, each.step) for each in record.measurements()]
    assert len({*keys}) == len(keys), "each evaluation once, though a process was killed"


def test_a_change_that_does_harm_is_found_though_the_command_is_killed(jobs: list[RunningJob]) -> None:
    job = jobs[-1]
    output = job.output_dir
    for wrong, code, words in [
        (("main", "evaluations.0.interval=3"), 2, "evaluations.0.interval cannot be tried"),
        (("main", "environments.0.args.nonsense=1"), 2, "nonsense"),
        (("main", "sampling.max_tokens=5000"), 2, "sampling.max_tokens = 5000 leaves no room"),
        (("main", "seed=3"), 2, "seed cannot be another"),
        (("main", "--step", "9999"), 3, "step 9999 of run main was not kept"),
        (("other",), 2, "there is no run 'other'"),
    ]:
        refused = play(*wrong, "--tokens", "1M", "--job", str(output))
        assert (refused[0], words in refused[2]) == (code, True), refused
    record, asked = trial_of(output, "held")
    assert not record.directory.exists()

    first = subprocess.Popen(command(*asked), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    job.wait_for("a measurement", lambda: bool([*measured(record)]))
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    wait_until(lambda: living_runs(output) == ["main"], "the branches' end")

    code, printed, errors = play(*asked)
    assert code == 0, printed + errors
    assert_sound(record, printed)
    assert living_runs(output) == ["main"]
    plain, changed = (drawn(output, record.branch(side)) for side in SIDES)
    common = plain.keys() & changed.keys()
    assert {group: plain[group] for group in common} == {group: changed[group] for group in common} != {}

    code, again, errors = play(*asked)
    assert (code, errors) == (0, "")
    assert json.loads(again) | {"seconds": 0} == json.loads(printed) | {"seconds": 0}
    made = len(steps_of(output / "run_main" / "metrics.jsonl"))
    job.wait_for("the run's next step", lambda: len(steps_of(output / "run_main" / "metrics.jsonl")) > made)


def test_it_is_found_though_trainer_branch_and_supervisor_are_killed(jobs: list[RunningJob], tmp_path: Path) -> None:
    job = jobs[-1]
    output = job.output_dir
    record, asked = trial_of(output, "other")
    with (tmp_path / "errors.txt").open("wb") as errors:
        trial = subprocess.Popen(command(*asked), stdout=subprocess.DEVNULL, stderr=errors)
    job.wait_for("a measurement", lambda: bool([*measured(record)]))
    job.wait_for("the branch", lambda: orchestrator_of(output, record.branch("with")) is not None)
    branch = orchestrator_of(output, record.branch("with"))
    assert branch is not None
    made = [len(steps_of(record.run_dir(side) / "metrics.jsonl")) for side in SIDES]
    for pid in (job.pid_of("counterpoint.cli.main trainer"), branch.pid):
        os.kill(pid, signal.SIGKILL)
    job.wait_for(
        "a branch's next steps",
        lambda: any(
            len(steps_of(record.run_dir(side) / "metrics.jsonl")) > before + 1
            for side, before in zip(SIDES, made, strict=True)
        ),
    )
    job.process.kill()
    assert trial.wait(DEADLINE_SECONDS) == UserError.code, "there is no verdict yet"
    assert "has ended; start it with --resume" in (tmp_path / "errors.txt").read_text()
    jobs.append(resumed := RunningJob(job.config_file, output, ("--resume",)))
    resumed.wait_for(
        "the resumed job's lock", lambda: is_running(output)
    )  # the killed one's roles may still commit a step
    made_before = len(steps_of(output / "run_main" / "metrics.jsonl"))
    resumed.wait_for("the run's next step", lambda: len(steps_of(output / "run_main" / "metrics.jsonl")) > made_before)
    code, printed, said = play(*asked)
    assert code == 0, printed + said
    assert_sound(record, printed)
    for side in SIDES:
        steps = steps_of(record.run_dir(side) / "metrics.jsonl")
        assert steps == sorted({*steps}), f"the branch {side} the change made a step twice"
        report = verify(record.run_dir(side))
        assert report.code == SOUND, report.text()
