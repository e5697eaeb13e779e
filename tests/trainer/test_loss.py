"""The built-in loss against its formula, written token by token."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from orchestrator.config import LossConfig
from trainer.loss import LossInputs, LossOutputs, load_loss


def scaled(inputs: LossInputs, *, scale: float) -> LossOutputs:
    """A custom loss, as a user would write one."""
    return LossOutputs(
        scale * inputs.trainer_log_probabilities_P, torch.zeros_like(inputs.advantages_P, dtype=torch.bool)
    )


def test_gradient_is_that_of_the_formula() -> None:
    random = np.random.default_rng(0)
    trainer = torch.tensor(-3 + 1.5 * random.standard_normal(200), dtype=torch.float64, requires_grad=True)
    inference = torch.tensor(-3 + 1.5 * random.standard_normal(200))
    advantages = torch.tensor(random.standard_normal(200))
    config = LossConfig(ratio_low=0.2, ratio_high=6.0, ratio_clip=1.5)
    outputs = load_loss(config)(LossInputs(trainer, inference, advantages))
    outputs.loss_P.sum().backward()
    assert trainer.grad is not None
    values_P, gradient_P, losses_P = trainer.tolist(), trainer.grad.tolist(), outputs.loss_P.tolist()
    seen = set()
    for index in range(200):
        ratio = math.exp(values_P[index] - float(inference[index]))
        kind = "masked" if ratio < 0.2 or ratio > 6.0 else "clipped" if ratio > 1.5 else "plain"
        seen.add(kind)
        weight = {"masked": 0.0, "clipped": 1.5, "plain": ratio}[kind] * float(advantages[index])
        assert bool(outputs.masked_P[index]) == (kind == "masked")
        assert losses_P[index] == pytest.approx(-weight * values_P[index])
        assert gradient_P[index] == pytest.approx(-weight)
    assert seen == {"masked", "clipped", "plain"}


def test_a_custom_loss_gets_its_arguments() -> None:
    loss = load_loss(LossConfig(kind=f"{__name__}:scaled", args={"scale": 3.0}))
    values = torch.tensor([-1.0, -2.0])
    assert loss(LossInputs(values, values, values)).loss_P.tolist() == [-3.0, -6.0]


@pytest.mark.parametrize(
    "kind",
    ["importance", "nowhere.at_all:loss", ":loss", f"{__name__}:missing", f"{__name__}:__name__", "broken_loss:any"],
)
def test_a_missing_loss_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_loss.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"training\.loss\.kind"):
        load_loss(LossConfig(kind=kind))


@pytest.mark.parametrize("args", [{}, {"scale": 1.0, "scalle": 2.0}])
def test_arguments_that_a_custom_loss_does_not_take_are_named(args: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"training\.loss\.args = .*scal"):
        load_loss(LossConfig(kind=f"{__name__}:scaled", args=args))
