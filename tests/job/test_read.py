"""A job's results as frames: every number of its files, joined by step."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tomli_w

import counterpoint
from counterpoint.transport.errors import UserError
from tests.support.synthetic_jobs import write_job


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_steps_have_what_both_files_say(tmp_path: Path) -> None:
    runs = write_job(tmp_path / "job", runs=2, steps=30)
    results = counterpoint.read(tmp_path / "job")
    assert results.runs == runs
    steps = results.steps()
    assert len(steps) == 2 * 30
    assert list(steps.columns[:2]) == ["run_id", "step"]
    of_second = results.steps(runs[1]).set_index("step")
    pd.testing.assert_frame_equal(
        of_second, steps[steps.run_id == runs[1]].set_index("step").dropna(axis="columns", how="all"), check_like=True
    )
    for line in lines_of(tmp_path / "job" / f"run_{runs[1]}" / "metrics.jsonl"):
        row = of_second.loc[line["step"]]
        numbers = {name: value for name, value in line.items() if type(value) in (int, float) and name != "step"}
        assert {name: row[name] for name in numbers} == numbers
    trained = [line for line in lines_of(tmp_path / "job/trainer/metrics.jsonl") if line["run_id"] == runs[1]]
    assert [of_second.loc[line["step"]]["loss"] for line in trained] == [line["loss"] for line in trained]
    assert [of_second.loc[line["step"]]["trainer/time"] for line in trained] == [line["time"] for line in trained]


def test_a_step_of_one_side_alone_is_a_row_and_a_line_that_is_no_step_is_not(tmp_path: Path) -> None:
    write_job(tmp_path / "job", steps=3)
    with open(tmp_path / "job/run_run-0000/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "time": 5.0, "reward/mean": 0.5, "step": 4}\n{"step": "5", "time": 1}\nnot a line\n')
    steps = counterpoint.read(tmp_path / "job").steps("run-0000").set_index("step")
    assert list(steps.index) == [1, 2, 3, 4]
    assert steps.loc[4, "reward/mean"] == 0.5
    assert pd.isna(steps.loc[4, "loss"])


def test_rollouts_and_evaluations(tmp_path: Path) -> None:
    write_job(tmp_path / "job", steps=2)
    run_dir = tmp_path / "job" / "run_run-0000"
    for step in (1, 2):
        directory = run_dir / "rollouts" / f"step_{step}"
        directory.mkdir(parents=True)
        (directory / "STABLE").touch()
        records = [
            {"rollout_id": f"{step}-{k}", "reward": k / 2, "turns": [{"completion_tokens": 3}]} for k in range(3)
        ]
        (directory / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    estimates = {"reward/mean": {"value": 0.5, "low": 0.25, "high": 0.75}, "sums/pass@1": {"value": 0.5, "n": 8}}
    played = {"evaluation": "held-out", "step": 2, "time": 9.0, "metrics": estimates}
    failed = {"evaluation": "held-out", "step": 3, "time": 10.0, "error": "no server"}
    (run_dir / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (played, failed)))
    results = counterpoint.read(str(tmp_path / "job"))
    rollouts = results.rollouts()
    assert list(rollouts.rollout_id) == ["1-0", "1-1", "1-2", "2-0", "2-1", "2-2"]
    assert rollouts.groupby("step").reward.mean().to_dict() == {1: 0.5, 2: 0.5}
    assert list(results.rollouts(steps=rollouts.step.max()).step.unique()) == [2]
    with pytest.raises(UserError, match="step 3"):
        results.rollouts(steps=[1, 3])
    evaluations = results.evaluations()
    assert list(evaluations.metric[:2]) == ["reward/mean", "sums/pass@1"]
    assert evaluations.loc[0, ["value", "low", "high"]].tolist() == [0.5, 0.25, 0.75]
    assert evaluations.error.tolist()[2] == "no server"


def test_a_directory_without_runs_and_a_run_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        counterpoint.read(tmp_path)
    write_job(tmp_path / "job", steps=2)
    with pytest.raises(UserError, match="'other'"):
        counterpoint.read(tmp_path / "job").steps("other")


def change(run_dir: Path, **values: Any) -> None:
    file = run_dir / "control" / "orch.toml"
    file.write_text(tomli_w.dumps(tomllib.loads(file.read_text()) | values))


def test_a_job_whose_runs_differ_has_a_column_for_each_key_that_does(tmp_path: Path) -> None:
    write_job(tmp_path / "job", runs=2, steps=3)
    change(tmp_path / "job/run_run-0000", training={"learning_rate": 1e-3}, seed=1)
    change(tmp_path / "job/run_run-0001", training={"learning_rate": 3e-4}, seed=1)
    results = counterpoint.read(tmp_path / "job")
    steps = results.steps()
    assert list(steps.columns[:3]) == ["run_id", "training.learning_rate", "step"]
    assert steps.groupby("training.learning_rate").run_id.unique().str[0].to_dict() == {
        1e-3: "run-0000", 3e-4: "run-0001",
    }  # fmt: skip
    assert results.config.set_index("run_id").loc["run-0001", ["seed", "model"]].tolist() == [1, "tiny-moe"]
    assert "training.learning_rate" not in write_and_read(tmp_path / "same").steps()


def write_and_read(directory: Path) -> Any:
    write_job(directory, runs=2, steps=2)
    return counterpoint.read(directory)


def test_the_folder_of_a_sweep_is_one_frame(tmp_path: Path) -> None:
    """Of jobs whose runs have one name, in the folder that has the sweep's name or the one above."""
    for number, rate in enumerate((1e-3, 3e-4)):
        write_job(tmp_path / "all" / "lr" / f"target-{number}", steps=3, seed=number)
        change(
            tmp_path / "all" / "lr" / f"target-{number}" / "run_run-0000",
            training={"learning_rate": rate},
            reward=number,
        )
    for folder, above in ((tmp_path / "all" / "lr", ""), (tmp_path / "all", "lr/")):
        results = counterpoint.read(folder)
        assert results.runs == [f"{above}target-0/run-0000", f"{above}target-1/run-0000"]
        steps = results.steps()
        assert set(steps.columns[2:4]) == {"training.learning_rate", "reward"}
        assert len(steps) == 6
        assert steps[steps.job == f"{above}target-1"]["training.learning_rate"].tolist() == [3e-4] * 3
        assert len(results.steps(f"{above}target-1/run-0000")) == 3
        with pytest.raises(UserError, match="target-2"):
            results.steps(f"{above}target-2/run-0000")
    shown = results.plot("loss")
    assert len(shown.get_lines()) == 2
    assert shown.get_lines()[1].get_ydata().tolist() == steps[steps.job == "lr/target-1"].loss.tolist()
    assert ["0.0003" in text.get_text() for text in shown.get_legend().get_texts()] == [False, True]
    with pytest.raises(UserError, match="reward/mean"):
        results.plot("reward/maen")


def test_a_key_with_the_name_of_a_metric_is_not_lost(tmp_path: Path) -> None:
    write_job(tmp_path / "job", runs=2, steps=2)
    change(tmp_path / "job/run_run-0000", loss="own")
    steps = counterpoint.read(tmp_path / "job").steps()
    assert steps[steps.run_id == "run-0000"]["config/loss"].tolist() == ["own"] * 2
    assert steps.loss.dtype == float
