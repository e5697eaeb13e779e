"""Advantages from values, and the value head's loss with its gradient, against their definitions one number at a time."""

from __future__ import annotations

import pytest
import torch

from counterpoint.job.plan.live_bytes import LiveBytes
from counterpoint.run.updates import ValueHeadConfig
from counterpoint.trainer.updates.advantages import estimate
from counterpoint.trainer.updates.value_head import differentiate


def by_definition(config: ValueHeadConfig, values: list[float], rewards: list[float]) -> list[float]:
    """Equation 11 of the source: the sum of all later residuals, each discounted from where it is."""
    following = [*values[1:], 0.0]
    residuals = [r + config.discount * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    decay = config.discount * config.gae_lambda
    return [
        sum(decay ** (later - token) * residuals[later] for later in range(token, len(values)))
        for token in range(len(values))
    ]


def at_ends(positions: list[torch.Tensor], rewards: list[float], tokens: int) -> torch.Tensor:
    """Each sample's reward at its last trained token."""
    rewards_T = torch.zeros(tokens, dtype=torch.float64)
    for own, reward in zip(positions, rewards, strict=True):
        rewards_T[own[-1]] = reward
    return rewards_T


@pytest.mark.parametrize("of_turns", [False, True])
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9), (0.9, 0.0)])
def test_advantages_from_values_are_those_of_the_definition(
    discount: float, gae_lambda: float, penalised: bool, of_turns: bool
) -> None:
    config = ValueHeadConfig(discount=discount, gae_lambda=gae_lambda, whiten=False)
    generator = torch.Generator().manual_seed(1)
    positions = [torch.tensor([1, 2, 5, 6, 9]), torch.tensor([13]), torch.tensor([15, 17, 18])]
    rewards_T = at_ends(positions, [0.75, -1.0, 0.25], 20)
    if of_turns:
        rewards_T[2], rewards_T[17] = 0.5, -2.0
    values_T, penalty_T = (torch.randn(20, dtype=torch.float64, generator=generator) for _ in range(2))
    advantages_T, returns_T = estimate(config, positions, rewards_T, values_T, penalty_T if penalised else None)
    trained = torch.zeros(20, dtype=torch.bool)
    for own in positions:
        trained[own] = True
        received = (rewards_T[own] - penalty_T[own] * penalised).tolist()
        expected = torch.tensor(by_definition(config, values_T[own].tolist(), received), dtype=torch.float64)
        torch.testing.assert_close(advantages_T[own], expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(returns_T[own], expected + values_T[own], atol=1e-12, rtol=0)
    assert not advantages_T[~trained].any()
    assert not returns_T[~trained].any()


def test_whitened_advantages_have_mean_0_and_variance_1_over_all_trained_tokens() -> None:
    values_T = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    positions = [torch.tensor([0, 1, 4]), torch.tensor([6, 7, 8, 11])]
    rewards_T = at_ends(positions, [1.0, 0.0], 12)
    plain_T, plain_returns_T = estimate(ValueHeadConfig(whiten=False), positions, rewards_T, values_T, None)
    white_T, returns_T = estimate(ValueHeadConfig(whiten=True), positions, rewards_T, values_T, None)
    trained = torch.cat(positions)
    assert torch.equal(returns_T, plain_returns_T)
    assert abs(float(white_T[trained].mean())) < 1e-12
    assert float(white_T[trained].var()) == pytest.approx(1.0, abs=1e-6)
    order = plain_T[trained].argsort()
    assert torch.equal(white_T[trained].argsort(), order)


def test_one_long_sample_does_not_pad_the_others() -> None:
    lengths = [4096, *[8] * 1023]
    ends = torch.tensor(lengths).cumsum(0)
    positions = [torch.arange(end - length, end) for end, length in zip(ends.tolist(), lengths, strict=True)]
    rewards_T = at_ends(positions, [1.0] * len(lengths), sum(lengths))
    with LiveBytes("cpu") as live:
        estimate(ValueHeadConfig(), positions, rewards_T, torch.zeros(sum(lengths)), None)
    assert live.peak < 20 * 8 * sum(lengths), "not those of 1,024 samples of 4,096 tokens"


def loss_of(value: float, old: float, wanted: float, clip: float) -> float:
    near = min(max(value, old - clip), old + clip)
    return 0.5 * max((value - wanted) ** 2, (near - wanted) ** 2)


def test_the_value_loss_and_its_gradient_are_those_of_the_formula() -> None:
    """The gradient by central differences. Estimates inside and outside the clip, on either side of what is wanted."""
    config = ValueHeadConfig(clip=0.2, coefficient=0.7)
    values = [0.1, 0.5, 0.5, -0.6, -0.6, 0.15, -0.1]
    olds = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    wanted = [1.0, 1.0, -1.0, 1.0, -1.0, -0.3, 0.1]
    values_P = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    old_P, returns_P = torch.tensor(olds, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    loss_P, gradient_P = differentiate(config, values_P, old_P, returns_P, divisor=11)
    small = 1e-6
    for index, each in enumerate(zip(values, olds, wanted, strict=True)):
        value, old, aim = each
        assert float(loss_P[index]) == pytest.approx(loss_of(value, old, aim, config.clip), abs=1e-12)
        above, below = (loss_of(value + sign * small, old, aim, config.clip) for sign in (1, -1))
        assert float(gradient_P[index]) == pytest.approx(0.7 / 11 * (above - below) / (2 * small), abs=1e-6)
    clipped = [index for index, slope in enumerate(gradient_P.tolist()) if slope == 0.0]
    assert clipped == [1, 4], "an estimate that left the clip towards what is wanted is not moved further"
