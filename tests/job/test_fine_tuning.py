"""`[sft]` in a job's file: what it takes from the job, what is refused, and what the runs begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from counterpoint.cli.main import main
from counterpoint.job import fine_tuning
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import merge
from counterpoint.job.derive import sft_of
from counterpoint.job.fine_tuning import LOG, as_begun, begun_with, check_resumed, fine_tune
from counterpoint.job.reading.fine_tuning import fine_tuning_of
from counterpoint.transport.errors import UserError

ROWS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]


def job_of(directory: Path, **changes: Any) -> JobConfig:
    table: dict[str, Any] = {
        "output_dir": str(directory),
        "model": "tiny-dense",
        "seed": 5,
        "sft": {"epochs": 2, "data": {"rows": ROWS}, "training": {"learning_rate": 1e-3}},
        "inference": {"max_model_len": 256},
        "trainer": {"device": "cpu", "max_tokens": 512, "max_runs": 3},
        "orchestrator": {
            "steps": 2,
            "sampling": {"max_tokens": 16},
            "environments": [{"name": "reverse", "kind": "reverse-text"}],
            "training": {"learning_rate": 1e-5, "lora": {"rank": 4, "alpha": 7.0}},
        },
    }
    return JobConfig.model_validate(merge(table, changes))


ALL_WEIGHTS = {"orchestrator": {"training": {"lora": None}}, "trainer": {"max_runs": 1}}


def test_it_has_the_model_the_trainer_and_the_adapter_of_the_job(tmp_path: Path) -> None:
    config = sft_of(job_of(tmp_path))
    assert (config.model, config.seed, config.output_dir, config.epochs) == ("tiny-dense", 5, tmp_path / "sft", 2)
    assert (config.trainer.device, config.trainer.max_tokens, config.trainer.max_runs) == ("cpu", 512, 1)
    assert config.training.learning_rate == 1e-3, "not that of the rollouts"
    assert config.training.lora is not None
    assert (config.training.lora.rank, config.training.lora.alpha) == (4, 7.0)
    assert sft_of(job_of(tmp_path, **ALL_WEIGHTS)).training.lora is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"sft": {"training": {"epochs": 2, "updates_per_step": 2}}},
            r"sft: training\.updates_per_step has no meaning",
        ),
        ({"sft": {"max_length": 4096}}, r"sft: max_length = 4096 is more than trainer\.max_tokens = 512"),
        ({"sft": {"model": "other"}}, r"model"),
        ({"trainer": {"nodes": 2}}, r"sft: trainer\.nodes = 2"),
        ({"runs": [{"run_id": "a", "training": {"lora": {"rank": 8}}}]}, r"run 'a' has another lora"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=said):
        job_of(tmp_path, **changes)


def test_every_run_begins_with_the_adapter_or_the_model(tmp_path: Path) -> None:
    weights = tmp_path / "step_3"
    runs = {"runs": [{"run_id": "a"}, {"run_id": "b", "training": {"start_from": {"run": "a", "step": 1}}}]}
    begun = begun_with(job_of(tmp_path, **runs), weights)
    starts = [run.training.lora.start_from for run in begun.every_run if run.training.lora is not None]
    assert starts == [weights, None], "a run that begins with another's has its weights from there"
    assert {begun.trainer.model, begun.inference.model} == {"tiny-dense"}
    begun = begun_with(job_of(tmp_path, **ALL_WEIGHTS), weights)
    assert {begun.trainer.model, begun.inference.model, begun.orchestrator.model} == {str(weights)}


def note_done(directory: Path, settings: dict[str, Any]) -> None:
    (directory / "sft").mkdir()
    done = {"weights": "run_sft/broadcast/step_2", "steps": 2, "settings": settings}
    (directory / "sft" / "done.json").write_text(json.dumps(done))


def test_a_resume_keeps_what_the_job_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path)
    check_resumed(job, has_steps=False)
    assert as_begun(job) == job
    with pytest.raises(UserError, match="before the first step"):
        check_resumed(job, has_steps=True)
    settings = sft_of(job).model_dump(mode="json", exclude_unset=True, include={"epochs", "data", "training", "seed"})
    note_done(tmp_path, settings)
    check_resumed(job, has_steps=True)
    assert fine_tune(job, pytest.fail) == 0, "nothing is trained again"
    monkeypatch.chdir(tmp_path)
    begun = as_begun(job_of(Path())).orchestrator.training.lora
    assert begun is not None
    assert begun.start_from == tmp_path / "sft" / "run_sft" / "broadcast" / "step_2", (
        "also where guests start elsewhere"
    )
    check_resumed(job_of(tmp_path, sft={"training": {"checkpoint_interval": 3}}), has_steps=True)
    with pytest.raises(UserError, match=r"another sft\.epochs, sft\.training:"):
        check_resumed(job_of(tmp_path, sft={"epochs": 3, "training": {"learning_rate": 1.0}}), has_steps=True)
    with pytest.raises(UserError, match=r"put \[sft\] back"):
        check_resumed(job_of(tmp_path).model_copy(update={"sft": None}), has_steps=True)


def test_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fine_tuning_of(tmp_path) is None
    (tmp_path / "sft" / "trainer").mkdir(parents=True)
    own = {"run_id": "default", "steps": 2, "environments": [{}]}
    job = {"model": "tiny-dense", "orchestrator": own, "sft": None}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert fine_tuning_of(tmp_path) is None, "a folder of the user's, or [sft] was removed before it was done"
    (tmp_path / "job.json").write_text(json.dumps(job | {"sft": {}}))
    (tmp_path / "sft" / "trainer" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n{"step": 2, "time": 2.0}\n')
    assert str(fine_tuning_of(tmp_path)) == "supervised fine-tuning: step 2/?; rollouts begin after it"
    assert main(["status", str(tmp_path)]) == 0
    assert "supervised fine-tuning: step 2/?" in capsys.readouterr().out
    assert main(["show", str(tmp_path)]) == 2
    assert "has no rollouts yet: supervised fine-tuning: step 2/?" in capsys.readouterr().err
    (tmp_path / "sft" / "done.json").write_text("[]")
    with pytest.raises(UserError, match=r"done\.json.*restore it"):
        fine_tuning_of(tmp_path)


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ([137, 1, 137], 137, ["start 2 of 3", "start 3 of 3", "exit code 137: out of memory"]),
        ([134, 143], 143, ["start 2 of 3"]),
        ([130], 130, []),
        ([2], 2, ["exit code 2: out of memory"]),
    ],
)
def test_what_was_killed_is_started_again_and_what_was_asked_to_end_is_not(
    codes: list[int], code: int, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / LOG).write_text("out of memory\n")
    monkeypatch.setattr(fine_tuning, "_train", lambda *_: codes.pop(0))
    lines: list[str] = []
    assert fine_tune(job_of(tmp_path, max_restarts=2), lines.append) == code
    assert not codes
    assert len(lines) == 1 + len(said)
    assert all(part in line for part, line in zip(said, lines[1:], strict=True))


@pytest.mark.slow
def test_data_that_cannot_be_used_ends_the_job_with_its_reason(tmp_path: Path, tiny_dense: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}]}]
    job = job_of(tmp_path, model=str(tiny_dense), sft={"data": {"rows": rows}, "on_long": "error"})
    tmp_path.mkdir(exist_ok=True)
    said: list[str] = []
    code = fine_tune(job.with_model(tiny_dense), said.append)
    assert code == 2, said
    assert "ended with exit code 2" in said[-1]
    assert "there is nothing to train; its log is" in said[-1]
