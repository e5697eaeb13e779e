"""A trainer that lacks what a run's orchestrator cannot send again: it removes nothing, and says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer.runs import checkpoint
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.messages import Hello
from tests.trainer.conftest import make_run_config
from tests.trainer.one_process_trainer import STEPS, broadcast, life, write_member
from tests.trainer.orchestrator_end import metrics_lines, write_run

pytestmark = pytest.mark.slow


def contents(directory: Path) -> dict[str, bytes]:
    """All files below a directory."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def trained(output_dir: Path, model: Path) -> Path:
    """A run that is trained to step 4, with checkpoints of 3 and 4. Returns its broadcasts."""
    write_member(output_dir, model, "winner", checkpoint_interval=1)
    with life(output_dir, model, {"winner": 4}) as one:
        one.until_step(winner=4)
    return output_dir / "run_winner" / "broadcast"


@pytest.mark.parametrize("lost", ["all", "the run's", "set aside", "the newest"])
def test_a_trainer_behind_the_run_refuses_it_and_removes_nothing(
    dense_directory: Path, tmp_path: Path, lost: str
) -> None:
    broadcasts = trained(tmp_path, dense_directory)
    published = contents(broadcasts)
    disk = {"all": tmp_path / "trainer", "the run's": tmp_path / "trainer" / "winner"}.get(
        lost, checkpoints_directory(tmp_path, "winner")
    )
    away = Path(shutil.copytree(disk, tmp_path / "away"))
    if lost == "the newest":  # an older state: step 2 is there, and batches up to 3 are not any more
        (disk / "step_3").rename(disk / "step_2")
        shutil.rmtree(disk / "step_4")
    elif lost == "set aside":  # the run's own directory was not mounted once
        disk = tmp_path / "trainer" / "winner"
        checkpoint.set_aside(tmp_path, "winner")
        away = tmp_path / "trainer" / ".deleted-winner"
    else:
        shutil.rmtree(disk)
    with life(tmp_path, dense_directory, {}) as one:
        one.wire.committed["winner"] = STEPS
        one.wire.say("winner", Hello("winner", 3))
        one.turn_until(lambda: "winner" in one.wire.evicted, "the refusal")
        reason = one.wire.evicted["winner"]
        assert str(checkpoints_directory(tmp_path, "winner")) in reason
        assert "up to step 3" in reason
        assert lost != "set aside" or f"move {away} to {disk}," in reason
        assert f'training.lora.start_from = "{broadcasts / "step_4"}"' in reason, "the way back"
        refusal = tmp_path / "run_winner" / "control" / "config_validation_error.txt"
        assert refusal.read_text().strip() == reason, "which ends the orchestrator with exit code 2"
        assert contents(broadcasts) == published
        # The disk is back, and the orchestrator is started again.
        shutil.rmtree(disk, ignore_errors=True)
        shutil.copytree(away, disk)
        refusal.unlink()
        write_member(tmp_path, dense_directory, "winner", checkpoint_interval=1)
        one.wire.say("winner", Hello("winner", 3))
        one.until_step(winner=5)
    if lost != "all":
        assert [line["step"] for line in metrics_lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_trainer_without_a_checkpoint_trains_again_what_can_be_sent_again(
    dense_directory: Path, tmp_path: Path
) -> None:
    broadcasts = trained(tmp_path, dense_directory)
    before = broadcast(tmp_path, "winner", 4)
    shutil.rmtree(tmp_path / "trainer" / "winner")
    with life(tmp_path, dense_directory, {"winner": 4}) as one:
        one.until_step(winner=4)
    after = broadcast(tmp_path, "winner", 4)
    assert published_steps(broadcasts) == [0, 1, 2, 3, 4]
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_full_weights_go_on_from_the_broadcast_that_the_refusal_names(dense_directory: Path, tmp_path: Path) -> None:
    write_run(make_run_config(tmp_path, dense_directory, steps=3).model_copy(update={"run_id": "full"}))
    with life(tmp_path, dense_directory, {"full": 2}, max_runs=1) as one:
        one.until_step(full=2)
    shutil.rmtree(tmp_path / "trainer")
    newest = tmp_path / "run_full" / "broadcast" / "step_2"
    with life(tmp_path, dense_directory, {}, max_runs=1) as one:
        one.wire.committed["full"] = 2
        one.wire.say("full", Hello("full", 2))
        one.turn_until(lambda: "full" in one.wire.evicted, "the refusal")
        assert f'model = "{newest}"' in one.wire.evicted["full"]
    again = tmp_path / "again"
    write_run(make_run_config(again, newest, steps=3).model_copy(update={"run_id": "full"}))
    with life(again, newest, {"full": 1}, max_runs=1) as one:
        one.until_step(full=1)
    first, former = (load_file(path / "model.safetensors") for path in (again / "run_full/broadcast/step_0", newest))
    assert all(torch.equal(first[name], former[name]) for name in former)
