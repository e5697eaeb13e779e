"""`counterpoint try` in a real job: the command is killed in the middle, asked again, and finds a change that does harm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from counterpoint.job.directory import living_runs
from counterpoint.job.reading.rollouts.rollout_records import read_records
from counterpoint.job.trial.decisions import SIDES, TrialDecisions
from counterpoint.job.trial.record import TrialRecord
from counterpoint.transport.files.atomic import published_steps
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.running_job import RunningJob, settings, steps_of
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ENVIRONMENTS = [{"name": "reverse", "kind": "reverse-text"}]


def write_job(directory: Path, server: ServerProcess) -> Path:
    """One run without an end, with held-out examples, and places for two more."""
    job = settings(directory / "output", server=server, steps=10_000)
    job["trainer"]["max_runs"] = 3
    own = job["orchestrator"]
    own |= {"run_id": "main", "environments": ENVIRONMENTS, "keep_checkpoints": 10}
    own["schedule"] |= {"max_inflight_rollouts": 16}
    own["training"] = {"learning_rate": 1e-4, "checkpoint_interval": 2, "lora": {"rank": 8}}
    held = [{"name": "reverse", "kind": "reverse-text", "args": {"seed": 1}}]
    own["evaluations"] = [{"name": "held", "interval": 1000, "examples": 100, "environments": held}]
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(job))
    return file


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "counterpoint.cli.main", "try", *words]


def play(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    return done.returncode, done.stdout, done.stderr


def replayed(record: TrialRecord, step: int, tokens: int) -> TrialDecisions:
    decisions = TrialDecisions(step, tokens)
    for each in record.measurements():
        decisions.measured(each)
    return decisions


def drawn(output: Path, run_id: str) -> dict[int, int]:
    """The examples of the groups that a branch has trained, by the groups' numbers."""
    steps = published_steps(output / f"run_{run_id}" / "rollouts")
    records = [record.fields for step in steps for record in read_records(output, run_id, step)]
    return {record["group_id"]: record["example_index"] for record in records}


def test_a_change_that_does_harm_is_found_though_the_command_is_killed(
    tmp_path: Path, adapter_server: ServerProcess
) -> None:
    job = RunningJob(write_job(tmp_path, adapter_server), tmp_path / "output")
    output = job.output_dir
    asked = ("main", "training.learning_rate=0.1", "--tokens", "1M", "--job", str(output), "--json")
    try:
        job.wait_for("a kept step", (output / "trainer" / "main" / "checkpoints" / "step_4" / "STABLE").exists)
        for wrong, code, words in [
            (("main", "evaluations.0.interval=3"), 2, "evaluations.0.interval cannot be tried"),
            (("main", "environments.0.args.nonsense=1"), 2, "nonsense"),
            (("main", "sampling.max_tokens=5000"), 2, "sampling.max_tokens = 5000 leaves no room"),
            (("main", "seed=3"), 2, "seed cannot be another"),
            (("main", "--step", "9999"), 3, "step 9999 of run main was not kept"),
            (("other",), 2, "there is no run 'other'"),
        ]:
            found = play(*wrong, "--tokens", "1M", "--job", str(output))
            assert (found[0], words in found[2]) == (code, True), found
        assert not (output / "tries").exists()

        first = subprocess.Popen(command(*asked), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        measured = "tries/*/measured.jsonl"
        job.wait_for("a measurement", lambda: any(path.stat().st_size for path in output.glob(measured)))
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        wait_until(lambda: living_runs(output) == ["main"], "the branches' end")

        code, printed, errors = play(*asked)
        assert code == 0, printed + errors
        found_there = json.loads(printed)
        assert (found_there["verdict"], found_there["difference"]["high"] < -0.02) == ("worse", True), printed + errors
        record = TrialRecord(output, found_there["try"])
        decisions = replayed(record, found_there["asked"]["step"], 10**6)
        assert decisions.verdict is not None
        assert record.verdict is not None
        assert record.verdict == replace(decisions.verdict, tokens=record.verdict.tokens)
        assert record.verdict.tokens >= decisions.verdict.tokens, "and what was used until both branches had ended"
        keys = [(each.side, each.step) for each in record.measurements()]
        assert len({*keys}) == len(keys), "each evaluation once, though one process was killed"
        assert living_runs(output) == ["main"]
        plain, changed = (drawn(output, record.branch(side)) for side in SIDES)
        common = plain.keys() & changed.keys()
        assert {group: plain[group] for group in common} == {group: changed[group] for group in common} != {}

        code, again, errors = play(*asked)
        assert (code, errors) == (0, "")
        assert json.loads(again) | {"seconds": 0} == found_there | {"seconds": 0}
        made = len(steps_of(output / "run_main" / "metrics.jsonl"))
        job.wait_for("the run's next step", lambda: len(steps_of(output / "run_main" / "metrics.jsonl")) > made)
    finally:
        job.end()
