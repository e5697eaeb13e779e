"""Runs on a GPU are those on a CPU: beside each other, resumed, and by each loss; and a step holds there what was planned."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from counterpoint.job.plan.dry_run import moments_bytes, step_bytes
from counterpoint.run.loss import LossConfig
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.losses.load import load_loss
from counterpoint.trainer.losses.objectives import divisor, token_weights
from counterpoint.trainer.model.chunks import device_memory
from counterpoint.trainer.ranks import Ranks
from tests.job.plan.test_against_real_steps import TOKENS, models, two_rows
from tests.perf.test_step_speed import SMALL, losses_of
from tests.trainer.lone_run import make_lone_run
from tests.trainer.losses.cases import CASES
from tests.trainer.losses.tokens import OPTIONAL_INPUTS, Tokens, make_tokens
from tests.trainer.sharded_learner import RESUMED, SCENARIOS, train_all, train_on
from tests.trainer.test_sharding import TIMES

__all__ = ["models"]

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def alone_on(device: torch.device) -> tuple[Ranks, dict[str, Any]]:
    """One rank, and its trainer's settings."""
    return Ranks(0, 1, device, None), {"dtype": "float32"}


def assert_close(own: list[dict[str, Any]], plain: list[dict[str, Any]], runs: list[str]) -> None:
    """Metrics of every step, as far as another device's sums go."""
    for line, expected in zip(own, plain, strict=True):
        for run_id in runs:
            wanted = {name: value for name, value in expected[run_id].items() if name not in TIMES}
            assert {name: line[run_id][name] for name in wanted} == pytest.approx(wanted, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("name", ["dense-full", "dense-lora", "moe-full", "moe-lora-two"])
def test_steps_are_those_of_a_cpu(
    dense_directory: Path, moe_directory: Path, tmp_path: Path, device: torch.device, name: str
) -> None:
    """Full weights and adapters, a dense model and a mixture with recorded routing, alone and beside another run."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for place in (device, CPU):
        directory = tmp_path / f"on_{place.type}_{len(lines)}"
        directory.mkdir()
        group, given = alone_on(place)
        found = train_all(directory, {"dense": dense_directory, "moe": moe_directory}, group, [name], **given)
        lines[directory.name] = found[name]["lines"]
    own, plain = lines.values()
    assert_close(own, plain, list(SCENARIOS[name][1]))


def test_a_checkpoint_is_resumed_on_the_other_device_with_the_same_bits(
    moe_directory: Path, tmp_path: Path, device: torch.device
) -> None:
    """Two steps on the GPU, two on a CPU, and three on the GPU again, beside seven on a CPU."""
    parts = []
    for place, steps in ((device, 2), (CPU, 2), (device, 3)):
        group, given = alone_on(place)
        parts.append(train_on(tmp_path, moe_directory, group, steps, **given))
    assert [part["step"] for part in parts] == [2, 4, 7]
    assert parts[1]["loaded"] == parts[0]["weights"], "bit for bit"
    assert parts[2]["loaded"] == parts[1]["weights"], "bit for bit"
    plain = tmp_path / "plain"
    plain.mkdir()
    group, given = alone_on(CPU)
    expected = train_all(plain, {"moe": moe_directory}, group, [RESUMED], **given)[RESUMED]["lines"]
    assert_close([line for part in parts for line in part["lines"]], expected, ["one"])


def on(tokens: Tokens, device: torch.device) -> Tokens:
    """The tokens on a device."""
    tensors = {
        name: value.detach().to(device).requires_grad_(value.requires_grad)
        for name in tokens.__dataclass_fields__
        if isinstance(value := getattr(tokens, name), torch.Tensor)
    }
    return replace(tokens, **tensors)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_that_on_a_cpu(name: str, device: torch.device) -> None:
    """There it is compared with TRL's own code (`tests/trainer/losses/test_against_trl.py`)."""
    config = LossConfig.model_validate(CASES[name].loss)
    found = []
    for place in (device, CPU):
        tokens = on(make_tokens(CASES[name].spread), place)
        inputs = tokens.inputs()
        tensors = [each for field in fields(inputs) if isinstance(each := getattr(inputs, field.name), torch.Tensor)]
        assert {each.device.type for each in tensors} == {place.type}
        loss = load_loss(config, OPTIONAL_INPUTS)
        found.append(loss(inputs, divisor(config, tokens.lengths), token_weights(config, inputs)))
    (outputs, gradients), (expected, wanted) = found
    torch.testing.assert_close(outputs.loss_P.cpu(), expected.loss_P, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        gradients.log_probabilities_P.cpu(), wanted.log_probabilities_P, rtol=0, atol=1e-6, check_device=False
    )
    assert (gradients.entropies_P is None) == (wanted.entropies_P is None)
    if gradients.entropies_P is not None and wanted.entropies_P is not None:
        torch.testing.assert_close(gradients.entropies_P.cpu(), wanted.entropies_P, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("training", [{}, {"lora": {"rank": 8}}], ids=["full", "adapter"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_holds_what_was_planned(
    models: dict[str, Path],
    tmp_path: Path,
    gpu: torch.device,
    kind: str,
    training: dict[str, Any],
    checkpointing: bool,
) -> None:
    """Within 10 % of what the allocator gave out at most. The kernels of a GPU may keep less or more than a CPU's."""
    config = TrainingConfig.model_validate(training)
    memory = device_memory(gpu)
    planned = step_bytes(
        models[kind], "float32", TOKENS, [config], checkpointing=checkpointing, memory=memory, compiled=True
    )
    expected = planned.weights + planned.adapters + planned.masters + moments_bytes(planned.trained, config)
    expected += planned.gradients + planned.activations
    before = torch.cuda.memory_allocated(gpu)
    trainer: dict[str, Any] = {"max_tokens": TOKENS, "activation_checkpointing": checkpointing, "router_replay": False}
    group, given = alone_on(gpu)
    lone = make_lone_run(tmp_path, models[kind], trainer | given, ranks=group, **training)
    lone.train(two_rows(1))
    torch.cuda.reset_peak_memory_stats(gpu)
    lone.train(two_rows(2))
    assert expected == pytest.approx(torch.cuda.max_memory_allocated(gpu) - before, rel=0.1)


def test_a_step_of_ours_and_of_trl_have_the_same_loss(gpu: torch.device) -> None:
    """In bfloat16 on a GPU; `python -m perf.step_speed` measures how fast each is."""
    ours, trl = losses_of(replace(SMALL, device=gpu.type))
    assert ours == pytest.approx(trl, abs=2e-2)
