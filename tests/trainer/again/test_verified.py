"""A step that was trained by a trainer's process is trained again here, from the checkpoint before: bit for bit."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cli.main import main
from counterpoint.cli.receipts.again import trainer_of
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.write_job import write_job
from counterpoint.trainer.again.kept import LOCK, find
from counterpoint.trainer.again.verified import BATCHES, CHECKPOINT, METRICS, StepAgain, train_again
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport import codec
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.records import Batch
from tests.trainer.again.recorded import LENGTHS, record
from tests.trainer.conftest import make_batch

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def again(config: TrainerConfig, step: int, directory: Path) -> StepAgain:
    directory.mkdir()
    kept = find(config.output_dir, "default", step, config.transport.max_batch_bytes)
    return train_again(config, kept, directory)[0]


def routed(step: int) -> Batch:
    return make_batch(step, LENGTHS, routed=True)


CASES: dict[str, dict[str, Any]] = {
    "full weights": {},
    "adapter": {"lora": LORA},
    "several updates": {"updates_per_step": 2, "lora": LORA},
    "several epochs": {"updates_per_step": 4, "epochs": 2},
    "value head": {"value_head": {}, "lora": LORA},
    "sgd": {"optimizer": "sgd", "momentum": 0.9},
}


@pytest.mark.parametrize("case", CASES)
async def test_a_step_trained_again_is_the_same(case: str, dense_directory: Path, tmp_path: Path) -> None:
    config = await record(tmp_path / "job", dense_directory, **CASES[case])
    for step, first in ((4, 2), (5, 4), (2, 0)):
        result = again(config, step, tmp_path / str(step))
        assert result.compared == {BATCHES: True, METRICS: True, CHECKPOINT: True}, result.text()
        assert (result.first, result.distance) == (first, 0.0)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "target_modules": ["q_proj", "experts"]}])
async def test_a_mixture_with_replayed_routing_is_the_same(
    lora: dict[str, Any] | None, moe_directory: Path, tmp_path: Path
) -> None:
    training = {} if lora is None else {"lora": lora}
    config = await record(tmp_path / "job", moe_directory, make=routed, **training)
    result = again(config, 4, tmp_path / "again")
    assert result.compared == {BATCHES: True, METRICS: True, CHECKPOINT: True}, result.text()


def verify(output_dir: Path, capsys: pytest.CaptureFixture[str], step: int) -> tuple[int, str]:
    """The command's exit code, and what it says."""
    capsys.readouterr()
    code = main(["verify", str(output_dir), "--step", str(step)])
    said = capsys.readouterr()
    return code, said.out + said.err


async def test_the_command(dense_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = await record(tmp_path, dense_directory, lora=LORA)
    shutil.rmtree(tmp_path / "run_default" / "broadcast")
    progress = logging.getLogger("counterpoint.trainer.model.parallel").getEffectiveLevel()
    code, said = verify(tmp_path, capsys, 5)
    assert (code, "bit-equal" in said, said.count("the same")) == (0, True, 4), said
    assert logging.getLogger("counterpoint.trainer.model.parallel").getEffectiveLevel() == progress

    batch = make_batch(4, LENGTHS)
    batch.columns["advantages_T"] = batch.columns["advantages_T"] * -1
    file = tmp_path / "run_default" / "rollouts" / "step_4" / "batch.bin"
    file.unlink()
    codec.write_file(file, batch)
    code, said = verify(tmp_path, capsys, 4)
    assert code == 1, said
    assert "batches, of receipts and checkpoint: different" in said

    file.unlink()
    code, said = verify(tmp_path, capsys, 4)
    assert code == 6
    assert f"there is no {file}" in said
    shutil.rmtree(tmp_path / "trainer" / "default" / "checkpoints" / "step_4")
    code, said = verify(tmp_path, capsys, 5)
    assert code == 6
    assert "the batch of step 4 was not kept" in said
    assert verify(tmp_path, capsys, 9) == (6, "counterpoint: error: run default has no step 9: its newest is 5\n")
    lock = take_lock(tmp_path / "run_default" / LOCK, "")
    code, said = verify(tmp_path, capsys, 5)
    os.close(lock)
    assert code == 4
    assert "an orchestrator writes run default now" in said
    (config.output_dir / "roles" / "trainer.toml").unlink()
    assert verify(tmp_path, capsys, 5)[0] == 2


async def test_another_division_of_rows_stays_within_the_bound(dense_directory: Path, tmp_path: Path) -> None:
    config = await record(tmp_path / "job", dense_directory)
    result = again(config.model_copy(update={"max_tokens": 128}), 4, tmp_path / "again")
    assert not result.is_equal
    assert result.distance is not None
    assert 0 < result.distance < result.bound / 10
    assert result.is_within


def test_a_job_whose_model_has_a_name(dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`job.json` has the name at its top, and its sections the directory that the name was resolved to."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = load(JobConfig, Path("configs/demo.toml"), ["--output_dir", str(tmp_path)])
    assert config.model == "tiny-moe"
    write_job(config.with_model(dense_directory), b"")
    assert trainer_of(tmp_path).model == str(dense_directory)
