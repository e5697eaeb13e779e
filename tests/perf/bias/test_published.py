"""What others have published about bias comes out of our losses, too.

martingale 0.2.0 (its README, "Test your own correction") counts, for eleven estimators and five lags, how many of 20 random
decision processes an estimator is unbiased in. The processes follow from a seed by BLAKE2b, and are made here as it makes them.
Their probabilities are no small fractions, so expectations are float64: an unbiased one is off by 1e-14 at most, a biased one
by 1e-6 at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import Any

import pytest
import torch
from torch import Tensor

from counterpoint.advantages import AdvantageInputs, AdvantageOutputs
from counterpoint.run.loss import LossConfig
from counterpoint.trainer.losses.contract import LossInputs
from counterpoint.trainer.losses.load import load_loss
from counterpoint.trainer.losses.objectives import token_weights
from perf.bias.processes import LONGEST, PROCESSES, Weights, gradient_of, true_gradient
from perf.bias.rows import UNBIASED_LOSS
from perf.bias.update import Case, expected_update
from perf.bias.verdicts import verdict

LAGS = (0, 1, 2, 4, 8)
SIZES = ((3, 2, 3), (4, 2, 3), (3, 3, 3), (4, 2, 4))
"""States, actions and horizon, of one process after another."""

NEVER = 1e9
SUM = {"normalisation": "sample", "normalisation_length": 1}

PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "unweighted": ({"kind": "reinforce"} | SUM, (20, 0, 0, 0, 0)),
    "seq_is": ({"kind": "aipo", "ratio_clip": NEVER, "ratio_level": "sequence"} | SUM, (20, 20, 20, 20, 20)),
    "token_is": ({"kind": "aipo", "ratio_clip": NEVER} | SUM, (20, 0, 0, 0, 0)),
    "seq_truncated_is": ({"kind": "aipo", "ratio_clip": 2, "ratio_level": "sequence"} | SUM, (20, 20, 20, 16, 7)),
    "token_truncated_is": ({"kind": "aipo", "ratio_clip": 2} | SUM, (20, 0, 0, 0, 0)),
    "seq_masked_is": (
        {"kind": "importance_ratio", "ratio_clip": NEVER, "ratio_low": 0.5, "ratio_high": 2, "ratio_level": "sequence"}
        | SUM,
        (20, 13, 7, 3, 2),
    ),
    "token_masked_is": (
        {"kind": "importance_ratio", "ratio_clip": NEVER, "ratio_low": 0.5, "ratio_high": 2} | SUM,
        (20, 0, 0, 0, 0),
    ),
    "seq_ppo_clip": ({"kind": "rloo"}, (20, 0, 2, 0, 0)),
    "token_ppo_clip": ({"kind": "dr_grpo", "normalisation_length": 1}, (20, 0, 0, 0, 0)),
    "seq_cispo": (
        {"kind": "cispo", "ratio_clip": 1.2, "ratio_clip_low": 0.8, "ratio_level": "sequence"} | SUM,
        (20, 0, 2, 0, 0),
    ),
    "token_cispo": ({"kind": "cispo", "ratio_clip": 1.2, "ratio_clip_low": 0.8} | SUM, (20, 0, 0, 0, 0)),
}
"""Configurations of ours that compute the same, and the published counts, by lag."""


def hashed(*parts: bytes | str, size: int) -> bytes:
    return blake2b(
        b"".join(part.encode() if isinstance(part, str) else part for part in parts), digest_size=size
    ).digest()


def simplex(seed: bytes, size: int) -> list[float]:
    values = [int.from_bytes(hashed(seed, index.to_bytes(4, "big"), size=8), "big") + 1 for index in range(size)]
    return [value / sum(values) for value in values]


@dataclass(frozen=True, slots=True)
class Process:
    """One of the 20 random processes."""

    seed: bytes
    states: int
    actions: int
    horizon: int

    def policy(self, lag: int) -> list[list[float]]:
        """The trained policy, or the one that plays: so many small steps from it."""
        policy = [
            simplex(hashed(self.seed, "pi", f"PI_{state}", size=16), self.actions) for state in range(self.states)
        ]
        for step in range(lag):
            chosen = hashed(self.seed, "lag", step.to_bytes(4, "big"), size=4)
            state = int.from_bytes(chosen[:2], "big") % self.states
            action = int.from_bytes(chosen[2:], "big") % self.actions
            policy[state] = [0.9 * each for each in policy[state]]
            policy[state][action] += 0.1
        return policy

    def paths(self, played: list[list[float]]) -> Iterator[tuple[float, list[int], int]]:
        """Yields the probability, the places of the actions (state times actions plus action) and the return of each path."""
        every = [(state, action) for state in range(self.states) for action in range(self.actions)]
        moves = {each: simplex(hashed(self.seed, "T_{}_{}".format(*each), size=16), self.states) for each in every}
        rewards = {
            (*each, after): hashed(self.seed, "R_{}_{}_{}".format(*each, after), size=8)[0] % 4
            for each in every
            for after in range(self.states)
        }
        open_paths: list[tuple[int, float, list[int], int]] = [(s, 1 / self.states, [], 0) for s in range(self.states)]
        for _ in range(self.horizon):
            open_paths = [
                (after, p * played[s][a] * move, [*taken, s * self.actions + a], reward + rewards[s, a, after])
                for s, p, taken, reward in open_paths
                for a in range(self.actions)
                for after, move in enumerate(moves[s, a])
            ]
        yield from ((p, taken, reward) for _, p, taken, reward in open_paths)


def expected_updates(process: Process, lag: int, configs: dict[str, LossConfig]) -> dict[str, Tensor]:
    """Returns each loss's expected update of the trained policy's probabilities, the parameters that the source takes."""
    trained, played = (torch.tensor(process.policy(each), dtype=torch.float64).flatten() for each in (0, lag))
    probabilities, taken, returns = zip(*process.paths(process.policy(lag)), strict=True)
    places_P = torch.tensor(taken).flatten()
    weights_P = torch.tensor(probabilities, dtype=torch.float64).repeat_interleave(process.horizon) / trained[places_P]
    found = {}
    for name, config in configs.items():
        inputs = LossInputs(
            trained.log()[places_P].requires_grad_(),
            played.log()[places_P],
            torch.tensor(returns, dtype=torch.float64).repeat_interleave(process.horizon),
            sample_P=torch.arange(len(taken)).repeat_interleave(process.horizon),
            samples=len(taken),
            entropies_P=torch.zeros(len(places_P)),
        )
        _, gradients = load_loss(config)(inputs, 1, token_weights(config, inputs))
        found[name] = torch.zeros_like(trained).index_add(0, places_P, -gradients.log_probabilities_P * weights_P)
    return found


@pytest.mark.slow
def test_martingales_table() -> None:
    configs = {name: LossConfig.model_validate(keys) for name, (keys, _) in PUBLISHED.items()}
    counts = {name: dict.fromkeys(LAGS, 0) for name in PUBLISHED}
    for number in range(20):
        seed = hashed("martingale-estimator-bench-v1", number.to_bytes(4, "big"), size=16)
        process = Process(seed, *SIZES[number % len(SIZES)])
        true = expected_updates(process, 0, configs)["unweighted"]
        for lag in LAGS:
            for name, update in expected_updates(process, lag, configs).items():
                off = float((update - true).abs().max() / true.abs().max())
                assert off < 1e-14 or off > 1e-6
                counts[name][lag] += off < 1e-14
    assert {name: tuple(each.values()) for name, each in counts.items()} == {
        name: published for name, (_, published) in PUBLISHED.items()
    }


def means_by_turn(inputs: AdvantageInputs) -> AdvantageOutputs:
    """The natural advantage of turns, which has a bias: each reward minus the others' mean of that turn number, then summed.

    The reward of a last turn is the outcome, compared with the others' outcomes; those of earlier turns with the earlier turns of
    those that have them.
    """
    advantages = []
    for own, rewards in enumerate(inputs.turn_rewards):
        others = [each for index, each in enumerate(inputs.turn_rewards) if index != own]
        above = [float(rewards[-1]) - sum(float(other[-1]) for other in others) / len(others)]
        for turn in reversed(range(len(rewards) - 1)):
            there = [float(other[turn]) for other in others if turn < len(other) - 1]
            above.insert(0, above[0] + float(rewards[turn]) - sum(there) / max(1, len(there)))
        advantages.append(above)
    return AdvantageOutputs(advantages)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_the_bonus_for_another_turn_of_verls_issue_7244(size: int) -> None:
    """https://github.com/verl-project/verl/issues/7244: who decides on another turn gets the mean intermediate reward subtracted.

    So the bias is the gradient of minus that mean for each turn beyond the first, at the probability of taking it. With the
    rollout's own left out, the mean is 0 if no other took the turn.
    """
    path = f"{__name__}:{means_by_turn.__name__}"
    update = expected_update(Case(path, UNBIASED_LOSS.config, group_size=size))
    assert update.exact
    true = true_gradient()
    expected: Weights = {}
    for trajectories in PROCESSES:
        probabilities = [each.probability([0] * LONGEST) for each in trajectories]
        for turn in range(LONGEST - 1):
            going_on = [turn < len(each.steps) - 1 for each in trajectories]
            reached = sum(p for p, goes_on in zip(probabilities, going_on, strict=True) if goes_on)
            if not reached:
                continue
            total = sum(
                p * each.steps[turn].reward
                for p, each, goes_on in zip(probabilities, trajectories, going_on, strict=True)
                if goes_on
            )
            mean = total / reached * (1 - (1 - reached) ** (size - 1))
            for p, each, goes_on in zip(probabilities, trajectories, going_on, strict=True):
                if goes_on:
                    for step in each.steps[: turn + 1]:
                        key = step.state, step.action
                        expected[key] = expected.get(key, Fraction(0)) - p * mean / len(PROCESSES)
    bias = {key: update.gradient[key] - true[key] for key in true}
    assert bias == gradient_of(expected)
    assert bias["two: go on?", 1] < 0 > bias["three: go on?", 1]


@pytest.mark.slow
def test_a_baseline_that_is_decided_before_the_turn_has_no_bonus() -> None:
    for staleness in range(3):
        assert str(verdict(Case("turn_returns", UNBIASED_LOSS.config, staleness))) == "unbiased"
