"""`counterpoint run` around its job: what a resume says of changed keys, and what is done while the workers end."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from rich.console import Console

import counterpoint.cli.run
from counterpoint.cli.run import _next_commands
from counterpoint.cluster.manager.events import Outcome
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.supervision import Show, SupervisedJob
from counterpoint.run.changes import Change, write_journal
from counterpoint.run.evaluations import EvaluationConfig
from counterpoint.transport.files.atomic import publish_directory


def test_curves_are_prepared_once_when_the_runs_have_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(counterpoint.cli.run, "_prepare_curves", lambda: calls.append("prepared"))
    job = SimpleNamespace(histories={}, is_complete=False)

    def run(show: Show) -> Outcome:
        show([], [])
        assert not calls
        job.is_complete = True
        show([], [])
        show([], [])
        return Outcome(0, "done")

    job.run = run
    config = cast(JobConfig, SimpleNamespace(serve=None, tinker=None, output_dir=Path()))
    assert counterpoint.cli.run._run(cast(SupervisedJob, cast(Any, job)), config, Console()).code == 0
    assert calls == ["prepared"]


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_jobs_end_names_its_page_its_rollouts_and_its_evaluations(job_file: Path, evaluates: bool) -> None:
    config = load(JobConfig, job_file, [])
    run = config.orchestrator
    evaluation = EvaluationConfig.model_validate({"name": "held-out", "environments": run.environments})
    if evaluates:
        config = config.model_copy(
            update={"orchestrator": (run := run.model_copy(update={"evaluations": [evaluation]}))}
        )
    job = cast(SupervisedJob, SimpleNamespace(histories={run.run_id: History.of(config.output_dir, run.run_id)}))
    directory = config.output_dir
    commands = [f"counterpoint serve {directory}", f"counterpoint show {directory} --worst"]
    assert _next_commands(job, config, job_file) == commands, "there are no weights"
    with publish_directory(run.run_dir / "broadcast" / "step_3", durable=False) as weights:
        (weights / "model.safetensors").touch()
    evaluate = f"counterpoint eval {job_file} --checkpoint {run.run_dir / 'broadcast' / 'step_3'}"
    assert _next_commands(job, config, job_file) == commands + ([evaluate] if evaluates else [])


def test_a_resume_names_the_keys_that_have_changed(job_file: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    counterpoint.cli.run._print_changed_keys(load(JobConfig, job_file, []), console)
    assert console.file.getvalue() == "", "there is no job yet"  # type: ignore[attr-defined]
    before = load(JobConfig, job_file, ["--orchestrator.steps=7", "--max_restarts=1"])
    before.output_dir.mkdir(parents=True)
    (before.output_dir / "job.json").write_text(before.model_dump_json())
    counterpoint.cli.run._print_changed_keys(
        load(JobConfig, job_file, ["--orchestrator.steps=9", "--max_restarts=1", "--resume=true"]), console
    )
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert said == ["changed since the last start: orchestrator.steps: 7 → 9"]


def test_a_resume_names_no_key_that_has_no_value_before_and_after(job_file: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    config = load(JobConfig, job_file, [])
    config.output_dir.mkdir(parents=True)
    of_another_version = config.model_dump(mode="json", exclude={"sft", "max_restarts"})
    (config.output_dir / "job.json").write_bytes(orjson.dumps(of_another_version))
    counterpoint.cli.run._print_changed_keys(config, console)
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert said == ["changed since the last start: max_restarts: unset → 3"]


def test_a_resume_names_the_keys_of_a_table_that_was_none_and_not_the_table(job_file: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    config = load(JobConfig, job_file, [])
    config.output_dir.mkdir(parents=True)
    with_a_table = config.model_dump(mode="json") | {"sft": {"steps": 3}}
    (config.output_dir / "job.json").write_bytes(orjson.dumps(with_a_table))
    counterpoint.cli.run._print_changed_keys(config, console)
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert said == ["changed since the last start: sft.steps: 3 → unset"]


def test_a_resume_names_what_was_changed_while_the_run_was_trained(job_file: Path) -> None:
    console, key = Console(file=io.StringIO(), width=300), "training.learning_rate"
    config = load(JobConfig, job_file, ["--orchestrator.training.learning_rate=1e-4", "--resume=true"])
    (run_dir := config.orchestrator.run_dir / "control").mkdir(parents=True)
    counterpoint.cli.run._print_kept_changes(config, console)
    write_journal(run_dir.parent, [Change(request_id="a", step=3, changes={key: 2e-3}, given={key: 1e-4})])
    counterpoint.cli.run._print_kept_changes(config, console)
    edited = load(JobConfig, job_file, ["--orchestrator.training.learning_rate=3e-4", "--resume=true"])
    counterpoint.cli.run._print_kept_changes(edited, console)
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [key in line and "0.002" in line and "0.0001" in line for line in said] == [True], "an edit holds again"
