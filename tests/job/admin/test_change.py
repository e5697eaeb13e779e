"""A change is held against what the job's servers can take, as the file is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from counterpoint.cli.main import main
from counterpoint.job.admin.ask import NotAnswered, Refused
from counterpoint.job.admin.change import change_run
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load, to_toml
from counterpoint.run.requests import ChangeRequest
from counterpoint.transport.files.lock import take_lock


@pytest.fixture
def job(job_file: Path, tmp_path: Path) -> Iterator[Path]:
    config = load(JobConfig, job_file, ["--inference.max_model_len=256"])
    directory = tmp_path / "job"
    run = directory / f"run_{config.orchestrator.run_id}"
    (run / "control").mkdir(parents=True)
    (run / "control" / "orch.toml").write_text(to_toml(config.orchestrator))
    (directory / "job.json").write_bytes(orjson.dumps(config.model_dump(mode="json")))
    lock = take_lock(run / "orchestrator.lock", "taken")
    yield directory
    os.close(lock)


def test_completions_that_leave_no_room_for_a_prompt_are_refused_and_nothing_is_asked(job: Path) -> None:
    (run_id,) = (path.name.removeprefix("run_") for path in job.glob("run_*"))
    changes = {"sampling.temperature": 0.5, "sampling.max_tokens": 256}
    expected = r"^sampling\.max_tokens = 256 leaves no room for a prompt in inference\.max_model_len = 256$"
    with pytest.raises(Refused, match=expected):
        change_run(job, run_id, ChangeRequest(changes=changes))
    assert not (job / f"run_{run_id}" / "control" / "requests").exists()
    with pytest.raises(NotAnswered):
        change_run(job, run_id, ChangeRequest(changes=changes | {"sampling.max_tokens": 255}), 0.0)
    with pytest.raises(NotAnswered):  # what else is wrong is for the run to say
        change_run(job, run_id, ChangeRequest(changes={"sampling.max_tokens": "many"}), 0.0)


@pytest.mark.parametrize(
    "value", ["NaN", "[Infinity]", "-" + "9" * 4300, "\udcff", "[" * 300 + "]" * 300], ids=lambda value: value[:9]
)
def test_a_value_that_json_does_not_have_is_refused_and_never_null(
    job: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["change", "a", f"sampling.top_k={value}", "--job", str(job), "--timeout", "0"]) == 2
    assert "changes: " in capsys.readouterr().err


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000], ids=["digits", "depth"])
def test_what_python_reads_as_no_json_is_a_word(job: Path, value: str) -> None:
    (run,) = job.glob("run_*")
    asked = ["change", run.name.removeprefix("run_"), f"sampling.top_k={value}", "--job", str(job), "--timeout", "0"]
    assert main(asked) == 1, "it is for the run to refuse"
