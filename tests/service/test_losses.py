"""The SDK's losses, from a request to the gradient by the logits of a tiny model, against plain loops in float64.

The loops are those of the SDK's documentation, tinker-docs.thinkingmachines.ai/tinker/losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tinker import types
from torch import Tensor

from counterpoint.run.loss import LossConfig
from counterpoint.trainer.losses.contract import LossInputs
from counterpoint.trainer.losses.load import load_loss
from tests.service.test_datums import contribution, datum

LENGTHS, SIZE, WORDS = (5, 1, 3), 4, 11

Loop = Callable[[list[float], list[float], list[float], list[float], dict[str, float]], tuple[float, list[float]]]
"""Of one datum: log-probabilities, those of the sampler, advantages or weights, and the mask, to the loss and its gradient."""


def cross_entropy(
    new: list[float], old: list[float], values: list[float], mask: list[float], config: dict[str, float]
) -> tuple[float, list[float]]:
    return -sum(value * each for value, each in zip(values, new, strict=True)), [-value for value in values]


def importance_sampling(
    new: list[float], old: list[float], values: list[float], mask: list[float], config: dict[str, float]
) -> tuple[float, list[float]]:
    terms = [-math.exp(each - before) * value for each, before, value in zip(new, old, values, strict=True)]
    return sum(terms), terms


def clipped(ratios: list[float], values: list[float], low: float, high: float) -> tuple[float, list[float]]:
    loss, gradient = 0.0, []
    for ratio, value in zip(ratios, values, strict=True):
        free, bound = ratio * value, min(max(ratio, low), high) * value
        loss -= min(free, bound)
        gradient.append(-free if free <= bound else 0.0)
    return loss, gradient


def ppo(
    new: list[float], old: list[float], values: list[float], mask: list[float], config: dict[str, float]
) -> tuple[float, list[float]]:
    ratios = [math.exp(each - before) for each, before in zip(new, old, strict=True)]
    return clipped(ratios, values, config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))


def gspo(
    new: list[float], old: list[float], values: list[float], mask: list[float], config: dict[str, float]
) -> tuple[float, list[float]]:
    chosen = [each - before for each, before, is_chosen in zip(new, old, mask, strict=True) if is_chosen]
    ratios = [math.exp(sum(chosen) / len(chosen))] * len(new)
    low, high = config.get("clip_low_threshold", 1 - 3e-4), config.get("clip_high_threshold", 1 + 4e-4)
    return clipped(ratios, values, low, high)


def cispo(
    new: list[float], old: list[float], values: list[float], mask: list[float], config: dict[str, float]
) -> tuple[float, list[float]]:
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    weights = [
        min(max(math.exp(each - before), low), high) * value
        for each, before, value in zip(new, old, values, strict=True)
    ]
    return -sum(weight * each for weight, each in zip(weights, new, strict=True)), [-weight for weight in weights]


def dro(
    new: list[float], old: list[float], values: list[float], mask: list[float], config: dict[str, float]
) -> tuple[float, list[float]]:
    loss, gradient = 0.0, []
    for each, before, value in zip(new, old, values, strict=True):
        loss -= value * each - 0.5 * config["beta"] * (each - before) ** 2
        gradient.append(-value + config["beta"] * (each - before))
    return loss, gradient


CASES: list[tuple[str, Loop, dict[str, float]]] = [
    ("cross_entropy", cross_entropy, {}),
    ("importance_sampling", importance_sampling, {}),
    ("ppo", ppo, {}),
    ("ppo", ppo, {"clip_low_threshold": 0.6, "clip_high_threshold": 1.1}),
    ("cispo", cispo, {}),
    ("cispo", cispo, {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}),
    ("dro", dro, {"beta": 0.3}),
    ("gspo", gspo, {}),
    ("gspo", gspo, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
]


@pytest.mark.parametrize(("loss", "loop", "config"), CASES)
def test_loss_and_gradient_by_the_logits_are_those_of_a_plain_loop(
    loss: str, loop: Loop, config: dict[str, float]
) -> None:
    generator = np.random.default_rng(3)
    states = torch.from_numpy(generator.standard_normal((sum(LENGTHS), SIZE)))
    model = torch.from_numpy(generator.standard_normal((SIZE, WORDS)) / 2).requires_grad_()
    targets = generator.integers(0, WORDS, sum(LENGTHS))
    new_P = torch.log_softmax(states @ model, -1)[torch.arange(sum(LENGTHS)), torch.from_numpy(targets)]
    old = np.minimum(new_P.detach().numpy() + 0.4 * generator.standard_normal(sum(LENGTHS)), 0).astype(np.float32)
    values = generator.standard_normal(sum(LENGTHS)).astype(np.float32)
    mask = np.array([0, 1, 1, 0, 1, 1, 0, 1, 1], np.float32)
    first, data, total, gradients = 0, [], 0.0, list[float]()
    for length in LENGTHS:
        own = slice(first, first := first + length)
        inputs = {"weights": values} if loss == "cross_entropy" else {"logprobs": old, "advantages": values}
        inputs |= {"sequence_ratio_mask": mask} if loss == "gspo" else {}
        given = {name: column[own] for name, column in inputs.items()}
        data.append(datum([1] * length, target_tokens=targets[own], **given))
        before, value, chosen = (column[own].astype(np.float64).tolist() for column in (old, values, mask))
        own_loss, gradient = loop(new_P[own].tolist(), before, value, chosen, config)
        total, gradients = total + own_loss, gradients + gradient
    (expected,) = torch.autograd.grad(new_P, model, torch.tensor(gradients, dtype=torch.float64), retain_graph=True)
    found_loss, found_P = trained(data, loss, config, new_P.detach())
    (found,) = torch.autograd.grad(new_P, model, found_P)
    assert found_loss == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert len({round(each, 6) for each in gradients}) > 3  # not all at a bound


def trained(data: list[types.Datum], loss: str, config: dict[str, float], new_P: Tensor) -> tuple[float, Tensor]:
    """What the trainer computes of a request, given the log-probabilities: the loss, and its gradient by them, in float64."""
    found = contribution(data, loss, dict(config))
    batch, objective = found.batch, found.objective
    places = batch.columns["loss_mask_T"].astype(bool)

    def column(name: str) -> Tensor:
        return torch.from_numpy(batch.columns[name][places].astype(np.float64))

    inputs = LossInputs(
        new_P.clone().requires_grad_(),
        column("log_probabilities_T"),
        column("advantages_T"),
        sample_P=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        samples=len(LENGTHS),
        entropies_P=torch.zeros_like(new_P),
        given={
            name: torch.from_numpy(np.frombuffer(each.data, each.dtype)[places].copy())
            for name, each in objective.inputs.items()
        },
    )
    weights_P = None
    if objective.weights:
        weights_P = torch.from_numpy(np.frombuffer(objective.weights, np.float32)[places].astype(np.float64))
    outputs, gradients = load_loss(LossConfig.model_validate(objective.loss))(inputs, 1.0, weights_P)
    losses_P = outputs.loss_P if weights_P is None else outputs.loss_P * weights_P
    return float(losses_P.detach().sum()), gradients.log_probabilities_P
