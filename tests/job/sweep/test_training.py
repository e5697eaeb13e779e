"""What a trial's training finds in its output: what the same configuration has trained, and nothing of another one."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from counterpoint.job.sweep import training
from counterpoint.job.sweep.training import TrainingFailed, run_training_on_worker
from tests.support.children import start_instead


def test_another_configuration_does_not_go_on_from_the_checkpoints_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an attempt that failed: the model would be that of neither."""
    monkeypatch.setenv("COUNTERPOINT_REGION_ROOT", str(tmp_path))
    code = "1"

    def replaced(command: Sequence[str]) -> list[str]:
        assert command[-1] == "--resume"
        return ["sh", "-c", f"exit {code}"]

    start_instead(monkeypatch, training, replaced)
    output = tmp_path / "trial"
    with pytest.raises(TrainingFailed):
        run_training_on_worker("trial", {"training": {"optimizer": "adamw", "learning_rate": 0.1}})
    (output / "checkpoint").touch()
    code = "0"
    run_training_on_worker("trial", {"training": {"learning_rate": 0.1, "optimizer": "adamw"}})
    assert (output / "checkpoint").exists()
    run_training_on_worker("trial", {"training": {"learning_rate": 0.2}})
    assert not (output / "checkpoint").exists()
    assert (tmp_path / "trial.1" / "checkpoint").exists()
    assert tomllib.loads((output / "trial.toml").read_text())["training"] == {"learning_rate": 0.2}
    run_training_on_worker("trial", {"training": {"learning_rate": 0.2}})
    assert not (tmp_path / "trial.2").exists()
