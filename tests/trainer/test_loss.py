"""The built-in loss against its formula, written token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from counterpoint.run.loss import LossConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.losses.contract import Loss, LossInputs, LossOutputs
from counterpoint.trainer.losses.load import load_loss
from counterpoint.trainer.runs.manager import MultiRunManager
from tests.trainer.conftest import make_run_config
from tests.trainer.lone_run import ALONE
from tests.trainer.orchestrator_end import write_run


def inputs_of(trainer_P: Tensor, inference_P: Tensor, advantages_P: Tensor) -> LossInputs:
    """Returns the inputs of two samples; the first has a third of the tokens."""
    sample_P = (torch.arange(len(trainer_P)) >= len(trainer_P) // 3).long()
    return LossInputs(trainer_P, inference_P, advantages_P, sample_P, 2, torch.ones_like(inference_P))


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
    outputs, gradients = load_loss(config)(inputs_of(trainer, inference, advantages))
    values_P, gradient_P, losses_P = trainer.tolist(), gradients.log_probabilities_P.tolist(), outputs.loss_P.tolist()
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
    values = torch.tensor([-1.0, -2.0], requires_grad=True)
    outputs, gradients = loss(inputs_of(values, values.detach(), values.detach()), divisor=2)
    assert outputs.loss_P.tolist() == [-3.0, -6.0]
    assert gradients.log_probabilities_P.tolist() == [1.5, 1.5]
    assert gradients.entropies_P is None


def of_one_number(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(
        inputs.trainer_log_probabilities_P.sum(), torch.zeros_like(inputs.advantages_P, dtype=torch.bool)
    )


def of_a_tuple(inputs: LossInputs) -> Any:
    return inputs.trainer_log_probabilities_P, None


def without_a_gradient(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(inputs.advantages_P, torch.zeros_like(inputs.advantages_P, dtype=torch.bool))


def with_numbers_for_a_mask(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(inputs.trainer_log_probabilities_P, torch.zeros_like(inputs.advantages_P))


def with_an_endless_gradient(inputs: LossInputs) -> LossOutputs:
    loss_P = (inputs.trainer_log_probabilities_P * 0.0).abs().sqrt()
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))


def leaving(inputs: LossInputs) -> LossOutputs:
    raise SystemExit(3)


class Odd(BaseException):
    """As test frameworks and schedulers have them: no `Exception`."""


def unusual(inputs: LossInputs) -> LossOutputs:
    raise Odd("of its own")


def with_a_number_for_a_metric(inputs: LossInputs) -> Any:
    mask_P = torch.zeros_like(inputs.advantages_P, dtype=torch.bool)
    metrics: Any = {"kl": 0.5}
    return LossOutputs(inputs.trainer_log_probabilities_P, mask_P, metrics)


def that_raises(inputs: LossInputs) -> LossOutputs:
    return inputs.nothing  # type: ignore[attr-defined]


def reporting(inputs: LossInputs, *, metrics: dict[str, Any]) -> LossOutputs:
    ones_P = torch.ones_like(inputs.advantages_P)
    return LossOutputs(
        inputs.trainer_log_probabilities_P, ones_P.bool(), {name: value * ones_P for name, value in metrics.items()}
    )


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (of_one_number, r"loss_P has shape \[\]; expected \[8\]"),
        (of_a_tuple, "returned tuple; expected LossOutputs"),
        (without_a_gradient, "loss_P does not depend on trainer_log_probabilities_P"),
        (with_numbers_for_a_mask, "masked_P has dtype torch.float32; expected torch.bool"),
        (with_an_endless_gradient, "the gradient of loss_P is not finite"),
        (leaving, "SystemExit: 3"),
        (unusual, "Odd: of its own"),
        (with_a_number_for_a_metric, r"metrics_P\['kl'\] is of type float; expected a tensor of shape \[8\]$"),
        (that_raises, r"no attribute 'nothing' \(in that_raises, .*test_loss\.py:\d+\)$"),
    ],
)
def test_a_custom_loss_is_called_once_before_it_is_needed(
    function: Callable[[LossInputs], LossOutputs], said: str
) -> None:
    kind = f"{__name__}:{function.__name__}"
    with pytest.raises(ValueError, match=rf"training\.loss\.kind = '{kind}', .*: .*{said}"):
        load_loss(LossConfig(kind=kind))


def test_the_names_of_a_losss_own_metrics_are_known_before_they_are_needed() -> None:
    def load(metrics: dict[str, float]) -> Loss:
        return load_loss(LossConfig(kind=f"{__name__}:reporting", args={"metrics": metrics}))

    assert load({"clipped": 1.0, "above": 2.0}).metrics == ("above", "clipped")
    assert load({}).metrics == load_loss(LossConfig()).metrics == ()
    with pytest.raises(ValueError, match=r"'a/b' is not a metric name"):
        load({"a/b": 1.0})


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


def test_the_trainer_imports_a_loss_that_its_file_allows_alone(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = tmp_path / "imported"
    (tmp_path / "guests_module.py").write_text(f"open({str(imported)!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)

    def discovered(*allowed: str) -> bool:
        config = TrainerConfig(output_dir=tmp_path, model=str(dense_directory), threads=1, allowed_imports=[*allowed])
        manager = MultiRunManager(tmp_path, 1)
        Learner(config, ALONE, manager)
        return bool(manager.discover_runs())

    write_run(
        make_run_config(tmp_path, dense_directory, loss={"kind": "guests_module:anything", "args": {"of": "the guest"}})
    )
    assert not discovered()
    assert not imported.exists()
    assert "guests_module:anything" in (tmp_path / "run_default/control/config_validation_error.txt").read_text()
    assert not discovered("guests_module:anything")  # it has no such function
    assert imported.exists()
