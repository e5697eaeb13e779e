"""Two small decision processes, whose policies have fractions as probabilities, and their true policy gradient.

Each is an example that a run may draw, with the same probability. A policy decides at each state between two actions, by two
logits of that state alone. It has three versions: that which is trained, and those of one and two updates before. So the number
of turns, the reward of each turn, and every ratio of two policies are small fractions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

Weights = dict[tuple[str, int], Fraction]
"""A number for each state and action: what the gradient of that action's log-probability is multiplied by."""

Gradient = dict[tuple[str, int], Fraction]
"""A gradient by the logits of each state's actions."""

_RISING = (Fraction(3, 4), Fraction(1, 2), Fraction(1, 4))
_FALLING = _RISING[::-1]

POLICIES: Mapping[str, tuple[Fraction, ...]] = {
    "two: go on?": _RISING,
    "two: answer": _FALLING,
    "three: go on?": _FALLING,
    "three: go on again?": _RISING,
    "three: answer": _RISING,
}
"""The probability of action 1 at each state, by the age of the policy in updates: 0 is the trained one."""


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A turn of a trajectory: what was done at which state, and the reward of the turn."""

    state: str
    action: int
    reward: int

    def probability(self, age: int) -> Fraction:
        """The probability of the action under the policy of that age."""
        of_one = POLICIES[self.state][age]
        return of_one if self.action == 1 else 1 - of_one


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One way through a process."""

    steps: tuple[Step, ...]
    cut: bool = False
    """Whether its last turn ends at the length limit."""

    @property
    def reward(self) -> int:
        """The sum of its turns' rewards."""
        return sum(step.reward for step in self.steps)

    def probability(self, ages: Sequence[int]) -> Fraction:
        """Its probability if each turn is played by the policy of that age."""
        return prod((step.probability(age) for step, age in zip(self.steps, ages, strict=False)), start=Fraction(1))


def _path(*steps: tuple[str, int, int], cut: bool = False) -> Trajectory:
    return Trajectory(tuple(Step(*step) for step in steps), cut)


_LOOK = ("two: go on?", 1, 1)
_FIRST, _SECOND = ("three: go on?", 1, 1), ("three: go on again?", 1, 0)

PROCESSES: tuple[tuple[Trajectory, ...], ...] = (
    (_path(("two: go on?", 0, 2)), _path(_LOOK, ("two: answer", 0, 0)), _path(_LOOK, ("two: answer", 1, 2))),
    (
        _path(("three: go on?", 0, 0)),
        _path(_FIRST, ("three: go on again?", 0, 1)),
        _path(_FIRST, _SECOND, ("three: answer", 0, 0), cut=True),
        _path(_FIRST, _SECOND, ("three: answer", 1, 3)),
    ),
)
"""All trajectories of each process: it ends at the first turn, or goes on, which has a reward of its own."""

LONGEST = 3
"""Turns of the longest trajectory."""


def gradient_of(weights: Weights) -> Gradient:
    """Returns the gradient by the logits of the sum over states and actions of weight times log-probability."""
    gradient: Gradient = {}
    for state, policies in POLICIES.items():
        of_actions = [weights.get((state, action), Fraction(0)) for action in (0, 1)]
        for action, probability in enumerate((1 - policies[0], policies[0])):
            gradient[state, action] = of_actions[action] - probability * sum(of_actions)
    return gradient


def true_gradient() -> Gradient:
    """Returns the gradient of the expected reward of a rollout, over all processes alike, under the trained policy."""
    weights: Weights = {}
    for trajectories in PROCESSES:
        for trajectory in trajectories:
            share = trajectory.probability([0] * LONGEST) * trajectory.reward / len(PROCESSES)
            for step in trajectory.steps:
                key = step.state, step.action
                weights[key] = weights.get(key, Fraction(0)) + share
    return gradient_of(weights)
