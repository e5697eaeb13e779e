"""rldoctor, as others run it, reads the log of a run, and most of its checks have what they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w
from rl_doctor import Severity, diagnose, load_run

from counterpoint.transport.files.json_lines import append_lines
from examples.rldoctor.log import log_of
from tests.orchestrator.early_warnings.recorded import recorded

OF_TRAINER = ("entropy", "ess/", "masked_share", "grad_")
"""What the names of the trainer's metrics begin with, in a recorded line."""


def job_of(name: str, directory: Path) -> Path:
    """A job's directory with the metrics of a recorded run, in the files of both sides."""
    run_dir = directory / "run_one"
    (run_dir / "control").mkdir(parents=True)
    (directory / "trainer").mkdir()
    config = {"steps": 45, "schedule": {"group_size": 8}}
    (run_dir / "control" / "orch.toml").write_text(tomli_w.dumps(config))
    lines = recorded(name)
    trained = [
        {"run_id": "one", **{name: line[name] for name in line if name == "step" or name.startswith(OF_TRAINER)}}
        for line in lines
    ]
    shipped = [{name: line[name] for name in line if not name.startswith(OF_TRAINER)} for line in lines]
    append_lines(directory / "trainer/metrics.jsonl", [{"run_id": "two", "step": 1, "entropy": 9.0}, *trained])
    append_lines(run_dir / "metrics.jsonl", shipped)
    return directory


@pytest.mark.parametrize(
    ("run", "named"),
    [("constant_answer_wins", {"reward_hacking"}), ("limit_of_4_tokens", {"length_pathology"}), ("healthy_0", set())],
)
def test_rldoctor_reads_a_run_and_skips_two_of_its_nine_checks(run: str, named: set[str], tmp_path: Path) -> None:
    lines = list(log_of(job_of(run, tmp_path / "job"), "one"))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    findings = diagnose(load_run(str(tmp_path / "log.jsonl"))).findings
    assert len(findings) == 9
    skipped = {found.detector for found in findings if found.severity is Severity.SKIPPED}
    assert skipped == {"kl_drift", "reward_composition"}  # without a reference, and without a rubric
    assert named <= {found.detector for found in findings if found.severity is Severity.CRITICAL}


def test_the_parts_of_a_rubric_and_the_reference_are_told(tmp_path: Path) -> None:
    """Then no check is skipped."""
    job = job_of("healthy_0", tmp_path / "job")
    own = job / "run_one" / "metrics.jsonl"
    lines = [json.loads(text) for text in own.read_text().splitlines()]
    own.unlink()
    head = "environment/math/"
    parts = [
        {
            f"{head}total/mean": 0.5,
            f"{head}right/mean": 0.01 * line["step"],
            f"{head}brief/mean": 0.2,
            f"{head}a/b/mean": 1.0,
        }
        for line in lines
    ]
    append_lines(own, [line | part | {"reference_kl": 0.1} for line, part in zip(lines, parts, strict=True)])
    told = list(log_of(job, "one"))[-1]
    assert {name for name in told if name.startswith("rewards/")} == {
        "rewards/math.right/mean",
        "rewards/math.brief/mean",
    }
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log_of(job, "one")))
    findings = diagnose(load_run(str(tmp_path / "log.jsonl"))).findings
    assert [found.detector for found in findings if found.severity is Severity.SKIPPED] == []
