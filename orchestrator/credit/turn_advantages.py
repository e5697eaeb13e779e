"""Advantages of single turns, from the rewards of a group's turns: pure functions, which `advantages.py` offers by name.

An advantage of turn `t` of a rollout is the return from `t` on, `G_t = r_t + discount * r_(t+1) + ...`, minus a baseline. The
gradient stays unbiased with a baseline that is decided before the turn's tokens are sampled: one of the rollout's siblings,
which are independent of it, of the turn's number, and of the state in which the turn begins. Both functions here have only such
baselines, and `tests/orchestrator/credit/test_turn_advantages.py` shows it by enumeration in fractions.

What is not here has a bias. If the mean reward of turn `t` is subtracted from each reward *before* they are summed, a rollout
subtracts as many means as it has turns, which it decides by itself: the policy is paid for ending early wherever turns have a
positive reward, for another turn where it is negative (https://github.com/verl-project/verl/issues/7244). A mean or a deviation
that includes the rollout's own return scales the turns differently, since late turns have fewer siblings.

Assumed, for both: a turn's reward depends on nothing that is sampled after that turn. One that is given later for what came of
the turn belongs to the turn at which that showed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from counterpoint.orchestrator.credit.equal_rewards import above_others, differ

Rewards = npt.NDArray[Any]
"""The rewards of a rollout's turns, `[turns]`, at least one: float64, or whatever else numpy can add."""


def turn_returns(rewards: Sequence[Rewards], discount: float) -> list[Rewards]:
    """Returns, for each turn, its return minus the mean of the siblings' returns from the same turn number on.

    A sibling that has ended by then counts with the return from its last turn. So a rollout whose only reward is its last turn's
    has, without a discount, `leave_one_out` of it at each turn. A single rollout has zeros.
    """
    returns = [discounted(own, discount) for own in rewards]
    longest = max(map(len, returns))
    held = np.stack([np.concatenate([own, np.repeat(own[-1:], longest - len(own))]) for own in returns])
    return [above[: len(own)] for above, own in zip(above_others(held), returns, strict=True)]


def anchor_states(rewards: Sequence[Rewards], states: Sequence[Sequence[Hashable]], discount: float) -> list[Rewards]:
    """Returns, for each turn, its return minus the mean return of the siblings' turns that began in the same state.

    Where no sibling was in that state, the baseline is that of `turn_returns`. A state is what `states` has for the turn.
    """
    found = turn_returns(rewards, discount)
    if len(rewards) == 1:
        return found
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for rollout, own in enumerate(states):
        for turn, state in enumerate(own):
            places.setdefault(state, []).append((rollout, turn))
    returns = [discounted(own, discount) for own in rewards]
    for alike in places.values():
        owners = np.array([rollout for rollout, _ in alike])
        others = len(alike) - np.bincount(owners)[owners]
        if not others.all():  # of one rollout alone
            continue
        values = np.array([returns[rollout][turn] for rollout, turn in alike])
        shifted = values - values[0] if differ(values) else np.zeros_like(values)
        of_rollout = np.zeros(len(rewards), shifted.dtype)
        np.add.at(of_rollout, owners, shifted)
        above = shifted - (shifted.sum() - of_rollout[owners]) / others
        for (rollout, turn), value in zip(alike, above, strict=True):
            found[rollout][turn] = value
    return found


def discounted(rewards: Rewards, discount: float) -> Rewards:
    """Returns the return from each turn on, `[turns]`."""
    returns = rewards.copy()
    for turn in range(len(returns) - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    return returns
