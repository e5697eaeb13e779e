"""`counterpoint sft` and its directory: one command at a time, and --fresh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tomli_w

import counterpoint.cli.sft
from counterpoint.cli.main import main
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.transport.files.lock import take_lock
from tests.orchestrator.toy_model import make_toy_model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = make_toy_model(tmp_path / "model")
    (model / "config.json").write_text("{}")
    path = tmp_path / "sft.toml"
    content = {"output_dir": str(tmp_path / "out"), "model": str(model), "data": {"path": str(tmp_path / "rows.jsonl")}}
    path.write_text(tomli_w.dumps(content))
    return path


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the directory had an earlier training, at each begin of one."""
    found: list[bool] = []

    def run(config: SftConfig) -> int:
        found.append((config.output_dir / "trainer").exists())
        (config.output_dir / "trainer").mkdir(exist_ok=True)
        return 0

    monkeypatch.setattr(counterpoint.cli.sft, "run", run)
    return found


def test_two_commands_do_not_train_in_one_directory(
    file: Path, tmp_path: Path, begun: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    lock = take_lock(tmp_path / "out" / "job.lock", "taken")
    assert main(["sft", str(file), "--resume"]) == 75
    assert "another `counterpoint run` or `counterpoint sft` uses it" in capsys.readouterr().err
    os.close(lock)
    assert main(["sft", str(file), "--resume"]) == 0
    assert begun == [False]


def test_fresh_moves_an_earlier_training_aside(
    file: Path, tmp_path: Path, begun: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    for switches in (["--fresh"], [], ["--fresh"]):
        assert main(["sft", str(file), *switches]) == 0
    assert begun == [False, True, False]
    assert (tmp_path / "out.1" / "trainer").is_dir()
    assert main(["sft", str(file), "--fresh", "--resume"]) == 2
    assert "--resume and --fresh exclude each other" in capsys.readouterr().err
