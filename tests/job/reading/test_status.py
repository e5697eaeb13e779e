"""The status of a job that is read again and again: equal to that of a fresh reader, from what the files gained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from counterpoint.job.reading.status import StatusReader, read_status
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import parse_json
from tests.support.jobs import shipped_line, write_lines


def add_steps(output: Path, run_id: str, *steps: int) -> None:
    write_lines(output / f"run_{run_id}" / "metrics.jsonl", [shipped_line(step, 100.0 + step) for step in steps])


def test_each_look_finds_what_a_fresh_reader_does(tmp_path: Path) -> None:
    reader = StatusReader(tmp_path)
    with pytest.raises(UserError, match="holds neither a job"):
        reader.read()
    add_steps(tmp_path, "a", 1, 2)
    assert reader.read().as_json() == read_status(tmp_path).as_json()
    add_steps(tmp_path, "a", 3)
    add_steps(tmp_path, "b", 1)
    assert [run["step"] for run in reader.read().as_json()["runs"]] == [3, 1]
    shutil.rmtree(tmp_path / "run_a")
    assert [run["run_id"] for run in reader.read().as_json()["runs"]] == ["b"]
    add_steps(tmp_path, "a", 1)
    status = reader.read().as_json()
    assert status == read_status(tmp_path).as_json()
    assert [run["step"] for run in status["runs"]] == [1, 1]


def test_a_driven_run_has_the_step_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "run_one" / "control").mkdir(parents=True)
    (tmp_path / "run_one" / "control" / "orch.toml").write_text('run_id = "one"\ndriven = true\n')
    (tmp_path / "trainer" / "one" / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "trainer" / "one" / "checkpoints" / "step_2" / "STABLE").touch()
    reader, file = StatusReader(tmp_path), tmp_path / "trainer" / "runs.json"
    for runs, step in (([], 2), ([{"run": "one", "step": 7}], 7), ([{"run": "one", "step": None}], 2)):
        file.write_text(json.dumps({"runs": runs}))
        [run] = reader.read().as_json()["runs"]
        assert run["trained"] == step
        assert reader.read().histories["one"].progress == f"{step}/?"


def test_a_further_look_parses_new_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def counted(text: bytes) -> dict[str, object]:
        parsed.append(text)
        return parse_json(text)

    monkeypatch.setattr("counterpoint.job.reading.metrics.metrics_lines.object_in", counted)
    add_steps(tmp_path, "a", *range(1, 51))
    reader = StatusReader(tmp_path)
    reader.read()
    assert len(parsed) == 50
    add_steps(tmp_path, "a", 51)
    assert reader.read().histories["a"].step == 51
    assert len(parsed) == 51


def test_a_notebook_shows_the_runs_and_nothing_that_they_inject(tmp_path: Path) -> None:
    add_steps(tmp_path / "<script>", "a", 1, 2)
    status = read_status(tmp_path / "<script>")
    shown = status._repr_html_()
    (run,) = status.as_json()["runs"]
    assert f"<td>{run['state']}</td>" in shown
    assert "<td>a</td>" in shown
    assert f"<td>{run['metrics']['reward/mean']:.4g}</td>" in shown
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown
