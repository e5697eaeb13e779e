"""What is computed around the loss, against plain loops: reference policy, several updates of a step, value head."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from counterpoint.run.updates import ValueHeadConfig
from counterpoint.trainer.losses.contract import LossInputs, LossOutputs
from tests.support.batches import with_changes
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import LoneRun, make_lone_run
from tests.trainer.plain_updates import BETA, CLIP, RATE, PlainLoop, of_constant_advantages


def clipped(inputs: LossInputs) -> LossOutputs:
    """PPO's policy loss with k3 of the reference: needs what this file is about."""
    old_P = inputs.old_log_probabilities_P
    new_P = inputs.trainer_log_probabilities_P
    ratio_P = (new_P - (new_P.detach() if old_P is None else old_P)).exp()
    loss_P = -torch.minimum(ratio_P * inputs.advantages_P, ratio_P.clamp(1 - CLIP, 1 + CLIP) * inputs.advantages_P)
    if inputs.reference_log_probabilities_P is not None:
        distance_P = inputs.reference_log_probabilities_P - new_P
        loss_P = loss_P + BETA * (distance_P.exp() - 1 - distance_P)
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))


def lone(directory: Path, output: Path, **training: Any) -> LoneRun:
    """Trained by plain SGD, with a few samples in a row."""
    settings: dict[str, Any] = {"optimizer": "sgd", "learning_rate": RATE, "max_grad_norm": 1e9}
    settings |= {"loss": {"kind": f"{__name__}:clipped"}} | training
    return make_lone_run(output, directory, {"max_tokens": 24}, **settings)


def distance(run: LoneRun, plain: PlainLoop) -> float:
    """The largest difference of a weight."""
    named = dict(plain.model.named_parameters())
    named |= {"value_head.weight": plain.linear.weight, "value_head.bias": plain.linear.bias}
    return max(float((value.double() - named[name].detach()).abs().max()) for name, value in run.weights().items())


@pytest.fixture(scope="module")
def other_directory(dense_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    model = AutoModelForCausalLM.from_pretrained(dense_directory)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    directory = tmp_path_factory.mktemp("other")
    model.save_pretrained(directory)
    return directory


CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "several updates": ({}, 2, 1),
    "several epochs": ({}, 1, 3),
    "mini-batches and epochs": ({}, 2, 2),
    "reference in the loss": ({"reference": True}, 1, 1),
    "reference in the reward": ({"reference": True, "penalty": 0.4}, 1, 1),
    "reference, several updates": ({"reference": True}, 2, 1),
    "value head": ({"head": {"gae_lambda": 0.9, "discount": 0.97}}, 1, 1),
    "value head, unwhitened": ({"head": {"whiten": False, "coefficient": 0.5, "clip": 0.05}}, 2, 2),
    "value head, rewards of turns": ({"head": {"gae_lambda": 0.9, "discount": 0.97}, "turns": True}, 2, 1),
    "all": ({"reference": True, "penalty": 0.4, "head": {}}, 2, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_a_plain_loop(
    dense_directory: Path, other_directory: Path, tmp_path: Path, case: str
) -> None:
    settings, minibatches, epochs = CASES[case]
    head = ValueHeadConfig.model_validate(settings["head"]) if "head" in settings else None
    penalty = settings.get("penalty", 0.0)
    training: dict[str, Any] = {"updates_per_step": minibatches * epochs, "epochs": epochs}
    if "reference" in settings:
        training["reference"] = {"model": str(other_directory), "reward_coefficient": penalty}
        if penalty:
            training["loss"] = {"kind": f"{__name__}:clipped_alone"}
    if head is not None:
        training |= {"value_head": settings["head"]}
    run = lone(dense_directory, tmp_path, **training)
    plain = PlainLoop(dense_directory, other_directory if "reference" in settings else None, head)
    for number in (1, 2):
        batch = make_batch(number)
        if "turns" in settings:
            batch = with_changes(
                batch, rewards=np.where(batch.loss_mask_T, batch.advantages_T / 2, 0).astype(np.float32)
            )
        metrics = run.train(batch)
        plain.step(batch, minibatches, epochs, penalty)
        norms = plain.norms[-minibatches * epochs :]
        assert metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-5)
        assert metrics["tokens/trained"] == int(batch.loss_mask_T.sum())
    assert distance(run, plain) < 1e-5
    assert distance(run, PlainLoop(dense_directory)) > 1e-3, "something was learnt"
    assert run.run.torch.held is None


def clipped_alone(inputs: LossInputs) -> LossOutputs:
    """Without the reference, which is in the reward."""
    return clipped(
        LossInputs(
            inputs.trainer_log_probabilities_P,
            inputs.inference_log_probabilities_P,
            inputs.advantages_P,
            inputs.sample_P,
            inputs.samples,
            inputs.entropies_P,
            inputs.old_log_probabilities_P,
        )
    )


@pytest.mark.slow
def test_several_updates_against_a_reference_are_those_of_trl(
    dense_directory: Path, other_directory: Path, tmp_path: Path
) -> None:
    """GRPO with `beta` > 0 and `num_iterations` > 1, by TRL's own loss."""
    out = tmp_path / "trl.safetensors"
    command = [sys.executable, "-m", "tests.trainer.trl_updates"]
    command += [str(dense_directory), str(other_directory), str(out)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = load_file(out)
    run = lone(
        dense_directory,
        tmp_path,
        loss={"kind": "grpo", "ratio_to": "old", "kl_coefficient": BETA},
        reference={"model": str(other_directory)},
        updates_per_step=4,
        epochs=2,
    )
    metrics = [run.train(of_constant_advantages(number)) for number in (1, 2)]
    assert metrics[0]["updates"] == 4
    before = PlainLoop(dense_directory)
    assert distance(run, before) > 1e-2
    for name, value in run.weights().items():
        torch.testing.assert_close(value.double(), expected[name], atol=1e-5, rtol=0)
