"""Divided experts on GPUs: the products of an owner on one, and whole steps of two ranks on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from counterpoint.trainer.model.experts import compute_experts
from counterpoint.trainer.model.load import load_model
from tests.trainer.expert_learner import FULL, LORA
from tests.trainer.forked_ranks import launch
from tests.trainer.sharded_learner import SCENARIOS
from tests.trainer.test_sharding import TIMES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_owners_products_are_those_of_the_models_experts(
    moe_directory: Path, device: torch.device, dtype: str
) -> None:
    """Sorted by expert, with an expert without a row."""
    experts: Any = load_model(moe_directory, dtype, device).get_submodule("model.layers.0.mlp.experts")
    expert_M = torch.tensor([0, 0, 1, 3, 3, 3, 7], device=device)
    rows_MH = torch.randn(7, 32, device=device, dtype=experts.down_proj.dtype, requires_grad=True)
    found_MH = compute_experts(experts, rows_MH, torch.bincount(expert_M, minlength=8))
    expected_MH = experts(rows_MH, expert_M[:, None], torch.ones(7, 1, device=device, dtype=rows_MH.dtype))
    torch.testing.assert_close(found_MH, expected_MH)
    weights = (rows_MH, experts.gate_up_proj, experts.down_proj)
    for own, wanted in zip(
        torch.autograd.grad(found_MH.square().sum(), weights),
        torch.autograd.grad(expected_MH.square().sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(own, wanted)


def test_two_gpus_with_half_the_experts_each_train_as_a_cpu(moe_directory: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    launch(2, tmp_path, moe_directory, "cuda", module="tests.trainer.expert_learner")
    found = json.loads((tmp_path / "found_2.json").read_text())
    for way, names in (("alone", (FULL, LORA)), ("sharded", (FULL, LORA)), ("context", (LORA,))):
        for name in names:
            for line, wanted in zip(found[way][name]["lines"], found["plain"][name]["lines"], strict=True):
                for run_id in SCENARIOS[name][1]:
                    expected = {key: value for key, value in wanted[run_id].items() if key not in TIMES}
                    own = {key: line[run_id][key] for key in expected}
                    assert own == pytest.approx(expected, rel=1e-2, abs=1e-3), (way, name)
