"""Built-in losses that TRL lacks, against their formulas written token by token; KL estimates against the exact divergence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
import torch

from counterpoint.run.loss import KINDS, LossConfig, Objective
from counterpoint.trainer.losses.contract import Gradients, LossOutputs
from counterpoint.trainer.losses.load import load_loss
from counterpoint.trainer.losses.objectives import OBJECTIVES, clipped, divergence, divisor, token_weights
from tests.trainer.losses.tokens import Tokens, make_tokens


def computed(tokens: Tokens, given: dict[str, Any], *, with_old: bool = True) -> tuple[LossOutputs, Gradients]:
    config = LossConfig.model_validate(given)
    inputs = tokens.inputs()
    if not with_old:
        inputs = replace(inputs, old_log_probabilities_P=None)
    weights_P = token_weights(config, inputs)
    return load_loss(config, ["reference_log_probabilities_P"])(inputs, divisor(config, tokens.lengths), weights_P)


def weight_of_sample(tokens: Tokens, index: int, values: torch.Tensor) -> float:
    """The sum of a sample's values, for the token `index` of it."""
    first = 0
    for length in tokens.lengths:
        if first <= index < first + length:
            return sum(float(value) for value in values[first : first + length])
        first += length
    raise IndexError(index)


def truncated(low: float, high: float, cap: float) -> Callable[[Tokens, int], tuple[float, bool]]:
    def weight(tokens: Tokens, index: int) -> tuple[float, bool]:
        ratio = math.exp(float(tokens.trainer_P[index]) - float(tokens.inference_P[index]))
        masked = ratio < low or ratio > high
        return (0.0 if masked else min(ratio, cap)), masked

    return weight


def plain(tokens: Tokens, index: int) -> tuple[float, bool]:
    return 1.0, False


def corrected_by_samples(tokens: Tokens, index: int) -> tuple[float, bool]:
    ratio = math.exp(weight_of_sample(tokens, index, tokens.old_P - tokens.inference_P))
    return (ratio, False) if 0.8 <= ratio <= 1.3 else (0.0, True)


def corrected_by_the_trainers_own(tokens: Tokens, index: int) -> tuple[float, bool]:
    ratio = math.exp(float(tokens.trainer_P[index]) - float(tokens.inference_P[index]))
    return min(ratio, 1.2), False


@pytest.mark.parametrize(
    ("given", "weight", "with_old"),
    [
        ({"kind": "importance_ratio"}, truncated(0.125, 8, 2), True),
        (
            {"kind": "importance_ratio", "ratio_low": 0.7, "ratio_high": 1.6, "ratio_clip": 1.2},
            truncated(0.7, 1.6, 1.2),
            True,
        ),
        ({"kind": "aipo", "ratio_clip": 1.2}, truncated(0, math.inf, 1.2), True),
        ({"kind": "cispo", "ratio_clip": 1.2, "ratio_low": 0.7}, truncated(0.7, math.inf, 1.2), True),
        ({"kind": "reinforce"}, plain, True),
        (
            {
                "kind": "reinforce",
                "correction": "mask",
                "correction_level": "sequence",
                "correction_low": 0.8,
                "correction_high": 1.3,
            },
            corrected_by_samples,
            True,
        ),
        (
            {"kind": "reinforce", "correction": "truncate", "correction_high": 1.2},
            corrected_by_the_trainers_own,
            False,
        ),
    ],
)
@pytest.mark.parametrize("normalised", ["token", "sequence", "sample"])
def test_gradient_is_that_of_the_formula(
    given: dict[str, Any], weight: Callable[[Tokens, int], tuple[float, bool]], with_old: bool, normalised: str
) -> None:
    tokens = make_tokens()
    length = {"normalisation_length": 5} if normalised == "sample" else {}
    given = given | {"normalisation": normalised, "entropy_coefficient": 0.3} | length
    outputs, gradients = computed(tokens, given, with_old=with_old)
    lengths = [length for length in tokens.lengths for _ in range(length)]
    share_P = {
        "token": [1 / sum(tokens.lengths)] * len(lengths),
        "sequence": [1 / len(tokens.lengths) / length for length in lengths],
        "sample": [1 / len(tokens.lengths) / 5] * len(lengths),
    }[normalised]
    seen = set()
    assert gradients.entropies_P is not None
    for index in range(sum(tokens.lengths)):
        factor, masked = weight(tokens, index)
        seen.add(factor)
        slope = -factor * float(tokens.advantages_P[index])
        value = slope * float(tokens.trainer_P[index]) - 0.3 * float(tokens.entropies_P[index])
        assert bool(outputs.masked_P[index]) == masked
        assert outputs.loss_P[index].item() == pytest.approx(value, abs=1e-6)
        assert gradients.log_probabilities_P[index].item() == pytest.approx(slope * share_P[index], abs=1e-6)
        assert gradients.entropies_P[index].item() == pytest.approx(-0.3 * share_P[index], abs=1e-6)
    assert weight is plain or len(seen) > 2


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "objective", "flat"),
    [
        (0.5, 2.0, None, 1.0, False), (1.1, 2.0, None, 2.2, False), (1.5, 2.0, None, 2.6, True),
        (0.5, -2.0, None, -1.6, True), (1.1, -2.0, None, -2.2, False), (4.0, -2.0, None, -8.0, False),
        (4.0, -2.0, 3.0, -6.0, True), (2.0, -2.0, 3.0, -4.0, False),
    ],
)  # fmt: skip
def test_ppo_takes_the_worse_of_the_ratio_and_the_clipped_ratio(
    ratio: float, advantage: float, dual: float | None, objective: float, flat: bool
) -> None:
    inputs = replace(make_tokens().inputs(), advantages_P=torch.tensor([advantage]))
    config = LossConfig(kind="grpo", clip_low=0.2, clip_high=0.3, clip_dual=dual)
    computed_P, flat_P = clipped(torch.tensor([ratio]), inputs, config)
    assert (computed_P.item(), flat_P.item()) == (pytest.approx(objective), flat)


REINFORCED = [kind for kind in KINDS if kind not in ("distillation", "sft")]


@pytest.mark.parametrize("kind", REINFORCED)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(kind: str) -> None:
    """All weigh -A grad log p by how a step is normalised alone; `rloo`, whose sample has one advantage, by the whole sample."""
    tokens = make_tokens()
    tokens = replace(tokens, inference_P=tokens.trainer_P, old_P=tokens.trainer_P)
    given = {"kind": kind} | ({"normalisation_length": 9} if kind == "dr_grpo" else {})
    outputs, gradients = computed(tokens, given)
    lengths_P = torch.repeat_interleave(torch.tensor(tokens.lengths), torch.tensor(tokens.lengths)).double()
    share_P = {
        "token": torch.full_like(lengths_P, 1 / sum(tokens.lengths)),
        "sequence": 1 / (len(tokens.lengths) * lengths_P),
        "sample": torch.full_like(lengths_P, 1 / (len(tokens.lengths) * 9)),
    }[LossConfig.model_validate(given).normalisation or ""]
    if kind == "rloo":
        share_P = share_P * lengths_P
    assert gradients.log_probabilities_P.tolist() == pytest.approx((-tokens.advantages_P * share_P).tolist(), abs=1e-6)
    assert not outputs.masked_P.any()


def test_the_kinds_that_are_configured_are_those_that_are_computed() -> None:
    assert {kind.objective for kind in KINDS.values()} == set(OBJECTIVES) == set(get_args(Objective))
    assert all(function.__doc__ for function in OBJECTIVES.values())


def test_a_ratio_without_a_bound_does_not_break_the_step() -> None:
    tokens = make_tokens()
    far = replace(
        tokens,
        inference_P=tokens.trainer_P - 60,
        old_P=tokens.trainer_P - 60,
        reference_P=tokens.trainer_P + 900,
        advantages_P=-tokens.advantages_P.abs(),
    )
    for kind in REINFORCED:
        given = {"kind": kind, "kl_coefficient": 0.1} | ({"normalisation_length": 9} if kind == "dr_grpo" else {})
        inputs = far.inputs()
        assert inputs.reference_log_probabilities_P is not None
        inputs = replace(
            inputs,
            trainer_log_probabilities_P=inputs.trainer_log_probabilities_P.detach().float().requires_grad_(),
            inference_log_probabilities_P=inputs.inference_log_probabilities_P.float(),
            old_log_probabilities_P=None if kind == "reinforce" else far.old_P.float(),
            reference_log_probabilities_P=inputs.reference_log_probabilities_P.float(),
            advantages_P=inputs.advantages_P.float(),
        )
        loss = load_loss(LossConfig.model_validate(given), ["reference_log_probabilities_P"])
        outputs, gradients = loss(inputs)
        assert outputs.loss_P.isfinite().all()
        assert gradients.log_probabilities_P.isfinite().all()


ESTIMATORS: tuple[Literal["k1", "k3"], ...] = ("k1", "k3")


def test_the_estimates_of_a_divergence() -> None:
    """k1 and k3 have the divergence as their mean; k2, and k3 times the ratio, have its gradient."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)
    weights = policy.exp().detach()
    for estimator in ESTIMATORS:
        assert float((weights * divergence(policy, reference, estimator)).sum().detach()) == pytest.approx(exact.item())
    (of_k2,) = torch.autograd.grad((weights * divergence(policy, reference, "k2")).sum(), logits, retain_graph=True)
    assert of_k2.tolist() == pytest.approx(slope.tolist())
    ratio = (policy - policy.detach()).exp()
    for estimator in ESTIMATORS:
        weighted = (weights * ratio * divergence(policy, reference, estimator)).sum()
        (of_weighted,) = torch.autograd.grad(weighted, logits, retain_graph=True)
        assert of_weighted.tolist() == pytest.approx(slope.tolist())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_never_leads_away_from_the_reference(estimator: Literal["k2", "k3"]) -> None:
    """Beyond the largest logarithm of a ratio, k3 has no gradient; it had one of the wrong sign."""
    policy = torch.tensor([-19.0, -21.0, -30.0, -0.1], requires_grad=True)
    (gradient,) = torch.autograd.grad(
        divergence(policy, torch.tensor([-0.5, -0.5, -0.5, -3.0]), estimator).sum(), policy
    )
    assert (gradient[:3] <= 0).all()
    assert gradient[3] > 0
    assert gradient[0] < 0
