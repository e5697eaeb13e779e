"""The reference policy of a run that begins with an adapter is the model with that adapter, and stays so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from counterpoint.job.population.exploit import request_copy
from counterpoint.run.trainer_files import start_directory
from counterpoint.trainer.lora.multi_lora import peft_state
from counterpoint.transport.files.atomic import remove_directory
from tests.trainer.one_process_trainer import Life, broadcast, life, write_member
from tests.trainer.orchestrator_end import metrics_lines

pytestmark = pytest.mark.slow

PLAIN = {"rank": 2, "target_modules": ["q_proj"]}
FAST: dict[str, Any] = {"learning_rate": 5e-2, "checkpoint_interval": 1}
LIMITS = {"max_runs": 4, "keep_checkpoints": 1}


def train_winner(output_dir: Path, model: Path) -> Path:
    """Returns the adapter that others begin with."""
    write_member(output_dir, model, "winner", lora=PLAIN, **FAST)
    with life(output_dir, model, {"winner": 2}, **LIMITS) as one:
        one.until_step(winner=2)
    return output_dir / "run_winner" / "broadcast" / "step_2"


def reference_of(one: Life, run_id: str) -> dict[str, Tensor]:
    slot = one.run(run_id).torch.reference_slot
    assert slot is not None
    return {name: tensor.clone() for name, tensor in peft_state(one.learner.manager.modules, slot).items()}


def divergence(output_dir: Path, run_id: str, step: int) -> float:
    found = [line for line in metrics_lines(output_dir) if (line["run_id"], line["step"]) == (run_id, step)]
    return float(found[-1]["reference_kl"])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["adapter", "run"])
def test_it_is_the_first_policy_also_after_a_copy_and_a_restart(
    kind: str, dense_directory: Path, tmp_path: Path
) -> None:
    given = train_winner(tmp_path, dense_directory)
    first = broadcast(tmp_path, "winner", 2)
    begins: dict[str, Any] = (
        {"lora": PLAIN | {"start_from": str(given)}}
        if kind == "adapter"
        else {"lora": PLAIN, "start_from": {"run": "winner", "step": 2}}
    )
    write_member(tmp_path, dense_directory, "child", reference={}, **begins, **FAST)
    write_member(tmp_path, dense_directory, "fresh", reference={}, lora=PLAIN, **FAST)
    committed = {"child": 1, "fresh": 1}
    with life(tmp_path, dense_directory, committed, **LIMITS) as one:
        one.until_step(**committed)
        assert divergence(tmp_path, "child", 1) < 1e-9, "before its first update a run is its own reference"
        assert divergence(tmp_path, "fresh", 1) < 1e-9
        assert one.run("fresh").torch.reference_slot is None, "the base"
        assert same(reference_of(one, "child"), first)
        remove_directory(given)
        shutil.rmtree(tmp_path / "trainer" / "winner")
        request_copy(tmp_path, "child", "fresh")
        one.turn()
        committed["child"] = 3
        one.until_step(child=3)
        assert same(reference_of(one, "child"), first), "it does not follow a copy"
        assert divergence(tmp_path, "child", 3) > 1e-5
    committed["child"] = 4
    with life(tmp_path, dense_directory, committed, **LIMITS) as one:
        one.until_step(child=4)
        assert same(reference_of(one, "child"), first), "nor a restart"
        assert not any(parameter.requires_grad for parameter in reference_parameters(one, "child"))


def reference_parameters(one: Life, run_id: str) -> list[Tensor]:
    slot = one.run(run_id).torch.reference_slot
    assert slot is not None
    return [each for layer in one.learner.manager.modules.values() for each in layer.adapter_parameters(slot).values()]


def test_a_run_whose_first_policy_is_gone_is_refused(dense_directory: Path, tmp_path: Path) -> None:
    given = train_winner(tmp_path, dense_directory)
    write_member(tmp_path, dense_directory, "child", reference={}, lora=PLAIN | {"start_from": str(given)}, **FAST)
    with life(tmp_path, dense_directory, {"child": 1}, **LIMITS) as one:
        one.until_step(child=1)
    remove_directory(start_directory(tmp_path, "child"))
    with life(tmp_path, dense_directory, {"child": 2}, **LIMITS) as one:
        one.turn_until(lambda: "child" in one.wire.evicted, "the refusal")
        assert "does not have the adapter that the run has begun with" in one.wire.evicted["child"]
