"""The enumeration of expected updates: its processes by another way, what is recovered, and properties that are known."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import get_args

import pytest

from counterpoint.run.loss import LossConfig, RatioLevel
from perf.bias.exact import recovered
from perf.bias.processes import POLICIES, PROCESSES, true_gradient
from perf.bias.rows import UNBIASED_LOSS, LossRow
from perf.bias.update import Case
from perf.bias.verdicts import Verdict, verdict
from perf.bias.waiting import ages_when_trained


def expected_reward(policies: dict[str, Fraction]) -> Fraction:
    """Returns the expected reward of policies, which map a state to the probability of action 1."""
    total = Fraction(0)
    for trajectories in PROCESSES:
        for trajectory in trajectories:
            own = [policies[step.state] if step.action else 1 - policies[step.state] for step in trajectory.steps]
            total += math.prod(own, start=Fraction(1, len(PROCESSES))) * trajectory.reward
    return total


@pytest.mark.parametrize("state", POLICIES)
def test_the_true_gradient_is_the_slope_of_the_expected_reward(state: str) -> None:
    """The reward is linear in each probability p, whose slope by its logit is p (1 - p)."""
    now = {each: policies[0] for each, policies in POLICIES.items()}
    slope = expected_reward({**now, state: Fraction(1)}) - expected_reward({**now, state: Fraction(0)})
    by_logit = slope * now[state] * (1 - now[state])
    assert by_logit
    assert true_gradient()[state, 1] == by_logit == -true_gradient()[state, 0]


def test_every_process_ends_for_certain() -> None:
    for trajectories in PROCESSES:
        for age in range(3):
            assert sum(each.probability([age] * 3) for each in trajectories) == 1


@pytest.mark.parametrize("value", ["0", "2/3", "-27/64", "343/4096", "1000", "-1/32767"])
def test_a_fraction_is_recovered_after_roundings(value: str) -> None:
    fraction = Fraction(value)
    assert recovered(float(fraction)) == (fraction, True)
    assert recovered(math.nextafter(float(fraction), 2)) == (fraction, True)


@pytest.mark.parametrize("value", [math.sqrt(2), math.pi, math.exp(0.25), 1 / 3 + 1e-12])
def test_what_is_no_small_fraction_is_said_to_be_none(value: float) -> None:
    assert recovered(value) == (Fraction(value), False)
    assert not recovered(value, 24).exact or value == 1 / 3 + 1e-12


def test_when_the_scheduler_trains_a_slow_group() -> None:
    """By turns 1, 2 and 3: the ages of the turns, in updates; None where the group is dropped."""
    on_policy = [(0,), (0, 0), (0, 0, 0)]
    expected = {
        ("wait", 0): on_policy,
        ("wait", 1): [(0,), (1, 0), (1, 0, 0)],
        ("wait", 2): [(0,), (1, 0), (2, 1, 0)],
        ("drop", 0): on_policy,
        ("drop", 1): [(0,), (1, 0), None],
        ("drop", 2): [(0,), (1, 0), (2, 1, 0)],
    }
    for stragglers in ("wait", "drop"):
        for staleness in range(3):
            found = [ages_when_trained(turns, stragglers, staleness) for turns in (1, 2, 3)]
            assert found == expected[stragglers, staleness], (stragglers, staleness)


def test_verdicts_in_words() -> None:
    half, one = Fraction(1, 2), Fraction(1)
    assert str(Verdict((one, one), exact=True)) == "unbiased"
    assert str(Verdict((half, half), exact=True)) == "scaled: 1/2"
    assert str(Verdict((half, one), exact=True)) == "biased: 1/2 to 1"
    assert str(Verdict((-half, -half), exact=True)) == "biased: -1/2 to -1/2"
    assert str(Verdict((Fraction(0), Fraction(0)), exact=True)) == "no update"
    assert str(Verdict((one, one + Fraction(1, 10**12)), exact=False)) == "scaled: ~1.000"
    assert str(Verdict((half, one), exact=False)) == "biased: ~0.500 to ~1.000"


@pytest.mark.slow
def test_leave_one_out_is_unbiased_and_the_group_mean_scaled_in_any_size_of_group() -> None:
    for size in (2, 3):
        assert str(verdict(Case("leave_one_out", UNBIASED_LOSS.config, group_size=size))) == "unbiased"
        scaled = verdict(Case("group_mean", UNBIASED_LOSS.config, group_size=size))
        assert set(scaled.ratios) == {Fraction(size - 1, size)}


@pytest.mark.slow
def test_a_filter_of_zero_advantages_moves_the_divisor_in_groups_of_three() -> None:
    assert verdict(Case("leave_one_out", UNBIASED_LOSS.config, selection="zero", group_size=3)).is_biased


def spread(kind: str, groups: int) -> Fraction:
    ratios = verdict(Case("leave_one_out", LossRow({"kind": kind}).config, groups=groups)).ratios
    return max(ratios) / min(ratios)


@pytest.mark.slow
def test_more_rollouts_a_step_mend_the_token_mean_and_not_the_mean_over_samples() -> None:
    assert spread("dapo", 2) < spread("dapo", 1) * Fraction(3, 4)
    assert spread("grpo", 2) == spread("grpo", 1) > 5


@pytest.mark.slow
def test_the_losses_that_mix_the_advantages_of_turns_are_those_that_are_refused_beside_them() -> None:
    """On policy, with each level of the ratio: of a sample with a gradient, each token has the mean of its advantages."""
    sums = {"normalisation": "sample", "normalisation_length": 1}
    for kind, level in product(("grpo", "sapo", "aipo"), get_args(RatioLevel)):
        config = LossConfig.model_validate({"kind": kind, "ratio_level": level, **sums})
        assert config.mixes_tokens == verdict(Case("turn_returns", config)).is_biased, (kind, level)


@pytest.mark.slow
def test_what_has_no_bias_has_none_together() -> None:
    """Of each axis what has no bias by itself."""
    losses = [UNBIASED_LOSS.config, LossConfig.model_validate({"kind": "dr_grpo", "normalisation_length": 1})]
    for advantage in ("leave_one_out", "group_mean"):
        for loss, staleness in ((losses[0], 0), (losses[0], 1), (losses[0], 2), (losses[1], 0)):
            for selection in ("all", "zero"):
                assert not verdict(Case(advantage, loss, staleness, selection)).is_biased
            assert verdict(Case(advantage, loss, staleness, "cut")).is_biased
